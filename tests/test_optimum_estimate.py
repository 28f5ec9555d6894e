"""Estimates of the optimum against toys whose log Z is exact: bias, coverage, and where they say that they cannot."""

from __future__ import annotations

import math

import numpy as np
import pytest

from textenv.optimum_estimate import MIN_EFFECTIVE_SAMPLES, distance, estimate_optimum
from textenv.oracle import enumerate_responses, evaluate, solve
from textenv.toy import PAD, ToyLanguage, standard_toy

SMALL = ToyLanguage(
    reference_logits=np.array([[0.0, 1.0, 0.5], [0.2, 0.0, -0.4], [0.0, 0.0, 0.0]]),
    stop_id=0,
    token_scores=np.array([0.0, 1.0, -0.5]),
    unfinished_score=-0.3,
)
BETA = 1.0


def listing(language):
    """Every response's probability under the reference and its score."""
    padded, _ = enumerate_responses(language)
    taken = np.where(padded == PAD, 0, padded)
    logprobs = np.where(padded == PAD, 0.0, language.reference_logprobs[np.arange(language.horizon), taken]).sum(1)
    return np.exp(logprobs), language.score_padded(padded)


def draw(language, shape, seed):
    probabilities, scores = listing(language)
    return np.random.default_rng(seed).choice(scores, size=shape, p=probabilities / probabilities.sum())


def test_two_responses_by_hand():
    """w = 1 and 3, mean 2, effective (1 + 3)^2 / (1 + 9) = 1.6; s^2 = 2, so the variance of the log is 2 / (2 * 4)."""
    found = estimate_optimum([0.0, math.log(3.0)], 1.0)
    assert found.plug_in == pytest.approx(math.log(2.0))
    assert found.effective_samples.tolist() == pytest.approx([1.6])
    assert found.at_least == pytest.approx(math.log(2.0) + math.log(0.05))
    assert not found.known and math.isnan(found.optimum.value)


def test_the_whole_list_as_the_sample_gives_the_oracle():
    """Samples in the exact proportions of a reference that is uniform: the plug-in is J*, the effective size exact."""
    toy = ToyLanguage(reference_logits=np.zeros((1, 4)), stop_id=0, token_scores=np.array([0.0, 1.0, 0.5, -0.5]))
    found = estimate_optimum(toy.token_scores[0].tolist() * 100, 0.7)
    assert found.plug_in == pytest.approx(solve(toy, 0.7).value)
    weights = np.exp(toy.token_scores[0] / 0.7)
    assert found.effective_samples[0] == pytest.approx(100 * weights.sum() ** 2 / (weights**2).sum())


def test_interval_covers_and_correction_removes_the_bias_of_the_plug_in():
    exact = solve(SMALL, BETA).value
    scores = draw(SMALL, (16000, 250), 0)
    found = [estimate_optimum(row, BETA) for row in scores]
    assert np.mean([one.known for one in found]) == 1.0
    covered = np.mean([one.optimum.low <= exact <= one.optimum.high for one in found])
    assert 0.93 < covered < 0.97
    bias = np.mean([one.plug_in for one in found]) - exact
    corrected = np.mean([one.optimum.value for one in found]) - exact
    standard_error = np.std([one.plug_in for one in found]) / math.sqrt(len(found))
    assert bias < -3 * standard_error  # Jensen: too low
    assert abs(corrected) < 3 * standard_error


def test_covers_for_several_prompts_where_the_uncorrected_value_does_not():
    """A thousand prompts of 250 samples: their errors average out, the bias of each stays."""
    exact = solve(SMALL, BETA).value
    scores = draw(SMALL, (60, 1000, 250), 1)
    found = [estimate_optimum(block, BETA) for block in scores]
    half = [one.optimum.high - one.optimum.value for one in found]
    assert np.mean([one.optimum.low <= exact <= one.optimum.high for one in found]) > 0.88
    assert np.mean([abs(one.plug_in - exact) < h for one, h in zip(found, half, strict=True)]) < 0.9


def test_the_lower_bound_holds_at_any_n_and_the_standard_toy_cannot_be_said():
    exact = solve(standard_toy(), 0.1).value
    table = np.random.default_rng(2)
    language = standard_toy()
    for _ in range(20):
        tokens = table.integers(0, 6, size=(500, 8))
        before = np.cumsum(tokens == 0, axis=1) - (tokens == 0)
        found = estimate_optimum(language.score_padded(np.where(before > 0, PAD, tokens)), 0.1)
        assert not found.known and found.effective_samples[0] < MIN_EFFECTIVE_SAMPLES
        assert found.at_least <= exact
        assert found.plug_in < exact  # the responses that make up the optimum were never drawn
        assert "cannot be said at this n" in str(found)
    few = [estimate_optimum(row, BETA, confidence=0.8).at_least for row in draw(SMALL, (2000, 2), 3)]
    assert np.mean(np.array(few) <= solve(SMALL, BETA).value) >= 0.8


def test_prompts_are_weighed_alike_whatever_their_number_of_samples():
    easy, hard = draw(SMALL, 400, 4), draw(SMALL, 900, 5) - 2.0
    both = estimate_optimum([easy, hard], BETA)
    apart = [estimate_optimum(x, BETA).optimum for x in (easy, hard)]
    assert both.optimum.value == pytest.approx(np.mean([one.value for one in apart]))
    half = math.hypot(*(one.high - one.value for one in apart)) / 2
    assert both.optimum.high - both.optimum.value == pytest.approx(half)
    assert both.samples == 1300


def test_distance_of_the_reference_covers_the_oracle():
    """The reference's own objective is its score: its distance to the optimum in the oracle's words."""
    exact = evaluate(SMALL, SMALL.reference_logprobs, BETA).distance
    hits = []
    for seed in range(400):
        optimum = estimate_optimum(draw(SMALL, (3, 300), 10 + seed), BETA)
        found = distance(optimum, draw(SMALL, (3, 60), 5000 + seed))
        hits.append(found.low <= exact <= found.high)
    assert 0.91 < np.mean(hits) < 0.985


def test_distance_says_at_least_where_the_optimum_cannot_be_said():
    optimum = estimate_optimum([0.0] * 99 + [8.0], 0.1)
    found = distance(optimum, [0.0, 0.2, -0.2, 0.0])
    assert math.isnan(found.value) and found.high == math.inf
    error = math.sqrt(np.var([0.0, 0.2, -0.2, 0.0], ddof=1) / 4)
    assert found.low == pytest.approx((8 + 0.1 * math.log(0.01) + 0.1 * math.log(0.025) - 1.959964 * error) / 0.1)


def test_large_scores_do_not_overflow():
    found = estimate_optimum([1e5, 1e5 + 0.1] * 100, 0.1)
    assert found.optimum.value == pytest.approx(1e5 + 0.1 * math.log((1 + math.e) / 2), abs=1e-3)


@pytest.mark.parametrize(
    "scores, kl_coef, says",
    [
        ([], 1.0, "at least one number"),
        ([[1.0], []], 1.0, "at least one number"),
        ([1.0, math.nan], 1.0, "should be finite"),
        ([1.0], 0.0, "above 0"),
        ([1.0], math.nan, "above 0"),
    ],
)
def test_refuses_what_has_no_answer(scores, kl_coef, says):
    with pytest.raises(ValueError, match=says):
        estimate_optimum(scores, kl_coef)


def test_distance_refuses_other_prompts():
    optimum = estimate_optimum(np.zeros((2, 100)), 1.0)
    for objectives in (np.zeros((3, 5)), np.zeros((2, 1)), np.zeros(5)):
        with pytest.raises(ValueError, match="each of 2 prompts"):
            distance(optimum, objectives)
