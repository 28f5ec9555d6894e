"""`HFEngine`: responses from a transformers model with a key-value cache, in the process that trains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.rollouts.base import (
    Recorder,
    StepwiseEngine,
    check_prompts,
    check_temperature,
    joined,
    repeated,
)
from textenv.agents.rollouts.hf_attention import grouped_attention
from textenv.agents.rollouts.hf_weights import Forward, fast_forwards, fast_head, replaced
from textenv.agents.rollouts.seeds import row_seeds
from textenv.agents.types import Generation, Sampling
from textenv.lm.cache import Place, why_not_cached
from textenv.lm.model import TOKENS_PER_PASS
from textenv.lm.output_head import OutputHead

if TYPE_CHECKING:
    from textenv.agents.language_model import LanguageModelPolicy
    from textenv.agents.rollouts.hf_cache import BatchCache

MAX_ROWS = 256
"""Responses that are decoded together: bounds the logits."""

CACHE_TOKENS = {"cpu": 16384, "cuda": 262144}
"""Prompt and response tokens that are decoded together: bounds the cache (SmolLM2-135M in float32: 46 kB a token)."""

FAST_FROM = 8
"""Response tokens from which layers are merged and packed: packing takes about as long as it saves in so many steps."""

Forwards = Sequence[tuple[torch.nn.Module, Forward]]


class HFEngine:
    """Decodes with the policy's own weights, in the process that trains them.

    Rows of like length are decoded together, in blocks that bound the memory. Equal prompts of a block, such as those
    of `Sampling.samples_per_prompt`, go through the model once. Rows that end leave the batch, and cost nothing more.
    What a row draws depends on its own seed alone (`row_seeds`), so blocks, order and company do not show, up to
    floating-point rounding.

    Log-probabilities of the drawn tokens come along. They are those of this engine's arithmetic: adapters are merged
    into a second copy of the linear layers while it writes, see `fast_forwards`.

    Models whose past cannot be kept (recurrent ones) are read whole for each token, as `StepwiseEngine` does.

    Args:
        policy: a `LanguageModelPolicy`.
    """

    def __init__(self, policy: LanguageModelPolicy) -> None:
        self.policy = policy
        self._cached: bool | None = None  # whether the model can keep its past; asked at the first call

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `Engine.generate`.

        Raises:
            ValueError: no prompts, an empty one, another temperature than the policy's.
        """
        check_temperature(self.policy, sampling)
        check_prompts(prompts, sampling.samples_per_prompt)
        if self._cached is None:
            self._cached = why_not_cached(self.policy.lm) is None
        if not self._cached:
            return StepwiseEngine(self.policy).generate(prompts, sampling)
        rows = repeated(prompts, sampling.samples_per_prompt)
        seeds = row_seeds(sampling.seed, len(prompts), sampling.samples_per_prompt)
        blocks = list(_blocks(rows, sampling.max_tokens, CACHE_TOKENS.get(self.policy.lm.device.type, 262144)))
        lm, forwards, head = self.policy.lm, [], self.policy.lm.head
        if sampling.max_tokens >= FAST_FROM:
            forwards, head = fast_forwards(lm.model, getattr(torch, lm.dtype)), fast_head(head)
        parts = [self._decode([rows[row] for row in block], seeds[block], sampling, forwards, head) for block in blocks]
        return joined(parts, np.concatenate(blocks))

    def _extend(self, ids: Tensor, cache: BatchCache, place: Place, forwards: Forwards) -> Tensor:
        """`LanguageModel.extend` with fast layers. They are the model's own again where a constraint asks it."""
        lm = self.policy.lm
        with grouped_attention(lm.model), replaced(forwards):
            return lm.extend(ids, cache, place)

    def _decode(
        self,
        rows: list[Sequence[int]],
        seeds: NDArray[np.uint64],
        sampling: Sampling,
        forwards: Forwards,
        head: OutputHead,
    ) -> Generation:
        """A block of rows from their prompts to their ends."""
        from textenv.agents.rollouts.hf_cache import BatchCache

        lm = self.policy.lm
        lengths = torch.tensor([len(row) for row in rows], device=lm.device)
        recorder = Recorder(sampling, seeds, lm.device, rows)
        cache = BatchCache(lm.num_layers, len(rows), int(lengths.max()) + sampling.max_tokens)
        with self.policy.arithmetic():
            hidden = self._read_prompts(rows, cache, forwards)
            for step in range(sampling.max_tokens):
                tokens, kept = recorder.choose(head.logits(hidden))
                if len(kept) == 0 or step == sampling.max_tokens - 1:
                    break
                cache.keep(kept)
                lengths = lengths[kept]
                place = Place(None, (lengths + step)[:, None], int(lengths.max()) + step + 1)
                hidden = self._extend(tokens[:, None], cache, place, forwards)[:, -1]
        return recorder.generation()

    def _read_prompts(self, rows: list[Sequence[int]], cache: BatchCache, forwards: Forwards) -> Tensor:
        """Run each different prompt once, hand its keys and values to its rows; hidden states (N, H) after them."""
        from textenv.agents.rollouts.hf_cache import PromptPlace

        lm, device = self.policy.lm, self.policy.lm.device
        different, which = _different(rows)
        states = torch.empty(len(rows), lm.hidden_size, device=device)
        size = max(1, TOKENS_PER_PASS.get(device.type, 16384) // max(map(len, different)))
        for first in range(0, len(different), size):
            block = different[first : first + size]
            ends = torch.tensor([len(prompt) for prompt in block], device=device)
            width = int(ends.max())
            ids = torch.zeros(len(block), width, dtype=torch.long)
            for row, prompt in enumerate(block):  # padded on the right, where no real token looks
                ids[row, : len(prompt)] = torch.as_tensor(prompt)
            targets = np.flatnonzero((which >= first) & (which < first + size))
            sources = torch.as_tensor(which[targets] - first, device=device)
            slots = torch.arange(width, device=device).expand(len(block), width)
            place = PromptPlace(None, slots, width, torch.as_tensor(targets, device=device), sources)
            last = self._extend(ids.to(device), cache, place, forwards)[
                torch.arange(len(block), device=device), ends - 1
            ]
            states[place.targets] = last.to(states.dtype)[sources]
        return states

    def sync(self, policy: LanguageModelPolicy) -> None:
        """Nothing to copy: the engine reads the policy itself."""
        if policy is not self.policy:
            self.policy, self._cached = policy, None

    def close(self) -> None:
        """Nothing to free."""


def _blocks(rows: Sequence[Sequence[int]], max_tokens: int, cache_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Rows that are decoded together: of like length, equal prompts side by side, within a budget of tokens."""
    order = sorted(range(len(rows)), key=lambda row: (len(rows[row]), tuple(rows[row])))
    start = 0
    while start < len(order):
        # The last row of a block is its longest, so from the longest of all that might fit downwards.
        end = min(start + MAX_ROWS, len(order))
        while end > start + 1 and (end - start) * (len(rows[order[end - 1]]) + max_tokens) > cache_tokens:
            end -= 1
        yield np.array(order[start:end])
        start = end


def _different(rows: Sequence[Sequence[int]]) -> tuple[list[Any], NDArray[np.int64]]:
    """The different prompts in their order, and which of them each row has (N,)."""
    places: dict[tuple[int, ...], int] = {}
    which = [places.setdefault(tuple(row), len(places)) for row in rows]
    return list(places), np.array(which)
