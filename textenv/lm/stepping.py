"""`Stepper`: a language model that reads an environment's rows token by token, and each token once.

Legend: N rows, L columns, R rows of a pass, Q new tokens of each, H hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.lm.cache import Place, RowCache, why_not_cached
from textenv.lm.lazy import LazyLanguageModel
from textenv.lm.logprobs import CHUNK
from textenv.lm.model import TOKENS_PER_PASS, LanguageModel
from textenv.lm.precision import precision
from textenv.lm.weights import Fingerprint

EMPTY = -1
"""In a slot that holds no token."""


class Stepper:
    """``stepper(observations, actions) -> logprobs (N,)``, equal to the model's own, at the cost of the new tokens.

    A row's keys and values are kept together with the token ids they belong to. A call compares the observation with
    those: a row that says the same needs nothing, one with a token more runs that token, and any other (its episode
    ended, whatever the autoreset mode) runs what follows the prefix that is still common. There is no reset to be
    told, rows may come in any order, and another number of rows starts anew.

    Example:
        A row of four tokens, then the same row with a fifth: four tokens go through the model, then one.

    What is kept is forgotten when the model's weights have changed (an optimiser's step, a loaded checkpoint), see
    `textenv.lm.weights.Fingerprint`; layers that were exchanged or adapters switched on and off from outside are not
    seen: call `clear`.

    Models without a past to keep (a recurrent state, an attention that takes no mask of ours) are read whole at each
    step, which one warning says; results are the same.

    Copies and pickles carry the model and no cache.

    Args:
        lm: a `LanguageModel`, or a `LazyLanguageModel`, which is then loaded by the first call.
    """

    def __init__(self, lm: LanguageModel | LazyLanguageModel) -> None:
        self.lm = lm
        self._cached: bool | None = None  # whether the model can keep its past; asked at the first call
        self.clear()

    def clear(self) -> None:
        """Forget every row and free the cache."""
        self._cache: RowCache | None = None
        self._tokens: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)  # (N, L) from the left, then EMPTY
        self._states = torch.empty(0, 0)  # (N, H) after each row's last token
        self._logits: tuple[object, Tensor] | None = None
        self._fingerprint: Fingerprint | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values, N * L * (bytes per token of the model); 0 before the first call."""
        return 0 if self._cache is None else self._cache.nbytes

    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        """Log-probability (N,) of each action after its prefix; see `LanguageModel.__call__`."""
        chosen = np.asarray(actions)
        found = [
            logits.gather(-1, torch.as_tensor(chosen[rows], device=logits.device).long()[:, None]).squeeze(-1)
            - logits.logsumexp(-1)
            for rows, logits in self.next_logits(observations)
        ]
        return torch.cat(found).double().cpu().numpy()

    def next_logprobs(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Log-probabilities (N, V) of every token after each prefix."""
        found = [torch.log_softmax(logits, -1) for _, logits in self.next_logits(observations)]
        return torch.cat(found).cpu().numpy()

    def next_logits(self, observations: Mapping[str, NDArray[Any]]) -> Iterator[tuple[slice, Tensor]]:
        """Logits (n, V) after each prefix, temperature included, in chunks of rows that bound the memory.

        They are kept until a row changes where they are few, so that the log-probability of an action that was just
        sampled costs nothing. Do not write into them.

        Yields:
            Which rows, and their logits.
        """
        states = self.states(np.asarray(observations["input_ids"]), np.asarray(observations["attention_mask"]))
        for start in range(0, len(states), CHUNK):
            rows = slice(start, start + CHUNK)
            yield rows, self._read(states[rows], keep=len(states) <= CHUNK)

    @torch.no_grad()
    def _read(self, states: Tensor, keep: bool) -> Tensor:
        model = self.lm.load()
        head = model.head
        distribution = (head.temperature, head.named_size)
        if keep and self._logits is not None and self._logits[0] == distribution:
            return self._logits[1]
        with precision(model.device.type, model.dtype):
            logits = head.logits(states)
        self._logits = (distribution, logits) if keep else None
        return logits

    def states(self, input_ids: NDArray[Any], attention_mask: NDArray[Any]) -> Tensor:
        """Hidden states (N, H), float32, after the last real token of each row (N, L). The next call overwrites them.

        Raises:
            ValueError: a row without a token.
        """
        tokens, lengths = _from_the_left(input_ids, attention_mask)
        self._prepare(*tokens.shape)
        new = _new_tokens(self._tokens, tokens, lengths)
        if new.any():
            self._logits = None
        for rows in _blocks(new, TOKENS_PER_PASS.get(self._states.device.type, 16384)):
            self._tokens[rows] = EMPTY  # of an interrupted pass nothing may be believed
            hidden = self._pass(rows, tokens, lengths, new[rows])
            self._states[torch.as_tensor(rows, device=hidden.device)] = hidden.float()
            self._tokens[rows] = tokens[rows]
        return self._states

    def _prepare(self, num_rows: int, num_slots: int) -> None:
        """Have a cache of that size which belongs to the weights of now."""
        model = self.lm.load()
        if self._cached is None:
            reason = why_not_cached(model)
            self._cached = reason is None
            if reason is not None:
                warnings.warn(
                    f"{type(model.model).__name__} is read whole at every step, so time per step grows with the "
                    f"prefix; results are the same. Its past cannot be kept: {reason}.",
                    UserWarning,
                    stacklevel=6,
                )
        stale = self._fingerprint is not None and self._fingerprint.changed()
        if stale or self._tokens.shape != (num_rows, num_slots):
            self.clear()
        if self._fingerprint is None:
            self._fingerprint = Fingerprint(model.model)
            self._tokens = np.full((num_rows, num_slots), EMPTY)
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside it
                self._states = torch.empty(num_rows, model.hidden_size, device=model.device)
            if self._cached:
                self._cache = RowCache(model.num_layers, num_rows, num_slots)

    def _pass(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], lengths: NDArray[np.int64], new: NDArray[np.int64]
    ) -> Tensor:
        """Run the last `new` (R,) tokens of some rows; hidden states (R, H) after them."""
        model, ends = self.lm.load(), lengths[rows]
        if self._cache is None:
            width = ends.max()
            return model.states_at(tokens[rows, :width].clip(0), np.arange(width) < ends[:, None], ends - 1)
        # Rows with fewer new tokens repeat their last one, in its own slot: the last column is every row's last token.
        slots = np.minimum((ends - new)[:, None] + np.arange(new.max()), ends[:, None] - 1)  # (R, Q)
        ids, where = (torch.as_tensor(x, device=model.device) for x in (tokens[rows[:, None], slots], slots))
        chosen = None if len(rows) == len(tokens) else torch.as_tensor(rows, device=model.device)
        return model.extend(ids, self._cache, Place(chosen, where, int(slots.max()) + 1))[:, -1]

    def __getstate__(self) -> dict[str, Any]:
        """The model alone."""
        return {"lm": self.lm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with an empty cache."""
        self.__init__(state["lm"])  # type: ignore[misc]


def _from_the_left(
    input_ids: NDArray[Any], attention_mask: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The real tokens (N, L) of each row from column 0 on, EMPTY after them, and their number (N,).

    Raises:
        ValueError: a row without a token.
    """
    real = np.asarray(attention_mask).astype(np.bool_)
    lengths = real.sum(1)
    if not lengths.all():
        raise ValueError(
            f"Every row should have at least one token, got none in row {int(lengths.argmin())}. Nothing can be "
            "predicted from nothing; begin with the model's BOS."
        )
    tokens = np.full(real.shape, EMPTY)
    tokens[np.arange(real.shape[1]) < lengths[:, None]] = np.asarray(input_ids)[real]
    return tokens, lengths


def _new_tokens(held: NDArray[np.int64], tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens (N,) at each row's end have to be run: none where the cache holds the row as it is.

    Else what follows the common prefix, and at least the last token, whose hidden state is asked for.
    """
    differs = held != tokens  # (N, L)
    first = np.where(differs.any(1), differs.argmax(1), lengths)
    return np.where(differs.any(1), np.maximum(lengths - first, 1), 0)


def _blocks(new: NDArray[np.int64], budget: int) -> Iterator[NDArray[np.int64]]:
    """Rows that run together: those with one new token, then the others by their number, within a budget of tokens."""
    for rows in (np.flatnonzero(new == 1), np.flatnonzero(new > 1)):
        rows = rows[np.argsort(new[rows], kind="stable")]
        size = max(1, budget // max(1, new[rows].max(initial=0)))
        for start in range(0, len(rows), size):
            yield np.sort(rows[start : start + size])
