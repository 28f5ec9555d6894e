"""`HFEngine`: responses from a transformers model with a key-value cache. Rows that have ended leave the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from textenv.agents.rollouts.base import Recorder, check_temperature, joined, left_pad
from textenv.agents.types import Generation, Sampling

if TYPE_CHECKING:
    from textenv.agents.language_model import LanguageModelPolicy

MAX_ROWS = 128
"""Prompts that are decoded together: bounds the cache."""

LEAVE_BELOW = 0.8
"""Ended rows are cut out of the cache when no more than this share of its rows still writes: cutting copies it."""


class HFEngine:
    """Decodes with the policy's own weights, in the process that trains them.

    Args:
        policy: a `LanguageModelPolicy`.
    """

    def __init__(self, policy: LanguageModelPolicy) -> None:
        self.policy = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `Engine.generate`. Prompts are decoded in blocks of `MAX_ROWS`, each with a seed of its own."""
        check_temperature(self.policy, sampling)
        parts = []
        for block, start in enumerate(range(0, len(prompts), MAX_ROWS)):
            seeded = dataclasses.replace(sampling, seed=(sampling.seed + block) % 2**63)
            with self.policy.arithmetic():
                parts.append(self._decode(prompts[start : start + MAX_ROWS], seeded))
        return joined(parts)

    def _decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        from transformers import DynamicCache

        model, head = self.policy.lm.model.base_model, self.policy.lm.head
        ids, mask = left_pad(prompts, self.policy.lm.device)
        recorder = Recorder(len(prompts), sampling, ids.device, prompts)
        cache = DynamicCache(config=self.policy.lm.model.config)
        position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
        writing = torch.arange(len(prompts), device=ids.device)  # rows of the cache that still write
        for _ in range(sampling.max_tokens):
            output = model(
                input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
            )
            tokens, going_on = recorder.choose(head.logits(output.last_hidden_state[writing, -1]))
            writing = writing[going_on]
            if len(writing) == 0:
                break
            ids = _scatter(tokens, writing, len(mask))
            if len(writing) <= LEAVE_BELOW * len(mask):
                cache.batch_select_indices(writing)
                ids, mask, position_ids = tokens[:, None], mask[writing], position_ids[writing]
                writing = torch.arange(len(writing), device=ids.device)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            position_ids = position_ids[:, -1:] + 1
        return recorder.generation()

    def sync(self, policy: LanguageModelPolicy) -> None:
        """Nothing to copy: the engine reads the policy itself."""
        self.policy = policy

    def close(self) -> None:
        """Nothing to free."""


def _scatter(tokens: Tensor, rows: Tensor, count: int) -> Tensor:
    """Tokens (count, 1) with those of `rows` filled in; the others are never read."""
    ids = torch.zeros(count, 1, dtype=torch.long, device=tokens.device)
    ids[rows, 0] = tokens
    return ids
