"""The constraints there are: no stop id before some length, fixed ids, the most likely tokens of a reference.

Legend: N rows, B responses, P prompt columns, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.constraints import Constraint
from textenv.distributions import check_gives_distributions, stepper_of, whole_distributions
from textenv.mdp import TokenMDP
from textenv.packed_masks import PackedMasks


class NoStopBefore(Constraint):
    """The first `min_length` tokens are no stop ids, so that a response has at least that many before it stops.

    Raises:
        ValueError: `min_length` is not between 1 and T - 1, or nothing but stop ids could be written.
    """

    def __init__(self, mdp: TokenMDP, min_length: int, named_size: int | None = None) -> None:
        super().__init__(mdp, named_size)
        most = mdp.max_response_tokens - 1
        if isinstance(min_length, bool) or not isinstance(min_length, int | np.integer) or not 1 <= min_length <= most:
            raise ValueError(
                f"`min_length` should be an integer from 1 to max_response_tokens - 1 = {most}, got {min_length!r}. "
                "With fewer it would do nothing; with more no response could ever stop."
            )
        self.min_length = int(min_length)
        going_on = self.named & ~mdp.is_stop
        if not going_on.any():
            raise ValueError(
                f"A minimal length should leave tokens to write, but all {int(self.named.sum())} tokens of the task "
                "are stop ids. Leave MinLength out."
            )
        self._table = np.packbits(np.stack([going_on, self.named]), axis=1)  # (2, W): before, after

    def next_masks(self, observations: Mapping[str, NDArray[Any]]) -> PackedMasks:
        """See `Constraint.next_masks`."""
        index = (self.written(observations["attention_mask"]) >= self.min_length).astype(np.int64)
        return PackedMasks(self._table, index, self.mdp.vocab_size)

    def response_masks(
        self,
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any],  # noqa: ARG002 - the protocol's
        response_tokens: int,
    ) -> PackedMasks:
        """See `Constraint.response_masks`."""
        index = (np.arange(response_tokens) >= self.min_length).astype(np.int64)
        return PackedMasks(self._table, np.tile(index, (len(input_ids), 1)), self.mdp.vocab_size)

    def reason(self, token: int) -> str:
        """See `Constraint.reason`."""
        if not self.mdp.is_stop[token]:
            return ""
        return f"MinLength({self.min_length}): {token} is a stop id, and {self.min_length} other tokens come first"


class AllowedIds(Constraint):
    """A fixed set of tokens, everywhere.

    Raises:
        ValueError: no ids, or ids that the vocabulary or the tokenizer does not have.
    """

    def __init__(self, mdp: TokenMDP, allowed_ids: Iterable[int], named_size: int | None = None) -> None:
        super().__init__(mdp, named_size)
        ids = np.unique(np.asarray(list(allowed_ids)))
        known = int(self.named.sum())
        if len(ids) == 0 or ids.dtype.kind not in "iu" or ids[0] < 0 or ids[-1] >= known:
            raise ValueError(
                f"`allowed_ids` should hold at least one token id in [0, {known}), got {ids.tolist()[:10]}. Other ids "
                "are no tokens of this task, and with none nothing could be written."
            )
        allowed = np.zeros(mdp.vocab_size, dtype=np.bool_)
        allowed[ids] = True
        self.can_stop = bool((allowed & mdp.is_stop).any())
        self._allowed = allowed
        self._table = np.packbits(allowed[None], axis=1)

    def next_masks(self, observations: Mapping[str, NDArray[Any]]) -> PackedMasks:
        """See `Constraint.next_masks`."""
        index = np.zeros(len(observations["input_ids"]), dtype=np.int64)
        return PackedMasks(self._table, index, self.mdp.vocab_size)

    def response_masks(
        self,
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any],  # noqa: ARG002 - the protocol's
        response_tokens: int,
    ) -> PackedMasks:
        """See `Constraint.response_masks`."""
        index = np.zeros((len(input_ids), response_tokens), dtype=np.int64)
        return PackedMasks(self._table, index, self.mdp.vocab_size)

    def reason(self, token: int) -> str:
        """See `Constraint.reason`."""
        return "" if self._allowed[token] else f"ActionMask: {token} is not among the allowed_ids"


class TopK(Constraint):
    """The k tokens that a reference finds most likely in each state; of equally likely ones those of lower id.

    Args:
        mdp: of the task.
        reference: has ``next_logprobs``.
        k: how many.
        named_size: see `Constraint`.

    Raises:
        TypeError: the reference knows chosen tokens only.
        ValueError: k is not between 1 and the number of tokens.
    """

    def __init__(self, mdp: TokenMDP, reference: Any, k: int, named_size: int | None = None) -> None:
        super().__init__(mdp, named_size)
        known = int(self.named.sum())
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= known:
            raise ValueError(
                f"`top_k` should be an integer from 1 to the {known} tokens of the task, got {k!r}. None leaves it out."
            )
        self.k = int(k)
        self._recent: list[tuple[NDArray[Any], NDArray[Any], PackedMasks]] = []
        self.reference = reference

    @property
    def reference(self) -> Any:
        """Whose most likely tokens are allowed."""
        return self._reference

    @reference.setter
    def reference(self, reference: Any) -> None:
        check_gives_distributions(reference, "The reference of a top-k mask", "Which tokens are the k most likely?")
        self._reference, self._stepper, self._recent = reference, stepper_of(reference), []

    def next_masks(self, observations: Mapping[str, NDArray[Any]]) -> PackedMasks:
        """See `Constraint.next_masks`.

        The reference is not asked again about the last two states: within a step a toll looks back at the one before.
        """
        ids, attention_mask = (np.asarray(observations[key]) for key in ("input_ids", "attention_mask"))
        for seen_ids, seen_mask, masks in self._recent:
            if np.array_equal(seen_ids, ids) and np.array_equal(seen_mask, attention_mask):
                return masks
        masks = PackedMasks.of(self._most_likely(np.asarray(self._stepper.next_logprobs(observations))))
        self._recent = [*self._recent[-1:], (ids.copy(), attention_mask.copy(), masks)]
        return masks

    def response_masks(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> PackedMasks:
        """See `Constraint.response_masks`."""
        real = np.asarray(attention_mask)[:, -response_tokens:] != 0  # (B, T)
        index = np.zeros(real.shape, dtype=np.int64)
        tables = [np.packbits(self.named[None], axis=1)]  # beyond the ends
        blocks = whole_distributions(self.reference, input_ids, attention_mask, response_tokens, self.mdp.vocab_size)
        for rows, log_pi in blocks:
            used = real[rows]
            index[rows][used] = sum(map(len, tables)) + np.arange(used.sum())
            tables.append(np.packbits(self._most_likely(log_pi[used]), axis=1))
        return PackedMasks(np.concatenate(tables), index, self.mdp.vocab_size)

    def reason(self, token: int) -> str:
        """See `Constraint.reason`."""
        return f"ActionMask: {token} is not among the {self.k} tokens that the reference finds most likely there"

    def _most_likely(self, log_pi: NDArray[Any]) -> NDArray[np.bool_]:
        """(M, V) True on the k most likely of (M, V)."""
        log_pi = np.where(self.named, log_pi, -np.inf)
        least = np.partition(log_pi, -self.k, axis=-1)[:, -self.k, None]
        above, ties = log_pi > least, log_pi == least
        missing = self.k - above.sum(axis=-1, keepdims=True)
        return (above | (ties & (ties.cumsum(axis=-1) <= missing))) & self.named
