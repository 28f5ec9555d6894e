"""Which states of a minibatch one pass reads together: a causal model sees a prefix in every text that begins with it.

Knows arrays only. Legend: M states, L columns, R rows of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABSENT = -1
"""Where a state has no token; below every id, so that a prefix sorts just before the texts that begin with it."""


@dataclass(frozen=True)
class SharedPrefixes:
    """R states that have to be read, and where in them each of the M states is found.

    Example:
        Of the states (5), (5 7), (5 7 9) and (5 8) the last two hold everything:

        >>> ids = np.array([[5, 0, 0], [5, 7, 0], [5, 7, 9], [5, 8, 0]])
        >>> shared = SharedPrefixes.of(ids, ids > 0)
        >>> ids[shared.rows].tolist(), shared.row_of.tolist(), shared.columns.tolist()
        ([[5, 7, 9], [5, 8, 0]], [0, 0, 0, 1], [0, 1, 2, 1])

    Attributes:
        rows: (R,) the states that are no prefix of another; of equal ones, one.
        row_of: (M,) which of the R each state is a prefix of.
        columns: (M,) of each state's last token.
    """

    rows: NDArray[np.int64]
    row_of: NDArray[np.int64]
    columns: NDArray[np.int64]

    @classmethod
    def of(cls, input_ids: NDArray[Any], attention_mask: NDArray[Any], shared: bool = True) -> SharedPrefixes:
        """Find them among states (M, L) by sorting, which puts a prefix before all texts that begin with it.

        Args:
            input_ids: (M, L).
            attention_mask: (M, L), without holes.
            shared: False: every state is read on its own.
        """
        real = np.asarray(attention_mask).astype(np.bool_)
        count, width = real.shape
        columns = width - 1 - real[:, ::-1].argmax(1)
        if not shared or count < 2:
            return cls(np.arange(count), np.arange(count), columns)
        tokens = np.where(real, np.asarray(input_ids), ABSENT)
        order = np.lexsort(tokens.T[::-1])  # by the first column, then the second, ...
        ordered, ends = tokens[order], columns[order]
        beyond = np.arange(width) > ends[:-1, None]
        in_next = ((ordered[:-1] == ordered[1:]) | beyond).all(1)  # (M - 1,) whether it is a prefix of its successor
        kept = np.append(~in_next, True)
        # What lies between a prefix and a text that begins with it begins with it too: the next kept one will do.
        row_of = np.empty(count, dtype=np.int64)
        row_of[order] = np.cumsum(kept) - kept
        return cls(order[kept], row_of, columns)
