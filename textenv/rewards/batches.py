"""Scoring rows of token ids in batches of like length. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def check_pairs(prompts: Sequence[str], responses: Sequence[str]) -> None:
    """Refuse prompts and responses that do not pair up.

    Raises:
        ValueError: there are more of one than of the other.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"`prompts` and `responses` should pair up, got {len(prompts)} and {len(responses)}.")


def score_by_length(
    rows: Sequence[list[int]], batch_size: int, score: Callable[[list[list[int]]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Scores (B,) of rows of ids, each batch made of neighbours in length so that it holds little padding.

    Args:
        rows: B lists of ids.
        batch_size: rows per call of `score`.
        score: rows (b) to scores (b,).
    """
    scores = np.zeros(len(rows))
    order = np.argsort([len(row) for row in rows], kind="stable")
    for start in range(0, len(rows), batch_size):
        block = order[start : start + batch_size]
        scores[block] = score([rows[i] for i in block])
    return scores
