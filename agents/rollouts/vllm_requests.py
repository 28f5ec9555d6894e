"""What vLLM is asked, in process and over HTTP alike: sampling parameters, constraints, and checks of prompts.

Plain dicts and lists: nothing here imports vLLM.

Legend: B responses, G samples per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from textenv.agents.rollouts import base
from textenv.agents.rollouts.seeds import row_seeds
from textenv.agents.types import Sampling
from textenv.constraint_kinds import AllowedIds, NoStopBefore
from textenv.constraints import Constraint

COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM takes, besides 0: below, it silently uses 0.01; above, it refuses."""


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """Every field of vLLM's `SamplingParams` that bears on the distribution, the same for all rows.

    What is left out vLLM fills in from the model folder's generation_config: a repetition penalty or a top-k there
    would be sampled with, and log-probabilities would be those of another distribution. Each row adds its own ``seed``,
    see `request_seeds`.

    Args:
        sampling: what the engine was asked for.

    Returns:
        Keyword arguments of `SamplingParams`; ``logprobs=0`` asks for those of the drawn tokens alone.

    Raises:
        ValueError: a temperature that vLLM would replace or refuse, or a constraint that it cannot follow.
    """
    temperature = float(sampling.temperature)
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"vLLM samples at temperatures from {COLDEST} to {HOTTEST}, or at 0 for the most likely token, got "
            f"{temperature}. It would draw from another distribution than the one that is trained. Choose one in that "
            "range, or train with engine=None, which knows no such limits."
        )
    return {
        "n": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": int(sampling.max_tokens),
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": [int(stop) for stop in sampling.stop_ids],
        "ignore_eos": True,  # the task's stop ids decide, not the model's end-of-text id
        "bad_words": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "logprobs": 0,
        **constraint_parameters(sampling.constraint, sampling.stop_ids),
    }


def request_seeds(sampling: Sampling, prompts: int) -> list[int]:
    """A seed for each of the B requests, prompt-major: of (seed, row, sample) alone, so runs and batches repeat."""
    return [int(seed) for seed in row_seeds(sampling.seed, prompts, sampling.samples_per_prompt)]


def repeated(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """The prompt of each of the B requests, prompt-major. vLLM computes a prompt's whole cache blocks once."""
    return [[int(token) for token in prompt] for prompt in base.repeated(prompts, sampling.samples_per_prompt)]


def constraint_parameters(constraint: Constraint | None, stop_ids: Sequence[int]) -> dict[str, Any]:
    """A constraint in vLLM's own words; it renormalises over what they leave, as policy and reference do.

    Args:
        constraint: of the task, or None.
        stop_ids: of the request: they are what ``min_tokens`` forbids.

    Raises:
        ValueError: a constraint that is not a minimal length or a set of ids, or one with other stop ids.
    """
    if constraint is None:
        return {}
    for part in constraint.parts:
        if not isinstance(part, NoStopBefore | AllowedIds):
            raise ValueError(
                "vLLM can follow MinLength and ActionMask(allowed_ids=...), got a constraint of type "
                f"{type(part).__name__}, which depends on what a reference says in each state. Ignoring it would "
                "sample from another distribution than the one that is trained. Leave it out, or train with "
                "engine=None."
            )
    width = constraint.mdp.max_prompt_tokens + constraint.mdp.max_response_tokens
    start = {name: np.zeros((1, width), dtype=np.int64) for name in ("input_ids", "attention_mask")}
    constraint.next_masks(start)  # refuses parts that together leave nothing to write
    parameters: dict[str, Any] = {}
    for part in constraint.parts:
        if isinstance(part, NoStopBefore):
            _check_stop_ids(part, stop_ids)
            parameters["min_tokens"] = max(part.min_length, parameters.get("min_tokens", 0))
        else:
            ids = np.flatnonzero(part.next_masks(start).unpacked()[0]).tolist()
            parameters["allowed_token_ids"] = sorted(set(ids) & set(parameters.get("allowed_token_ids", ids)))
    return parameters


def _check_stop_ids(part: NoStopBefore, stop_ids: Sequence[int]) -> None:
    own = set(np.flatnonzero(part.mdp.is_stop).tolist())
    if own != set(stop_ids):
        raise ValueError(
            f"A minimal length should forbid the request's stop ids, {sorted(stop_ids)}, got a constraint whose task "
            f"stops with {sorted(own)}. vLLM forbids those of the request. Take both from one task."
        )


def check_prompts(
    prompts: Sequence[Sequence[int]], max_tokens: int, context: int, vocab_size: int, samples: int = 1
) -> None:
    """Refuse prompts that vLLM could not continue to the end, before anything is computed.

    Args:
        prompts: lists of ids.
        max_tokens: of a response.
        context: tokens of prompt and response together that the engine holds, vLLM's ``max_model_len``.
        vocab_size: ids from here on have no token.
        samples: of each prompt.

    Raises:
        ValueError: no prompts or samples, or a prompt that is empty, has unknown ids, fills the context, or leaves too
            little room for a response; the row is named.
    """
    base.check_prompts(prompts, samples)
    for row, prompt in enumerate(prompts):
        length = len(prompt)
        if length + max_tokens > context:
            full = "fills that alone" if length >= context else f"leaves {context - length} for the response"
            raise ValueError(
                f"Prompt and response should fit the engine's context of {context} tokens, got a prompt of {length} "
                f"tokens in row {row}, which {full}, and a response budget of {max_tokens}. vLLM would end responses "
                "early, as if the budget had. Drop or cut long prompts (max_prompt_tokens), lower "
                "max_response_tokens, or raise the engine's max_model_len if the model has more context."
            )
        ids = np.asarray(prompt)
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"Prompts should hold ids in [0, {vocab_size}), got {int(ids.max() if ids.min() >= 0 else ids.min())} "
                f"in row {row}. The model's tokenizer names no such token."
            )
