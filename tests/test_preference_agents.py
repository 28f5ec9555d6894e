"""Online DPO and expert iteration: pairs and chosen rows by hand, optima on the toy, exact resumption, refusals."""

from __future__ import annotations

import dataclasses
import doctest
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_helpers import TOY, lm_envs, parameters, same, toy_envs

from textenv.agents import (
    ExpertIteration,
    ExpertIterationConfig,
    LanguageModelPolicy,
    OnlineDPO,
    OnlineDPOConfig,
    TablePolicy,
    expert_iteration,
)
from textenv.agents.nll import nll_losses
from textenv.oracle import evaluate, solve
from textenv.wrappers.vector import KLPenalty

AGENTS = [OnlineDPO, ExpertIteration]
OPTIMUM = solve(TOY, 0.1)


def table_agent(agent, envs=None, seed=0, logits=TOY.reference_logits, **config):
    return agent(TablePolicy(logits), envs or toy_envs(64), agent.config_class(**config), seed=seed)


def measured(learner):
    return evaluate(TOY, torch.log_softmax(learner.policy.logits.detach().double(), -1).numpy(), 0.1)


def test_the_page_runs(capsys):
    page = (Path(__file__).parent.parent / "docs" / "preference_agents.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


# What they learn


@pytest.mark.parametrize("agent", AGENTS)
def test_one_line_swaps_the_agent(agent):
    learner = agent(TablePolicy(TOY.reference_logits), toy_envs(256), seed=0)
    before = measured(learner).score
    learner.learn(256 * 12, run_dir=None, progress=False)
    assert measured(learner).score > before + 0.005  # exact, and the default rate is that of language models


SETTINGS = {"learning_rate": 0.1, "lr_schedule": "linear"}


def test_soft_labels_lead_to_the_optimum_and_hard_ones_beyond():
    """At kl_coef 0.1: distance in nats, from 20 at the start, and a judge without doubts who knows no optimum."""
    soft, hard = (table_agent(OnlineDPO, toy_envs(256), labels=labels, **SETTINGS) for labels in ("soft", "hard"))
    for learner in (soft, hard):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learner, "_warn_once", lambda message: None)  # a batch of equal scores, late in training
            learner.learn(20_000, run_dir=None, progress=False)
    assert measured(soft).distance < 0.15
    assert measured(soft).kl == pytest.approx(OPTIMUM.kl, abs=0.4)
    assert measured(hard).kl > OPTIMUM.kl + 0.6 and measured(hard).score > OPTIMUM.score


def test_at_the_optimum_soft_labels_ask_for_nothing():
    """Not on average only: whatever pair is drawn."""
    learner = table_agent(OnlineDPO, logits=OPTIMUM.policy_logprobs, check_start=False)
    rollout = learner.rollout()
    for name, labels in (("soft", 1e-6), ("hard", None)):
        learner.config = dataclasses.replace(learner.config, labels=name, epochs=1)
        stats = learner.optimise(rollout)
        (norm,) = stats.grad_norms
        assert norm < labels if labels else norm > 1e-3
        learner.policy.load_state_dict(TablePolicy(OPTIMUM.policy_logprobs).state_dict())


def test_expert_iteration_comes_near_the_optimum_of_its_shaped_returns():
    learner = table_agent(ExpertIteration, toy_envs(256), **SETTINGS)
    before = measured(learner)
    learner.learn(20_000, run_dir=None, progress=False)
    assert measured(learner).regret < 0.02 * before.regret
    assert measured(learner).distance > 0  # there is no promise that it gets there


@pytest.mark.parametrize("agent", AGENTS)
def test_language_models_learn(agent, tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    learner = agent(policy, lm_envs(tiny_model, num_envs=32), agent.config_class(learning_rate=1e-2), seed=0)
    stats = [learner.step() for _ in range(8)]
    assert stats[0].kl == pytest.approx(0.0, abs=1e-5) and stats[-1].kl > 0
    assert stats[-1].score > stats[0].score
    assert 0 < stats[0].entropy and math.isfinite(stats[0].approx_kl) and math.isnan(stats[0].value_loss)


# The pairs of online DPO


def rollout_of(learner, scores, tolls=None):
    """An iteration's rollout whose responses are paid as given; nan for dropped ones."""
    rollout = learner.rollout()
    scores = torch.tensor(scores)
    mask = rollout.response_mask & ~scores.isnan()[:, None]
    rewards = torch.zeros_like(rollout.rewards)
    rewards[:, 0] = scores.nan_to_num(123.0)
    tolls = torch.zeros(len(scores)) if tolls is None else torch.tensor(tolls)
    return dataclasses.replace(rollout, scores=scores, rewards=rewards, response_mask=mask, tolls=tolls)


def test_pairs_by_hand():
    nan = math.nan
    learner = table_agent(OnlineDPO, toy_envs(16), samples_per_prompt=4)
    scores = [1.0, 3.0, 2.0, 0.0, 5.0, 5.0, 5.0, 5.0, nan, 2.0, nan, 4.0, nan, nan, nan, 1.0]
    best, worst = learner.pairs(rollout_of(learner, scores))
    assert (best.tolist(), worst.tolist()) == ([1, 4, 11], [3, 7, 9])  # one response alone is compared with nothing
    learner.config = dataclasses.replace(learner.config, labels="hard")
    best, worst = learner.pairs(rollout_of(learner, scores))
    assert (best.tolist(), worst.tolist()) == ([1, 11], [3, 9])
    tolls = [0.0, -3.0, 0.0, 0.0] + [0.0] * 12  # the environment paid 3 of which 3 were its toll's
    assert [x.tolist() for x in learner.pairs(rollout_of(learner, scores, tolls))] == [[2, 11], [3, 9]]


def test_labels_are_as_sure_as_the_scores():
    learner = table_agent(OnlineDPO, toy_envs(4))
    batch, episodes = learner.batch(rollout_of(learner, [1.0, 3.0, 2.0, 2.0]))
    assert batch.label_smoothing.tolist() == pytest.approx([1 / (1 + math.exp(2)), 0.5])
    assert len(batch) == 2 and len(episodes.input_ids) == 4
    learner.config = dataclasses.replace(learner.config, labels="hard")
    assert learner.batch(rollout_of(learner, [1.0, 3.0, 2.0, 2.0]))[0].label_smoothing == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
def test_what_the_environment_pays_is_the_score_as_the_wrappers_shape_it(estimator):
    """Whatever the toll is made of; a missing end costs what it costs every agent."""
    envs = toy_envs(64, kl_estimator=estimator, missing_eos_penalty=2.0)
    logits = TOY.reference_logits + np.random.default_rng(0).normal(size=TOY.reference_logits.shape)
    learner = table_agent(OnlineDPO, envs, logits=logits, check_start=False)
    rollout = learner.rollout()
    cut = torch.tensor([reason == "length" for reason in rollout.finish_reason])
    assert cut.any() and rollout.tolls.abs().max() > 0.01
    torch.testing.assert_close(rollout.paid(), rollout.scores - 2.0 * cut, atol=1e-5, rtol=0)
    assert (rollout.advantages[~rollout.response_mask] == 0).all()
    assert rollout.advantages.sum(-1).sign().view(-1, 2).sum(-1).tolist() == [0.0] * 32


def test_figures_of_an_iteration():
    learner = table_agent(OnlineDPO, learning_rate=0.1)
    first = learner.step()
    assert first.pairs == 32 and first.policy_loss < math.log(2) < 0.7
    assert first.updates == 4 and first.metrics()["accuracy"] == first.accuracy
    last = [learner.step() for _ in range(15)][-1]
    assert last.accuracy > 0.65 and last.margin > 0.1


def test_beta_is_the_environments_price():
    envs = toy_envs(16, kl_coef=0.3, target_kl=0.001)
    learner = table_agent(OnlineDPO, envs)
    assert learner.beta == 0.3
    for _ in range(4):
        learner.step()
    assert learner.beta == next(x.leash.kl_coef for x in (envs, envs.env) if "leash" in vars(x)) != 0.3
    assert table_agent(OnlineDPO, envs, beta=0.7).beta == 0.7
    with pytest.raises(ValueError, match=r"OnlineDPO should have a reference .* got none"):
        table_agent(OnlineDPO, toy_envs(16, kl_coef=None))
    free = KLPenalty(toy_envs(16, kl_coef=None), TOY.reference, kl_coef=0.0)
    with pytest.raises(ValueError, match=r"got beta=None and environments that charge 0\.0"):
        table_agent(OnlineDPO, free)
    assert table_agent(OnlineDPO, free, beta=0.2).step().pairs == 8


def test_dropped_samples_take_part_in_nothing(tiny_model):
    """A scorer that fails for some; what stands there moves no gradient."""

    def some(_prompts, responses):
        return [math.nan if place % 3 == 0 else float(len(r)) for place, r in enumerate(responses)]

    for agent in AGENTS:
        envs = lm_envs(tiny_model, 12, scorer=some, scorer_errors="drop")
        policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
        stats = agent(policy, envs, agent.config_class(samples_per_prompt=4), seed=0).step()
        assert stats.dropped == 4 and math.isfinite(stats.policy_loss) and math.isfinite(stats.grad_norm)

    def none(_prompts, responses):
        return [math.nan] * len(responses)

    for agent in AGENTS:
        envs = lm_envs(tiny_model, 4, scorer=none, scorer_errors="drop")
        policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
        learner = agent(policy, envs, agent.config_class(samples_per_prompt=4), seed=0)
        before = parameters(learner)
        with pytest.warns(UserWarning, match="Every advantage of a batch is 0"):
            assert learner.step().updates == 0
        assert same(before, parameters(learner))


# What expert iteration imitates


def test_examples_run():
    assert doctest.testmod(expert_iteration).failed == 0


def test_only_the_best_are_imitated():
    """The loss is that of SFT on the best response of each group, and no other row moves it."""
    learner = table_agent(ExpertIteration, toy_envs(16), epochs=1)
    rollout = learner.rollout()
    returns = torch.where(rollout.response_mask, rollout.rewards, 0.0).sum(-1)
    best = returns.view(4, 4).argmax(-1) + 4 * torch.arange(4)
    assert (rollout.advantages != 0).any(-1).nonzero().squeeze(-1).tolist() == best.tolist()
    expected = list(nll_losses(learner.policy, rollout.input_ids[best], rollout.attention_mask[best], 8))
    assert learner.optimise(rollout).figures()["policy_loss"] == pytest.approx(sum(expected).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 16), ({"keep_share": 0.5}, 32), ({"keep_within": "batch", "keep_share": 0.1}, 6), ({"keep_share": 0.01}, 16)],
)
def test_shares(options, kept):
    learner = table_agent(ExpertIteration, **options)
    rollout = learner.rollout()
    marked = (rollout.advantages != 0).any(-1)
    assert marked.sum() == kept
    if options.get("keep_within") == "batch":
        returns = torch.where(rollout.response_mask, rollout.rewards, 0.0).sum(-1)
        assert returns[marked].min() >= returns[~marked].max()


# The run


@pytest.mark.parametrize("agent", AGENTS)
def test_micro_batches_add_up_to_the_batch(agent):
    whole, pieces = (table_agent(agent, micro_batch_tokens=size, epochs=1) for size in (None, 20))
    for learner in (whole, pieces):
        learner.step()
    torch.testing.assert_close(whole.policy.logits.grad, pieces.policy.logits.grad, atol=1e-6, rtol=1e-5)
    assert whole.policy.logits.grad.abs().max() > 1e-4


@pytest.mark.parametrize("agent", AGENTS)
def test_a_resumed_run_is_the_uninterrupted_one(agent, tmp_path):
    options = {"num_minibatches": 2}
    through = table_agent(agent, **options).learn(64 * 4, run_dir=None, progress=False)
    table_agent(agent, **options).learn(64 * 2, run_dir=tmp_path / "run", progress=False)
    resumed = agent.load(tmp_path / "run", toy_envs(64), TablePolicy(TOY.reference_logits))
    assert resumed.config == through.config
    resumed.learn(64 * 4, run_dir=None, progress=False)
    assert same(parameters(through), parameters(resumed))
    assert resumed.predict({"input_ids": np.zeros(9, int), "attention_mask": np.eye(9, dtype=int)[0]}) in range(6)


def test_garbage_behind_the_ends_moves_nothing():
    """Rewards and log-probabilities at masked positions, NaN included."""
    results = []
    for garbage in (0.0, math.nan):
        learner = table_agent(OnlineDPO, epochs=1)
        rollout = learner.rollout()
        fill = torch.tensor(garbage)
        changed = {
            name: torch.where(rollout.response_mask, getattr(rollout, name), fill)
            for name in ("rewards", "logprobs", "ref_logprobs")
        }
        stats = learner.optimise(dataclasses.replace(rollout, **changed))
        results.append((stats.figures()["policy_loss"], learner.policy.logits.grad))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: OnlineDPOConfig(clip_range=0.3),
            r"`clip_range` should be left as it is, 0\.2, got 0\.3",
        ),
        (lambda: OnlineDPOConfig(entropy_coef=0.1), "`entropy_coef` should be left as it is"),
        (lambda: OnlineDPOConfig(beta=0.0), "`beta` should be a positive number"),
        (lambda: OnlineDPOConfig(loss="hinge"), "`loss` should be one of"),
        (lambda: OnlineDPOConfig(labels="sure"), "`labels` should be 'soft' or 'hard'"),
        (lambda: OnlineDPOConfig(samples_per_prompt=1), "`samples_per_prompt` should be at least 2"),
        (lambda: ExpertIterationConfig(dual_clip=3.0), r"`dual_clip` should be left as it is, None, got 3\.0"),
        (lambda: ExpertIterationConfig(keep_share=1.0), "`keep_share` should be above 0 and below 1"),
        (lambda: ExpertIterationConfig(keep_within="group"), "`keep_within` should be 'prompt' or 'batch'"),
        (lambda: ExpertIterationConfig(samples_per_prompt=1), "`samples_per_prompt` should be at least 2"),
    ],
)
def test_settings_that_cannot_train_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config()
