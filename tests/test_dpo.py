"""DPO as an agent: its loss and gradient by independent routes, its optimum, exact resumption, and what it refuses."""

from __future__ import annotations

import doctest
import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, lm_envs, parameters, same, toy_envs
from lm_helpers import NAMED, llama, save_model

from textenv import PreferenceSet
from textenv.agents import DPO, SFT, DPOConfig, LanguageModelPolicy, TablePolicy, pairs, sample_preferences
from textenv.agents.dpo import reference_logprobs
from textenv.agents.micro_batches import token_budget
from textenv.agents.pairs import PairBatch, PairFigures, pair_losses
from textenv.oracle import evaluate, solve
from textenv.rewards import Preference
from textenv.toy import ToyLanguage, sum_over_tokens

pytestmark = pytest.mark.filterwarnings(CUT)

TEXTS = [
    Preference("the a", " good", " bad"),
    Preference("the long and winding road of go", "od the", "ld"),
    Preference("good", " the a", " a"),
    Preference("a bc", "d", "e f"),
    Preference("the a", " xyz", " good"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("dpo") / "tiny", llama(vocab_size=NAMED))


@pytest.fixture(scope="module")
def encoded(folder):
    return PreferenceSet.encode(TEXTS, lm_envs(folder, 2, stop=[], max_response_tokens=6))


def policy_of(folder, lora_rank=4, **options):
    return LanguageModelPolicy.from_pretrained(folder, lora_rank=lora_rank, **options)


def text(ids):
    return "".join(f" {i}" for i in ids)


def toy_pairs(*chosen_and_rejected, envs=None):
    return PreferenceSet.encode(
        [Preference(" 0", text(c), text(r)) for c, r in chosen_and_rejected], envs or toy_envs(2), ended=False
    )


HAND = ([1, 0], [2, 1, 0]), ([3, 3, 3, 0], [0]), ([0], [1, 1, 0]), ([5, 4, 3, 2, 1, 0], [2, 0])
UNIFORM = TablePolicy(np.zeros((8, 6)))


def table(seed=None):
    logits = np.zeros((8, 6)) if seed is None else np.random.default_rng(seed).normal(size=(8, 6))
    return TablePolicy(logits)


def dpo(policy=None, data=None, seed=0, reference=TOY.reference, held_out=None, **config):
    return DPO(
        table() if policy is None else policy,
        toy_pairs(*HAND) if data is None else data,
        DPOConfig(**config),
        held_out=held_out,
        reference=reference,
        seed=seed,
    )


def by_formula(logits, beta, smoothing=0.0):
    """Mean loss of `HAND` in float64 numpy, from sums of table entries and nothing else."""
    log_pi = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = []
    for chosen, rejected in HAND:
        sums = [sum(table[t, i] for t, i in enumerate(r)) for table in (log_pi,) for r in (chosen, rejected)]
        ref = [-math.log(6) * len(r) for r in (chosen, rejected)]
        gap = (sums[0] - ref[0]) - (sums[1] - ref[1])
        losses.append((1 - smoothing) * np.log1p(np.exp(-beta * gap)) + smoothing * np.log1p(np.exp(beta * gap)))
    return float(np.mean(losses))


# The loss


def test_examples_run():
    assert doctest.testmod(pairs).failed == 0


def test_the_first_step_starts_at_log_two(folder, encoded):
    for agent in (dpo(), DPO(policy_of(folder), encoded, DPOConfig())):
        stats = agent.step()
        assert stats.loss == pytest.approx(math.log(2), abs=1e-5)
        assert abs(stats.margin) < 1e-5 and abs(stats.ref_kl) < 1e-4
        assert stats.tokens == agent.pairs.episodes.tokens
    assert dpo().step().accuracy == 0.5  # of ties nothing is known


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradient_and_figures_of_a_step(smoothing):
    """Against finite differences of a formula that knows neither torch nor episodes."""
    policy, step = table(3), 1e-5
    agent = dpo(policy, beta=0.7, label_smoothing=smoothing, batch_size=4)
    figures = agent.gradient(torch.arange(4))
    logits = policy.logits.detach().double().numpy()
    assert figures["loss"] == pytest.approx(by_formula(logits, 0.7, smoothing), rel=1e-6)
    for place in [(0, 0), (0, 3), (1, 1), (2, 0), (5, 0), (3, 0), (7, 2)]:
        up, down = logits.copy(), logits.copy()
        up[place] += step
        down[place] -= step
        slope = (by_formula(up, 0.7, smoothing) - by_formula(down, 0.7, smoothing)) / (2 * step)
        assert policy.logits.grad[place].item() == pytest.approx(slope, abs=1e-6)
    log_pi = policy.logits.detach().log_softmax(-1)
    rewards = [
        0.7 * (sum(log_pi[t, i].item() for t, i in enumerate(r)) + math.log(6) * len(r)) for both in HAND for r in both
    ]
    chosen, rejected = np.array(rewards[::2]), np.array(rewards[1::2])
    assert figures["chosen_reward"] == pytest.approx(chosen.mean(), abs=1e-5)
    assert figures["rejected_reward"] == pytest.approx(rejected.mean(), abs=1e-5)
    assert figures["margin"] == pytest.approx((chosen - rejected).mean(), abs=1e-5)
    assert figures["accuracy"] == (chosen > rejected).mean()
    assert figures["ref_kl"] == pytest.approx(-(chosen + rejected).mean() / 1.4, abs=1e-5)


def test_figures_by_hand():
    figures = PairFigures(np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, -1.0]), np.array([0.0, 1.0, 2.0]))
    assert (figures.loss, figures.accuracy, figures.margin) == (2.0, 0.5, pytest.approx(-2.5 / 3))
    assert figures.accuracy_estimate().low < 0.5 < figures.accuracy_estimate().high
    assert figures.metrics()["chosen_reward"] == pytest.approx(1 / 6)
    joined = PairFigures.joined([figures, figures])
    assert len(joined.losses) == 6 and joined.margin == figures.margin


def losses_of(policy, batch, budget=None, loss="sigmoid"):
    shares = list(pair_losses(policy, batch, 0.5, loss, budget))
    total = sum(share.loss for share in shares)
    total.backward()
    return len(shares), total.item(), [p.grad for p in policy.parameters() if p.grad is not None]


def batch_of(policy, data):
    state = data.state()
    ref = reference_logprobs(policy.reference, data)
    arrays = [torch.as_tensor(x) for x in (state.input_ids, state.attention_mask)]
    return PairBatch(*arrays, data.mdp.max_response_tokens, torch.as_tensor(ref.reshape(-1)) - 0.3)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_micro_batches_add_up_to_the_whole_batch(folder, encoded, loss):
    """Pairs of unequal lengths, one at a time and in twos, against all at once: the denominators are the batch's."""
    expected = losses_of(policy_of(folder), batch_of(policy_of(folder), encoded), None, loss)
    assert expected[0] == 1
    for budget, parts in ((1, 5), (40, None)):
        found = losses_of(policy_of(folder), batch_of(policy_of(folder), encoded), budget, loss)
        assert found[0] == parts or 1 < found[0] < 5
        assert found[1] == pytest.approx(expected[1], rel=1e-6)
        for one, other in zip(found[2], expected[2], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


class Garbage(TablePolicy):
    """A policy that says something odd of what is not there."""

    def evaluate(self, input_ids, attention_mask, response_tokens, **options):
        output = super().evaluate(input_ids, attention_mask, response_tokens, **options)
        output.logprobs[~attention_mask[:, -response_tokens:].bool()] = torch.nan
        return output


def test_what_stands_in_masked_columns_moves_nothing():
    data = toy_pairs(*HAND)
    clean, state = table(3), data.state()
    ref = torch.as_tensor(reference_logprobs(TOY.reference, data).reshape(-1))
    results = []
    for policy, fill in ((clean, 0), (Garbage(clean.logits.detach()), 5)):
        ids = torch.as_tensor(np.where(state.attention_mask == 1, state.input_ids, fill))
        results.append(losses_of(policy, PairBatch(ids, torch.as_tensor(state.attention_mask), 8, ref), 9))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2][0], results[1][2][0])


def test_what_wrappers_forbid_is_no_choice():
    """Policy and reference are both renormalised over what is allowed: at the start the loss is log 2 all the same."""
    envs = toy_envs(2, min_length=2)
    data = toy_pairs(([1, 2, 0], [1, 1, 3, 0]), envs=envs)
    agent = dpo(data=data, learning_rate=0.1, warmup_fraction=0.0)
    np.testing.assert_allclose(
        agent.ref_logprobs(data)[0], [-2 * math.log(5) - math.log(6), -2 * math.log(5) - 2 * math.log(6)]
    )
    assert agent.step().loss == pytest.approx(math.log(2))
    assert agent.policy.logits[0, 0] == 0 and agent.policy.logits[1, 0] == 0 and agent.policy.logits[2, 0] != 0


def test_a_reference_of_ones_own():
    shifted = ToyLanguage(
        reference_logits=np.random.default_rng(0).normal(size=(8, 6)), stop_id=0, token_scores=[0] * 6
    )
    data = toy_pairs(*HAND)
    found = reference_logprobs(shifted.reference, data)
    padded = np.full((8, 8), -1)
    for row, response in enumerate(r for both in HAND for r in both):
        padded[row, : len(response)] = response
    np.testing.assert_allclose(found.reshape(-1), sum_over_tokens(shifted.reference_logprobs, padded), atol=1e-6)
    assert dpo(reference=shifted.reference).step().loss != pytest.approx(math.log(2), abs=1e-3)


def test_a_language_model_is_measured_against_itself_without_adapters(folder, encoded):
    agent = DPO(policy_of(folder, temperature=0.7), encoded, DPOConfig(learning_rate=0.01, epochs=4, warmup_fraction=0))
    before = agent.ref_logprobs(encoded).copy()
    first, *_, last = agent.iterate()
    assert first.loss == pytest.approx(math.log(2), abs=1e-5) and last.loss < 0.6 and last.accuracy > 0.5
    np.testing.assert_array_equal(reference_logprobs(agent.policy.reference, encoded), before)


# Where it leads


def test_comparisons_of_its_own_samples_lead_to_the_optimum():
    """Samples of the reference, labelled as Bradley and Terry's judge does; a table can be the optimum itself."""
    envs, beta = toy_envs(64), 0.5
    found = sample_preferences(TablePolicy(TOY.reference_logits), None, envs, None, 6000, 0, noise=1.0)
    data = PreferenceSet.encode(found.preferences, envs)
    config = {"beta": beta, "epochs": 12, "batch_size": 1000, "learning_rate": 0.1, "lr_schedule": "cosine"}
    distances = {}
    for name, changes in (("dpo", {}), ("cautious", {"label_smoothing": 0.3}), ("strict", {"beta": 2.0})):
        agent = dpo(data=data, **(config | changes)).learn(None, progress=False)
        log_pi = agent.policy.logits.detach().double().log_softmax(-1).numpy()
        distances[name] = evaluate(TOY, log_pi, beta).distance
    start = evaluate(TOY, TOY.reference_logprobs, beta).distance
    assert distances["dpo"] < 0.05 < start / 15, (distances, start)
    assert distances["cautious"] > 0.1 and distances["strict"] > 0.1, distances  # other losses have other optima
    assert solve(TOY, beta).kl > 0.5


# The run

CONFIG = {"epochs": 3, "batch_size": 2, "learning_rate": 0.01, "weight_decay": 0.01, "lr_schedule": "cosine"}


@pytest.fixture(params=["table", "adapters", "bfloat16"])
def make(request, folder, encoded):
    """(policy, or None where a checkpoint remakes it; a fresh agent; what `load` takes besides)"""
    if request.param == "table":
        data = toy_pairs(*HAND, ([2, 2, 0], [4, 0]))
        return table, lambda: dpo(data=data, held_out=data, seed=5, **CONFIG), {"reference": TOY.reference}
    dtype = "bfloat16" if request.param == "bfloat16" else "float32"
    agent = lambda: DPO(  # noqa: E731
        policy_of(folder, dtype=dtype), encoded, DPOConfig(**CONFIG), held_out=encoded, seed=5
    )
    return lambda: None, agent, {}


def figures(row):
    return {name: value for name, value in row.items() if "second" not in name}


def test_training_goes_on_bit_for_bit(make, tmp_path):
    """Nine steps, or four of them, a checkpoint in the midst of an epoch, everything made anew, and five."""
    remade, agent_of, options = make
    whole = agent_of()
    expected = [figures(stats.metrics()) for stats in whole.iterate()]
    first = agent_of()
    before = [figures(first.step().metrics()) for _ in range(4)]
    first.save(tmp_path / "saved")
    torch.manual_seed(99)
    second = DPO.load(tmp_path / "saved", first.pairs, remade(), held_out=first.held_out, **options)
    assert (second.iteration, second.episodes, second.seed, second.config) == (4, first.episodes, 5, first.config)
    after = [figures(stats.metrics()) for stats in second.iterate()]
    assert before + after == expected and len(expected) == 9
    assert same(parameters(second), parameters(whole))
    assert expected[-1]["loss"] != expected[0]["loss"]


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    data = toy_pairs(*HAND)
    agent = dpo(data=data, held_out=data, epochs=3, batch_size=2, learning_rate=0.1)
    agent.learn(tmp_path / "run", eval_every=2)
    for name in ("metrics.jsonl", "training.png", "checkpoint/state.json", "checkpoint/policy.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0, name
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "eval/loss" in row] == [0, 2, 4, 6]
    assert rows[0]["eval/accuracy"] == 0.5 and rows[-1]["eval/accuracy"] > 0.5
    assert rows[-1]["eval/margin"] == pytest.approx(agent.evaluate().margin)
    shown = capsys.readouterr().out
    assert "held-out loss" in shown and "step 6 of 6" in shown and "accuracy" in shown
    goes_on = DPO.load(tmp_path / "run", data, table(), reference=TOY.reference)
    assert goes_on.iteration == 6 and not list(goes_on.iterate())


def test_measuring_leaves_no_trace(folder, encoded):
    agents = [DPO(policy_of(folder), encoded, held_out=held) for held in (None, encoded)]
    for agent in agents:
        agent.learn(None, progress=False, eval_every=1)
    assert same(*map(parameters, agents))


def test_other_runs_are_refused(tmp_path):
    agent = dpo()
    agent.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"pairs should be as for training.*load\(folder, pairs\)"):
        DPO.load(tmp_path / "saved", toy_pairs(*HAND[::-1]), table(), reference=TOY.reference)
    with pytest.raises(ValueError, match="saved by DPO, got SFT"):
        SFT.load(tmp_path / "saved", agent.pairs.episodes, table())


# What it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "`beta` should be a positive number"),
        ({"beta": math.inf}, "`beta` should be a positive number"),
        ({"loss": "dpo"}, "`loss` should be one of"),
        ({"label_smoothing": 0.5}, "`label_smoothing` should be at least 0 and below 0.5"),
        ({"label_smoothing": -0.1}, "`label_smoothing` should be at least 0 and below 0.5"),
        ({"epochs": 0}, "`epochs` should be an integer of at least 1"),
        ({"learning_rate": math.nan}, "`learning_rate` should be a positive number"),
    ],
)
def test_settings_that_could_not_train(options, message):
    with pytest.raises(ValueError, match=message):
        DPOConfig(**options)


def test_what_an_agent_is_made_of_is_checked(encoded):
    with pytest.raises(TypeError, match="`pairs` should be a PreferenceSet, got list"):
        DPO(table(), TEXTS, reference=TOY.reference)
    with pytest.raises(ValueError, match="`held_out` should be of the same task"):
        dpo(held_out=encoded)
    with pytest.raises(ValueError, match="should have a reference to measure log-ratios against"):
        dpo(reference=None)
    with pytest.raises(ValueError, match="`held_out` should be pairs that nothing is learned from"):
        dpo().evaluate()


def test_responses_that_are_impossible_take_no_step():
    logits = np.zeros((8, 6))
    logits[:, 3] = -np.inf
    forbidding = ToyLanguage(reference_logits=logits, stop_id=0, token_scores=[0] * 6)
    with pytest.raises(FloatingPointError, match=r"preferences\[1\], chosen should have a finite log-probability"):
        dpo(reference=forbidding.reference).step()
    agent = dpo(TablePolicy(logits))
    before = parameters(agent)
    with pytest.raises(FloatingPointError, match="loss on pairs should be finite"):
        agent.step()
    assert same(before, parameters(agent)) and agent.iteration == 0


@pytest.mark.slow
def test_smollm2_learns_from_its_own_samples():
    """Two steps on one batch: the chosen responses become likelier than the rejected ones."""
    envs = gym.make_vec("RLHF-v0", num_envs=4, max_prompt_tokens=16, max_response_tokens=8)
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=4)
    data = PreferenceSet.encode(sample_preferences(policy, None, envs, None, 8, 0).preferences, envs)
    assert all(data.as_sampled)
    agent = DPO(policy, data, DPOConfig(epochs=2, batch_size=8, learning_rate=1e-3, warmup_fraction=0.0))
    assert token_budget(policy, None) == 1024
    first, second = agent.iterate()
    assert first.loss == pytest.approx(math.log(2), abs=1e-3) and abs(first.margin) < 1e-3
    assert second.loss < first.loss and second.margin > 0.01
