"""Comparisons asked in both orders, what they say of a judge's liking for one place, and preferences made of them.

A judge that prefers whatever stands first (or second) is common, see "Large Language Models are not Fair Evaluators"
(arXiv:2305.17926) and MT-Bench (arXiv:2306.05685, section 3.4). With p the judge's probability that the response at the
first place is better, asked as (x, y) and as (y, x)::

    preference     (p(x, y) + 1 - p(y, x)) / 2        that x is better; 1/2 for a judge that sees places alone
    position bias  (p(x, y) + p(y, x)) / 2 - 1/2      0 for a judge that sees responses alone, 1/2 for one that always
                                                      takes the first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from textenv.rewards.preferences import Preference


@dataclass(frozen=True)
class Comparison:
    """What a judge thinks of two responses.

    Attributes:
        prompt: what both respond to.
        first: a response.
        second: another one.
        forth: probability that the response at the first place is better, asked as (first, second); NaN where a reply
            was dropped.
        back: the same, asked as (second, first).

    >>> fair, blind = Comparison("", "x", "y", 0.75, 0.25), Comparison("", "x", "y", 1.0, 1.0)
    >>> fair.preference, fair.position_bias, fair.consistent
    (0.75, 0.0, True)
    >>> blind.preference, blind.position_bias, blind.consistent
    (0.5, 0.5, False)
    """

    prompt: str
    first: str
    second: str
    forth: float
    back: float

    @property
    def preference(self) -> float:
        """Probability that `first` is better, the mean over both orders."""
        return (self.forth + 1 - self.back) / 2

    @property
    def position_bias(self) -> float:
        """From -1/2 to 1/2: how much the judge favours the first place."""
        return (self.forth + self.back) / 2 - 0.5

    @property
    def consistent(self) -> bool:
        """Whether both orders name the same response as the better one."""
        return (self.forth - 0.5) * (0.5 - self.back) > 0


@dataclass(frozen=True)
class Labels:
    """What becomes of B comparisons; none is left out silently.

    Attributes:
        preferences: one for each pair that was decided, in their order.
        decided: the rows of those pairs.
        undecided: the rows of the others: equal texts, an empty one, a preference too near 1/2, or a dropped reply.
        position_bias: the mean over all pairs that were asked, NaN where none was.
        consistency: share of those pairs whose two orders agreed, NaN where none was.
    """

    preferences: list[Preference]
    decided: list[int]
    undecided: list[int]
    position_bias: float
    consistency: float


def labels_of(compared: Sequence[Comparison], threshold: float) -> Labels:
    """Comparisons as preferences.

    Args:
        compared: B of them.
        threshold: the winner's preference must be above it.
    """
    winners = [_winner(comparison, threshold) for comparison in compared]
    asked = [c for c in compared if c.first != c.second and not math.isnan(c.preference)]
    return Labels(
        preferences=[winner for winner in winners if winner is not None],
        decided=[row for row, winner in enumerate(winners) if winner is not None],
        undecided=[row for row, winner in enumerate(winners) if winner is None],
        position_bias=float(np.mean([c.position_bias for c in asked])) if asked else math.nan,
        consistency=float(np.mean([c.consistent for c in asked])) if asked else math.nan,
    )


def _winner(compared: Comparison, threshold: float) -> Preference | None:
    """The comparison as a preference, None where nobody won or there is nothing to learn."""
    first, second, chance = compared.first, compared.second, compared.preference
    if first == second or not first.strip() or not second.strip() or not max(chance, 1 - chance) > threshold:
        return None
    chosen, rejected = (first, second) if chance > 0.5 else (second, first)
    return Preference(compared.prompt, chosen, rejected)
