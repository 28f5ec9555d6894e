"""Figures about texts. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Distinct word n-grams over word n-grams, all texts together (Li et al. 2016, arXiv:1510.03055).

    1 means that no n-gram occurs twice, near 0 that everything repeats. It falls as more text is looked at, so compare
    equal numbers of texts. nan where no text has n words.

    Example:
        >>> distinct_n(["a b a b", "a b"], 2)
        0.5
    """
    grams = [
        tuple(words[i : i + n]) for words in (text.lower().split() for text in texts) for i in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else float("nan")
