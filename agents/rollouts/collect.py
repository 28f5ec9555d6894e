"""From prompts to a `Rollout`: write, score, log-probabilities, values, shaped rewards. Knows no algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.policy import Policy, device_of, temperature_of
from textenv.agents.rollouts.base import Engine
from textenv.agents.rollouts.policy_pass import policy_pass
from textenv.agents.types import Generation, PolicyOutput, Sampling
from textenv.constraints import Constraint, check_allowed, constraint_of
from textenv.evaluation import draw_prompts
from textenv.layers import reference_of
from textenv.mdp import TokenState
from textenv.packed_masks import PackedMasks
from textenv.prompts import EncodedPrompt
from textenv.replay import Replay, replay, text_envs, whole_responses
from textenv.scoring import check_scores
from textenv.task import TextTask
from textenv.whole import whole_logprobs


@dataclass(frozen=True)
class Episodes:
    """Finished episodes before an algorithm has looked at them.

    Attributes:
        replayed: rewards, masks and infos from the wrapped environments.
        output: the policy's log-probabilities, values and entropies (B, T), without gradient unless it was asked for.
        logprobs: of the policy that wrote, (B, T): those of `output`, or the engine's where these were to count.
        engine_logprobs: what the engine reported (B, T), or None.
        ref_logprobs: (B, T), or None without a reference.
        prompts: B texts.
        responses: B texts.
        seconds: wall time by phase.
        action_masks: what was allowed, index (B, T); None: everything.
    """

    replayed: Replay
    output: PolicyOutput
    logprobs: Tensor
    engine_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    seconds: dict[str, float]
    action_masks: PackedMasks | None = None


def collect(
    policy: Policy,
    envs: VectorEnv[Any, Any, Any],
    engine: Engine,
    *,
    episodes: int,
    seed: int,
    samples_per_prompt: int = 1,
    env_seed: int | None = None,
    micro_batch_tokens: int | None = None,
    logprobs_from: str = "trainer",
    with_gradient: dict[str, Any] | None = None,
) -> Episodes:
    """Let the policy finish `episodes` episodes of the environments.

    Args:
        policy: writes and values the responses.
        envs: vector text environments; prompts come from their `reset`, rewards from their `step`.
        engine: writes for the policy.
        episodes: B.
        seed: of the sampling.
        samples_per_prompt: responses to each prompt, next to each other in the batch; B and the number of environments
            are multiples of it.
        env_seed: given to the environments' first reset.
        micro_batch_tokens: tokens per pass of the policy.
        logprobs_from: ``"trainer"``, or ``"engine"`` for those that the engine reports.
        with_gradient: see `policy_pass`.

    Raises:
        ValueError: the engine reports no log-probabilities, and `logprobs_from` wants them; numbers that do not divide
            into groups.
    """
    seconds: dict[str, float] = {}
    constraint = constraint_of(envs)
    task = text_envs(envs).task
    prompts = draw_prompts(envs, episodes, env_seed, samples_per_prompt)
    prompt_ids = [list(prompt.ids) for prompt in prompts]
    with _timed(seconds, "generate"):
        engine.sync(policy)
        sampling = Sampling(
            max_tokens=task.mdp.max_response_tokens,
            stop_ids=task.mdp.stop_ids,
            temperature=temperature_of(policy),
            seed=seed,
            constraint=constraint,
            samples_per_prompt=samples_per_prompt,
        )
        generation = engine.generate(prompt_ids[::samples_per_prompt], sampling)
    responses = generation.responses
    state = whole_responses(task.mdp, prompt_ids, responses)
    action_masks = masks_of(constraint, generation, state)
    texts = task.response_texts(state, range(episodes))
    reference = reference_of(policy, envs)
    with _timed(seconds, "score"):
        scores, ref_logprobs = _scores_and_reference(task, reference, prompts, texts, state, action_masks)
    device, width = device_of(policy), task.mdp.max_response_tokens
    engine_logprobs = padded_logprobs(generation, width, device)
    if logprobs_from == "engine" and engine_logprobs is None:
        raise ValueError(
            f"With logprobs_from='engine' the engine should report log-probabilities, got none from "
            f"{type(engine).__name__}. Fill Generation.logprobs, or use logprobs_from='trainer'."
        )
    known = engine_logprobs if logprobs_from == "engine" else None
    with _timed(seconds, "logprobs"):
        output = policy_pass(policy, state, width, micro_batch_tokens, action_masks, known, with_gradient)
    logprobs = output.logprobs.detach() if known is None else known
    with _timed(seconds, "rewards"):
        replayed = replay(
            envs,
            prompts,
            responses,
            scores=scores,
            logprobs=logprobs.double().cpu().numpy(),
            ref_logprobs=ref_logprobs,
            action_masks=action_masks,
        )
    ref = None if ref_logprobs is None else torch.as_tensor(ref_logprobs, dtype=torch.float32, device=device)
    asked = tuple(prompt.text for prompt in prompts)
    return Episodes(replayed, output, logprobs, engine_logprobs, ref, asked, tuple(texts), seconds, action_masks)


def masks_of(constraint: Constraint | None, generation: Generation, state: TokenState) -> PackedMasks | None:
    """What a constraint allowed where each token was chosen: as the engine wrote it down, or asked again.

    Raises:
        ValueError: the engine wrote a forbidden token.
    """
    if constraint is None:
        return None
    first, masks = constraint.mdp.max_prompt_tokens, generation.action_masks
    if masks is None:
        budget = constraint.mdp.max_response_tokens
        masks = constraint.response_masks(state.input_ids, state.attention_mask, budget)
    check_allowed(constraint, masks, state.input_ids[:, first:], state.attention_mask[:, first:] == 1)
    return masks


def _scores_and_reference(
    task: TextTask,
    reference: Any,
    prompts: Sequence[EncodedPrompt],
    responses: list[str],
    state: TokenState,
    action_masks: PackedMasks | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Scores (B,) and reference log-probabilities (B, T): one pass for both where they share a trunk."""
    width = task.mdp.max_response_tokens
    if hasattr(task.scorer, "with_trunk"):
        from textenv.rewards.shared import score_and_logprobs, shares_trunk

        if shares_trunk(task.scorer, reference):
            reference = reference.load() if hasattr(reference, "load") else reference
            ids, mask = state.input_ids, state.attention_mask
            asked = [prompt.text for prompt in prompts]
            scores, ref = score_and_logprobs(task.scorer, reference, asked, responses, ids, mask, width, action_masks)
            return check_scores(scores, asked, responses, task.scorer_errors), ref
    scores = task.score(prompts, responses)
    return scores, None if reference is None else whole_logprobs(reference, state, task.mdp, action_masks)


def padded_logprobs(generation: Generation, response_tokens: int, device: torch.device) -> Tensor | None:
    """An engine's log-probabilities as (B, T), 0 beyond the ends; None where it reports none."""
    if generation.logprobs is None:
        return None
    whole = np.zeros((len(generation.logprobs), response_tokens), dtype=np.float32)
    for row, logprobs in zip(whole, generation.logprobs, strict=True):
        row[: len(logprobs)] = logprobs
    return torch.as_tensor(whole, device=device)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
