"""Whole responses through the wrapped environments: the rewards that stepping would give, from a few batched calls.

An engine writes responses in one go. Stepping them token by token through the environments is cheap integer work, as long
as nobody calls a model per token; so scores and log-probabilities are computed once for the whole batch and handed to the
layers that want them, and the layers, third-party Gymnasium wrappers included, stay the only source of rewards.

Legend: N environments, B responses (any number), T response tokens at most, L = P + T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.mdp import TokenMDP, TokenState, initial_state
from textenv.prompts import Prompt
from textenv.scoring import call_scorer
from textenv.task import TextTask
from textenv.vector_env import TextGenerationVectorEnv


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


def layers(envs: VectorEnv[Any, Any, Any]) -> Iterator[Any]:
    """The wrapped environment and everything inside it, outermost first."""
    while envs is not envs.unwrapped:
        yield envs
        envs = envs.env  # type: ignore[attr-defined]
    yield envs


def text_envs(envs: VectorEnv[Any, Any, Any]) -> TextGenerationVectorEnv:
    """The text environments at the bottom of a stack of vector wrappers.

    Raises:
        TypeError: there are none.
    """
    base = getattr(envs, "unwrapped", envs)
    if not isinstance(base, TextGenerationVectorEnv):
        raise TypeError(
            f"Expected vector text environments (a TextGenerationVectorEnv, wrapped or not), got {type(base).__name__}. "
            'Make them with gym.make_vec("RLHF-v0", num_envs=...); for one environment use num_envs=1.'
        )
    return base


def attach_policy(envs: VectorEnv[Any, Any, Any], policy_logprobs: Any, reference: Any = None) -> None:
    """Hand a policy's log-probabilities, and its own reference where it carries one, to every layer that wants them."""
    for layer in layers(envs):
        if "attach_policy" in dir(type(layer)):
            layer.attach_policy(policy_logprobs, reference)


def whole_responses(
    mdp: TokenMDP, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int] | NDArray[Any]]
) -> TokenState:
    """The final states (B rows) of given responses.

    Raises:
        ValueError: a response that no episode could have produced (empty, over the budget, going on after a stop id, or
            ending without one below the budget), or ids outside the vocabulary.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"There should be one response per prompt, got {len(prompts)} and {len(responses)}.")
    state = initial_state(mdp, prompts)
    for row, response in enumerate(responses):
        ids = np.asarray(response)
        if ids.ndim != 1 or not 1 <= len(ids) <= mdp.max_response_tokens:
            raise ValueError(f"responses[{row}] should hold 1 to {mdp.max_response_tokens} token ids, got shape {ids.shape}.")
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= mdp.vocab_size:
            raise ValueError(f"responses[{row}] should hold token ids in [0, {mdp.vocab_size}), got {ids.tolist()}.")
        stops = mdp.is_stop[ids]
        if stops[:-1].any() or not (stops[-1] or len(ids) == mdp.max_response_tokens):
            raise ValueError(
                f"responses[{row}] should end at its first stop id {mdp.stop_ids} or at {mdp.max_response_tokens} tokens,"
                f" got {ids.tolist()}. Stepping it would end the episode elsewhere."
            )
        state.input_ids[row, mdp.max_prompt_tokens : mdp.max_prompt_tokens + len(ids)] = ids
        state.attention_mask[row, mdp.max_prompt_tokens : mdp.max_prompt_tokens + len(ids)] = 1
        state.response_lengths[row] = len(ids)
    return state


def replay(
    envs: VectorEnv[Any, Any, Any],
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[int] | NDArray[Any]],
    *,
    scores: NDArray[Any] | None = None,
    logprobs: NDArray[Any] | None = None,
    ref_logprobs: NDArray[Any] | None = None,
) -> Replay:
    """Step B whole responses through the environments, N at a time. The environments need a `reset` afterwards.

    Args:
        envs: vector text environments, wrapped as one likes.
        prompts: B texts or lists of ids.
        responses: B lists of ids, each ending at its first stop id or at the budget.
        scores: (B,) where known; else the scorer is called once.
        logprobs: (B, T) under the policy where known; else the attached policy is called once.
        ref_logprobs: (B, T) under the reference where known; else it is called once.

    Returns:
        Rewards and everything that describes the episodes.

    Raises:
        ValueError: see `whole_responses`.
        ScorerError: see `call_scorer`.
    """
    base = text_envs(envs)
    task = base.task
    started = [task.start(prompt, np.random.default_rng()) for prompt in prompts]
    texts, ids = [text for text, _ in started], [ids for _, ids in started]
    state = whole_responses(task.mdp, ids, responses)
    if scores is None:
        scores = call_scorer(task.scorer, texts, task.response_texts(state, range(len(ids))), task.scorer_errors)
    leashes = [layer.leash for layer in layers(envs) if "leash" in vars(layer)]
    if leashes:
        logprobs = _known(logprobs, leashes[0].policy_logprobs, state, task.mdp)
        ref_logprobs = _known(ref_logprobs, leashes[0].ref_logprobs, state, task.mdp) if logprobs is not None else None
    parts = []
    for start in range(0, len(ids), base.num_envs):
        rows = slice(start, start + base.num_envs)
        planned = [None if array is None else np.asarray(array, np.float64)[rows] for array in (logprobs, ref_logprobs)]
        parts.append(_replay_rows(envs, task, texts[rows], ids[rows], state, rows, np.asarray(scores)[rows], planned))
    merged = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    infos = {key.removeprefix("info:"): values for key, values in merged.items() if key.startswith("info:")}
    return Replay(
        state.input_ids,
        state.attention_mask,
        merged["rewards"],
        merged["response_mask"],
        merged["terminated"],
        merged["truncated"],
        np.asarray(scores, dtype=np.float64),
        infos,
    )


def _known(given: NDArray[Any] | None, model: Any, state: TokenState, mdp: TokenMDP) -> NDArray[Any] | None:
    """Log-probabilities (B, T): as given, or from one call of the model, or (per-token callables) one per column."""
    if given is not None or model is None:
        return given
    if hasattr(model, "response_logprobs"):
        whole: NDArray[Any] = model.response_logprobs(
            state.input_ids, state.attention_mask, mdp.max_response_tokens
        )
        return whole
    columns = []
    for token in range(mdp.max_response_tokens):
        seen = np.minimum(mdp.max_prompt_tokens + token, mdp.max_prompt_tokens + state.response_lengths - 1)
        mask = np.where(np.arange(mdp.length) < seen[:, None], state.attention_mask, 0).astype(np.int8)
        actions = state.input_ids[np.arange(len(seen)), seen]
        prefix = np.where(np.arange(mdp.length) < seen[:, None], state.input_ids, mdp.pad_id).astype(np.int32)
        columns.append(model({"input_ids": prefix, "attention_mask": mask}, actions))
    return np.stack(columns, axis=1)


def _replay_rows(
    envs: VectorEnv[Any, Any, Any],
    task: TextTask,
    texts: list[str],
    ids: list[tuple[int, ...]],
    state: TokenState,
    rows: slice,
    scores: NDArray[np.float64],
    planned: list[NDArray[Any] | None],
) -> dict[str, NDArray[Any]]:
    """Step at most N responses in lockstep; rows that have ended, or that hold no response, stay as they are."""
    base, mdp = text_envs(envs), task.mdp
    count, missing = len(ids), base.num_envs - len(ids)
    lengths = state.response_lengths[rows]
    tokens = state.input_ids[rows, mdp.max_prompt_tokens :]
    kept: dict[str, NDArray[Any]] = {
        "rewards": np.zeros((count, mdp.max_response_tokens)),
        "response_mask": np.zeros((count, mdp.max_response_tokens), dtype=np.bool_),
        "terminated": np.zeros(count, dtype=np.bool_),
        "truncated": np.zeros(count, dtype=np.bool_),
    }
    padded = [None if array is None else np.pad(array, ((0, missing), (0, 0))) for array in planned]
    leashes = [layer.leash for layer in layers(envs) if "leash" in vars(layer)]
    envs.reset(options={"prompts": list(ids) + [ids[0]] * missing})
    base.plan(np.pad(scores, (0, missing)), np.arange(base.num_envs) >= count)
    for leash in leashes:
        leash.plan(*padded)
    try:
        over = np.zeros(count, dtype=np.bool_)
        for token in range(int(lengths.max())):
            actions = np.pad(tokens[:, token], (0, missing)).astype(np.int64)
            actions[:count] = np.where(token < lengths, actions[:count], 0)
            _, rewards, terminations, truncations, infos = envs.step(actions)
            live = ~over
            kept["rewards"][:, token] = np.where(live, np.asarray(rewards)[:count], 0.0)
            kept["response_mask"][:, token] = live
            kept["terminated"] |= live & np.asarray(terminations)[:count]
            kept["truncated"] |= live & np.asarray(truncations)[:count]
            _keep_infos(kept, infos.get("final_info", infos), live)
            over |= kept["terminated"] | kept["truncated"]
    finally:
        base.plan(None)
        for leash in leashes:
            leash.plan(None, None)
    return kept


def _keep_infos(kept: dict[str, NDArray[Any]], infos: dict[str, Any], live: NDArray[np.bool_]) -> None:
    """Store the flat end-of-episode entries of this step."""
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None or not isinstance(values, np.ndarray) or values.ndim != 1:
            continue
        rows = np.flatnonzero(mask[: len(live)] & live)
        if len(rows):
            column = kept.setdefault(f"info:{key}", np.zeros(len(live), dtype=values.dtype))
            column[rows] = values[rows]
