"""How well people agree with people: what no reward model can be asked to beat. Numpy only.

Legend: S sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from textenv.rewards.ratings import RatedSentence


class Agreement(NamedTuple):
    """How one judgement of sentences agrees with another.

    Attributes:
        accuracy: share of pairs, ordered by both, that they order alike.
        with_ties: the same where a pair that the first leaves tied counts one half, as `pair_accuracy` counts.
        correlation: of the two judgements.
    """

    accuracy: float
    with_ties: float
    correlation: float


def pair_accuracy(scores: NDArray[np.float64], means: NDArray[np.float64]) -> float:
    """Share of pairs with distinct mean ratings that the scores order as the means do; tied scores count one half."""
    above = means[:, None] > means  # (S, S): each pair once
    order = np.sign(scores[:, None] - scores)[above]
    return float((order.mean() + 1) / 2)


def agreement(judged: NDArray[np.float64], against: NDArray[np.float64]) -> Agreement:
    """How judgements (S,) agree with others (S,); nan where nothing is ordered."""
    order = np.sign(judged[:, None] - judged)[against[:, None] > against]
    flat = not (np.ptp(judged) and np.ptp(against))
    correlation = np.nan if flat else float(np.corrcoef(judged, against)[0, 1])
    return Agreement(_share_right(order[order != 0]), _share_right(order), correlation)


def _share_right(order: NDArray[np.float64]) -> float:
    return float((order.mean() + 1) / 2) if len(order) else np.nan


def one_against_rest(sentences: Sequence[RatedSentence], rng: np.random.Generator) -> Agreement:
    """One rater of each sentence, drawn at random, against the mean of its other raters.

    Args:
        sentences: with at least two raters each.
        rng: the only source of randomness.

    Raises:
        ValueError: a sentence has fewer.
    """
    ratings = _rated(sentences)
    drawn = [int(rng.integers(len(row))) for row in ratings]
    alone = np.array([row[k] for row, k in zip(ratings, drawn, strict=True)])
    rest = np.array([np.delete(row, k).mean() for row, k in zip(ratings, drawn, strict=True)])
    return agreement(alone, rest)


def half_against_half(sentences: Sequence[RatedSentence], rng: np.random.Generator) -> Agreement:
    """The mean of half of each sentence's raters, drawn at random, against the mean of the other half.

    Args:
        sentences: with at least two raters each.
        rng: the only source of randomness.

    Raises:
        ValueError: a sentence has fewer.
    """
    shuffled = [rng.permutation(row) for row in _rated(sentences)]
    first = np.array([row[: len(row) // 2].mean() for row in shuffled])
    return agreement(first, np.array([row[len(row) // 2 :].mean() for row in shuffled]))


def _rated(sentences: Sequence[RatedSentence]) -> list[NDArray[np.float64]]:
    short = next((s for s in sentences if len(s.ratings) < 2), None)
    if short is not None:
        raise ValueError(
            f"Every sentence should have at least two raters, got {len(short.ratings)} of {short.text!r}: nobody is "
            "left to agree with."
        )
    return [np.array(s.ratings, np.float64) for s in sentences]
