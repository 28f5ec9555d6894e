"""Intervals: worked examples, and how often they hold the true figure."""

import math

import numpy as np
import pytest

from textenv.estimates import (
    Estimate,
    jackknife_estimate,
    mean_estimate,
    quantile_of,
    ratio_estimate,
    share_estimate,
)
from textenv.metrics import distinct_n, distinct_n_estimate

Z = 1.959963984540054


def test_quantile():
    assert quantile_of(0.95) == pytest.approx(Z)
    assert quantile_of(0.6826894921) == pytest.approx(1.0)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, -0.1, math.nan])
def test_bad_confidence(confidence):
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile_of(confidence)


def test_mean_by_hand():
    # Variance with n - 1: (1 + 0 + 1) / 2 = 1; standard error 1 / sqrt(3).
    found = mean_estimate([1.0, 2.0, 3.0])
    assert found == pytest.approx((2.0, 2 - Z / math.sqrt(3), 2 + Z / math.sqrt(3)))
    wrong = 2 - Z * math.sqrt(2 / 3) / math.sqrt(3)  # n in the denominator
    assert abs(found.low - wrong) > 0.1


def test_mean_of_few():
    assert mean_estimate([4.0]) == (4.0, -math.inf, math.inf)
    assert all(math.isnan(x) for x in mean_estimate([]))


def test_wilson_by_hand():
    # n = 10, p = 1: centre (1 + z^2/20) / (1 + z^2/10), half z/(1+z^2/10) * z/20.
    low = (1 + Z**2 / 20) / (1 + Z**2 / 10) - Z / (1 + Z**2 / 10) * Z / 20
    assert share_estimate([1] * 10) == pytest.approx((1.0, low, 1.0))
    assert low == pytest.approx(1 / (1 + Z**2 / 10))
    # Three of four, from the published formula: (0.301, 0.954).
    assert share_estimate([1, 1, 1, 0]) == pytest.approx((0.75, 0.3006, 0.9544), abs=1e-4)
    assert share_estimate([0.5, 0.5]).value == 0.5
    assert all(math.isnan(x) for x in share_estimate([]))


def test_share_is_not_the_normal_interval():
    # The plain interval around 10 of 10 has no width at all.
    assert share_estimate([1] * 10).low < 0.75 < mean_estimate([1.0] * 10).low


def test_ratio_by_hand():
    # R = 4 / 4; residuals 1 and -1; variance 2 / 1 * 2 / 16 = 1 / 4.
    assert ratio_estimate([3.0, 1.0], [2.0, 2.0]) == pytest.approx((1.0, 1 - Z / 2, 1 + Z / 2))
    # Long texts weigh more: 5 nats over 5 tokens, not the mean of 1/1 and 4/4 by accident, nor of 3/1 and 2/4.
    assert ratio_estimate([3.0, 2.0], [1.0, 4.0]).value == 1.0 != pytest.approx(np.mean([3 / 1, 2 / 4]))
    assert ratio_estimate([3.0], [2.0]) == (1.5, -math.inf, math.inf)
    assert all(math.isnan(x) for x in ratio_estimate([], []))


def test_jackknife_of_the_mean_is_the_standard_error():
    x = np.array([1.0, 4.0, 2.0, 8.0])
    left_out = [np.delete(x, i).mean() for i in range(4)]
    assert jackknife_estimate(x.mean(), left_out) == pytest.approx(mean_estimate(x))
    assert jackknife_estimate(1.0, [0.5]) == (1.0, -math.inf, math.inf)
    assert all(math.isnan(v) for v in jackknife_estimate(math.nan, []))


@pytest.mark.parametrize("kind", ["mean", "share", "ratio"])
def test_intervals_hold_the_truth_nineteen_times_in_twenty(kind):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        if kind == "mean":
            found, truth = mean_estimate(rng.exponential(2.0, 200)), 2.0
        elif kind == "share":
            found, truth = share_estimate(rng.random(50) < 0.9), 0.9
        else:
            tokens = rng.integers(1, 30, 200)
            found, truth = ratio_estimate(rng.normal(1.5 * tokens, np.sqrt(tokens)), tokens), 1.5
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 1000 <= 0.975


def test_text_of_an_estimate():
    assert str(Estimate(1.23456, 1.0, 1.5)) == "1.23 [1, 1.5]"


def test_distinct_left_out_by_hand():
    texts = ["a b a", "a b", "c d"]  # pairs: ab ba | ab | cd, 3 distinct of 4
    assert distinct_n(texts) == 0.75
    left_out = [2 / 2, 3 / 3, 2 / 3]  # without the first: ab cd; without the second: ab ba cd; the third: ab ba of 3
    assert [distinct_n([t for j, t in enumerate(texts) if j != i]) for i in range(3)] == pytest.approx(left_out)
    found = distinct_n_estimate(texts)
    wanted = jackknife_estimate(0.75, left_out)
    assert found == pytest.approx((0.75, max(wanted.low, 0.0), min(wanted.high, 1.0)))


def test_distinct_of_random_texts_matches_leaving_out_each():
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(list("abcdef"), rng.integers(0, 9))) for _ in range(12)]
    left_out = [distinct_n(texts[:i] + texts[i + 1 :]) for i in range(12)]
    wanted = jackknife_estimate(distinct_n(texts), left_out)
    found = distinct_n_estimate(texts)
    assert found.value == wanted.value
    assert found.low == pytest.approx(max(wanted.low, 0.0))


def test_distinct_without_words():
    assert all(math.isnan(x) for x in distinct_n_estimate(["", "one"]))
