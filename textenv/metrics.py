"""Figures about texts. Knows nothing of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from textenv.estimates import Estimate, jackknife_estimate


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Distinct word n-grams over word n-grams, all texts together (Li et al. 2016, arXiv:1510.03055).

    1 means that no n-gram occurs twice, near 0 that everything repeats. It falls as more text is looked at, so compare
    equal numbers of texts. nan where no text has n words.

    Example:
        >>> distinct_n(["a b a b", "a b"], 2)
        0.5
    """
    counts = [ngrams(text, n) for text in texts]
    total = sum(c.total() for c in counts)
    return len(set().union(*counts)) / total if total else float("nan")


def distinct_n_estimate(texts: Sequence[str], n: int = 2, confidence: float = 0.95) -> Estimate:
    """`distinct_n` with a jackknife interval over texts: resampling with replacement would itself repeat n-grams."""
    counts = [ngrams(text, n) for text in texts]
    together: Counter[tuple[str, ...]] = Counter()
    for count in counts:
        together.update(count)
    total = together.total()
    left_out = []
    for count in counts:
        lost = sum(together[gram] == times for gram, times in count.items())  # n-grams that no other text has
        rest = total - count.total()
        left_out.append((len(together) - lost) / rest if rest else np.nan)
    value = len(together) / total if total else float("nan")
    value, low, high = jackknife_estimate(value, left_out, confidence)
    return Estimate(value, max(low, 0.0), min(high, 1.0))


def repetition_rate(texts: Sequence[str], n: int = 4) -> float:
    """Share of a text's word n-grams that it has said before, averaged over texts.

    seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319): 1 - distinct n-grams / n-grams, within each text. Unlike
    `distinct_n` it does not depend on how many texts there are, and does not see that they resemble each other. Texts
    of fewer than n words are left out; nan where all are.

    Example:
        Of the pairs "a b", "b a", "a b" one has been said before:

        >>> repetition_rate(["a b a b"], 2)
        0.333...
    """
    counts = [count for text in texts if (count := ngrams(text, n))]
    return float(np.mean([1 - len(count) / count.total() for count in counts])) if counts else float("nan")


def ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    """Word n-grams of a text, lower case, with the number of their occurrences."""
    words = text.lower().split()
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
