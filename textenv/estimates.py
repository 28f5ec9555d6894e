"""Figures with confidence intervals, from independent observations. Pure numpy: knows no text, policy or environment.

Every interval is two-sided at a given confidence and rests on independent observations: responses to one prompt
drawn many times vary less than responses to as many prompts, and the interval does not know.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Estimate(NamedTuple):
    """A figure and its confidence interval; nan where it is not defined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """The figure and its interval to three significant digits."""
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


UNDEFINED = Estimate(math.nan, math.nan, math.nan)


def quantile_of(confidence: float) -> float:
    """Standard deviations on either side of the mean of a normal distribution, 1.96 at 0.95.

    Raises:
        ValueError: `confidence` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(
            f"`confidence` should be between 0 and 1, got {confidence!r}: 0.95 means that 95 of 100 such intervals "
            "hold the true figure."
        )
    return statistics.NormalDist().inv_cdf(0.5 + confidence / 2)


def mean_estimate(x: ArrayLike, confidence: float = 0.95) -> Estimate:
    """The mean, plus and minus z standard errors s / sqrt(n), s with n - 1 in its denominator.

    Args:
        x: (n,) independent observations. None: undefined; one: its interval is unbounded.
        confidence: see `quantile_of`.

    Example:
        >>> mean_estimate([1.0, 2.0, 3.0])
        Estimate(value=2.0, low=0.868..., high=3.131...)
    """
    z, x = quantile_of(confidence), np.asarray(x, dtype=np.float64)
    if len(x) == 0:
        return UNDEFINED
    error = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.inf
    mean = float(x.mean())
    return Estimate(mean, mean - z * error, mean + z * error)


def share_estimate(x: ArrayLike, confidence: float = 0.95) -> Estimate:
    """A share of n observations in [0, 1] with Wilson's interval, which stays inside [0, 1] and is never empty.

    Wilson 1927 (J. Am. Stat. Assoc. 22), eq. 4. Observations between 0 and 1 (ties of a win rate) make it wider than
    need be, never narrower.

    Args:
        x: (n,) observations, 0 or 1 as a rule.
        confidence: see `quantile_of`.

    Example:
        Ten successes of ten leave room for a share of 0.72:

        >>> share_estimate([1] * 10)
        Estimate(value=1.0, low=0.722..., high=1.0)
    """
    z, x = quantile_of(confidence), np.asarray(x, dtype=np.float64)
    n = len(x)
    if n == 0:
        return UNDEFINED
    share = float(x.mean())
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def ratio_estimate(numerators: ArrayLike, denominators: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Sum of numerators over sum of denominators, such as nats over tokens; linearised standard error.

    Cochran 1977, Sampling Techniques, eq. 6.13: the residuals are e_i = a_i - R b_i, the variance of R is
    n / (n - 1) * sum(e_i^2) / sum(b_i)^2.

    Args:
        numerators: (n,) one per independent observation (a response, a text).
        denominators: (n,) at least 0.
        confidence: see `quantile_of`.

    Example:
        Two texts, 3 nats over 2 tokens and 1 nat over 2: 1 nat per token, not the mean of 1.5 and 0.5 by chance only:

        >>> ratio_estimate([3.0, 1.0], [2.0, 2.0]).value
        1.0
    """
    z = quantile_of(confidence)
    a, b = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    total = float(b.sum())
    if total == 0:
        return UNDEFINED
    ratio = float(a.sum()) / total
    n = len(a)
    error = math.sqrt(n / (n - 1) * float(((a - ratio * b) ** 2).sum())) / total if n > 1 else math.inf
    return Estimate(ratio, ratio - z * error, ratio + z * error)


def jackknife_estimate(value: float, left_out: ArrayLike, confidence: float = 0.95) -> Estimate:
    """A statistic of n observations with the jackknife's standard error.

    Efron & Stein 1981 (Ann. Stat. 9), eq. 1.3: variance (n - 1) / n * sum((t_i - mean t)^2), t_i the statistic without
    observation i.

    Args:
        value: the statistic of all observations.
        left_out: (n,) the statistic without each of them.
        confidence: see `quantile_of`.
    """
    z, t = quantile_of(confidence), np.asarray(left_out, dtype=np.float64)
    if len(t) < 2:
        return Estimate(value, -math.inf, math.inf) if math.isfinite(value) else UNDEFINED
    error = math.sqrt((len(t) - 1) / len(t) * float(((t - t.mean()) ** 2).sum()))
    return Estimate(value, value - z * error, value + z * error)
