"""Correlations and their intervals, by hand and against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from textenv.correlation import pearson, ranks, spearman


def test_by_hand():
    """Deviations -1.5, -.5, .5, 1.5 and -1.5, .5, -.5, 1.5: products sum to 4, squares to 5 each."""
    r = pearson([1, 2, 3, 4], [1, 3, 2, 4])
    assert r.value == pytest.approx(0.8)
    # one observation beyond three: standard error 1
    assert (r.low, r.high) == pytest.approx(
        (math.tanh(math.atanh(0.8) - 1.959964), math.tanh(math.atanh(0.8) + 1.959964))
    )


def test_ranks_make_it_blind_to_the_scale():
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 2.0, 4.0, 500.0]
    rho = spearman(x, y)
    assert rho.value == pytest.approx(0.9)  # 1 - 6 * (1 + 1) / (5 * 24)
    assert pearson(x, y).value == pytest.approx(np.corrcoef(x, y)[0, 1])
    half = 1.959964 * math.sqrt((1 + 0.81 / 2) / 2)
    assert rho.low == pytest.approx(math.tanh(math.atanh(0.9) - half))


def test_ties_share_their_ranks():
    assert ranks([3.0, 1.0, 3.0, 3.0, 0.0]).tolist() == [4.0, 2.0, 4.0, 4.0, 1.0]
    assert ranks([]).tolist() == []


def test_what_does_not_vary_has_no_correlation():
    for estimate in (pearson([1, 2, 3], [5, 5, 5]), spearman([5, 5], [1, 2]), pearson([], []), pearson([1], [1])):
        assert all(map(math.isnan, estimate))
    assert pearson([1, 2], [2, 4]) == (1.0, -1.0, 1.0)  # any two points are on a line
    assert pearson([1, 2, 3, 4], [2, 4, 6, 8]) == (1.0, 1.0, 1.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"both have shape \(n,\), got \(2,\) and \(3,\)"):
        pearson([1, 2], [1, 2, 3])


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=30))
def test_against_numpy(points):
    x, y = np.array(points, float).T
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert pearson(x, y).value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)
        assert spearman(x, y).value == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-9)
        for estimate in (pearson(x, y), spearman(x, y)):
            assert -1 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(500):
        x = rng.normal(size=40)
        low, high = pearson(x, 0.6 * x + 0.8 * rng.normal(size=40))[1:]
        covered.append(low <= 0.6 <= high)
    assert 0.92 < np.mean(covered) < 0.98
