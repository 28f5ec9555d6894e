"""PPO: the optimum of the toy, one iteration recomputed by hand, masks, micro-batches, faults, the loop around it."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, lm_agent, lm_envs, parameters, same, toy_agent, toy_envs
from lm_helpers import GRUPolicy, llama

from textenv import ScorerError
from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.agents.losses import LOSS_MODES, Counts, approx_kl
from textenv.agents.mismatch import Proximal
from textenv.agents.stats import UpdateStats, iteration_stats
from textenv.lm import LanguageModel
from textenv.oracle import evaluate


def last_returns(agent, iterations):
    return np.mean([stats.shaped_return for _, stats in zip(range(iterations), agent.iterate(), strict=False)][-3:])


# It learns


def test_table_reaches_the_optimum_of_the_toy():
    agent = toy_agent(envs=toy_envs(256), gae_lambda=1.0, vf_coef=0.5, learning_rate=0.05, lr_schedule="linear")
    agent.learn(30_000, run_dir=None, progress=False)
    logprobs = torch.log_softmax(agent.policy.logits.detach().double(), -1).numpy()
    start, end = (evaluate(TOY, table, kl_coef=0.1) for table in (TOY.reference_logprobs, logprobs))
    assert 1 - end.regret / start.regret >= 0.98
    assert end.kl > 10  # it had to go far for that


def test_recurrent_policy_learns_the_toy():
    """J* is 2.09, the uniform policy has -0.23."""
    agent = toy_agent(GRUPolicy(6), toy_envs(128), gae_lambda=1.0, vf_coef=0.5, learning_rate=0.01)
    assert last_returns(agent, 25) > 1.6


@pytest.mark.filterwarnings(CUT)  # the optimum stops early in 1% of responses
def test_language_model_learns_the_toy():
    module = llama(vocab_size=6, initializer_range=0.02)  # nearly uniform
    reference = LanguageModel(copy.deepcopy(module), source="toy")
    policy = LanguageModelPolicy(LanguageModel(module.requires_grad_(True), source="toy"), reference, None, {})
    agent = toy_agent(policy, toy_envs(128), gae_lambda=1.0, vf_coef=0.5, learning_rate=0.01)
    assert last_returns(agent, 15) > 1.6


@pytest.mark.filterwarnings(CUT)
def test_adapters_of_a_language_model_learn_from_a_function(tiny_model):
    agent = lm_agent(tiny_model, lm_envs(tiny_model, 64), learning_rate=0.01)
    scores = [stats.score for _, stats in zip(range(12), agent.iterate(), strict=False)]
    assert np.mean(scores[-3:]) > scores[0] + 1.5


# One iteration by hand


@pytest.fixture(scope="module")
def iteration():
    """A rollout of the toy and its record, after a step so small that nothing moves."""
    policy = TablePolicy(np.random.default_rng(0).normal(size=(8, 6)))
    with torch.no_grad():
        policy.values.copy_(torch.linspace(-0.5, 1, 8))
    agent = toy_agent(policy, epochs=1, learning_rate=1e-12, check_start=False, whiten_advantages=False)
    rollouts = []
    collect = agent.rollout
    agent.rollout = lambda **options: rollouts.append(collect(**options)) or rollouts[-1]
    stats = agent.step()
    assert {1, 8} <= set(rollouts[0].response_mask.sum(-1).tolist())  # ragged
    return rollouts[0], stats, agent


def per_response(rollout, x):
    """Sums over each response's own tokens, by slicing."""
    return [float(row[:length].double().sum()) for row, length in zip(x, lengths(rollout), strict=True)]


def lengths(rollout):
    return [len(text.split()) for text in rollout.responses]


def test_rollout_holds_what_was_written(iteration):
    rollout, _, _ = iteration
    for row, text in enumerate(rollout.responses):
        ids = [int(word) for word in text.split()]
        assert rollout.input_ids[row, 1 : 1 + len(ids)].tolist() == ids
        assert rollout.response_mask[row].tolist() == [t < len(ids) for t in range(8)]
        assert rollout.attention_mask[row].tolist() == [1, *rollout.response_mask[row].int().tolist()]
        assert rollout.finish_reason[row] == ("stop" if ids[-1] == 0 else "length")
    np.testing.assert_allclose(rollout.scores, TOY.scorer(rollout.prompts, rollout.responses), atol=1e-6)


def test_rewards_are_tolls_and_a_score_at_the_end(iteration):
    rollout, _, agent = iteration
    log_pi = torch.log_softmax(agent.policy.logits.detach(), -1)
    for row, length in enumerate(lengths(rollout)):
        ids = rollout.input_ids[row, 1 : 1 + length].long()
        chosen = log_pi[torch.arange(length), ids]
        torch.testing.assert_close(rollout.logprobs[row, :length], chosen, atol=1e-5, rtol=0)
        rewards = -0.1 * (chosen - math.log(1 / 6))
        rewards[-1] += rollout.scores[row]
        torch.testing.assert_close(rollout.rewards[row, :length], rewards, atol=1e-5, rtol=0)


def test_every_real_token_has_an_advantage_and_no_other(iteration):
    rollout, _, _ = iteration
    assert (rollout.advantages != 0).sum() == rollout.response_mask.sum() == sum(lengths(rollout))


def test_figures_of_the_texts(iteration):
    rollout, stats, _ = iteration
    scores = rollout.scores.double().numpy()
    assert stats.score == pytest.approx(scores.mean(), abs=1e-6)
    assert stats.score_std == pytest.approx(scores.std(), abs=1e-6)
    assert stats.response_length == pytest.approx(np.mean(lengths(rollout)))
    assert stats.eos_rate == pytest.approx(np.mean([text.endswith(" 0") for text in rollout.responses]))
    pairs = [pair for text in rollout.responses for pair in zip(text.split(), text.split()[1:], strict=False)]
    assert stats.distinct_2 == pytest.approx(len(set(pairs)) / len(pairs))
    assert stats.tokens == sum(lengths(rollout)) and stats.dropped == 0
    assert (stats.iteration, stats.episodes, stats.kl_coef, stats.learning_rate) == (1, 32, 0.1, 1e-12)
    first = stats.samples[0]
    assert (first.prompt, first.response) == (rollout.prompts[0], rollout.responses[0]) and len(stats.samples) == 4


def test_figures_of_the_tokens(iteration):
    rollout, stats, agent = iteration
    kl = np.mean(per_response(rollout, rollout.logprobs - math.log(1 / 6)))
    assert stats.kl == pytest.approx(kl, abs=1e-5)
    assert stats.shaped_return == pytest.approx(stats.score - 0.1 * kl, abs=1e-5)  # the objective
    log_pi = torch.log_softmax(agent.policy.logits.detach().double(), -1)
    entropy_by_position = -(log_pi.exp() * log_pi).sum(-1)
    entropies = torch.cat([entropy_by_position[:length] for length in lengths(rollout)])
    assert stats.entropy == pytest.approx(entropies.mean().item(), abs=1e-5)


def test_figures_of_an_update_that_moves_nothing(iteration):
    rollout, stats, _ = iteration
    assert stats.ratio_q01 == stats.ratio_q50 == stats.ratio_q99 == 1.0
    assert stats.clip_fraction == stats.approx_kl == 0.0
    real = [(row, t) for row, length in enumerate(lengths(rollout)) for t in range(length)]
    advantages = np.array([rollout.advantages[at].item() for at in real])
    errors = np.array([(rollout.values[at] - rollout.returns[at]).item() for at in real])
    returns = np.array([rollout.returns[at].item() for at in real])
    assert stats.policy_loss == pytest.approx(-advantages.mean(), abs=1e-5)  # ratio 1
    assert stats.value_loss == pytest.approx(0.5 * (errors**2).mean(), abs=1e-5)
    assert stats.explained_variance == pytest.approx(1 - errors.var() / returns.var(), abs=1e-5)


def test_gradient_norm_is_that_of_the_policy_gradient(iteration):
    """At ratio 1 the gradient is mean(-A grad log pi) + vf_coef mean((V - G) grad V), here written out for a table."""
    rollout, stats, agent = iteration
    pi = torch.softmax(agent.policy.logits.detach().double(), -1)
    logits, values = np.zeros((8, 6)), np.zeros(8)
    for row, length in enumerate(lengths(rollout)):
        for t in range(length):
            chosen = np.eye(6)[int(rollout.input_ids[row, 1 + t])]
            logits[t] -= rollout.advantages[row, t].item() * (chosen - pi[t].numpy())
            values[t] += 0.1 * (rollout.values[row, t] - rollout.returns[row, t]).item()
    norm = np.sqrt((logits**2).sum() + (values**2).sum()) / sum(lengths(rollout))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)


def test_rates_and_phases(iteration):
    _, stats, _ = iteration
    assert set(stats.seconds) == {"generate", "score", "logprobs", "rewards", "update"}
    assert all(taken > 0 for taken in stats.seconds.values())
    total = stats.tokens / sum(stats.seconds.values())
    assert stats.tokens_per_second["total"] == pytest.approx(total)
    assert stats.metrics()["tokens_per_second/total"] == pytest.approx(total)
    assert all(isinstance(value, int | float) for value in stats.metrics().values())


def test_update_figures_by_hand():
    """Ratios 1, 1.1, 1.5 and 0.5 over two micro-batches; padding holds NaN."""
    stats = UpdateStats(clip_range=0.2)
    nan, mask = float("nan"), torch.tensor([[True, True, False]])
    for ratios, losses, entropies in (((1.0, 1.1), (1.0, 3.0), (0.5, 1.0)), ((1.5, 0.5), (2.0, 4.0), (1.5, 2.0))):
        logratio = torch.tensor([[*np.log(ratios), nan]])
        policy_loss, value_loss = torch.tensor(losses)
        entropies = torch.tensor([[*entropies, nan]])
        stats.add(logratio, entropies, mask, policy_loss=policy_loss, value_loss=value_loss)
    stats.add_grad_norm(0.5)
    stats.add_grad_norm(1.5)
    figures = stats.figures()
    assert (figures["policy_loss"], figures["value_loss"], figures["grad_norm"]) == (1.5, 3.5, 1.0)  # per step
    assert figures["clip_fraction"] == 0.5 and figures["entropy"] == 1.25
    expected = np.mean([r - 1 - math.log(r) for r in (1.0, 1.1, 1.5, 0.5)])
    assert figures["approx_kl"] == pytest.approx(expected, abs=1e-6)
    assert figures["ratio_q50"] == pytest.approx(1.05, abs=1e-6)
    assert 0.5 < figures["ratio_q01"] < 0.52 and 1.48 < figures["ratio_q99"] < 1.5


def test_no_optimiser_step_no_figures():
    figures = UpdateStats(0.2).figures()
    assert (figures.pop("updates"), figures.pop("early_stop")) == (0, 0)
    assert len(figures) == 16 and all(math.isnan(value) for value in figures.values())


def test_whitening_is_over_the_batch():
    rollout = toy_agent().rollout()
    real = rollout.advantages[rollout.response_mask]
    assert abs(real.mean()) < 1e-5 and real.square().mean() == pytest.approx(1, abs=1e-4)


# Masked positions and dropped samples


def poisoned(rollout, keep):
    """NaN wherever nothing real stands."""
    garbage = {
        name: torch.where(keep, getattr(rollout, name), torch.tensor(float("nan")))
        for name in ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    }
    return dataclasses.replace(rollout, **garbage)


def record_of(agent, rollout):
    update = agent.optimise(rollout)
    stats = iteration_stats(rollout, update, iteration=1, episodes=1, kl_coef=0.1, learning_rate=0.1)
    return {name: x for name, x in stats.metrics().items() if "second" not in name}, parameters(agent)


TERMS = {"clip_range_high": 0.3, "dual_clip": 1.5, "entropy_coef": 0.3, "kl_loss_coef": 0.2}
"""Everything that can be in the loss."""

AGENTS = {
    "table": lambda _: toy_agent(num_minibatches=2, learning_rate=0.1, clip_range_vf=0.2),
    "table, k1": lambda _: toy_agent(num_minibatches=2, learning_rate=0.1, **TERMS, kl_loss_estimator="k1"),
    "table, k2": lambda _: toy_agent(num_minibatches=2, learning_rate=0.1, **TERMS),
    "table, k3": lambda _: toy_agent(num_minibatches=2, learning_rate=0.1, **TERMS, kl_loss_estimator="k3"),
    "table, stops": lambda _: toy_agent(num_minibatches=2, learning_rate=0.1, target_kl=0.001),
    "recurrent": lambda _: toy_agent(GRUPolicy(6), num_minibatches=2, learning_rate=0.1),
    "language model": lambda folder: lm_agent(folder, num_minibatches=2, learning_rate=0.1),
    "language model, all terms": lambda folder: lm_agent(folder, num_minibatches=2, learning_rate=0.1, **TERMS),
}


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)
def test_masked_values_move_no_update_and_no_figure_by_a_bit(make, tiny_model):
    agents = make(tiny_model), make(tiny_model)
    rollout = agents[0].rollout()
    assert not rollout.response_mask.all()
    ids = torch.where(rollout.attention_mask.bool(), rollout.input_ids, torch.tensor(4, dtype=torch.int32))
    dirty = dataclasses.replace(poisoned(rollout, rollout.response_mask), input_ids=ids)
    (clean_figures, clean), (dirty_figures, moved) = record_of(agents[0], rollout), record_of(agents[1], dirty)
    np.testing.assert_equal(dirty_figures, clean_figures)  # NaN equals NaN
    assert same(clean, moved)
    assert not same(clean, parameters(make(tiny_model)))  # something did move


def every_third(prompts, responses):
    """No score for every third sample."""
    scores = TOY.scorer(prompts, responses)
    scores[::3] = np.nan
    return scores


def dropping_agent(**config):
    envs = toy_envs()
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=every_third, scorer_errors="drop")
    return toy_agent(envs=envs, learning_rate=0.1, **config)


def test_dropped_samples_are_counted_and_take_part_in_nothing():
    agent = dropping_agent()
    rollout = agent.rollout()
    dropped = torch.arange(32) % 3 == 0
    assert torch.equal(torch.isnan(rollout.scores), dropped)
    assert not rollout.response_mask[dropped].any() and not rollout.advantages[dropped].any()
    figures, moved = record_of(agent, rollout)
    assert figures["dropped"] == 11
    kept = ~dropped.numpy()
    scores = TOY.scorer(np.array(rollout.prompts)[kept], np.array(rollout.responses)[kept])
    assert figures["score"] == pytest.approx(scores.mean(), abs=1e-6)
    assert figures["response_length"] == pytest.approx(np.array(lengths(rollout))[kept].mean())
    other = dropping_agent()
    figures_too, moved_too = record_of(other, poisoned(other.rollout(), ~dropped[:, None].expand(-1, 8)))
    np.testing.assert_equal(figures_too, figures)
    assert same(moved, moved_too)


def test_iterations_without_any_score_leave_the_policy_alone():
    envs = toy_envs()
    task = envs.unwrapped.task
    envs.unwrapped.task = dataclasses.replace(task, scorer=lambda p, r: [None] * len(p), scorer_errors="drop")
    agent = toy_agent(envs=envs)
    before = parameters(agent)
    with pytest.warns(UserWarning, match="Every advantage of a batch is 0"):
        stats = agent.step()
    assert same(parameters(agent), before)
    assert stats.dropped == 32 and math.isnan(stats.score) and math.isnan(stats.policy_loss)


# Micro-batches


MICRO = {name: AGENTS[name] for name in ("recurrent", "language model", "language model, all terms")}


@pytest.mark.parametrize("mode", LOSS_MODES)
@pytest.mark.parametrize("make", MICRO.values(), ids=MICRO)
def test_eight_micro_batches_of_one_have_the_gradients_of_one_batch_of_eight(make, mode, tiny_model):
    agent = make(tiny_model)
    rollout = agent.rollout()
    index = torch.arange(8)
    assert len(set(rollout.response_mask[index].sum(-1).tolist())) > 2
    results = {}
    for size in (None, 1, 40):
        config = dataclasses.replace(agent.config, micro_batch_tokens=size, loss_mode=mode, max_grad_norm=1e9)
        agent.config, stats = config, UpdateStats(0.2)
        before = copy.deepcopy(agent.policy.state_dict())
        agent._update(rollout, index, Proximal(rollout, None), stats, begins=False)
        agent.policy.load_state_dict(before)
        results[size] = ([parameter.grad.clone() for parameter in agent.parameters], stats.figures())
    whole, figures = results[None]
    assert max(gradient.abs().max() for gradient in whole) > 1e-3
    for size in (1, 40):
        for one, other in zip(whole, results[size][0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
        for name, value in figures.items():
            assert results[size][1][name] == pytest.approx(value, abs=1e-5, nan_ok=True), name


def test_averaging_micro_batches_by_their_own_token_counts_would_be_another_gradient():
    """The contrast: what accumulation without global counts gives."""
    agent = toy_agent(GRUPolicy(6), max_grad_norm=1e9)
    rollout = agent.rollout()
    gradients = []
    for index in (torch.arange(8), *torch.arange(8).split(1)):
        agent._update(rollout, index, Proximal(rollout, None), UpdateStats(0.2), begins=False)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in agent.parameters]))
        agent = toy_agent(GRUPolicy(6), max_grad_norm=1e9)
    assert not torch.allclose(gradients[0], sum(gradients[1:]) / 8, atol=1e-3)


def test_minibatches_visit_every_episode_once_per_epoch(monkeypatch):
    agent = toy_agent(num_minibatches=3, epochs=2)
    visited = []
    update = agent._update
    monkeypatch.setattr(agent, "_update", lambda r, i, *rest: visited.append(i.tolist()) or update(r, i, *rest))
    agent.step()
    assert [len(index) for index in visited] == [11, 11, 10] * 2
    for epoch in (visited[:3], visited[3:]):
        assert sorted(row for index in epoch for row in index) == list(range(32))
    assert visited[:3] != visited[3:]


# Terms of the loss


def loss_and_gradient(rollout, policy, **config):
    """Of the whole rollout as one minibatch; the policy's logits are left as they are."""
    agent = toy_agent(policy, check_start=False, max_grad_norm=1e9, learning_rate=1e-12, **config)
    stats = UpdateStats(0.2)
    agent._update(rollout, torch.arange(len(rollout.input_ids)), Proximal(rollout, None), stats, begins=False)
    return policy.logits.grad.double(), stats.figures()


@pytest.fixture
def moved():
    """A rollout, and a policy that has moved away from the one that wrote it."""
    policy = TablePolicy(np.random.default_rng(0).normal(size=(8, 6)))
    rollout = toy_agent(policy, check_start=False).rollout()
    with torch.no_grad():
        policy.logits += 0.5 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return rollout, policy


def test_entropy_bonus_adds_the_gradient_of_the_mean_entropy(moved):
    """Written out for a table: d H_t / d logit = -pi (log pi + H), weighted by how often position t occurs."""
    rollout, policy = moved
    plain, _ = loss_and_gradient(rollout, policy)
    bonus, figures = loss_and_gradient(rollout, policy, entropy_coef=0.7)
    pi = torch.softmax(policy.logits.detach().double(), -1)
    entropy = -(pi * pi.log()).sum(-1)
    share = rollout.response_mask.sum(0) / rollout.response_mask.sum()
    slope = -pi * (pi.log() + entropy[:, None]) * share[:, None]
    torch.testing.assert_close(bonus - plain, -0.7 * slope, atol=1e-6, rtol=0)  # the loss goes down with entropy
    assert slope.abs().max() > 0.01
    assert figures["entropy"] == pytest.approx((entropy * share).sum().item(), abs=1e-5)


def test_entropy_bonus_keeps_a_policy_wide():
    ends = [[agent.step() for _ in range(8)][-1].entropy for agent in map(entropic, (0.0, 1.0))]
    assert ends[0] < 1.2 < 1.7 < ends[1] < math.log(6) + 1e-5


def entropic(coef):
    return toy_agent(learning_rate=0.1, entropy_coef=coef)


@pytest.mark.parametrize(
    "estimator, slope", [("k1", lambda u: 1.0), ("k2", lambda u: u), ("k3", lambda u: 1 - 1 / math.exp(u))]
)
def test_kl_in_the_loss_adds_its_gradient_token_by_token(moved, estimator, slope):
    rollout, policy = moved
    plain, off = loss_and_gradient(rollout, policy)
    with_kl, figures = loss_and_gradient(rollout, policy, kl_loss_coef=0.7, kl_loss_estimator=estimator)
    log_pi = torch.log_softmax(policy.logits.detach().double(), -1)
    expected, losses = torch.zeros(8, 6, dtype=torch.float64), []
    for row, length in enumerate(lengths(rollout)):
        for t in range(length):
            token = int(rollout.input_ids[row, 1 + t])
            u = log_pi[t, token].item() - math.log(1 / 6)
            losses.append({"k1": u, "k2": u * u / 2, "k3": math.exp(-u) - 1 + u}[estimator])
            expected[t] += 0.7 * slope(u) * (torch.eye(6)[token] - log_pi[t].exp()) / sum(lengths(rollout))
    torch.testing.assert_close(with_kl - plain, expected, atol=1e-6, rtol=0)
    assert figures["kl_loss"] == pytest.approx(np.mean(losses), abs=1e-5) and math.isnan(off["kl_loss"])
    assert figures["policy_loss"] == off["policy_loss"]  # logged apart


def tilt_of_the_score_alone(kl_coef):
    """Where KL in the loss settles: each position's tilt by the score expected from there, KL to come left out."""
    rows, value = [], -1.0  # of a response that never stops
    for reference, scores in zip(TOY.reference_logprobs[::-1], TOY.token_scores[::-1], strict=True):
        q = scores + np.where(np.arange(6) == 0, 0.0, value)
        tilted = reference + q / kl_coef
        rows.append(tilted - np.logaddexp.reduce(tilted))
        value = (np.exp(rows[-1]) * q).sum()
    return np.array(rows[::-1])


def regret_of(kl_coef, toll=0.0, **config):
    options = {"gae_lambda": 1.0, "vf_coef": 0.5, "learning_rate": 0.05, "lr_schedule": "linear"}
    agent = toy_agent(envs=toy_envs(256, kl_coef=toll), **options, whiten_advantages=False, **config)
    agent.learn(30_000, run_dir=None, progress=False)
    logprobs = torch.log_softmax(agent.policy.logits.detach().double(), -1).numpy()
    return evaluate(TOY, logprobs, kl_coef=kl_coef).regret


def test_kl_in_the_loss_comes_near_the_optimum_where_the_score_dominates():
    """Of a regret of 2.32 at the start; KL in the reward leaves 0.01 of it with the same settings."""
    assert regret_of(0.1, kl_loss_coef=0.1) < 0.02 * 2.318


@pytest.mark.slow
def test_kl_in_the_loss_settles_where_it_is_said_to():
    """At a coefficient that matters: 0.453 at the start, 0.065 at the tilt by the score alone, 0 at the optimum."""
    predicted = evaluate(TOY, tilt_of_the_score_alone(0.5), kl_coef=0.5).regret
    assert predicted == pytest.approx(0.065, abs=1e-3)
    assert regret_of(0.5, kl_loss_coef=0.5) == pytest.approx(predicted, abs=0.01)
    assert regret_of(0.5, toll=0.5) < 0.01  # in the reward: the optimum
    assert regret_of(0.5, kl_loss_coef=0.5, kl_loss_estimator="k1") > 1  # no pull at all
    assert regret_of(0.5, kl_loss_coef=0.5, kl_loss_estimator="k3") > 0.09  # the other KL's


def test_clipping_options_reach_the_loss(moved):
    """The figure for tokens beyond the range too."""
    rollout, policy = moved
    losses = {}
    for name, options in {"plain": {}, "high": {"clip_range_high": 0.6}, "dual": {"dual_clip": 1.2}}.items():
        agent = toy_agent(policy, check_start=False, learning_rate=1e-12, epochs=1, **options)
        stats = agent.optimise(rollout)
        losses[name] = stats.figures()
    ratio, advantage = [], []
    log_pi = torch.log_softmax(policy.logits.detach(), -1)
    for row, length in enumerate(lengths(rollout)):
        for t in range(length):
            ratio.append(math.exp(log_pi[t, int(rollout.input_ids[row, 1 + t])] - rollout.logprobs[row, t]))
            advantage.append(rollout.advantages[row, t].item())
    r, a = np.array(ratio), np.array(advantage)
    high = np.maximum(-a * r, -a * r.clip(0.8, 1.6))
    dual = np.maximum(-a * r, -a * r.clip(0.8, 1.2))
    dual = np.where(a < 0, np.minimum(dual, -1.2 * a), dual)
    assert losses["high"]["policy_loss"] == pytest.approx(high.mean(), abs=1e-5)
    assert losses["dual"]["policy_loss"] == pytest.approx(dual.mean(), abs=1e-5)
    assert len({round(figures["policy_loss"], 4) for figures in losses.values()}) == 3
    assert losses["plain"]["clip_fraction"] == pytest.approx(((r > 1.2) | (r < 0.8)).mean())
    assert (
        losses["high"]["clip_fraction"]
        == pytest.approx(((r > 1.6) | (r < 0.8)).mean())
        != losses["plain"]["clip_fraction"]
    )


def test_terms_that_are_off_leave_no_trace():
    runs = []
    for options in ({}, {"entropy_coef": 0, "kl_loss_coef": 0.0, "kl_loss_estimator": "k3", "target_kl": 1e9}):
        agent = toy_agent(learning_rate=0.1, num_minibatches=2, **options)
        stats = [agent.step() for _ in range(3)]
        runs.append(([s.policy_loss for s in stats], parameters(agent)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("coef", ["entropy_coef", "kl_loss_coef"])
def test_terms_alone_teach_where_rewards_do_not(coef):
    """All rewards equal: advantages are 0, not NaN, and what moves is the term's doing."""
    envs = toy_envs(kl_coef=0.0)
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=lambda p, r: [1.0] * len(p))
    start = np.random.default_rng(0).normal(size=(8, 6))
    policy = TablePolicy(start)
    with torch.no_grad():
        policy.values.fill_(1.0)
    agent = toy_agent(policy, envs, check_start=False, learning_rate=0.1, **{coef: 1.0})
    with pytest.warns(UserWarning, match="Every advantage of a batch is 0"):
        stats = [agent.step() for _ in range(10)]
    assert not any(s.policy_loss for s in stats[:1])
    spread = policy.logits.detach() - policy.logits.detach().mean(-1, keepdim=True)
    assert spread[:3].abs().max() < 0.4 < np.abs(start[:3]).max()  # towards the uniform reference


def test_policies_without_differentiable_entropies_are_refused():
    with pytest.raises(
        TypeError, match=r"With entropy_coef=0\.1 .* should take the argument `entropy_grad`, got GRUPolicy"
    ):
        toy_agent(GRUPolicy(6), entropy_coef=0.1)
    toy_agent(GRUPolicy(6), kl_loss_coef=0.1)


def test_kl_in_the_loss_without_a_reference_is_refused(tiny_model):
    envs = lm_envs(tiny_model, kl_coef=None)
    with pytest.raises(ValueError, match=r"With kl_loss_coef=0\.1 there should be a reference .* got none"):
        toy_agent(GRUPolicy(envs.unwrapped.task.mdp.vocab_size), envs, kl_loss_coef=0.1)
    lm_agent(tiny_model, envs, kl_loss_coef=0.1)  # carries its own


@pytest.mark.filterwarnings(CUT)
def test_every_term_in_bfloat16(tiny_model):
    """Losses are float32, and near those of float32 arithmetic."""
    figures, rollout = {}, None
    for dtype in ("float32", "bfloat16"):
        policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, dtype=dtype)
        agent = toy_agent(policy, lm_envs(tiny_model), learning_rate=1e-3, micro_batch_tokens=40, **TERMS)
        rollout = rollout or agent.rollout()
        with policy.arithmetic():
            counts = Counts.of(rollout.response_mask)
            loss = agent._loss(rollout, agent._evaluate(rollout), rollout.logprobs, None, counts, UpdateStats(0.2))
        assert loss.dtype == torch.float32
        figures[dtype] = agent.optimise(rollout).figures()
        assert all(parameter.dtype == torch.float32 for parameter in agent.parameters)
    for name in ("policy_loss", "value_loss", "kl_loss", "entropy"):
        assert figures["bfloat16"][name] == pytest.approx(figures["float32"][name], abs=0.1), name


# Early stop


def test_updates_stop_before_the_step_whose_minibatch_has_gone_too_far():
    """Step by step beside an agent that is never stopped: the same updates until approx_kl exceeds 1.5 target_kl."""
    free = toy_agent(learning_rate=0.05, epochs=10)
    rollout = free.rollout()
    kls, weights = [], []
    for _ in range(10):
        weights.append(parameters(free))
        stats = UpdateStats(0.2)
        order = torch.randperm(32, generator=free.generator)
        free._update(rollout, order, Proximal(rollout, None), stats, begins=False)
        kls.append(stats.figures()["approx_kl"])
    assert kls[0] == 0 and kls[4] > kls[3]
    target = (kls[3] + kls[4]) / 2 / 1.5  # between the fourth and the fifth
    agent = toy_agent(learning_rate=0.05, epochs=10, target_kl=target)
    figures = agent.optimise(agent.rollout()).figures()
    assert (figures["updates"], figures["early_stop"]) == (4, 1)
    assert same(parameters(agent), weights[4])
    assert figures["approx_kl"] == pytest.approx(np.mean(kls[:5]), abs=1e-6)  # the one that stopped it too
    other = toy_agent(learning_rate=0.05, epochs=10, target_kl=1.5 * target)
    assert other.optimise(other.rollout()).figures()["updates"] > 4  # the factor is 1.5


def test_the_whole_minibatch_decides_not_a_micro_batch_of_it():
    """Some rows alone exceed the limit; the mean over all tokens does not."""
    logits = torch.log_softmax(torch.linspace(0, 3, 48).reshape(8, 6), -1)
    counts = []
    for size in (None, 1, 40):
        agent = toy_agent(TablePolicy(logits), check_start=False, micro_batch_tokens=size)
        rollout = agent.rollout()
        with torch.no_grad():
            agent.policy.logits += 0.2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        stats = UpdateStats(0.2)
        agent._update(rollout, torch.arange(32), Proximal(rollout, None), stats, begins=False)
        kl = stats.figures()["approx_kl"]
        by_row = [approx_kl(x).mean().item() for x in stats._logratios]
        agent.config = dataclasses.replace(agent.config, target_kl=kl / 1.4)
        with torch.no_grad():
            agent.policy.logits.copy_(logits + 0.2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
        agent._update(rollout, torch.arange(32), Proximal(rollout, None), again := UpdateStats(0.2), begins=False)
        counts.append((again.figures()["updates"], again.early_stop))
        assert size is None or max(by_row) > 1.5 * kl / 1.4
    assert counts == [(1, False)] * 3


def test_each_minibatch_is_judged_by_itself():
    """A calm first minibatch does not make up for a wild second one."""
    stats, mask = UpdateStats(0.2), torch.ones(1, 2, dtype=torch.bool)
    for logratio, kl in ((0.0, 0.0), (0.5, math.expm1(0.5) - 0.5)):
        stats.add(torch.full((1, 2), logratio), torch.zeros(1, 2), mask, policy_loss=torch.tensor(3.0))
        assert stats.minibatch_kl == pytest.approx(kl)
        if logratio == 0:
            stats.add_grad_norm(1.0)
    stats.stop()
    figures = stats.figures()
    assert figures["policy_loss"] == 3.0  # of two minibatches looked at
    assert (figures["grad_norm"], figures["updates"], figures["early_stop"]) == (1.0, 1, 1)


def test_a_stop_at_the_first_minibatch_takes_no_step():
    """An engine's or an older policy's rollout."""
    policy = TablePolicy(TOY.reference_logits)
    agent = toy_agent(policy, target_kl=0.01, check_start=False)
    rollout = agent.rollout()
    with torch.no_grad():
        policy.logits += torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    before = parameters(agent)
    stats = agent.optimise(rollout)
    assert same(parameters(agent), before) and not agent.optimizer.state
    figures = stats.figures()
    assert (figures["updates"], figures["early_stop"]) == (0, 1)
    assert math.isnan(figures["grad_norm"]) and figures["approx_kl"] > 0.015 and math.isfinite(figures["policy_loss"])
    assert all(parameter.grad is None for parameter in agent.parameters)


def test_the_next_iteration_starts_afresh():
    agent = toy_agent(learning_rate=0.1, target_kl=0.005, epochs=10)
    stats = [agent.step() for _ in range(4)]
    assert all(s.early_stop == 1 and 1 <= s.updates < 10 for s in stats)
    assert stats[0].metrics()["updates"] == stats[0].updates
    calm = toy_agent(learning_rate=1e-4, target_kl=0.1, epochs=3, num_minibatches=2).step()
    assert (calm.updates, calm.early_stop) == (6, 0)


# Seeds


def test_equal_seeds_give_equal_runs_and_torch_and_numpy_are_left_alone():
    torch.manual_seed(0)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - the state that must not move
    runs = []
    for seed in (5, 5, 6):
        agent = toy_agent(seed=seed, num_minibatches=2, learning_rate=0.1)
        runs.append(([agent.step().samples for _ in range(2)], parameters(agent)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0] and not same(runs[0][1], runs[2][1])
    assert runs[0][0][0] != runs[0][0][1]  # iterations differ from each other


@pytest.mark.filterwarnings(CUT)
def test_prompts_go_on_from_iteration_to_iteration(tiny_model):
    """The seed starts them once; seeded again each time, every batch would ask the same."""
    drawn = []
    for _ in range(2):
        agent = lm_agent(tiny_model, lm_envs(tiny_model, 16))
        first = agent.rollout().prompts
        agent.step()
        drawn.append((first, agent.rollout().prompts))
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


# Faults


@pytest.mark.parametrize("fault", [None, float("nan"), "too few", "raises"])
def test_a_scorers_fault_comes_before_any_update(fault):
    def scorer(prompts, _responses):
        if fault == "raises":
            raise KeyError("lost")
        return [0.0] * (len(prompts) - 1) + ([] if fault == "too few" else [fault])

    envs = toy_envs()
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=scorer)
    agent = toy_agent(envs=envs)
    before = parameters(agent)
    with pytest.raises(ScorerError, match=r"prompt .* response"):
        agent.step()
    assert same(parameters(agent), before) and not agent.optimizer.state and agent.iteration == 0


def test_gradients_that_are_not_finite_are_not_taken():
    agent = toy_agent()
    before = parameters(agent)
    rollout = agent.rollout()
    broken = dataclasses.replace(rollout, advantages=rollout.advantages * float("inf"))
    with pytest.raises(FloatingPointError, match=r"should be finite.* the step was not taken"):
        agent.optimise(broken)
    assert same(parameters(agent), before)


def warnings_of(agent, steps=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            agent.step()
    return [str(warning.message) for warning in caught]


def test_batches_that_are_all_cut_are_warned_of_once():
    logits = np.zeros((8, 6))
    logits[:, 0] = -np.inf  # cannot stop
    found = warnings_of(toy_agent(TablePolicy(logits), check_start=False))
    assert len(found) == 1 and "Every response of a batch was cut by the budget" in found[0]
    assert warnings_of(toy_agent(learning_rate=0.1)) == []


def test_equal_rewards_are_warned_of_once_and_teach_nothing():
    envs = toy_envs(kl_coef=0.0)
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=lambda p, r: [1.0] * len(p))
    policy = TablePolicy(TOY.reference_logits)
    with torch.no_grad():
        policy.values.fill_(1.0)
    agent = toy_agent(policy, envs)
    found = warnings_of(agent)
    assert len(found) == 1 and "Every advantage of a batch is 0" in found[0]
    np.testing.assert_allclose(policy.logits.detach(), 0, atol=1e-6)


def test_nothing_to_train_is_refused():
    policy = TablePolicy(TOY.reference_logits).requires_grad_(False)
    with pytest.raises(ValueError, match="parameters that require a gradient, got none"):
        toy_agent(policy)


def test_other_environments_are_refused():
    with pytest.raises(TypeError, match=r"should be vector text environments.*make_vec\('RLHF-v0'"):
        toy_agent(envs=gym.make_vec("CartPole-v1", num_envs=2))


# The loop around it


def test_learning_rate_falls_to_zero_over_learn():
    agent = toy_agent(learning_rate=0.1, lr_schedule="linear")
    agent.total_episodes = 4 * 32
    assert [agent.step().learning_rate for _ in range(5)] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])
    assert agent.optimizer.param_groups[0]["lr"] == 0.0


def test_learn_counts_episodes_since_training_began_in_whole_iterations():
    agent = toy_agent()
    assert agent.learn(40, run_dir=None, progress=False) is agent
    assert (agent.iteration, agent.episodes) == (2, 64)
    agent.learn(96, run_dir=None, progress=False)
    assert (agent.iteration, agent.episodes) == (3, 96)
    agent.learn(10, run_dir=None, progress=False)  # there already
    assert agent.iteration == 3


@pytest.mark.parametrize("name", ["total_episodes", "save_every"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "many"])
def test_learn_refuses_what_it_could_not_do(name, value):
    arguments = {"total_episodes": 32, "save_every": 1} | {name: value}
    with pytest.raises(ValueError, match=f"`{name}` should be an integer of at least 1, got {value!r}"):
        toy_agent().learn(run_dir=None, **arguments)


# Prediction


def test_predict_gives_an_int_for_one_and_an_array_for_many():
    policy = TablePolicy(np.eye(8, 6)[:, ::-1].copy())
    agent = toy_agent(policy)
    env = gym.make("textenv/Toy-v0")
    observation, _ = env.reset(seed=0)
    token = agent.predict(observation)
    assert isinstance(token, int) and token == 5
    observations, _ = toy_envs(4).reset(seed=0)
    assert agent.predict(observations).tolist() == [5] * 4
    after = env.step(token)[0]
    assert agent.predict(after) == 4  # the second position


def test_predict_can_draw():
    agent = toy_agent()
    observations, _ = toy_envs(600).reset(seed=0)
    tokens = agent.predict(observations, deterministic=False)
    assert np.bincount(tokens, minlength=6).min() > 60  # of 100 each
    assert set(agent.predict(observations)) == {0}  # the first of equals


@pytest.mark.filterwarnings(CUT)
def test_predict_reads_through_left_padding(tiny_model):
    agent = lm_agent(tiny_model)
    observations, _ = lm_envs(tiny_model).reset(seed=0)
    together = agent.predict(observations)
    alone = [agent.predict({key: array[row] for key, array in observations.items()}) for row in range(8)]
    assert together.tolist() == alone and len(set(alone)) > 1


def test_predictions_in_between_leave_training_alone():
    observations, _ = toy_envs(4).reset(seed=0)
    runs = []
    for predicts in (False, True):
        agent = toy_agent(num_minibatches=2, learning_rate=0.1)
        for _ in range(2):
            agent.step()
            if predicts:
                agent.predict(observations), agent.predict(observations, deterministic=False)
        runs.append(parameters(agent))
    assert same(*runs)
