"""A policy that is a table of logits: one row per response position. Enough to be optimal on additive toy languages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from textenv.agents import acting
from textenv.agents.policy import PolicyLogprobs, last_columns, output_from_logits
from textenv.agents.types import PolicyOutput
from textenv.packed_masks import PackedMasks


class TablePolicy(nn.Module):
    """Logits and values that depend on the number of response tokens so far, and on nothing else.

    Args:
        logits: (T, V) to start from, those of the reference as a rule. -inf forbids a token for good.
        prompt_tokens: P, the columns before the response.
    """

    def __init__(self, logits: ArrayLike, prompt_tokens: int = 1) -> None:
        super().__init__()
        start = torch.tensor(np.asarray(logits), dtype=torch.float32)
        self.prompt_tokens = prompt_tokens
        self.logits = nn.Parameter(start.clone())
        self.values = nn.Parameter(torch.zeros(len(start)))

    def evaluate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_tokens: int,
        *,
        entropy_grad: bool = False,
        action_masks: PackedMasks | None = None,
    ) -> PolicyOutput:
        """See `Policy.evaluate`.

        Raises:
            ValueError: `response_tokens` is more than the table has rows.
        """
        if response_tokens > len(self.logits):
            raise ValueError(
                f"`response_tokens` should be at most {len(self.logits)}, the table's rows, got {response_tokens}: "
                "there are no logits for later positions. Make the table as long as responses and texts can be."
            )
        logits = self.logits[:response_tokens].expand(len(input_ids), -1, -1)
        values = self.values[:response_tokens].expand(len(input_ids), -1)
        return output_from_logits(
            logits,
            values,
            input_ids,
            attention_mask[:, -response_tokens:],
            entropy_grad=entropy_grad,
            action_masks=action_masks,
        )

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # noqa: ARG002 - the protocol's
        """See `Policy.next_logits`; a full response has no next token and gets the last position's logits.

        Raises:
            ValueError: there are fewer columns than the prompt has, so that positions cannot be told.
        """
        position = last_columns(attention_mask) - self.prompt_tokens + 1
        if (position < 0).any():
            raise ValueError(
                f"A table counts positions from column {self.prompt_tokens}, got prefixes that end at column "
                f"{int(position.min()) + self.prompt_tokens}. Pad prompts on the left to {self.prompt_tokens} columns, "
                "or make the table for prompts of equal length."
            )
        return self.logits[position.clamp_max(len(self.logits) - 1)]

    def act(
        self,
        observations: Mapping[str, NDArray[Any]],
        *,
        generator: np.random.Generator | None = None,
        deterministic: bool = False,
        action_masks: PackedMasks | None = None,
    ) -> NDArray[np.int64] | int:
        """Choose a token for each row; see `acting.act`."""
        return acting.act(
            self, observations, generator=generator, deterministic=deterministic, action_masks=action_masks
        )

    def response_logprobs(
        self,
        input_ids: NDArray[Any],
        attention_mask: NDArray[Any],
        response_tokens: int,
        action_masks: PackedMasks | None = None,
    ) -> NDArray[np.float64]:
        """Log-probabilities (B, T) of whole responses; see `PolicyLogprobs.response_logprobs`."""
        return PolicyLogprobs(self).response_logprobs(input_ids, attention_mask, response_tokens, action_masks)
