"""How good a score is at comparisons: accuracy, calibration, distribution. Pure numpy: knows neither texts nor models.

Intervals rest on independent comparisons: pairs that share responses vary less than they say.

Legend: n comparisons, M bins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from textenv.estimates import Estimate, share_estimate
from textenv.rewards.preferences import Preference
from textenv.scoring import call_scorer


def accuracy_estimate(chosen: ArrayLike, rejected: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Share of comparisons in which the preferred response has the higher score, with Wilson's interval.

    Args:
        chosen: (n,) scores of the preferred responses.
        rejected: (n,) scores of the others; a tie counts one half.
        confidence: of the interval.

    Raises:
        ValueError: the shapes differ, there is no comparison, or a score is not finite.

    Example:
        >>> accuracy_estimate([2.0, 1.0, 0.5, 3.0], [1.0, 2.0, 0.5, 0.0]).value
        0.625
    """
    gaps = _gaps(chosen, rejected)
    return share_estimate((np.sign(gaps) + 1) / 2, confidence)


class Calibration(NamedTuple):
    """What a score claims against what people chose, by bins of equal width from 1/2 to 1.

    Attributes:
        confidence: (M,) mean of sigmoid(|gap|), the claimed probability that the higher score wins; nan in empty bins.
        win_rate: (M,) how often it did.
        low: (M,) lower end of the win rate's interval.
        high: (M,) upper end.
        counts: (M,) comparisons.
        error: the expected calibration error, sum of counts / n * |win_rate - confidence|.
    """

    confidence: NDArray[np.float64]
    win_rate: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    counts: NDArray[np.int64]
    error: float


def calibration_curve(chosen: ArrayLike, rejected: ArrayLike, bins: int = 10, confidence: float = 0.95) -> Calibration:
    """Compare sigmoid(gap) with the observed win rate.

    Under the Bradley-Terry model the response with the higher score wins with probability sigmoid(|gap|). Comparisons
    are put in bins by that claim, as Guo et al. (2017, arXiv:1706.04599, eq. 3) do for classifiers. The error
    of a perfect score is not 0 on few comparisons: each bin's win rate misses by its own chance.

    Args:
        chosen: (n,) scores of the preferred responses.
        rejected: (n,) scores of the others; a tie of scores is a claim of 1/2 and wins half.
        bins: M.
        confidence: of the win rates' intervals.

    Raises:
        ValueError: the shapes differ, there is no comparison or no bin, or a score is not finite.
    """
    if bins < 1:
        raise ValueError(f"`bins` should be at least 1, got {bins}.")
    gaps = _gaps(chosen, rejected)
    claims, wins = sigmoid(np.abs(gaps)), (np.sign(gaps) + 1) / 2  # (n,)
    place = np.minimum(((claims - 0.5) * 2 * bins).astype(np.int64), bins - 1)
    claimed = np.full(bins, np.nan)
    rates = [share_estimate(wins[place == m], confidence) for m in range(bins)]
    count = np.bincount(place, minlength=bins)
    for m in np.flatnonzero(count):
        claimed[m] = claims[place == m].mean()
    win_rate, low, high = np.array(rates).T
    error = float(np.nansum(count * np.abs(win_rate - claimed)) / len(gaps))
    return Calibration(claimed, win_rate, low, high, count, error)


class Distribution(NamedTuple):
    """How scores spread."""

    mean: float
    std: float
    """With n in its denominator."""
    quantiles: tuple[float, ...]
    """At 0, 5, 25, 50, 75, 95 and 100%."""


QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def score_distribution(scores: ArrayLike) -> Distribution:
    """Mean, standard deviation and quantiles of scores (n,).

    Raises:
        ValueError: there is no score, or one that is not finite.
    """
    x = np.asarray(scores, np.float64)
    if x.ndim != 1 or len(x) == 0 or not np.isfinite(x).all():
        raise ValueError(f"`scores` should be finite numbers (n,), n at least 1, got an array of shape {x.shape}.")
    return Distribution(float(x.mean()), float(x.std()), tuple(float(q) for q in np.quantile(x, QUANTILES)))


@dataclass(frozen=True)
class PreferenceEvaluation:
    """A scorer against comparisons.

    Attributes:
        chosen: (n,) scores of the preferred responses.
        rejected: (n,) scores of the others.
        accuracy: see `accuracy_estimate`.
        log_loss: mean of -log sigmoid(gap) in nats; log 2 for a score that knows nothing.
        calibration: see `calibration_curve`.
        distribution: of all scores.
    """

    chosen: NDArray[np.float64]
    rejected: NDArray[np.float64]
    accuracy: Estimate
    log_loss: float
    calibration: Calibration
    distribution: Distribution

    def summary(self) -> dict[str, Any]:
        """The figures that JSON can hold."""
        return {
            "comparisons": len(self.chosen),
            "accuracy": self.accuracy.value,
            "accuracy_interval": [self.accuracy.low, self.accuracy.high],
            "log_loss": self.log_loss,
            "calibration_error": self.calibration.error,
            "score_mean": self.distribution.mean,
            "score_std": self.distribution.std,
            "score_quantiles": dict(zip(map(str, QUANTILES), self.distribution.quantiles, strict=True)),
        }


def report_of_scores(chosen: ArrayLike, rejected: ArrayLike, bins: int = 10) -> PreferenceEvaluation:
    """Everything about scores (n,) of preferred responses and of the others.

    Raises:
        ValueError: see `accuracy_estimate`.
    """
    gaps = _gaps(chosen, rejected)
    a, b = np.asarray(chosen, np.float64), np.asarray(rejected, np.float64)
    return PreferenceEvaluation(
        chosen=a,
        rejected=b,
        accuracy=accuracy_estimate(a, b),
        log_loss=float(np.logaddexp(0, -gaps).mean()),
        calibration=calibration_curve(a, b, bins),
        distribution=score_distribution(np.concatenate([a, b])),
    )


def evaluate_preferences(
    scorer: Callable[..., Any], preferences: Sequence[Preference], bins: int = 10
) -> PreferenceEvaluation:
    """Score both sides of all comparisons in one call of any scorer. Margins are not looked at.

    Raises:
        ValueError: there are no preferences.
        ScorerError: the scorer fails, see `textenv.scoring.call_scorer`.
    """
    if not preferences:
        raise ValueError("`preferences` should hold at least one comparison, got none: there is nothing to measure.")
    prompts = [p.prompt for p in preferences]
    responses = [p.chosen for p in preferences] + [p.rejected for p in preferences]
    scores = call_scorer(scorer, prompts * 2, responses)
    return report_of_scores(scores[: len(prompts)], scores[len(prompts) :], bins)


def sigmoid(x: ArrayLike) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)) without overflow."""
    result: NDArray[np.float64] = np.exp(-np.logaddexp(0, -np.asarray(x, np.float64)))
    return result


def _gaps(chosen: ArrayLike, rejected: ArrayLike) -> NDArray[np.float64]:
    a, b = np.asarray(chosen, np.float64), np.asarray(rejected, np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) == 0:
        raise ValueError(
            f"`chosen` and `rejected` should both have shape (n,) with n of at least 1, got {a.shape} and {b.shape}."
        )
    gaps: NDArray[np.float64] = a - b
    if not np.isfinite(gaps).all():
        row = int(np.flatnonzero(~np.isfinite(gaps))[0])
        raise ValueError(
            f"Scores should be finite, got {a[row]} and {b[row]} in row {row}: every figure would be nan. Mend the "
            "scorer."
        )
    return gaps
