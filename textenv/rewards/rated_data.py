"""Comparisons among rated sentences for reward training: every pair of a batch, one rater of each side. No network.

A batch of sentences goes through the network once, and all its pairs are compared: with 32 sentences, 496 comparisons
for the price of 32 texts. Each comparison is what two single raters said: one rating of each sentence is drawn anew
for every pair, and pairs whose ratings are equal are left out. No mean rating is seen.

Legend: S sentences, K reading points (the end, then cuts), t sentences of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from textenv.rewards.comparison_data import ComparisonBatch, fingerprint
from textenv.rewards.ratings import RatedSentence


class RatedData:
    """Sentences in a new order each epoch; a step compares those of one batch. See `ComparisonData`.

    Args:
        sentences: S rated sentences, at least two.
        rows: their token ids.
        points: (S, K) after how many tokens each is read: its end first, then where it is cut.
        batch_size: sentences per step, at least two.
        cut_share: of the loss, for comparisons of cut sentences; a policy's responses are often cut by their budget.
        seed: of orders, raters and cuts.

    Raises:
        ValueError: fewer than two sentences in all or per step, or a share outside [0, 1), or one without cuts.
    """

    def __init__(
        self,
        sentences: Sequence[RatedSentence],
        rows: list[list[int]],
        points: NDArray[np.int64],
        *,
        batch_size: int = 32,
        cut_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        if min(len(sentences), batch_size) < 2 or not len(sentences) == len(rows) == len(points):
            raise ValueError(
                f"`sentences` should be at least two, with as many rows and points, and two a step, got "
                f"{len(sentences)}, {len(rows)}, {len(points)} and batch_size={batch_size}: nothing could be compared."
            )
        if not 0 <= cut_share < 1 or (cut_share and points.shape[1] < 2):
            raise ValueError(
                f"`cut_share` should be at least 0 and below 1, and 0 where no cuts are read, got {cut_share} with "
                f"{points.shape[1]} reading points."
            )
        self.rows, self.points, self.seed = rows, points, seed
        self.batch_size, self.cut_share = batch_size, cut_share
        self.counts = np.array([len(s.ratings) for s in sentences])  # (S,)
        self.table = np.zeros((len(sentences), self.counts.max()), np.int64)  # (S, most raters)
        for number, sentence in enumerate(sentences):
            self.table[number, : len(sentence.ratings)] = sentence.ratings
        self.steps_per_epoch = max(1, len(sentences) // batch_size)

    @property
    def fingerprint(self) -> str:
        """See `ComparisonData`."""
        return fingerprint(self.rows, self.points, self.table, np.array([self.batch_size, self.cut_share, self.seed]))

    def step(self, epoch: int, index: int) -> list[ComparisonBatch]:
        """See `ComparisonData`. All sentences come in each epoch: a batch has one or two more where they do not divide.

        Raises:
            ValueError: no two raters of the batch disagree.
        """
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        texts = np.array_split(order, self.steps_per_epoch)[index]
        rng = np.random.default_rng([self.seed, epoch, index])
        pairs = np.stack(np.triu_indices(len(texts), 1))  # (2, n)
        raters = (rng.random(pairs.shape) * self.counts[texts[pairs]]).astype(np.int64)
        ratings = self.table[texts[pairs], raters]
        decided = ratings[0] != ratings[1]
        if not decided.any():
            raise ValueError(
                f"A batch of {len(texts)} sentences should hold two that its raters do not rate alike, got none. Take "
                "a larger `batch_size`."
            )
        pairs, ratings = pairs[:, decided], ratings[:, decided]
        pairs = np.take_along_axis(pairs, np.argsort(-ratings, axis=0), 0)  # the higher-rated first
        return [self._batch(texts, pairs, rng)]

    def _batch(self, texts: NDArray[np.int64], pairs: NDArray[np.int64], rng: np.random.Generator) -> ComparisonBatch:
        """The same comparisons of whole and, where they count, of cut sentences."""
        k, n = self.points.shape[1], pairs.shape[1]
        whole, weight = pairs * k, np.full(n, (1 - self.cut_share) / n)
        if self.cut_share:
            whole = np.concatenate([whole, whole + rng.integers(1, k, whole.shape)], 1)  # (2, 2 n)
            weight = np.concatenate([weight, np.full(n, self.cut_share / n)])
        margin = np.zeros(whole.shape[1], np.float32)
        return ComparisonBatch(texts, whole[0], whole[1], margin, weight.astype(np.float32))
