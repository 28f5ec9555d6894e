"""Correlations with confidence intervals. Pure numpy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from textenv.estimates import UNDEFINED, Estimate, quantile_of

ROUNDING = 1e-12
"""A correlation this near to 1 is 1: points on a line, to the last digits."""


def pearson(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> Estimate:
    """The linear correlation of two figures of n observations, with Fisher's interval.

    tanh(artanh r plus and minus z / sqrt(n - 3)): Fisher 1921 (Metron 1). Undefined (nan) where one of the two does not
    vary; unbounded, [-1, 1], below four observations.

    Args:
        x: (n,).
        y: (n,).
        confidence: see `quantile_of`.

    Raises:
        ValueError: shapes that differ.

    >>> round(pearson([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]).value, 6)
    0.8
    """
    x, y = _pair(x, y)
    return _with_interval(_correlation(x, y), len(x), 1.0, confidence)


def spearman(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> Estimate:
    """The correlation of ranks, ties sharing their mean rank: whether one figure rises with another at all.

    The interval is Fisher's with the variance (1 + r^2 / 2) / (n - 3) of Bonett & Wright (2000, Psychometrika 65).

    Args:
        x: (n,).
        y: (n,).
        confidence: see `quantile_of`.

    Raises:
        ValueError: shapes that differ.

    >>> spearman([1.0, 2.0, 3.0], [1.0, 10.0, 100.0]).value
    1.0
    """
    x, y = _pair(x, y)
    r = _correlation(ranks(x), ranks(y))
    return _with_interval(r, len(x), 1 + r**2 / 2, confidence)


def ranks(x: ArrayLike) -> NDArray[np.float64]:
    """Ranks (n,) from 1 upwards; equal figures share the mean of their ranks.

    >>> ranks([7.0, 3.0, 7.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, group, sizes = np.unique(np.asarray(x, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    shared: NDArray[np.float64] = (last - (sizes - 1) / 2)[group]
    return shared


def _pair(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"`x` and `y` should both have shape (n,), got {x.shape} and {y.shape}.")
    return x, y


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    if scale == 0:  # differences too small to be squared are none
        return math.nan
    r = float(x @ y) / scale
    return math.copysign(1.0, r) if abs(r) > 1 - ROUNDING else r


def _with_interval(r: float, n: int, variance: float, confidence: float) -> Estimate:
    z = quantile_of(confidence)
    if math.isnan(r):
        return UNDEFINED
    if n < 4:
        return Estimate(r, -1.0, 1.0)
    if abs(r) == 1:
        return Estimate(r, r, r)
    half = z * math.sqrt(variance / (n - 3))
    return Estimate(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
