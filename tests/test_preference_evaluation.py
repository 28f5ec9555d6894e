"""Figures of reward models against hand-worked values and against data whose truth is known."""

import itertools
import math

import numpy as np
import pytest

from textenv.rewards import (
    Preference,
    RatedSentence,
    RewardEnsemble,
    accuracy_estimate,
    calibration_curve,
    evaluate_preferences,
    half_against_half,
    learning_curve,
    load_ratings,
    one_against_rest,
    pair_accuracy,
    pessimistic,
    plot_calibration,
    plot_learning_curve,
    plot_scores,
    score_distribution,
    split_ratings,
)
from textenv.rewards.noise_ceiling import agreement
from textenv.rewards.preference_evaluation import report_of_scores, sigmoid
from textenv.scoring import ScorerError


def bradley_terry_data(n, seed=0, std=1.5):
    """Scores of two responses each, and the same with the one that people preferred first, as the model has it."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, std, (2, n))
    first = rng.random(n) < 1 / (1 + np.exp(b - a))
    return np.where(first, a, b), np.where(first, b, a)


# Accuracy and calibration


def test_accuracy_by_hand():
    """Right, wrong, tied, right: 2.5 of 4; Wilson's interval of it with z = 1.96."""
    estimate = accuracy_estimate([2.0, 1.0, 0.5, 3.0], [1.0, 2.0, 0.5, 0.0])
    assert estimate.value == 0.625
    z, n, p = 1.959964, 4, 0.625
    centre, half = (p + z * z / 8) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / 64) / (1 + z * z / n)
    assert (estimate.low, estimate.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """The true accuracy of true scores is the mean of sigmoid(|gap|)."""
    truth = float(sigmoid(np.abs(np.subtract(*bradley_terry_data(200_000)))).mean())
    held = [e.low <= truth <= e.high for e in (accuracy_estimate(*bradley_terry_data(150, s)) for s in range(400))]
    assert 0.92 < np.mean(held) < 0.98


def test_calibration_by_hand():
    """Two bins, 1/2 to 3/4 and 3/4 to 1. Gaps log 1.5 (0.6): one right, one wrong; gaps log 9 (0.9): two right."""
    small, large = math.log(1.5), math.log(9)
    curve = calibration_curve([small, 0.0, large, 0.0], [0.0, small, 0.0, -large], bins=2)
    np.testing.assert_allclose(curve.confidence, [0.6, 0.9])
    np.testing.assert_allclose(curve.win_rate, [0.5, 1.0])
    assert curve.counts.tolist() == [2, 2]
    assert curve.error == pytest.approx((2 * 0.1 + 2 * 0.1) / 4)


def test_true_scores_are_calibrated_and_inflated_ones_are_not():
    """Tripled scores claim sigmoid(3 gap) where sigmoid(gap) is true: the error is the mean of their difference."""
    chosen, rejected = bradley_terry_data(100_000)
    curve = calibration_curve(chosen, rejected)
    assert curve.error < 0.006
    assert ((curve.low - 0.01 < curve.confidence) & (curve.confidence < curve.high + 0.01)).all()
    gaps = np.abs(chosen - rejected)
    expected = float((sigmoid(3 * gaps) - sigmoid(gaps)).mean())
    assert calibration_curve(3 * chosen, 3 * rejected).error == pytest.approx(expected, abs=0.005)
    assert expected > 0.1


def test_scores_that_know_nothing_claim_a_half():
    curve = calibration_curve(np.zeros(5), np.zeros(5))
    assert curve.confidence[0] == curve.win_rate[0] == 0.5 and curve.error == 0 and curve.counts.sum() == 5
    assert np.isnan(curve.win_rate[1:]).all()


def test_swapping_the_offset_changes_no_figure():
    chosen, rejected = bradley_terry_data(500)
    one, other = report_of_scores(chosen, rejected), report_of_scores(chosen + 7, rejected + 7)
    assert one.accuracy == other.accuracy and one.log_loss == pytest.approx(other.log_loss)
    assert one.calibration.error == pytest.approx(other.calibration.error, abs=1e-9)
    assert other.distribution.mean == pytest.approx(one.distribution.mean + 7)


def test_log_loss_by_hand():
    """Gaps log 3 and -log 3: log 4/3 and log 4."""
    report = report_of_scores([math.log(3), 0.0], [0.0, math.log(3)])
    assert report.log_loss == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


def test_distribution_by_hand():
    found = score_distribution(np.arange(21.0))
    assert found.mean == 10 and found.std == pytest.approx(math.sqrt((21**2 - 1) / 12))
    assert found.quantiles == pytest.approx((0, 1, 5, 10, 15, 19, 20))


def test_a_scorer_is_asked_for_both_sides():
    preferences = [Preference("p", "long answer", "no"), Preference("q", "a", "longer")]
    report = evaluate_preferences(lambda prompts, responses: [len(r) for r in responses], preferences)
    assert report.chosen.tolist() == [11, 1] and report.rejected.tolist() == [2, 6]
    assert report.accuracy.value == 0.5
    with pytest.raises(ScorerError):
        evaluate_preferences(lambda prompts, responses: [math.nan] * len(responses), preferences)


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        ([1.0], [1.0, 2.0], "shape"),
        ([], [], "n of at least 1"),
        ([math.nan], [0.0], "finite, got nan and 0.0 in row 0"),
    ],
)
def test_bad_scores_are_refused(chosen, rejected, message):
    for function in (accuracy_estimate, calibration_curve, report_of_scores):
        with pytest.raises(ValueError, match=message):
            function(chosen, rejected)
    with pytest.raises(ValueError, match="`bins`"):
        calibration_curve([1.0], [0.0], bins=0)


def test_plots_are_drawn(tmp_path):
    report = report_of_scores(*bradley_terry_data(200))
    plot_calibration(report.calibration, tmp_path / "c.png")
    plot_scores(report, tmp_path / "s.png")
    curve = learning_curve(KNOWN, KNOWN, [1, 2], lambda train, seed: lambda p, r: [len(x) for x in r])
    plot_learning_curve(list(curve), tmp_path / "l.png", ceiling=0.9)
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in "csl")


# Ensembles


def test_pessimism_by_hand():
    """Members 1, 2, 6: mean 3, variance (4 + 1 + 9) / 3."""
    scores = [[1.0], [2.0], [6.0]]
    assert pessimistic(scores, 0.5)[0] == pytest.approx(3 - 0.5 * math.sqrt(14 / 3))
    assert pessimistic(scores, 0.5, "variance")[0] == pytest.approx(3 - 0.5 * 14 / 3)
    assert pessimistic(scores, 0.5, "min")[0] == 1
    assert pessimistic(scores, 0.0)[0] == 3


def member(scale, offset=0.0):
    return lambda prompts, responses, **context: [scale * len(r) + offset for r in responses]


def test_an_ensemble_is_low_where_members_disagree():
    ensemble = RewardEnsemble([member(1), member(-1)], k=2.0)
    np.testing.assert_allclose(ensemble(["", ""], ["", "abc"]), [0, -6])
    np.testing.assert_allclose(RewardEnsemble([member(1), member(-1)], by="min")([""], ["abc"]), [-3])


def test_centring_takes_out_constants_that_mean_nothing():
    members = [member(1), member(1, 100.0)]
    assert RewardEnsemble(members)([""], ["ab"]) == pytest.approx([2 + 50 - 50])
    centred = RewardEnsemble.centred(members, ["", ""], ["a", "abc"])  # mean length 2
    np.testing.assert_allclose(centred(["", ""], ["ab", "abcd"]), [0, 2])
    assert centred.offsets.tolist() == [-2, -102]


def test_members_get_the_context_and_their_faults_are_named():
    ensemble = RewardEnsemble([lambda p, r, answer: [float(a) for a in answer], member(0)], k=0.0)
    assert ensemble(["p"], ["r"], answer=["4"]) == [2]
    with pytest.raises(ScorerError):
        RewardEnsemble([member(0), lambda p, r: [None]])(["p"], ["r"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scorers": [member(1)]}, "at least two, got 1"),
        ({"k": -1.0}, "disagreement would be rewarded"),
        ({"by": "max"}, "`by` should be one of"),
        ({"offsets": [1.0]}, "2 finite numbers"),
    ],
)
def test_bad_ensembles_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RewardEnsemble(**({"scorers": [member(1), member(2)]} | options))


# How well people agree with people


def test_agreement_by_hand():
    """Pairs of (1, 1, 3) against (1, 2, 3): one tied, two right."""
    found = agreement(np.array([1.0, 1.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert found.accuracy == 1 and found.with_ties == pytest.approx(2.5 / 3)
    assert found.correlation == pytest.approx(math.sqrt(3) / 2)
    assert pair_accuracy(np.array([1.0, 1.0, 3.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(2.5 / 3)


def test_a_rater_is_left_out_of_the_rest():
    """Two raters that always disagree in turn: one against the other is always wrong, the mean would be tied."""
    sentences = [RatedSentence(0, "a", (0, 2)), RatedSentence(1, "b", (2, 0))]
    found = [one_against_rest(sentences, np.random.default_rng(s)) for s in range(8)]
    decided = [f for f in found if not math.isnan(f.accuracy)]
    assert decided and len(decided) < len(found)  # where both drawn ratings are equal, nothing is ordered
    assert all(f.accuracy == 0 and f.correlation == pytest.approx(-1) for f in decided)
    with pytest.raises(ValueError, match="at least two raters"):
        one_against_rest([RatedSentence(0, "a", (1,))], np.random.default_rng(0))


def test_raters_of_the_film_sentences():
    held_out = split_ratings(load_ratings())[1][::3]  # the file is sorted
    alone = one_against_rest(held_out, np.random.default_rng(0))
    half = half_against_half(held_out, np.random.default_rng(0))
    assert 0.86 < alone.accuracy < 0.92 and 0.80 < alone.correlation < 0.90
    assert 0.89 < half.accuracy < 0.93 and half.correlation > 0.93


# Learning curves

KNOWN = [Preference("", "abc", "a"), Preference("", "ab", "a"), Preference("", "abcd", "abc")]


def test_subsets_are_nested_and_grow():
    seen = []

    def fit(train, seed):
        seen.append((seed, train))
        return lambda prompts, responses: [len(r) * (len(train) > 1) for r in responses]

    points = list(learning_curve(KNOWN, KNOWN, [3, 1, 2], fit, repeats=2, seed=5))
    assert [(p.comparisons, p.repeat) for p in points] == [(n, r) for r in (0, 1) for n in (1, 2, 3)]
    assert [seed for seed, _ in seen] == [5, 5, 5, 6, 6, 6]
    for small, large in itertools.pairwise(seen):
        assert small[0] != large[0] or large[1][: len(small[1])] == small[1]
    assert [p.accuracy.value for p in points] == [0.5, 1, 1] * 2
    assert points[0].log_loss == pytest.approx(math.log(2))


@pytest.mark.parametrize("sizes", [[], [0], [4]])
def test_sizes_must_be_there(sizes):
    with pytest.raises(ValueError, match="between 1 and the 3 comparisons"):
        learning_curve(KNOWN, KNOWN, sizes, lambda train, seed: None)
