"""Best-of-n estimates against enumeration, curves by hand, the peak against what is known."""

from __future__ import annotations

import io
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv.rewards import (
    OverOptimisation,
    best_of_n_curve,
    best_of_n_kl,
    best_of_n_scores,
    best_of_n_weights,
    fit_gold,
)

small = st.integers(-3, 3)


# KL


def test_kl_by_hand():
    assert best_of_n_kl(1) == 0
    assert best_of_n_kl([2, 8]).tolist() == pytest.approx([math.log(2) - 0.5, math.log(8) - 7 / 8])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        best_of_n_kl([2, 0])


@pytest.mark.parametrize("n", [2, 5, 40])
def test_kl_is_that_of_the_best_ones_density(n):
    """The best of n has density n u^(n-1) in the quantile u; KL = integral of n u^(n-1) log(n u^(n-1))."""
    u = (np.arange(400_000) + 0.5) / 400_000
    density = n * u ** (n - 1)
    terms = density * (math.log(n) + (n - 1) * np.log(u))
    assert best_of_n_kl(n) == pytest.approx(terms.mean(), abs=1e-5)


# Weights and estimates


@pytest.mark.parametrize("samples", [1, 2, 7, 60])
def test_weights_are_the_binomial_ones_exactly(samples):
    for n in range(1, samples + 1):
        exact = [Fraction(math.comb(i - 1, n - 1), math.comb(samples, n)) for i in range(1, samples + 1)]
        assert sum(exact) == 1
        np.testing.assert_allclose(best_of_n_weights(samples, n), [float(w) for w in exact], rtol=1e-12, atol=0)


def test_large_numbers_do_not_overflow():
    weights = best_of_n_weights(100_000, 60_000)
    assert weights.sum() == pytest.approx(1) and weights[-1] == pytest.approx(0.6) and np.isfinite(weights).all()


@pytest.mark.parametrize("samples, n", [(4, 0), (4, 5), (4, 2.0), (True, 1), (4, -1)])
def test_an_n_that_cannot_be_estimated_is_refused(samples, n):
    with pytest.raises(ValueError, match="should be"):
        best_of_n_weights(samples, n)


def by_enumeration(proxy, gold, n):
    """The mean over all subsets of n samples of the gold score of the best by proxy, ties broken at random."""
    total = []
    for subset in itertools.combinations(range(len(proxy)), n):
        best = max(proxy[i] for i in subset)
        total.append(np.mean([gold[i] for i in subset if proxy[i] == best]))
    return np.mean(total)


@given(st.lists(st.tuples(small, small), min_size=1, max_size=7))
@settings(max_examples=150, deadline=None)
def test_estimates_equal_enumeration_ties_included(samples):
    proxy, gold = np.array(samples, float).T
    ns = list(range(1, len(samples) + 1))
    expected = [by_enumeration(proxy, gold, n) for n in ns]
    np.testing.assert_allclose(best_of_n_scores(proxy, gold, ns)[0], expected, atol=1e-12)


def test_every_prompt_on_its_own():
    rng = np.random.default_rng(0)
    proxy, gold = rng.normal(size=(2, 5, 6))
    together = best_of_n_scores(proxy, gold, [1, 3])
    for row in range(5):
        np.testing.assert_allclose(together[row], best_of_n_scores(proxy[row], gold[row], [1, 3])[0])
    np.testing.assert_allclose(together[:, 0], gold.mean(1))
    np.testing.assert_allclose(best_of_n_scores(proxy, proxy, [6])[:, 0], proxy.max(1))


def test_the_order_of_samples_means_nothing():
    rng = np.random.default_rng(1)
    proxy, gold = rng.integers(0, 3, (2, 4, 8)).astype(float)
    order = rng.permutation(8)
    ns = range(1, 9)
    np.testing.assert_allclose(best_of_n_scores(proxy, gold, ns), best_of_n_scores(proxy[:, order], gold[:, order], ns))


def test_estimates_are_unbiased_for_fresh_samples():
    """The best of 4 uniforms has mean 4/5, estimated from 6; the naive best of the first four is noisier."""
    rng = np.random.default_rng(2)
    u = rng.random((20_000, 6))
    estimates = best_of_n_scores(u, u, [4])[:, 0]
    assert estimates.mean() == pytest.approx(0.8, abs=4 * estimates.std() / math.sqrt(20_000))
    assert estimates.std() < 0.95 * u[:, :4].max(1).std()


@pytest.mark.parametrize(
    "proxy, gold, message",
    [
        ([[1.0, 2.0]], [[1.0, 2.0, 3.0]], r"got \(1, 2\) and \(1, 3\)"),
        (np.zeros((0, 3)), np.zeros((0, 3)), r"\(P, N\)"),
        (np.zeros((2, 2, 2)), np.zeros((2, 2, 2)), r"\(P, N\)"),
        ([[1.0, math.nan]], [[1.0, 2.0]], "`proxy` should be finite, got nan for prompt 0, sample 1"),
        ([[1.0, 2.0]], [[math.inf, 2.0]], "`gold` should be finite, got inf for prompt 0, sample 0"),
    ],
)
def test_scores_that_cannot_be_ranked_are_refused(proxy, gold, message):
    with pytest.raises(ValueError, match=message):
        best_of_n_scores(proxy, gold, [1])


# Curves


def noisy_proxies(prompts=200, samples=64, seed=0):
    """A gold score that is high where the proxy is middling: good up to about one deviation, bad beyond."""
    rng = np.random.default_rng(seed)
    proxy = rng.normal(size=(prompts, samples))
    return proxy, proxy - 0.5 * proxy**2 + 0.1 * rng.normal(size=(prompts, samples))


def test_a_curve_begins_at_zero_in_its_own_deviations():
    proxy, gold = noisy_proxies()
    curve = best_of_n_curve(7 * proxy - 3, gold)
    assert curve.labels == tuple(f"best of {n}" for n in (1, 2, 4, 8, 16, 32, 64))
    assert curve.kl.tolist() == pytest.approx(best_of_n_kl([1, 2, 4, 8, 16, 32, 64]).tolist())
    assert curve.proxy.mean(0)[0] == pytest.approx(0, abs=1e-12) and curve.gold.mean(0)[0] == pytest.approx(
        0, abs=1e-12
    )
    np.testing.assert_allclose(curve.proxy, best_of_n_curve(proxy, gold).proxy)  # blind to unit and zero
    # the best of 2 and of 4 standard normals: 1 / sqrt(pi), 1.02938
    assert curve.proxy.mean(0)[1:3] == pytest.approx([1 / math.sqrt(math.pi), 1.02938], abs=0.02)


def test_raw_scores_where_they_are_asked_for():
    curve = best_of_n_curve([[1.0, 2.0]], [[5.0, 3.0]], [1, 2], standardise=False)
    assert curve.proxy.tolist() == [[1.5, 2.0]] and curve.gold.tolist() == [[4.0, 3.0]]
    with pytest.raises(ValueError, match=r"`gold` should differ between samples, got 4\.0 for all 2"):
        best_of_n_curve([[1.0, 2.0]], [[4.0, 4.0]])


def test_the_peak_is_where_theory_has_it():
    """E[x - x^2 / 2] of the best of n normals is largest at n = 4: -0.5, 0.06, 0.25, 0.22, 0.06 at 1, 2, 4, 8, 16."""
    proxy, gold = noisy_proxies()
    curve = best_of_n_curve(proxy, gold, [1, 2, 4, 8, 16, 32])
    peak = curve.peak()
    # E[max]: .5642, 1.0294, 1.4236, 1.7660; E[max^2]: 1, 1.5513, 2.3997, 3.4137
    expected = [0 - 0.5, 0.5642 - 0.5, 1.0294 - 1.5513 / 2, 1.4236 - 2.3997 / 2, 1.7660 - 3.4137 / 2]
    assert peak.index == int(np.argmax(expected)) == 2
    assert peak.kl.low <= float(best_of_n_kl(4)) <= peak.kl.high < best_of_n_kl(32)
    assert peak.fall.low > 0
    assert peak.kl == curve.peak(np.random.default_rng(0)).kl


def test_without_over_optimisation_there_is_no_fall():
    rng = np.random.default_rng(0)
    proxy = rng.normal(size=(100, 32))
    peak = best_of_n_curve(proxy, proxy + rng.normal(size=proxy.shape)).peak()
    assert peak.index == 5 and peak.fall.low <= 0 <= peak.fall.high


def test_chance_makes_no_fall():
    """Gold knows nothing of the proxy: the highest of six noisy points is nearly always above the last one."""
    rng = np.random.default_rng(1)
    naive, honest = [], []
    for _ in range(100):
        gold = rng.normal(size=(30, 6))
        curve = OverOptimisation(np.arange(6.0), gold, gold)
        peak = curve.peak(resamples=1)
        naive.append(curve.gold[:, peak.index].mean() - curve.gold[:, -1].mean())
        honest.append(peak.fall.low > 0)
    assert np.mean(naive) > 0.15  # what choosing the highest does
    assert np.mean(honest) < 0.08


def test_the_fall_by_hand():
    """Even prompts peak at point 1, odd ones at point 0: each half is asked at the other's peak."""
    gold = np.array([[0.0, 5.0, 1.0], [4.0, 0.0, 1.0], [0.0, 7.0, 1.0], [6.0, 0.0, 2.0]])
    peak = OverOptimisation([0.0, 1.0, 2.0], gold, gold).peak()
    # even prompts at point 0: 0 - 1, 0 - 1; odd prompts at point 1: 0 - 1, 0 - 2
    assert peak.fall.value == pytest.approx(-1.25)
    assert peak.index == 1 and peak.gold.value == 3


def test_one_prompt_or_means_alone_have_no_interval():
    peak = OverOptimisation([0.0, 1.0], [0.0, 1.0], [1.0, 3.0]).peak()
    assert peak.kl == (1.0, 0.0, math.inf) and math.isnan(peak.fall.value)


@pytest.mark.parametrize(
    "kl, proxy, gold, message",
    [
        ([0.0, 1.0], [[1.0, 2.0]], [[1.0, 2.0, 3.0]], r"\(1, 2\) and \(1, 3\)"),
        ([0.0], [[1.0, 2.0]], [[1.0, 2.0]], r"got \(1,\), \(1, 2\)"),
        ([], np.zeros((1, 0)), np.zeros((1, 0)), "K points"),
        ([1.0, 0.5], [1.0, 2.0], [1.0, 2.0], "rise from point to point"),
        ([0.5, 0.5], [1.0, 2.0], [1.0, 2.0], "rise from point to point"),
        ([-0.5, 0.5], [1.0, 2.0], [1.0, 2.0], "at least 0"),
        ([0.0, 1.0], [1.0, math.nan], [1.0, 2.0], "finite"),
    ],
)
def test_curves_that_are_none_are_refused(kl, proxy, gold, message):
    with pytest.raises(ValueError, match=message):
        OverOptimisation(kl, proxy, gold)


def test_labels_resamples_and_confidence_are_checked():
    with pytest.raises(ValueError, match="`labels` should be 2"):
        OverOptimisation([0.0, 1.0], [1.0, 2.0], [1.0, 2.0], labels=("a",))
    with pytest.raises(ValueError, match="confidence"):
        OverOptimisation([0.0, 1.0], [1.0, 2.0], [1.0, 2.0], confidence=2)
    with pytest.raises(ValueError, match="`resamples`"):
        OverOptimisation([0.0, 1.0], [1.0, 2.0], [1.0, 2.0]).peak(resamples=0)


def test_the_callers_arrays_are_their_own():
    kl, gold = np.array([0.0, 1.0]), np.array([[1.0, 2.0]])
    curve = OverOptimisation(kl, gold, gold)
    kl[1], gold[0, 0] = 9, 9
    assert curve.kl.tolist() == [0, 1] and curve.gold.tolist() == [[1, 2]]


# What can be shown and kept


def test_table_json_and_picture(tmp_path):
    from rich.console import Console

    curve = best_of_n_curve(*noisy_proxies(40, 16))
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(curve.table())
    text = console.export_text()
    assert "best of 16" in text and "Gold peaks at KL" in text and "0.636" in text
    curve.save_json(tmp_path / "curve.json")
    read = json.loads((tmp_path / "curve.json").read_text())
    assert read["prompts"] == 40 and [p["label"] for p in read["points"]] == list(curve.labels)
    assert read["peak"]["kl"]["value"] == pytest.approx(curve.peak().kl.value)
    for number, shown in enumerate((curve, OverOptimisation([0.5, 1.0], [0.0, 1.0], [1.0, 3.0]))):
        path = tmp_path / f"{number}.png"
        shown.plot(path, gold_label="people")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    shown.save_json(path)  # an unbounded interval is null
    assert json.loads(path.read_text())["peak"]["kl"]["high"] is None


# The forms of Gao et al.


def test_fits_find_what_made_the_points():
    kl = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
    d = np.sqrt(kl)
    bon = fit_gold(kl, d * (1.2 - 0.4 * d))
    assert (bon.alpha, bon.beta) == pytest.approx((1.2, 0.4)) and bon.peak_kl == pytest.approx(1.5**2)
    gain = np.array([0.0, *(d[1:] * (1.2 - 0.4 * np.log(d[1:])))])
    rl = fit_gold(kl, gain, "rl")
    assert (rl.alpha, rl.beta) == pytest.approx((1.2, 0.4)) and rl.peak_kl == pytest.approx(math.exp(2 * (3 - 1)))
    np.testing.assert_allclose(rl.gain(kl), gain, atol=1e-12)


@pytest.mark.parametrize("kind", ["best-of-n", "rl"])
@pytest.mark.parametrize("alpha, beta", [(1.0, 0.3), (0.2, 0.5), (-0.5, 0.3)])
def test_the_peak_of_a_fit_is_its_highest_point(kind, alpha, beta):
    fit = type(fit_gold([1, 2], [1, 1], kind))(kind, alpha, beta)
    kl = np.linspace(0, 100, 2_000_001) if kind == "best-of-n" else np.geomspace(1e-12, 1e4, 2_000_001)
    highest = kl[fit.gain(kl).argmax()]
    assert fit.peak_kl == pytest.approx(highest, rel=1e-3, abs=1e-4)


def test_fits_that_only_rise_or_fall():
    assert fit_gold([1.0, 4.0], [1.0, 2.0]).peak_kl > 1e9  # a straight line in d, to rounding
    assert fit_gold([1.0, 4.0], [1.0, 4.0]).peak_kl == math.inf
    assert fit_gold([1.0, 4.0], [-1.0, -4.0]).peak_kl == pytest.approx(0, abs=1e-9)
    assert fit_gold([1.0, 4.0], [0.0, 0.0]).peak_kl == 0
    for arguments in (([1.0], [1.0]), ([0.0, 1.0], [0.0, 1.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="two different KLs above 0"):
            fit_gold(*arguments)
    with pytest.raises(ValueError, match="`kind`"):
        fit_gold([1.0, 2.0], [1.0, 2.0], "ppo")
