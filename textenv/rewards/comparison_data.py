"""What reward training reads: texts as rows of ids, and which of them are compared in each step. Knows no network.

A step is a list of micro-batches whose weights add up to 1, so that their gradients add up to that of the whole step,
however it was cut. What a step holds is a function of the seed, the epoch and its number: a run that goes on from a
checkpoint needs no more than to know how far it came.

Legend: S texts of the data, t texts of a micro-batch, K reading points in each, n comparisons.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from textenv.lm.token_blocks import block_sizes
from textenv.rewards.preferences import Preference


@dataclass(frozen=True)
class ComparisonBatch:
    """Comparisons whose texts go through the network together.

    Attributes:
        texts: (t,) row numbers of the data.
        chosen: (n,) places of the preferred scores in (t, K) laid out flat.
        rejected: (n,) places of the others.
        margin: (n,) by how much the preferred score should win.
        weight: (n,) share of each comparison in the loss of its step.
    """

    texts: NDArray[np.int64]
    chosen: NDArray[np.int64]
    rejected: NDArray[np.int64]
    margin: NDArray[np.float32]
    weight: NDArray[np.float32]


class ComparisonData(Protocol):
    """Texts and steps, the same for the same seed."""

    rows: list[list[int]]
    """S texts as token ids."""
    points: NDArray[np.int64]
    """(S, K) after how many tokens each is read."""
    steps_per_epoch: int

    @property
    def fingerprint(self) -> str:
        """Changes with the texts, the comparisons and the seed."""
        ...

    def step(self, epoch: int, index: int) -> list[ComparisonBatch]:
        """The micro-batches of one step."""
        ...


class PreferenceData:
    """Preferences in a new order each epoch, `batch_size` of them a step; every distinct text is read once.

    Args:
        preferences: at least one.
        encode: (prompt, response, what to call the text in errors) to token ids, `RewardNetwork.encode`.
        batch_size: comparisons per step.
        tokens_per_pass: tokens of a micro-batch, its texts times its longest; None: no bound. A step is cut into as
            many as it takes, and a comparison that is larger goes alone.
        seed: of the order.

    Raises:
        ValueError: no preferences, a size below 1, or a text that cannot be encoded, with the row's number.
    """

    def __init__(
        self,
        preferences: Sequence[Preference],
        encode: Callable[[str, str, str], list[int]],
        *,
        batch_size: int = 32,
        tokens_per_pass: int | None = 2048,
        seed: int = 0,
    ) -> None:
        if not preferences:
            raise ValueError("`preferences` should hold at least one comparison, got none: nothing can be learned.")
        if batch_size < 1 or (tokens_per_pass is not None and tokens_per_pass < 1):
            raise ValueError(
                f"`batch_size` and `tokens_per_pass` should be at least 1, got {batch_size} and {tokens_per_pass}."
            )
        self.batch_size, self.tokens_per_pass, self.seed = batch_size, tokens_per_pass, seed
        self.rows: list[list[int]] = []
        known: dict[tuple[int, ...], int] = {}
        self.pairs = np.array(
            [
                [self._place(encode, known, p, side, i) for side in ("chosen", "rejected")]
                for i, p in enumerate(preferences)
            ]
        )  # (n, 2)
        self.points = np.array([[len(row)] for row in self.rows])  # (S, 1)
        self.lengths = self.points[self.pairs, 0].max(1)  # (n,) of the longer text of each comparison
        self.margins = np.array([p.margin or 0.0 for p in preferences], np.float32)
        self.steps_per_epoch = -(-len(preferences) // batch_size)

    def _place(
        self,
        encode: Callable[[str, str, str], list[int]],
        known: dict[tuple[int, ...], int],
        preference: Preference,
        side: str,
        index: int,
    ) -> int:
        """The row number of one text, which joins the rows where it is new."""
        ids = encode(preference.prompt, getattr(preference, side), f"Comparison {index}, {side}")
        number = known.setdefault(tuple(ids), len(self.rows))
        if number == len(self.rows):
            self.rows.append(ids)
        return number

    @property
    def fingerprint(self) -> str:
        """See `ComparisonData`."""
        settings = np.array([self.batch_size, self.tokens_per_pass or 0, self.seed])
        return fingerprint(self.rows, settings, self.pairs, self.margins)

    def step(self, epoch: int, index: int) -> list[ComparisonBatch]:
        """See `ComparisonData`."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.pairs))
        chosen_ones = order[index * self.batch_size : (index + 1) * self.batch_size]
        lengths = self.lengths[chosen_ones]  # (n,)
        by_length = chosen_ones[np.argsort(lengths, kind="stable")]
        sizes = block_sizes((2 * np.sort(lengths)).tolist(), self.tokens_per_pass)
        return [self._batch(block, len(chosen_ones)) for block in np.split(by_length, np.cumsum(sizes)[:-1])]

    def _batch(self, block: NDArray[np.int64], whole: int) -> ComparisonBatch:
        texts, places = np.unique(self.pairs[block], return_inverse=True)
        chosen, rejected = places.reshape(-1, 2).T
        weight = np.full(len(block), 1 / whole, np.float32)
        return ComparisonBatch(texts, chosen, rejected, self.margins[block], weight)


def fingerprint(rows: Sequence[Sequence[int]], *arrays: NDArray[np.generic]) -> str:
    """Sixteen hexadecimal digits that change with any id, any boundary between rows and any number."""
    digest = hashlib.blake2b(digest_size=8)
    lengths = np.array([len(row) for row in rows])
    for array in (lengths, np.concatenate([np.asarray(row) for row in rows]), *arrays):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
