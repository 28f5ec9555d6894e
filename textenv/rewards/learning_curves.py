"""How a reward model grows with its data: held-out accuracy against the number of comparisons. Numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from textenv.estimates import Estimate
from textenv.rewards.preference_evaluation import evaluate_preferences
from textenv.rewards.preferences import Preference

Fit = Callable[[list[Preference], int], Callable[..., Any]]
"""``(preferences, seed) -> scorer``."""


@dataclass(frozen=True)
class CurvePoint:
    """One fit.

    Attributes:
        comparisons: it was trained on so many.
        repeat: which of the fits on as many it is.
        accuracy: on the held-out comparisons, with its interval.
        log_loss: on them, in nats.
        calibration_error: on them.
    """

    comparisons: int
    repeat: int
    accuracy: Estimate
    log_loss: float
    calibration_error: float


def learning_curve(
    train: Sequence[Preference],
    held_out: Sequence[Preference],
    sizes: Sequence[int],
    fit: Fit,
    *,
    repeats: int = 1,
    seed: int = 0,
) -> Iterator[CurvePoint]:
    """Fit on random subsets of growing size, and measure each fit on the same held-out comparisons.

    Within a repeat the subsets are nested, so that a curve rises by what was added and not by what was exchanged.

    Args:
        train: to draw from.
        held_out: to measure on; no text of them should be in `train`.
        sizes: how many comparisons each fit gets.
        fit: trains a reward model from scratch and gives it as a scorer.
        repeats: fits per size, on other subsets and with other seeds.
        seed: of the subsets and fits.

    Yields:
        A point per fit, small sizes first within a repeat.

    Raises:
        ValueError: no sizes, one below 1 or larger than `train`, no held-out comparison, or no repeat.
    """
    if not sizes or min(sizes) < 1 or max(sizes) > len(train):
        raise ValueError(
            f"`sizes` should be between 1 and the {len(train)} comparisons to train on, got {list(sizes)}."
        )
    if repeats < 1 or not held_out:
        raise ValueError(f"There should be a repeat and a held-out comparison, got {repeats} and {len(held_out)}.")
    return _points(train, held_out, sorted(sizes), fit, repeats, seed)


def _points(
    train: Sequence[Preference], held_out: Sequence[Preference], sizes: list[int], fit: Fit, repeats: int, seed: int
) -> Iterator[CurvePoint]:
    for repeat in range(repeats):
        order = np.random.default_rng([seed, repeat]).permutation(len(train))
        for size in sizes:
            scorer = fit([train[i] for i in order[:size]], seed + repeat)
            report = evaluate_preferences(scorer, held_out)
            yield CurvePoint(size, repeat, report.accuracy, report.log_loss, report.calibration.error)
