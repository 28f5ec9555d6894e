"""What an engine is, sampling, and the engine that serves any policy. Token ids in, token ids out: no text here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.policy import Policy, arithmetic, device_of, temperature_of
from textenv.agents.rollouts.seeds import row_seeds, uniforms
from textenv.agents.types import Generation, Sampling
from textenv.lm.output_head import forbid
from textenv.packed_masks import concatenated
from textenv.step_masks import StepMasks
from textenv.task import TextTask


class Engine(Protocol):
    """Writes responses with the policy's current weights.

    Optional: ``context``, the tokens of prompt and response together that it can hold.
    """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """Write `sampling.samples_per_prompt` responses to each prompt (lists of token ids, not empty).

        What a row draws depends on (`sampling.seed`, its prompt's place, its sample's number) alone, see `row_seeds`.
        """
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
    return draw_tokens(logits, uniforms, temperature)[0]


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (B,) as `sample_tokens` draws them, and their log-probabilities (B,), float32, without a second pass.

    At temperature 0 these are the log-probabilities that the most likely tokens have under the logits' distribution.
    """
    probabilities = torch.softmax(logits.float(), -1)
    if temperature == 0:
        likeliest, tokens = probabilities.max(-1)
        return tokens, likeliest.log()
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]  # 1 up to rounding
    # Below the total there is a first entry beyond, and it is beyond because its own probability is not 0.
    below = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(uniforms[:, None].to(total.dtype) * total, below)
    tokens = torch.searchsorted(cumulative, wanted, right=True)
    return tokens.squeeze(-1), probabilities.gather(-1, tokens).squeeze(-1).log()


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
        sampling: stop ids, budget and constraint.
        seeds: (B,) of the rows, see `row_seeds`.
        device: of the tokens.
        prompts: the B prompts, for the constraint.
    """

    def __init__(
        self,
        sampling: Sampling,
        seeds: NDArray[np.uint64],
        device: torch.device,
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        rows = len(seeds)
        self.sampling = sampling
        self._masks = None if sampling.constraint is None else StepMasks(sampling.constraint, prompts)
        self.live = np.arange(rows)
        self._stops = np.array(sampling.stop_ids, dtype=np.int64)
        self._tokens = np.zeros((rows, sampling.max_tokens), dtype=np.int64)
        self._logprobs = np.zeros((rows, sampling.max_tokens), dtype=np.float32)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._uniforms = torch.as_tensor(uniforms(seeds, sampling.max_tokens), device=device)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw and record a token for each row of `live`, whose order is that of the logits (n, V).

        Returns:
            tokens (m,) of the rows that go on, and which of the n they were (m,). Rows stay where they are or fill
            the place of one that ended, see `fill_holes`; `live` follows.
        """
        live, step = self.live, int(self._lengths[self.live[0]])
        if self._masks is not None:
            logits = forbid(logits, self._masks.next_masks()[live])
        numbers = self._uniforms[torch.as_tensor(live, device=logits.device), step]
        drawn, logprobs = draw_tokens(logits, numbers, self.sampling.temperature)
        tokens: NDArray[np.int64] = drawn.cpu().numpy()
        self._tokens[live, step], self._logprobs[live, step] = tokens, logprobs.cpu().numpy()
        self._lengths[live] = step + 1
        if self._masks is not None:
            self._masks.append(live, tokens)
        kept = fill_holes(~np.isin(tokens, self._stops))
        self.live = live[kept]
        index = torch.as_tensor(kept, device=logits.device)
        return drawn[index], index

    def generation(self) -> Generation:
        """What has been written."""
        ends = list(enumerate(self._lengths.tolist()))
        return Generation(
            [self._tokens[row, :end].copy() for row, end in ends],
            None if self._masks is None else self._masks.response_masks(),
            [self._logprobs[row, :end].copy() for row, end in ends],
        )


def fill_holes(going_on: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Which of n rows stands at each of the first places when some leave, and as few as possible move.

    Example:
        >>> fill_holes(np.array([True, False, True, True])).tolist()
        [0, 3, 2]
    """
    count = int(going_on.sum())
    rows = np.arange(count)
    rows[~going_on[:count]] = count + np.flatnonzero(going_on[count:])
    return rows


def repeated(prompts: Sequence[Sequence[int]], samples: int) -> list[Sequence[int]]:
    """Each prompt as often as it is answered, one behind the other."""
    return [prompt for prompt in prompts for _ in range(samples)]


def check_prompts(prompts: Sequence[Sequence[int]], samples: int) -> None:
    """Refuse what nothing can be generated from.

    Raises:
        ValueError: no prompts, one without tokens, or fewer than one sample of each.
    """
    if not len(prompts) or samples < 1:
        raise ValueError(
            f"An engine should be given at least 1 prompt and 1 sample of each, got {len(prompts)} and {samples}."
        )
    empty = [row for row, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ValueError(
            f"Every prompt should have at least one token, got none in prompt {empty[0]}. Nothing can be predicted "
            "from nothing; begin with the model's BOS."
        )


def joined(parts: Sequence[Generation], order: NDArray[np.int64]) -> Generation:
    """Generations of blocks of rows as one.

    Args:
        parts: one after the other.
        order: (B,), the place that each row of theirs shall have.
    """
    back = np.argsort(order)
    responses = [response for part in parts for response in part.responses]
    logprobs = [logprobs for part in parts for logprobs in part.logprobs or ()]
    masks = [part.action_masks for part in parts if part.action_masks is not None]
    return Generation(
        [responses[row] for row in back],
        concatenated(masks)[back] if masks else None,
        [logprobs[row] for row in back],
    )


class StepwiseEngine:
    """Asks the policy for the next token's logits again and again: no cache, no assumption, fine for small policies."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `Engine.generate`."""
        check_temperature(self.policy, sampling)
        check_prompts(prompts, sampling.samples_per_prompt)
        rows = repeated(prompts, sampling.samples_per_prompt)
        ids, mask = left_pad(rows, device_of(self.policy))
        seeds = row_seeds(sampling.seed, len(prompts), sampling.samples_per_prompt)
        recorder = Recorder(sampling, seeds, ids.device, rows)
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


def check_context(engine: Any, task: TextTask) -> None:
    """Refuse prompts that an engine will not be able to answer, when an agent is made and before anything is written.

    Raises:
        ValueError: a prompt and a whole response are longer than the engine's context; the prompt is named.
    """
    context, budget = getattr(engine, "context", None), task.mdp.max_response_tokens
    if context is None:
        return
    for name, prompt in zip(task.prompts.names, task.prompts.prompts, strict=True):
        if len(prompt.ids) + budget > context:
            raise ValueError(
                f"{name} and its response should fit the context of {type(engine).__name__}, {context} tokens, got "
                f"{len(prompt.ids)} + {budget}: it could not be answered, and the run would stop when it is drawn. "
                "Give the engine a larger max_model_len, lower max_response_tokens, or cut or drop long prompts."
            )


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
