"""Whole responses through the wrapped environments: the rewards that stepping would give, from a few batched calls.

An engine writes responses in one go. Stepping them token by token through the environments is cheap integer work, as
long as nobody calls a model per token; so scores and log-probabilities are computed once for the whole batch and handed
to the layers that want them, and the layers, third-party Gymnasium wrappers included, stay the only source of rewards.

Legend: N environments, B responses (any number), T response tokens at most, L = P + T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.constraints import check_allowed, constraint_of
from textenv.layers import attach_policy, layers, text_envs
from textenv.mdp import TokenMDP, TokenState
from textenv.packed_masks import PackedMasks
from textenv.prompts import EncodedPrompt, Prompt
from textenv.scoring import check_scores
from textenv.task import TextTask
from textenv.whole import can_be_constrained, check_logprobs, whole_kl, whole_logprobs, whole_responses

__all__ = ["Replay", "attach_policy", "layers", "replay", "text_envs", "whole_responses"]


@dataclass(frozen=True)
class Replay:
    """What stepping B responses would have given.

    Attributes:
        input_ids: (B, L).
        attention_mask: (B, L).
        rewards: (B, T), 0 where `response_mask` is False.
        response_mask: (B, T) True on tokens that were stepped, stop ids included.
        terminated: (B,).
        truncated: (B,).
        scores: (B,) the scorer's numbers, NaN where a sample was dropped.
        infos: end-of-episode infos, (B,) per key.
    """

    input_ids: NDArray[np.int32]
    attention_mask: NDArray[np.int8]
    rewards: NDArray[np.float64]
    response_mask: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    scores: NDArray[np.float64]
    infos: dict[str, NDArray[Any]]


def replay(
    envs: VectorEnv[Any, Any, Any],
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[int] | NDArray[Any]],
    *,
    scores: NDArray[Any] | None = None,
    logprobs: NDArray[Any] | None = None,
    ref_logprobs: NDArray[Any] | None = None,
    action_masks: PackedMasks | None = None,
) -> Replay:
    """Step B whole responses through the environments, N at a time. The environments need a `reset` afterwards.

    Args:
        envs: vector text environments, wrapped as one likes.
        prompts: B texts or lists of ids.
        responses: B lists of ids, each ending at its first stop id or at the budget.
        scores: (B,) where known; else the scorer is called once.
        logprobs: (B, T) under the policy of the outermost `KLPenalty` where known; else it is called once.
        ref_logprobs: (B, T) under the reference of the outermost `KLPenalty` where known; else it is called once.
        action_masks: what was allowed where each token was chosen, index (B, T), where an engine has written it down;
            else the constraints of the environments are asked.

    Returns:
        Rewards and everything that describes the episodes.

    Raises:
        ValueError: see `whole_responses`; prompts that cannot be used, arrays of a wrong shape, or forbidden tokens.
        ScorerError: see `call_scorer`.
    """
    base = text_envs(envs)
    started = [base.task.encode(prompt, f"prompts[{row}]") for row, prompt in enumerate(prompts)]
    state = whole_responses(base.task.mdp, [prompt.ids for prompt in started], responses)
    action_masks = _checked_masks(envs, state, base.task.mdp, action_masks)
    scores = _scores(base.task, started, state, scores)
    plans: list[Any] = [
        *_plan_tolls(envs, state, base.task.mdp, logprobs, ref_logprobs, action_masks),
        *_plan_layers(envs, started, state),
    ]
    parts = [
        _replay_rows(envs, started, state, slice(start, start + base.num_envs), scores, plans)
        for start in range(0, len(started), base.num_envs)
    ]
    merged = _merge(parts)
    return Replay(
        input_ids=state.input_ids,
        attention_mask=state.attention_mask,
        rewards=merged.pop("rewards"),
        response_mask=merged.pop("response_mask"),
        terminated=merged.pop("terminated"),
        truncated=merged.pop("truncated"),
        scores=scores,
        infos={key.removeprefix("info:"): values for key, values in merged.items()},
    )


def _scores(
    task: TextTask, prompts: Sequence[EncodedPrompt], state: TokenState, given: NDArray[Any] | None
) -> NDArray[np.float64]:
    """Scores (B,), from one call of the scorer where they are not given."""
    responses = task.response_texts(state, range(len(prompts)))
    if given is not None:
        return check_scores(given, [prompt.text for prompt in prompts], responses, task.scorer_errors)
    return task.score(prompts, responses)


@dataclass(frozen=True)
class _Plan:
    """What one layer's leash will be told: (B, T) log-probabilities under both models, or None to leave it as it is."""

    leash: Any
    logprobs: NDArray[np.float64] | None
    ref_logprobs: NDArray[np.float64] | None
    exact: NDArray[np.float64] | None

    def enter(self, rows: slice, num_envs: int) -> None:
        arrays = (None if array is None else array[rows] for array in (self.logprobs, self.ref_logprobs, self.exact))
        self.leash.plan(*(None if a is None else np.pad(a, ((0, num_envs - len(a)), (0, 0))) for a in arrays))

    def leave(self) -> None:
        self.leash.plan(None, None)


def _plan_tolls(
    envs: VectorEnv[Any, Any, Any],
    state: TokenState,
    mdp: TokenMDP,
    logprobs: NDArray[Any] | None,
    ref_logprobs: NDArray[Any] | None,
    action_masks: PackedMasks | None,
) -> list[_Plan]:
    """Log-probabilities for every layer that charges a toll; a model that several of them share is called once."""
    leashes = [layer.leash for layer in layers(envs) if "leash" in vars(layer)]
    known: dict[tuple[Any, ...], Any] = {}

    def of(name: str, model: Any, given: NDArray[Any] | None) -> NDArray[np.float64] | None:
        key = (name, id(model))
        if key not in known:
            # A policy that is a bare function gives the log-probabilities of the policy that acts: masked already.
            masks = None if name == "logprobs" and not can_be_constrained(model) else action_masks
            whole = given if given is not None or model is None else whole_logprobs(model, state, mdp, masks)
            known[key] = None if whole is None else check_logprobs(whole, name, state, mdp)
        return known[key]

    def exact_of(leash: Any) -> NDArray[np.float64]:
        key = ("exact", id(leash.policy_logprobs), id(leash.ref_logprobs))
        if key not in known:
            known[key] = whole_kl(leash.policy_logprobs, leash.ref_logprobs, state, mdp, action_masks)
        return known[key]

    plans = []
    for place, leash in enumerate(leashes):
        policy = of("logprobs", leash.policy_logprobs, logprobs if place == 0 else None)
        # Without a policy the toll is 0, whatever the reference says; but not where it is the reference's alone.
        wanted = policy is not None or leash.estimator == "cross_entropy"
        reference = of("ref_logprobs", leash.ref_logprobs, ref_logprobs if place == 0 else None) if wanted else None
        both = policy is not None and reference is not None
        plans.append(_Plan(leash, policy, reference, exact_of(leash) if both and leash.estimator == "exact" else None))
    return plans


def _checked_masks(
    envs: VectorEnv[Any, Any, Any], state: TokenState, mdp: TokenMDP, given: PackedMasks | None
) -> PackedMasks | None:
    """What the constraints of the stack allowed, index (B, T), and whether the responses kept to it."""
    constraint = constraint_of(envs)
    if constraint is None:
        return None
    budget, first = mdp.max_response_tokens, mdp.max_prompt_tokens
    masks = constraint.response_masks(state.input_ids, state.attention_mask, budget) if given is None else given
    check_allowed(constraint, masks, state.input_ids[:, first:], state.attention_mask[:, first:] == 1)
    return masks


def _plan_layers(envs: VectorEnv[Any, Any, Any], prompts: Sequence[EncodedPrompt], state: TokenState) -> list[Any]:
    """The plans of layers that want to see all B responses at once, so that they call a model once for the batch.

    Such a layer has ``plan_responses(prompts, state)``; what it returns has ``enter(rows, num_envs)``, called when the
    responses of those rows come next, and ``leave()``.
    """
    planners = [layer for layer in layers(envs) if hasattr(type(layer), "plan_responses")]
    return [layer.plan_responses(prompts, state) for layer in planners]


def _replay_rows(
    envs: VectorEnv[Any, Any, Any],
    started: Sequence[EncodedPrompt],
    state: TokenState,
    rows: slice,
    scores: NDArray[np.float64],
    plans: Sequence[Any],
) -> dict[str, NDArray[Any]]:
    """Enter replay with at most N responses, step them, and leave it whatever happens."""
    base = text_envs(envs)
    prompts = list(started[rows])
    missing = base.num_envs - len(prompts)
    envs.reset(options={"prompts": prompts + prompts[:1] * missing})
    try:
        base.plan(np.pad(scores[rows], (0, missing)), np.arange(base.num_envs) >= len(prompts))
        for plan in plans:
            plan.enter(rows, base.num_envs)
        tokens = state.input_ids[rows, base.task.mdp.max_prompt_tokens :].astype(np.int64)
        return _step_rows(envs, tokens, state.response_lengths[rows])
    finally:
        base.plan(None)
        for plan in plans:
            plan.leave()


def _step_rows(
    envs: VectorEnv[Any, Any, Any], tokens: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Step responses (k, T) in lockstep; rows that have ended, or that hold no response, stay as they are."""
    count, budget = tokens.shape
    kept: dict[str, NDArray[Any]] = {
        "rewards": np.zeros((count, budget)),
        "response_mask": np.zeros((count, budget), dtype=np.bool_),
        "terminated": np.zeros(count, dtype=np.bool_),
        "truncated": np.zeros(count, dtype=np.bool_),
    }
    actions = np.pad(np.where(np.arange(budget) < lengths[:, None], tokens, 0), ((0, envs.num_envs - count), (0, 0)))
    live = np.ones(count, dtype=np.bool_)
    for token in range(int(lengths.max())):
        _, rewards, terminations, truncations, infos = envs.step(actions[:, token])
        kept["rewards"][:, token] = np.where(live, np.asarray(rewards)[:count], 0.0)
        kept["response_mask"][:, token] = live
        kept["terminated"] |= live & np.asarray(terminations)[:count]
        kept["truncated"] |= live & np.asarray(truncations)[:count]
        _keep_infos(kept, infos.get("final_info", infos), live)
        live = ~(kept["terminated"] | kept["truncated"])
    return kept


def _keep_infos(kept: dict[str, NDArray[Any]], infos: dict[str, Any], live: NDArray[np.bool_]) -> None:
    """Store the flat end-of-episode entries of this step."""
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None or not isinstance(values, np.ndarray) or values.ndim != 1:
            continue
        rows = np.flatnonzero(mask[: len(live)] & live)
        if len(rows):
            kept.setdefault(f"info:{key}", _blank(values, len(live)))[rows] = values[rows]


def _blank(like: NDArray[Any], count: int) -> NDArray[Any]:
    """What an info array holds where there is no info, in Gymnasium's convention."""
    return np.full(count, None, dtype=object) if like.dtype == object else np.zeros(count, dtype=like.dtype)


def _merge(parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Parts of at most N rows as one; an entry that some part lacks is blank there."""
    examples = {key: values for part in parts for key, values in part.items()}
    return {
        key: np.concatenate([part.get(key, _blank(like, len(part["rewards"]))) for part in parts])
        for key, like in examples.items()
    }
