"""What an engine is, sampling, and the engine that serves any policy. Token ids in, token ids out: no text here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.policy import Policy, arithmetic, device_of, temperature_of
from textenv.agents.types import Generation, Sampling
from textenv.lm.logprobs import forbid
from textenv.packed_masks import concatenated
from textenv.step_masks import StepMasks


class Engine(Protocol):
    """Writes responses with the policy's current weights."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """One response per prompt (lists of token ids, not empty)."""
        ...

    def sync(self, policy: Any) -> None:
        """Take over the policy's weights, before each batch."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


def engine_for(policy: Any) -> Engine:
    """The policy's own engine, or the one that serves any policy."""
    engine: Engine = policy.engine() if hasattr(policy, "engine") else StepwiseEngine(policy)
    return engine


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution; the most likely one at temperature 0.

    On a CPU this is twenty times as fast as `torch.multinomial` over 50k words, and a row's draw depends on its own
    uniform number alone, so rows may leave the batch without changing what the others write.

    Args:
        logits: (B, V), temperature already in them.
        uniforms: (B,) in [0, 1).
        temperature: 0, or anything else.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.float(), -1).cumsum(-1)
    # The last entry is 1 up to rounding; scaling by it keeps the draw inside the vocabulary.
    wanted = uniforms[:, None].to(cumulative.dtype) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)
    last_possible = logits.shape[-1] - 1 - torch.isfinite(logits).flip(-1).int().argmax(-1)
    return torch.minimum(drawn, last_possible)


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged prompts as input_ids and attention_mask (B, P), padded on the left."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


class Recorder:
    """Collects B responses token by token, and knows which rows still write.

    Args:
        rows: B.
        sampling: stop ids, budget, seed and constraint.
        device: of the tokens.
        prompts: the B prompts, for the constraint.
    """

    def __init__(
        self, rows: int, sampling: Sampling, device: torch.device, prompts: Sequence[Sequence[int]] = ()
    ) -> None:
        self.sampling = sampling
        self._masks = None if sampling.constraint is None else StepMasks(sampling.constraint, prompts)
        self.live = torch.arange(rows, device=device)
        self._stops = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw and record a token for each live row.

        Returns:
            tokens (b,) of the rows that go on, and their indices among the rows that `logits` (live, V) had.
        """
        live = self.live.cpu().numpy()
        if self._masks is not None:
            logits = forbid(logits, self._masks.next_masks()[live])
        uniforms = torch.rand(len(self._tokens), generator=self._generator, dtype=torch.float64).to(logits.device)
        tokens = sample_tokens(logits, uniforms[self.live], self.sampling.temperature)
        for row, token in zip(live.tolist(), tokens.tolist(), strict=True):
            self._tokens[row].append(token)
        if self._masks is not None:
            self._masks.append(live, tokens.cpu().numpy())
        going_on = torch.nonzero(~torch.isin(tokens, self._stops)).squeeze(-1)
        self.live = self.live[going_on]
        return tokens[going_on], going_on

    def generation(self) -> Generation:
        """What has been written."""
        responses: list[NDArray[np.int64]] = [np.array(tokens, dtype=np.int64) for tokens in self._tokens]
        return Generation(responses, None if self._masks is None else self._masks.response_masks())


def joined(parts: Sequence[Generation]) -> Generation:
    """Generations of blocks of prompts as one."""
    masks = [part.action_masks for part in parts if part.action_masks is not None]
    responses = [response for part in parts for response in part.responses]
    return Generation(responses, concatenated(masks) if masks else None)


class StepwiseEngine:
    """Asks the policy for the next token's logits again and again: no cache, no assumption, fine for small policies."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `Engine.generate`."""
        check_temperature(self.policy, sampling)
        ids, mask = left_pad(prompts, device_of(self.policy))
        recorder = Recorder(len(prompts), sampling, ids.device, prompts)
        for _ in range(sampling.max_tokens):
            with arithmetic(self.policy):
                logits = self.policy.next_logits(ids, mask)
            tokens, going_on = recorder.choose(logits)
            if len(going_on) == 0:
                break
            ids = torch.cat([ids[going_on], tokens[:, None]], 1)
            mask = torch.cat([mask[going_on], torch.ones_like(tokens)[:, None]], 1)
        return recorder.generation()

    def sync(self, policy: Policy) -> None:
        """Nothing to do: the engine reads the policy itself."""
        self.policy = policy

    def close(self) -> None:
        """Nothing to free."""


def check_temperature(policy: Any, sampling: Sampling) -> None:
    """Refuse to sample at another temperature than the policy's: log-probabilities would be of another distribution.

    Raises:
        ValueError: they differ (0, for the most likely token, is allowed).
    """
    if sampling.temperature not in (0, temperature_of(policy)):
        raise ValueError(
            f"Sampling should be at the policy's temperature, {temperature_of(policy)}, got {sampling.temperature}: "
            "its log-probabilities would be those of another distribution and every ratio wrong. Make the policy with "
            "the temperature that you want."
        )
