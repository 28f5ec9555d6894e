"""The parts of the examples that compute something, on numbers that can be checked by hand."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_helpers import CUT, letters, lm_envs

from textenv.agents import LanguageModelPolicy, attach
from textenv.agents.rollouts.collect import Episodes, collect
from textenv.agents.types import PolicyOutput
from textenv.agents.value_models import ValueHead
from textenv.replay import Replay

ROOT = Path(__file__).parent.parent


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def report(score, kl, distinct_2):
    rows = zip(score, kl, distinct_2, strict=True)
    sides = [{"score": s, "kl": k, "distinct_2": d, "samples": ["a", "b"]} for s, k, d in rows]
    return dict(zip(("before", "after"), sides, strict=True))


def test_leash_compares_both_ends(example):
    leash = example("leash")
    loose = report((0.1, 2.5), (0.0, 40.0), (0.9, 0.2))
    held = report((0.1, 2.0), (0.0, 8.0), (0.9, 0.8))
    figures = leash.compare(loose, held)
    assert figures == pytest.approx({"score_gap": 0.5, "kl_ratio": 5.0, "distinct_2_gap": 0.6})
    text = leash.side_by_side({leash.LOOSE: loose, leash.HELD: held})
    assert [line.split(":")[0].strip() for line in text.split("\n\n")[1].splitlines()] == [
        "reference",
        leash.LOOSE,
        leash.HELD,
    ]


def test_leash_refuses_two_equal_runs(example):
    leash = example("leash")
    with pytest.raises(SystemExit, match="kl-coef should be above 0, got 0"):
        leash.main(leash.Arguments(kl_coef=0.0))


def hand_made():
    """Two responses of three and two tokens; the second is there to be left alone."""
    nan = np.nan
    logprobs = torch.tensor([[-1.0, -2.0, -0.5, 0.0], [-9.0, -9.0, 0.0, 0.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, -0.5, 0.0], [-8.0, -9.0, 0.0, 0.0]])
    values = torch.tensor([[1.0, 1.0, 1.0, 7.0], [7.0, 7.0, 7.0, 7.0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=bool)
    replayed = Replay(
        input_ids=np.zeros((2, 6), np.int32),
        attention_mask=np.ones((2, 6), np.int8),
        rewards=np.array([[-0.1, 0.2, 2.0, nan], [nan] * 4]),
        response_mask=mask,
        terminated=np.array([True, True]),
        truncated=np.array([False, False]),
        scores=np.array([2.5, 0.0]),
        infos={"kl_coef": np.array([0.2, 0.2]), "score": np.array([2.5, 0.0]), "shaped_score": np.array([2.0, 0.0])},
    )
    output = PolicyOutput(logprobs, values, torch.zeros(2, 4))
    return Episodes(replayed, output, logprobs, None, ref_logprobs, ("the film", "it"), ("is so good", "x y"), {})


def test_credit_by_hand(example):
    """Tolls 0.2 * (0.5, -1, 0); deltas -0.1, 0.2, 1 against a value of 1; advantages with lambda = 0.5 from behind."""
    one = example("token_rewards").credit(hand_made(), 0, [" is", " so", " good"], gae_lambda=0.5)
    assert one.toll == pytest.approx([0.1, -0.2, 0.0])
    assert one.score == [0.0, 0.0, 2.0]
    assert one.reward == pytest.approx([-0.1, 0.2, 2.0])
    assert one.returns == pytest.approx([2.1, 2.2, 2.0])
    assert one.value == [1.0, 1.0, 1.0]
    assert one.advantage == pytest.approx([0.25, 0.7, 1.0])
    assert one.kl == pytest.approx(-0.5)
    assert (one.prompt, one.tokens, one.kl_coef) == ("the film", [" is", " so", " good"], 0.2)


def test_credit_is_drawn_in_the_right_colours(example):
    token_rewards = example("token_rewards")
    one = token_rewards.credit(hand_made(), 0, [" is", "[so]", " good"], gae_lambda=0.5)
    text = token_rewards.coloured(one, one.toll, -1)
    assert text.plain == "the film | is[so] good"
    assert [str(span.style) for span in text.spans] == [
        "black on rgb(255,167,167)",  # paid, half of the largest
        "black on rgb(80,255,80)",  # earned by going back to the reference
        "black on rgb(255,255,255)",
    ]
    table = token_rewards.table_of(one)
    assert table.row_count == 4
    assert [str(cell) for cell in table.columns[1].cells] == ["' is'", "'[so]'", "' good'", "sum"]
    assert list(table.columns[4].cells)[-1] == "-0.100"  # tolls: 0.1 - 0.2 + 0


def test_value_errors_by_hand(example):
    value_head = example("value_head")
    tokens = value_head.Tokens(
        features=torch.zeros(5, 2),
        returns=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        position=torch.tensor([0, 1, 2, 0, 1]),
        last=torch.tensor([False, False, True, False, True]),
    )
    figures = value_head.measure(torch.tensor([0.0, 0.5, 1.0, 0.0, -1.0]), tokens)
    assert figures["error"] == pytest.approx(math.sqrt((1 + 0.25 + 0 + 1 + 0) / 5))
    assert figures["constant"] == pytest.approx(math.sqrt(0.96))
    assert figures["first"] == 1.0 and figures["last"] == 0.0
    assert math.isnan(figures["correlation_first"])  # the same value for both
    assert figures["correlation_last"] == pytest.approx(1.0)
    expected = np.corrcoef([0, 0.5, 1, 0, -1], [1, 1, 1, -1, -1])[0, 1]
    assert figures["correlation"] == pytest.approx(expected)
    assert value_head.errors(torch.zeros(5), tokens, [0, 2]) == [1.0, 1.0]


def test_a_value_head_learns_what_its_features_say(example):
    value_head = example("value_head")
    features = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    returns = features[:, 0] / features.std(-1) + 0.5  # linear in normalised features, nearly

    class Policy:
        value_head = ValueHead(8, torch.device("cpu"))

    tokens = value_head.Tokens(
        features, returns, torch.zeros(2000, dtype=torch.int64), torch.ones(2000, dtype=torch.bool)
    )
    before = value_head.measure(value_head.predict(Policy, tokens), tokens)
    assert before["error"] == pytest.approx(float(returns.square().mean().sqrt()), rel=1e-6)
    arguments = value_head.Arguments(epochs=40, learning_rate=0.03, weight_decay=0.0, minibatch_tokens=500)
    value_head.train(Policy, tokens, arguments)
    after = value_head.measure(value_head.predict(Policy, tokens), tokens)
    assert after["error"] < 0.5 * before["error"]
    assert after["correlation"] > 0.9


@pytest.mark.filterwarnings(CUT)
def test_a_rollouts_tokens_are_what_the_policy_saw(example, tiny_model):
    value_head = example("value_head")
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, value="detached")
    with torch.no_grad():
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))

    def fresh():
        envs = lm_envs(tiny_model, num_envs=4, scorer=letters)
        attach(policy, envs)
        return envs

    tokens = value_head.gather(policy, fresh(), episodes=6, seed=3, title="")
    envs, engine = fresh(), policy.engine()
    parts = [
        collect(policy, envs, engine, episodes=4, seed=3, env_seed=3),
        collect(policy, envs, engine, episodes=2, seed=7),
    ]
    masks = [torch.as_tensor(part.replayed.response_mask) for part in parts]
    values = torch.cat([part.output.values[mask] for part, mask in zip(parts, masks, strict=True)])
    scores = torch.cat([torch.as_tensor(part.replayed.scores) for part in parts]).float()
    lengths = torch.cat([mask.sum(-1) for mask in masks])
    assert torch.allclose(value_head.predict(policy, tokens), values, atol=1e-5)
    assert torch.allclose(tokens.returns, scores.repeat_interleave(lengths), atol=1e-6)  # no toll: the score throughout
    assert tokens.last.sum() == 6 and (tokens.position == 0).sum() == 6
    assert torch.equal(tokens.position[tokens.last], lengths - 1)


def test_prompts_are_first_words_that_go_on(example):
    value_head = example("value_head")
    prompts = value_head.make_prompts(12)
    assert len(prompts) == len(set(prompts)) > 5000
    assert all(len(prompt.split()) == 12 for prompt in prompts)
