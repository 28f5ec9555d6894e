"""Best-of-n as a policy: its distribution against enumeration, where it acts, and what it refuses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from agent_helpers import TOY, letters, lm_envs, toy_envs

from textenv import evaluate
from textenv.agents import BestOfN, LanguageModelPolicy, TablePolicy
from textenv.oracle import enumerate_responses
from textenv.rewards import best_of_n_kl, best_of_n_logprobs
from textenv.toy import ToyLanguage, sum_over_tokens

SMALL = ToyLanguage(
    reference_logits=[[0.3, -0.2, 0.9], [1.0, 0.0, -1.0]],
    stop_id=0,
    token_scores=[0.0, 1.0, 0.4],
    unfinished_score=-0.4,
)
RESPONSES, _ = enumerate_responses(SMALL)
SCORES = SMALL.score_padded(RESPONSES)
LOGPROBS = sum_over_tokens(SMALL.reference_logprobs, RESPONSES)


def small_envs(num_envs=16, **options):
    return toy_envs(num_envs, language=SMALL, **options)


def best_of(n, envs=None, **options):
    return BestOfN(TablePolicy(SMALL.reference_logits), envs or small_envs(), n, **options)


# The distribution


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_exact_distribution_is_that_of_all_draws(n):
    """By listing every tuple of n draws, ties shared among the tied."""
    logprobs, scores = np.log([0.1, 0.2, 0.3, 0.25, 0.15]), np.array([2.0, -1.0, 2.0, 0.5, -1.0])
    expected = np.zeros(5)
    for draws in itertools.product(range(5), repeat=n):
        best = max(scores[list(draws)])
        among = [draw for draw in draws if scores[draw] == best]
        for draw in among:
            expected[draw] += np.exp(logprobs[list(draws)].sum()) / len(among)
    np.testing.assert_allclose(np.exp(best_of_n_logprobs(logprobs, scores, n)), expected, atol=1e-12)


def test_what_is_never_drawn_is_never_the_best():
    with np.errstate(divide="ignore"):
        found = best_of_n_logprobs(np.log([0.0, 0.5, 0.5, 0.0]), [-1.0, 0.0, 1.0, 2.0], 3)
    assert found.tolist() == pytest.approx([-math.inf, math.log(1 / 8), math.log(7 / 8), -math.inf])


@pytest.mark.parametrize("n", [2, 16, 1000])
def test_the_kl_is_bounded_and_the_bound_is_reached(n):
    """Many outcomes of their own scores come near it, ties stay below; a thousand draws neither overflow nor vanish."""
    many = np.full(20_000, -math.log(20_000))
    for logprobs, scores, gap in ((many, np.arange(20_000), 0.05), (LOGPROBS, SCORES, math.inf)):
        best = best_of_n_logprobs(logprobs, scores, n)
        assert np.exp(best).sum() == pytest.approx(1)
        kl = float((np.exp(best) * np.where(best > -math.inf, best - logprobs, 0)).sum())
        assert best_of_n_kl(n) - gap < kl < best_of_n_kl(n)


def test_numbers_that_are_no_distribution():
    with pytest.raises(ValueError, match=r"should both be \(M,\), got \(2,\) and \(3,\)"):
        best_of_n_logprobs([0.0, 0.0], [1.0, 2.0, 3.0], 2)
    with pytest.raises(ValueError, match="`n` should be an integer of at least 1, got 0"):
        best_of_n_logprobs([0.0], [1.0], 0)


@pytest.mark.parametrize("n", [1, 3])
def test_what_it_writes_has_the_exact_distribution(n):
    """Frequencies of all seven responses in 3,000 answers; Pearson's statistic has 6 degrees of freedom."""
    found = best_of(n, seed=1).write(3000)
    padded = np.full((3000, 2), -1)
    for row, response in enumerate(found.responses):
        padded[row, : len(response)] = response
    counts = (padded[:, None] == RESPONSES[None]).all(-1).sum(0)
    expected = 3000 * np.exp(best_of_n_logprobs(LOGPROBS, SCORES, n))
    assert counts.sum() == 3000
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # beyond in one of a thousand seeds
    assert best_of(n).kl == pytest.approx(math.log(n) - (n - 1) / n)


# What it gives and where it acts


def test_the_best_is_kept_with_all_scores():
    found = best_of(5).write(40, progress=True)
    assert found.all_scores.shape == (40, 5)
    np.testing.assert_array_equal(found.scores, found.all_scores.max(1))
    np.testing.assert_array_equal(found.scores, SMALL.score([r.tolist() for r in found.responses]))
    assert [" " + " ".join(map(str, r.tolist())) for r in found.responses] == list(found.texts)


def test_seeds():
    agent = best_of(3)
    one, other, again = agent.write(60), agent.write(60), best_of(3).write(60)
    assert one.texts == again.texts != other.texts
    assert agent.write(60, seed=7).texts == best_of(3, seed=9).write(60, seed=7).texts
    assert best_of(300).write(2).all_scores.shape == (2, 300)  # more than are written at once


def test_evaluation_measures_it_like_any_policy():
    """Its score is the exact one; its KL is not that of the policy which it draws from, and so is not said."""
    agent, envs = best_of(4), small_envs(64, kl_coef=None)
    exact = float(np.exp(best_of_n_logprobs(LOGPROBS, SCORES, 4)) @ SCORES)
    found = evaluate(agent, envs, 3000, seed=3, confidence=0.999)
    assert found.score.low < exact < found.score.high and found.score.high - found.score.low < 0.1
    assert math.isnan(found.kl.value)
    assert evaluate(agent, envs, 64, seed=3).score == evaluate(best_of(4), envs, 64, seed=3).score


def test_it_steps_through_environments_that_restart():
    """Also through its own ones; every episode ends with what was chosen when it began."""
    envs = small_envs(8)
    agent = best_of(4, envs)
    observations, _ = envs.reset(seed=0)
    finished = []
    for _ in range(40):
        observations, _, _, _, infos = envs.step(agent.act(observations))
        finished += [
            score for score, there in zip(infos.get("score", ()), infos.get("_score", ()), strict=True) if there
        ]
    exact = float(np.exp(best_of_n_logprobs(LOGPROBS, SCORES, 4)) @ SCORES)
    assert len(finished) > 80 and np.mean(finished) == pytest.approx(exact, abs=4 * SCORES.std() / math.sqrt(80))
    assert np.mean(finished) > np.exp(LOGPROBS) @ SCORES + 0.2


def test_single_observations_and_repeated_predictions():
    start = {"input_ids": np.array([0, 0, 0]), "attention_mask": np.array([1, 0, 0])}
    agent = best_of(3)
    token = agent.predict(start)
    assert isinstance(token, int) and all(agent.predict(start) == token for _ in range(5))
    assert len({agent.act(start, generator=np.random.default_rng(i)) for i in range(30)}) > 1
    agent.act(start, deterministic=True)
    written = {"input_ids": np.array([0, (token + 1) % 3, 0]), "attention_mask": np.array([1, 1, 0])}
    with pytest.raises(ValueError, match="Row 0 should begin with a prompt alone or go on with what best-of-n chose"):
        agent.predict(written)


def test_it_keeps_to_what_is_allowed():
    found = BestOfN(TablePolicy(TOY.reference_logits), toy_envs(8, min_length=3), 4).write(50)
    assert min(len(response) for response in found.responses) == 4  # three tokens, and then the stop at the earliest


# Language models, context, dropped samples


@pytest.fixture
def policy(tiny_model):
    return LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)


def test_a_language_model_writes_better(policy, tiny_model):
    envs = lm_envs(tiny_model, 8)
    single, best = (BestOfN(policy, envs, n).write(64, seed=0) for n in (1, 8))
    assert best.scores.mean() > single.scores.mean() + 0.5
    assert [p.text for p in best.prompts] == [p.text for p in single.prompts]
    assert letters([], list(best.texts)) == best.scores.tolist()


def test_the_scorer_is_given_the_context_of_each_prompt(policy, tiny_model):
    def scorer(prompts, responses, wanted):
        return [
            float(prompt == f"the {w}") + len(r) / 100 for prompt, r, w in zip(prompts, responses, wanted, strict=True)
        ]

    prompts = [{"prompt": "the a", "wanted": "a"}, {"prompt": "the good", "wanted": "good"}]
    options = {"scorer": scorer, "context_columns": ["wanted"], "kl_coef": None}
    agent = BestOfN(policy, lm_envs(tiny_model, 8, prompts=prompts, **options), 2)
    assert (agent.write(16).all_scores >= 1).all()
    assert evaluate(agent, lm_envs(tiny_model, 8, prompts=prompts, **options), 16).score.value >= 1
    alike = [*prompts, {"prompt": "the a", "wanted": "another"}]
    agent = BestOfN(policy, lm_envs(tiny_model, 8, prompts=alike, **options), 2)
    agent.write(4)
    with pytest.raises(ValueError, match="Prompts of equal tokens should have equal texts and context"):
        evaluate(agent, lm_envs(tiny_model, 8, prompts=alike, **options), 16)


def test_dropped_samples_are_never_the_best(policy, tiny_model):
    def some(_prompts, responses):
        return [math.nan if place % 4 != 3 else -5.0 for place in range(len(responses))]

    found = BestOfN(policy, lm_envs(tiny_model, 4, scorer=some, scorer_errors="drop"), 4).write(6)
    assert found.scores.tolist() == [-5.0] * 6

    def none(_prompts, responses):
        return [math.nan] * len(responses)

    found = BestOfN(policy, lm_envs(tiny_model, 4, scorer=none, scorer_errors="drop"), 2).write(3)
    assert np.isnan(found.scores).all() and len(found.responses) == 3


@pytest.mark.parametrize("n", [0, 2.0, True])
def test_nothing_to_choose_from(n):
    with pytest.raises(ValueError, match="`n` should be an integer of at least 1"):
        best_of(n)
    with pytest.raises(ValueError, match="`episodes` should be an integer of at least 1"):
        best_of(2).write(n)
