"""Masks over the vocabulary as packed bits: 152 thousand actions take 19 kB a row. Knows no constraint and no model.

Legend: N rows, B responses, T response tokens, V vocabulary, W = ceil(V / 8) bytes, K different masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PackedMasks:
    """Which actions are allowed, (N, V) or (B, T, V) without ever being that large.

    Most states share their mask with others, so each different one is stored once.

    Example:
        >>> masks = PackedMasks.of(np.array([[True, False, True], [True, True, True]]))
        >>> masks.table.tolist()
        [[160], [224]]
        >>> masks.allows(np.array([1, 1])).tolist()
        [False, True]

    Attributes:
        table: (K, W) the different masks, `np.packbits` of V bools each.
        index: (N,) or (B, T), the row of `table` for each state.
        vocab_size: V.
    """

    table: NDArray[np.uint8]
    index: NDArray[np.int64]
    vocab_size: int

    @classmethod
    def of(cls, allowed: NDArray[np.bool_]) -> PackedMasks:
        """Masks (..., V), True = allowed, each a row of the table."""
        rows = allowed.reshape(-1, allowed.shape[-1])
        return cls(np.packbits(rows, axis=1), np.arange(len(rows)).reshape(allowed.shape[:-1]), allowed.shape[-1])

    def __getitem__(self, rows: Any) -> PackedMasks:
        """Those of some states; the table is shared."""
        return PackedMasks(self.table, self.index[rows], self.vocab_size)

    def packed(self) -> NDArray[np.uint8]:
        """(..., W) bits of every state."""
        packed: NDArray[np.uint8] = self.table[self.index]
        return packed

    def unpacked(self) -> NDArray[np.bool_]:
        """(..., V) bools of every state."""
        return np.unpackbits(self.packed(), axis=-1, count=self.vocab_size).view(np.bool_)

    def allows(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether each state allows its action; `actions` has the shape of `index`."""
        actions = np.asarray(actions, dtype=np.int64)
        bits = self.table[self.index, actions >> 3] >> (7 - (actions & 7)).astype(np.uint8)
        return (bits & 1).astype(np.bool_)


def intersection(masks: Sequence[PackedMasks]) -> PackedMasks:
    """Masks that allow what all of `masks` (one or more, of one shape) allow."""
    first, *others = masks
    table, index = first.table, first.index
    for other in others:
        pairs, inverse = np.unique(index * len(other.table) + other.index, return_inverse=True)
        table = table[pairs // len(other.table)] & other.table[pairs % len(other.table)]
        index = inverse.reshape(index.shape).astype(np.int64)
    return PackedMasks(table, index, first.vocab_size)


def concatenated(parts: Sequence[PackedMasks]) -> PackedMasks:
    """Masks of states one after the other, along the first axis; a table that several parts share is stored once."""
    tables: list[NDArray[np.uint8]] = []
    starts: dict[int, int] = {}
    for part in parts:
        if id(part.table) not in starts:
            starts[id(part.table)] = sum(map(len, tables))
            tables.append(part.table)
    index = np.concatenate([part.index + starts[id(part.table)] for part in parts])
    return PackedMasks(np.concatenate(tables), index, parts[0].vocab_size)
