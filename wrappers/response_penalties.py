"""Penalties on how long a response is and how much it repeats itself. Pure functions and their settings.

Legend: k responses that finish together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from textenv.metrics import ngrams
from textenv.wrappers.scores import Ends, Fixed

LENGTH_MODES = ("linear", "soft-overlong")


def overlong(lengths: NDArray[np.int64], budget: int, cache: int) -> NDArray[np.float64]:
    """clip((length - (budget - cache)) / cache, 0, 1): 0 up to `cache` tokens before the budget, 1 at it.

    The soft overlong punishment of Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 13, with its sign turned: a penalty.

    Example:
        A budget of 10 tokens whose last 4 are the cache:

        >>> overlong(np.array([1, 6, 7, 9, 10]), 10, 4).tolist()
        [0.0, 0.0, 0.25, 0.75, 1.0]

    Args:
        lengths: (k,) tokens.
        budget: T, at which responses are cut.
        cache: tokens over which the penalty grows, 1 to T.
    """
    return np.clip((lengths - (budget - cache)) / cache, 0.0, 1.0)


def repeated_share(responses: Sequence[str], n: int) -> NDArray[np.float64]:
    """1 - distinct n-grams / n-grams, per response: 0 where no n-gram occurs twice, near 1 where everything repeats.

    seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319), over words in lower case as `textenv.metrics.distinct_n` has
    them, so that it is the complement of that figure. 0 where there are fewer than n words.

    Example:
        Of the pairs (a b) (b a) (a b) one repeats another; two words make one pair, which repeats nothing:

        >>> np.round(repeated_share(["a b a b", "a b"], 2), 3).tolist()
        [0.333, 0.0]

    Args:
        responses: k texts.
        n: words per n-gram.
    """
    counts = [ngrams(response, n) for response in responses]
    return np.array([1 - len(count) / count.total() if count else 0.0 for count in counts])


class Length(Fixed):
    """score - coef * length (``"linear"``), or score - coef * `overlong` (``"soft-overlong"``).

    Raises:
        ValueError: a negative or non-finite coefficient, an unknown mode, or a cache that the mode cannot use.
    """

    def __init__(self, coef: float, mode: str, cache: int | None, budget: int) -> None:
        self.coef = check_coef(coef, "long")
        if mode not in LENGTH_MODES:
            raise ValueError(f"`mode` should be one of {LENGTH_MODES}, got {mode!r}. Choose one of them.")
        if mode == "linear" and cache is not None:
            raise ValueError(
                f"`cache` should be left out in mode 'linear', got {cache!r}: it would be ignored. It belongs to mode "
                "'soft-overlong'."
            )
        if mode == "soft-overlong" and not (
            isinstance(cache, int | np.integer) and not isinstance(cache, bool) and 1 <= cache <= budget
        ):
            raise ValueError(
                f"`cache` should be a number of tokens from 1 to the budget of {budget} in mode 'soft-overlong', got "
                f"{cache!r}. The penalty grows over the last `cache` tokens before the budget; a fifth of it, say."
            )
        self.mode, self.cache, self.budget = mode, cache, budget

    def __call__(self, scores: NDArray[np.float64], ends: Ends) -> NDArray[np.float64]:
        """Scores (k,) lowered by the responses' lengths."""
        if self.cache is None:
            return scores - self.coef * ends.lengths
        return scores - self.coef * overlong(ends.lengths, self.budget, self.cache)


class Repetition(Fixed):
    """score - coef * `repeated_share`.

    Raises:
        ValueError: a negative or non-finite coefficient, or n below 1.
    """

    def __init__(self, coef: float, n: int) -> None:
        self.coef = check_coef(coef, "repetitive")
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ValueError(
                f"`n` should be a number of words of at least 1, got {n!r}. There would be no n-gram to repeat. 3 is "
                "usual; 1 counts words that occur twice."
            )
        self.n = n

    def __call__(self, scores: NDArray[np.float64], ends: Ends) -> NDArray[np.float64]:
        """Scores (k,) lowered by the responses' repetitions."""
        return scores - self.coef * repeated_share(ends.responses, self.n)


def check_coef(coef: float, what: str) -> float:
    """The coefficient as a float.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not (isinstance(coef, int | float | np.number) and math.isfinite(coef) and coef >= 0):
        raise ValueError(
            f"`coef` should be a finite number of at least 0 (the penalty is subtracted), got {coef!r}. A negative one "
            f"would reward {what} responses, NaN turns every reward into NaN; 0 switches the penalty off."
        )
    return float(coef)
