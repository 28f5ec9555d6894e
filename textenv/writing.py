"""Responses written token by token by anything that acts on observations. Knows no reward, wrapper or model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from textenv.checks import check_actions
from textenv.constraints import Constraint
from textenv.mdp import TokenMDP, initial_state, is_terminated, is_truncated, responses, transition
from textenv.packed_masks import PackedMasks
from textenv.step_masks import StepMasks
from textenv.task import observation

Act = Callable[[Mapping[str, NDArray[Any]], PackedMasks | None], NDArray[Any]]
"""``(observations, action_masks) -> actions``: (N, L) input_ids and attention_mask, and what may be chosen (None:
everything), to (N,) token ids."""


class Written(NamedTuple):
    """Responses of B prompts."""

    responses: list[NDArray[np.int32]]
    """Each ends at its first stop id or at the budget."""
    action_masks: PackedMasks | None
    """What was allowed where each token was chosen, index (B, T); None where everything was."""


def actor_of(policy: Any, generator: np.random.Generator, deterministic: bool) -> Act:
    """What a policy, an agent or a function does in a state.

    Args:
        policy: has ``act(observations, generator=, deterministic=)`` (policies of `textenv.agents`), or
            ``predict(observations, deterministic=)`` (agents, Stable-Baselines3's too), or is a function of the
            observations. An agent that holds a policy of the first kind acts by it. ``act`` is told what may be chosen
            (`action_masks`) where not everything may; the others must know it themselves.
        generator: where ``act`` draws from.
        deterministic: take the most likely token; a function is not asked.

    Raises:
        TypeError: it is none of these.
    """
    policy = _with_act(policy)
    if hasattr(policy, "act"):
        options = {"generator": generator, "deterministic": deterministic}
        return lambda observations, masks: policy.act(
            observations, **options, **({} if masks is None else {"action_masks": masks})
        )
    if hasattr(policy, "predict"):
        return lambda observations, _masks: _first(policy.predict(observations, deterministic=deterministic))
    if callable(policy):
        return lambda observations, _masks: policy(observations)
    raise TypeError(
        f"`policy` should act on observations, got {type(policy).__name__}, which has no `act` or `predict` and is no "
        "function. Pass a policy of textenv.agents, an agent, or a function observations -> actions."
    )


def _with_act(policy: Any) -> Any:
    """The policy that an agent holds, where that one has more to say than the agent."""
    inner = getattr(policy, "policy", None)
    return inner if not hasattr(policy, "act") and hasattr(inner, "act") else policy


def logprobs_of(policy: Any) -> Any:
    """The policy, or the one that an agent holds, as a model of log-probabilities; None where it is none."""
    for model in (policy, getattr(policy, "policy", None)):
        if hasattr(model, "response_logprobs"):
            return model
    return None


def _first(predicted: Any) -> Any:
    """Actions alone: Stable-Baselines3 returns (actions, state)."""
    return predicted[0] if isinstance(predicted, tuple) else predicted


def write_responses(
    act: Act, mdp: TokenMDP, prompts: Sequence[Sequence[int]], constraint: Constraint | None = None
) -> Written:
    """One response per prompt, all rows side by side. Rows that have ended stay as they are until the last one has.

    Args:
        act: chooses the next token of every row.
        mdp: stop ids and budgets.
        prompts: B lists of ids.
        constraint: what may be chosen.

    Raises:
        ValueError: actions of a wrong shape or outside the vocabulary.
    """
    state = initial_state(mdp, prompts)
    allowed = None if constraint is None else StepMasks(constraint, prompts)
    ended = np.zeros(len(prompts), dtype=np.bool_)
    while not ended.all():
        chosen = act(observation(state), None if allowed is None else allowed.next_masks())
        actions = check_actions(chosen, (len(prompts),), mdp.vocab_size)
        writing = np.flatnonzero(~ended)
        state = transition(mdp, state, actions, writing)
        if allowed is not None:
            allowed.append(writing, actions[writing])
        stopped = is_terminated(mdp, actions) & ~ended
        ended |= stopped | is_truncated(mdp, state, stopped)
    masks = None if allowed is None else allowed.response_masks()
    return Written(responses(mdp, state, range(len(prompts))), masks)
