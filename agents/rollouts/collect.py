"""From prompts to a `Rollout`: write, score, log-probabilities, values, shaped rewards. Knows no algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from textenv.agents.policy import Policy, arithmetic, device_of, temperature_of
from textenv.agents.rollouts.base import Engine
from textenv.agents.types import PolicyOutput, Sampling
from textenv.mdp import TokenState
from textenv.replay import Replay, layers, replay, text_envs, whole_responses
from textenv.scoring import call_scorer
from textenv.task import TextTask
from textenv.whole import whole_logprobs


@dataclass(frozen=True)
class Episodes:
    """Finished episodes before an algorithm has looked at them.

    Attributes:
        replayed: rewards, masks and infos from the wrapped environments.
        output: the policy's log-probabilities, values and entropies (B, T), without gradient.
        ref_logprobs: (B, T), or None without a reference.
        prompts: B texts.
        responses: B texts.
        seconds: wall time by phase.
    """

    replayed: Replay
    output: PolicyOutput
    ref_logprobs: Tensor | None
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    seconds: dict[str, float]


def collect(
    policy: Policy,
    envs: VectorEnv[Any, Any, Any],
    engine: Engine,
    *,
    episodes: int,
    seed: int,
    env_seed: int | None = None,
    micro_batch_size: int | None = None,
) -> Episodes:
    """Let the policy finish `episodes` episodes of the environments.

    Args:
        policy: writes and values the responses.
        envs: vector text environments; prompts come from their `reset`, rewards from their `step`.
        engine: writes for the policy.
        episodes: B.
        seed: of the sampling.
        env_seed: given to the environments' first reset.
        micro_batch_size: rows per pass of the policy.
    """
    seconds: dict[str, float] = {}
    task = text_envs(envs).task
    prompts, prompt_texts = draw_prompts(envs, episodes, env_seed)
    with _timed(seconds, "generate"):
        engine.sync(policy)
        sampling = Sampling(
            max_tokens=task.mdp.max_response_tokens,
            stop_ids=task.mdp.stop_ids,
            temperature=temperature_of(policy),
            seed=seed,
        )
        responses = engine.generate(prompts, sampling).responses
    state = whole_responses(task.mdp, prompts, responses)
    texts = task.response_texts(state, range(episodes))
    reference = reference_of(policy, envs)
    with _timed(seconds, "score"):
        scores, ref_logprobs = _scores_and_reference(task, reference, prompt_texts, texts, state)
    with _timed(seconds, "logprobs"):
        output = evaluate_frozen(policy, state, task.mdp.max_response_tokens, micro_batch_size)
    with _timed(seconds, "rewards"):
        replayed = replay(
            envs,
            prompts,
            responses,
            scores=scores,
            logprobs=output.logprobs.double().cpu().numpy(),
            ref_logprobs=ref_logprobs,
        )
    device = device_of(policy)
    ref = None if ref_logprobs is None else torch.as_tensor(ref_logprobs, dtype=torch.float32, device=device)
    return Episodes(replayed, output, ref, tuple(prompt_texts), tuple(texts), seconds)


def draw_prompts(
    envs: VectorEnv[Any, Any, Any], count: int, seed: int | None = None
) -> tuple[list[list[int]], list[str]]:
    """Token ids and texts of `count` prompts, from as many resets of the environments as it takes."""
    width = text_envs(envs).task.mdp.max_prompt_tokens
    ids: list[list[int]] = []
    texts: list[str] = []
    while len(ids) < count:
        observations, infos = envs.reset(seed=seed)
        seed = None
        for row, mask in zip(observations["input_ids"], observations["attention_mask"], strict=True):
            ids.append([int(i) for i in np.asarray(row)[:width][np.asarray(mask)[:width] == 1]])
        texts.extend(infos["prompt"])
    return ids[:count], texts[:count]


def reference_of(policy: Any, envs: VectorEnv[Any, Any, Any]) -> Any:
    """What the toll measures against; without a toll the policy's own reference, for the record; else None."""
    for layer in layers(envs):
        if "leash" in vars(layer) and layer.leash.ref_logprobs is not None:
            return layer.leash.ref_logprobs
    return getattr(policy, "reference", None)


def _scores_and_reference(
    task: TextTask, reference: Any, prompts: list[str], responses: list[str], state: TokenState
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Scores (B,) and reference log-probabilities (B, T): one pass for both where they share a trunk."""
    width = task.mdp.max_response_tokens
    if hasattr(task.scorer, "with_trunk"):
        from textenv.rewards.shared import score_and_logprobs, shares_trunk

        if shares_trunk(task.scorer, reference):
            reference = reference.load() if hasattr(reference, "load") else reference
            ids, mask = state.input_ids, state.attention_mask
            scores, ref = score_and_logprobs(task.scorer, reference, prompts, responses, ids, mask, width)
            return call_scorer(lambda _prompts, _responses: scores, prompts, responses, task.scorer_errors), ref
    scores = call_scorer(task.scorer, prompts, responses, task.scorer_errors)
    return scores, None if reference is None else whole_logprobs(reference, state, task.mdp)


def by_length(attention_mask: Tensor, index: Tensor) -> Tensor:
    """The rows of `index` from short to long, so that micro-batches of neighbours hold little padding."""
    return index[attention_mask[index].sum(-1).argsort(stable=True)]


@torch.no_grad()
def evaluate_frozen(policy: Policy, state: TokenState, response_tokens: int, rows: int | None) -> PolicyOutput:
    """The policy's view of the batch without gradients, `rows` at a time."""
    device = device_of(policy)
    ids = torch.as_tensor(state.input_ids, device=device)
    mask = torch.as_tensor(state.attention_mask, device=device)
    order = by_length(mask, torch.arange(len(ids), device=device))
    with arithmetic(policy):
        parts = [policy.evaluate(ids[block], mask[block], response_tokens) for block in order.split(rows or len(ids))]
    back = order.argsort()
    return PolicyOutput(
        torch.cat([part.logprobs for part in parts])[back].float(),
        torch.cat([part.values for part in parts])[back].float(),
        torch.cat([part.entropies for part in parts])[back].float(),
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
