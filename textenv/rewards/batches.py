"""Scoring rows of token ids in batches of like length. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.scoring import ScorerError


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


def context_column(context: Mapping[str, Any], column: str, count: int, who: str) -> Sequence[Any]:
    """A column of context that a scorer cannot do without.

    Args:
        context: what the scorer was called with.
        column: its name.
        count: B.
        who: needs it, the start of a sentence.

    Raises:
        ScorerError: it is not there, or holds another number of values.
    """
    values = context.get(column)
    if values is None or len(values) != count:
        got = f"the columns {sorted(context)}" if values is None else f"{len(values)} values"
        raise ScorerError(
            f"{who} should be given the column {column!r} of the prompts' context, {count} values, got {got}. Name it "
            f"when the prompts are loaded: context=[{column!r}] (of RLHF-v0: context_columns).",
            whole_batch=True,
        )
    found: Sequence[Any] = values
    return found


def context_rows(context: Mapping[str, Any], columns: Sequence[str], count: int, who: str) -> list[dict[str, Any]]:
    """Some columns of context as B dicts; see `context_column`."""
    found = {column: context_column(context, column, count, who) for column in columns}
    return [{column: values[row] for column, values in found.items()} for row in range(count)]
