"""Which prompt comes next: uniform, weighted, by a curriculum, or one after the other. Holds no place and no generator.

What comes next is a function of a row's generator and of how many prompts the row has drawn since it was seeded. So a
row of a vector environment draws what a single environment of its seed would, and generator and count are all to save.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ORDERS = ("random", "sequential")

Curriculum = Callable[[int], ArrayLike] | Sequence[tuple[int, ArrayLike]]
"""Weights over time: a function of the prompts drawn so far, or stages ``[(0, weights), (1000, weights), ...]``."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """How prompts are chosen.

    Attributes:
        rows: the place of each prompt among those given, which weights are given for.
        given: how many there were.
        weights: one per prompt given, drawn in proportion to; None: all alike.
        curriculum: see `Curriculum`. It counts per row: with N environments a stage that starts at n begins when N * n
            episodes have been drawn in all. Prompts asked for in reset options do not count.
        order: ``"random"``, or ``"sequential"``: row i of N takes prompts i, i + N, i + 2N, ..., and goes round.

    Raises:
        ValueError: weights or orders that say nothing, or contradict each other.
    """

    rows: tuple[int, ...]
    given: int
    weights: ArrayLike | None = None
    curriculum: Curriculum | None = None
    order: str = "random"
    _cumulated: dict[int, NDArray[np.float64]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what would only fail at some later reset."""
        if self.order not in ORDERS:
            raise ValueError(f"`order` should be one of {ORDERS}, got {self.order!r}. Choose one of them.")
        told = [name for name in ("weights", "curriculum") if getattr(self, name) is not None]
        if told and self.order == "sequential":
            raise ValueError(
                f'order="sequential" takes every prompt equally often, got `{told[0]}` beside it, which would be '
                'ignored. Leave one of them out, or use order="random".'
            )
        if len(told) == 2:
            raise ValueError(
                "`weights` (or the weights of prompt records) and `curriculum` both say how often prompts are drawn. "
                "Put the weights into the curriculum, or leave one out."
            )
        if self.weights is not None:
            self._cumulated[0] = self._cumulate(self.weights, "`weights`")
        elif callable(self.curriculum):
            self._from(0)
        elif self.curriculum is not None:
            self._add_stages(self.curriculum)

    def of(self, places: Sequence[int]) -> Schedule:
        """The schedule of some of the prompts."""
        rows = tuple(self.rows[place] for place in places)
        return Schedule(rows, self.given, self.weights, self.curriculum, self.order)

    def choose(self, rng: np.random.Generator, drawn: int, row: int, num_rows: int) -> int:
        """Place of the next prompt.

        Args:
            rng: the row's generator; used by ``"random"`` only.
            drawn: prompts that the row has drawn since it was seeded.
            row: which row it is, of
            num_rows: N.
        """
        if self.order == "sequential":
            return (row + drawn * num_rows) % len(self.rows)
        cumulated = self._from(drawn)
        if cumulated is None:
            return int(rng.integers(len(self.rows)))
        return int(np.searchsorted(cumulated, rng.random(), side="right"))  # an interval of width 0 is never hit

    def _from(self, drawn: int) -> NDArray[np.float64] | None:
        """Cumulated probabilities after so many draws, None where all prompts are alike."""
        if callable(self.curriculum):
            if drawn not in self._cumulated:  # rows in lockstep ask for the same one
                now = self._cumulate(self.curriculum(drawn), f"`curriculum`({drawn})")
                self._cumulated.clear()
                self._cumulated[drawn] = now
            return self._cumulated[drawn]
        if not self._cumulated:
            return None
        return self._cumulated[max(start for start in self._cumulated if start <= drawn)]

    def _add_stages(self, stages: Any) -> None:
        expected = (
            "`curriculum` should be a function of the number of episodes, or stages [(0, weights), (1000, weights), "
            "...] that start at 0 and go up"
        )
        try:
            pairs = [(start, weights) for start, weights in stages]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{expected}, got {stages!r}. Give each stage as a pair.") from error
        starts = [start for start, _ in pairs]
        whole = all(isinstance(start, int | np.integer) and not isinstance(start, bool) for start in starts)
        if not pairs or not whole or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"{expected}, got stages that start at {starts}. Before the first stage, or within two at once, it "
                "would not be known what to draw."
            )
        for start, weights in pairs:
            self._cumulated[int(start)] = self._cumulate(weights, f"`curriculum` from {start} on")

    def _cumulate(self, weights: ArrayLike, name: str) -> NDArray[np.float64]:
        """Cumulated probabilities of the prompts that are left, ending at exactly 1."""
        checked = check_weights(weights, self.given, name)[list(self.rows)]
        if not checked.any():
            raise ValueError(
                f"{name} should be above 0 for at least one of the {len(self.rows)} prompts to draw from, got 0 for "
                "all. No prompt could be drawn."
            )
        cumulated = np.cumsum(checked / checked.max())
        return np.asarray(cumulated / cumulated[-1])


def check_weights(weights: ArrayLike, count: int, name: str) -> NDArray[np.float64]:
    """Weights (count,), float64.

    Raises:
        ValueError: another number of them, or one that is no number, NaN, infinite or negative; the row is named.
    """
    try:
        array = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} should be {count} numbers, one per prompt, got {weights!r}.") from error
    if array.shape != (count,):
        raise ValueError(
            f"{name} should be {count} numbers, one per prompt, got shape {array.shape}. Prompts would be drawn by "
            "the weights of others. Count those that are dropped, too."
        )
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ValueError(
            f"{name} should be finite and at least 0, got {array[bad[0]]} for prompts[{bad[0]}]. It is no probability; "
            "use 0 for prompts that should not be drawn."
        )
    return array
