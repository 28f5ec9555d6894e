"""The reference of a toy language as an object that the environment and its wrappers can call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from textenv.distributions import chosen, renormalised
from textenv.packed_masks import PackedMasks
from textenv.toy_checks import FloatArray, IntArray, as_tokens

if TYPE_CHECKING:
    from textenv.toy import ToyLanguage


@dataclass(frozen=True)
class ToyReference:
    """Log-probabilities, in nats, of the reference: `language.reference_logprobs` read at the right positions."""

    language: ToyLanguage

    def __call__(self, observations: Mapping[str, npt.ArrayLike], actions: npt.ArrayLike) -> FloatArray:
        """Log-probability of each next token.

        The prompt of a toy episode is one token, so a state has `attention_mask.sum(1) - 1` response tokens so far. A
        full state (T of them) has no next token; its entry is 0, for steps whose action an autoreset ignores.

        Args:
            observations: `input_ids` and `attention_mask`, (N, L) each.
            actions: (N,) token ids.

        Returns:
            (N,) log-probabilities, -inf for forbidden tokens.

        Raises:
            ValueError: Wrong shapes, ids outside the vocabulary, or a number of tokens that no toy state has.
        """
        mask = np.asarray(observations["attention_mask"])  # (N, L)
        tokens = as_tokens(actions, self.language.vocab_size, "`actions`")
        if mask.ndim != 2 or tokens.shape != mask.shape[:1]:
            raise ValueError(
                f"`attention_mask` should be (N, L) and `actions` (N,), got {mask.shape} and {tokens.shape}. Tokens "
                "would be read at the wrong positions. Add the leading axis: a single environment is N = 1."
            )
        positions = self._positions(mask)
        full = positions == self.language.horizon
        return np.where(full, 0.0, self.language.reference_logprobs[np.where(full, 0, positions), tokens])

    def next_logprobs(self, observations: Mapping[str, npt.ArrayLike]) -> FloatArray:
        """Log-distribution (N, V) after each prefix; a full state has none and gets that of the last position."""
        positions = self._positions(np.asarray(observations["attention_mask"]))
        return self.language.reference_logprobs[np.minimum(positions, self.language.horizon - 1)]

    def response_distributions(
        self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike, response_tokens: int
    ) -> FloatArray:
        """Log-distributions (B, response_tokens, V) that response tokens were drawn from; see `response_logprobs`."""
        self._response(input_ids, attention_mask, response_tokens)
        whole = self.language.reference_logprobs[:response_tokens]
        return np.broadcast_to(whole, (len(np.asarray(input_ids)), *whole.shape))

    def _positions(self, mask: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Response tokens so far (N,)."""
        horizon = self.language.horizon
        positions: npt.NDArray[np.int64] = (mask != 0).sum(axis=1) - 1  # (N,)
        if ((positions < 0) | (positions > horizon)).any():
            raise ValueError(
                f"`attention_mask` should show 1 prompt token and 0 to {horizon} response tokens per row, got "
                f"{(positions + 1).tolist()} tokens. The reference would be read at positions it does not have. Use "
                "the one-token prompt and a budget of `horizon` response tokens."
            )
        return positions

    def response_logprobs(
        self,
        input_ids: npt.ArrayLike,
        attention_mask: npt.ArrayLike,
        response_tokens: int,
        action_masks: PackedMasks | None = None,
    ) -> FloatArray:
        """Log-probability of every response token at once.

        Args:
            input_ids: (B, L) prompts and responses; what stands where the mask is 0 does not matter.
            attention_mask: (B, L), 1 on tokens.
            response_tokens: The number of response columns, the last ones of L; at most the horizon.
            action_masks: What was allowed, index (B, response_tokens); the reference is renormalised over it.

        Returns:
            (B, response_tokens) log-probabilities, 0 where `attention_mask` is 0.

        Raises:
            ValueError: Wrong shapes, too many response columns, or ids outside the vocabulary.
        """
        tokens, mask = self._response(input_ids, attention_mask, response_tokens)
        log_pi = self.language.reference_logprobs[:response_tokens]
        if action_masks is None:
            return np.where(mask, log_pi[np.arange(response_tokens), tokens], 0.0)
        masked = renormalised(np.broadcast_to(log_pi, (len(tokens), *log_pi.shape)), action_masks)
        return np.where(mask, chosen(masked, tokens), 0.0)

    def _response(
        self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike, response_tokens: int
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Response tokens and their mask, both (B, response_tokens), checked."""
        horizon = self.language.horizon
        ids, mask = np.asarray(input_ids), np.asarray(attention_mask) != 0
        if ids.ndim != 2 or ids.shape != mask.shape or not 1 <= response_tokens <= min(horizon, ids.shape[1]):
            raise ValueError(
                f"`input_ids` and `attention_mask` should be (B, L) with 1 to {horizon} response tokens among the "
                f"L columns, got {ids.shape}, {mask.shape} and response_tokens={response_tokens}. Tokens would be read "
                "at the wrong positions. Pass the arrays of a whole batch and the environment's token budget."
            )
        mask = mask[:, -response_tokens:]
        tokens = np.where(mask, ids[:, -response_tokens:], 0)
        return as_tokens(tokens, self.language.vocab_size, "`input_ids`"), mask
