"""Shaping of scores: functions from the scores of finished responses to better-behaved ones. Knows no environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

MISSING_EOS_MODES = ("subtract", "replace")


class Ends(NamedTuple):
    """The k responses that finish together, as far as a shaper may look at them."""

    finish_reasons: Sequence[str]
    """k of ``"stop"`` and ``"length"``."""
    lengths: NDArray[np.int64]
    """(k,) tokens, the stop id included."""
    responses: Sequence[str]
    """k texts."""

    def where(self, keep: NDArray[np.bool_]) -> Ends:
        """Those where `keep` (k,) is True."""
        rows = np.flatnonzero(keep)
        return Ends(
            [self.finish_reasons[row] for row in rows], self.lengths[rows], [self.responses[row] for row in rows]
        )


class ScoreShaper(Protocol):
    """Maps the scores of responses that finish together to new ones."""

    def __call__(self, scores: NDArray[np.float64], ends: Ends, /) -> NDArray[np.float64]:
        """Scores (k,), finite, and the responses that they judge, to scores (k,)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        ...


def missing_eos_scores(
    scores: NDArray[np.float64], finish_reasons: Sequence[str], penalty: float, mode: str
) -> NDArray[np.float64]:
    """Give ``score - penalty`` (``"subtract"``) or ``-penalty`` (``"replace"``) where the budget cut the response.

    Keyed on how the episode finished, so any id of the stop set counts as an ending. Replacing is the rule of Stiennon
    et al. 2020's code (arXiv:2009.01325) and of Huang et al. 2024 (arXiv:2403.17031), detail 4.

    Args:
        scores: (k,).
        finish_reasons: k of ``"stop"`` and ``"length"``.
        penalty: at least 0.
        mode: see above.
    """
    cut = np.array([reason == "length" for reason in finish_reasons], dtype=bool)
    penalised = scores - penalty if mode == "subtract" else np.full_like(scores, -penalty)
    return np.where(cut, penalised, scores)


class Fixed:
    """The part of a `ScoreShaper` that remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing changes over time."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing changes over time."""


class MissingEOS(Fixed):
    """`missing_eos_scores` with its settings.

    Raises:
        ValueError: penalty negative or not finite, or an unknown mode.
    """

    def __init__(self, penalty: float, mode: str) -> None:
        if not (math.isfinite(penalty) and penalty >= 0):
            raise ValueError(
                f"`penalty` should be a finite number of at least 0 (it is subtracted), got {penalty!r}. A negative "
                "one would reward responses that never end."
            )
        if mode not in MISSING_EOS_MODES:
            raise ValueError(f"`mode` should be one of {MISSING_EOS_MODES}, got {mode!r}.")
        self.penalty, self.mode = float(penalty), mode

    def __call__(self, scores: NDArray[np.float64], ends: Ends) -> NDArray[np.float64]:
        """See `missing_eos_scores`."""
        return missing_eos_scores(scores, ends.finish_reasons, self.penalty, self.mode)


class Clip(Fixed):
    """min(max(score, low), high).

    Raises:
        ValueError: a bound that is no number, or `low` not below `high`.
    """

    def __init__(self, low: float, high: float) -> None:
        numbers = all(isinstance(bound, int | float | np.number) for bound in (low, high))
        if not (numbers and low < high):
            raise ValueError(
                f"`low` and `high` should be numbers with low < high, got {low!r} and {high!r}. Every score would "
                "become the same, or NaN. Leave a side open with -math.inf or math.inf."
            )
        self.low, self.high = float(low), float(high)

    def __call__(self, scores: NDArray[np.float64], _ends: Ends) -> NDArray[np.float64]:
        """Scores (k,) between the bounds."""
        return np.clip(scores, self.low, self.high)


class Normalize:
    """(score - mean) / std, with given figures or those of all scores seen so far.

    Running figures are exact (Chan et al. 1979's update of mean and sum of squares), and count a batch before they are
    applied to it. The standard deviation is the population's; until two different scores have been seen it is 0, and
    scores are only centred.

    Args:
        mean: fixed mean; None for the running one.
        std: fixed standard deviation, above 0; None for the running one.
    """

    def __init__(self, mean: float | None, std: float | None) -> None:
        if (mean is None) != (std is None):
            raise ValueError(
                f"`mean` and `std` should be given together or not at all, got mean={mean}, std={std}. Leave both out "
                "for the running figures."
            )
        if mean is not None and std is not None and not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ValueError(
                f"`mean` should be finite and `std` positive, got mean={mean}, std={std}. Leave both out for the "
                "running figures."
            )
        self.fixed = None if mean is None or std is None else (float(mean), float(std))
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def __call__(self, scores: NDArray[np.float64], _ends: Ends) -> NDArray[np.float64]:
        """Scores (k,) normalised."""
        if self.fixed is not None:
            mean, std = self.fixed
            return (scores - mean) / std
        self._update(scores)
        std = math.sqrt(self.squares / self.count)
        return (scores - self.mean) / (std if std > 0 else 1.0)

    def _update(self, scores: NDArray[np.float64]) -> None:
        total = self.count + len(scores)
        batch_mean = float(scores.mean())
        shift = batch_mean - self.mean
        self.squares += float(((scores - batch_mean) ** 2).sum()) + shift**2 * self.count * len(scores) / total
        self.mean += shift * len(scores) / total
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        """The running figures."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])


def shape_scores(shaper: ScoreShaper, scores: NDArray[np.float64], ends: Ends) -> NDArray[np.float64]:
    """Apply a shaper to the finite scores; dropped samples (NaN) stay NaN and leave its statistics alone."""
    finite = np.isfinite(scores)
    shaped = scores.copy()
    if finite.any():
        shaped[finite] = shaper(scores[finite], ends.where(finite))
    return shaped
