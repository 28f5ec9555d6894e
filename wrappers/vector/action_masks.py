"""`MinLength` and `ActionMask` for vector environments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from textenv.checks import check_actions
from textenv.constraints import Constraint, PackedMasks, check_allowed, constraint_of
from textenv.wrappers.action_masks import (
    action_mask_constraint,
    min_length_constraint,
    take_reference,
    tell_leashes,
)
from textenv.wrappers.vector.infos import reset_rows
from textenv.wrappers.vector.wrapper import TextVectorWrapper


class ConstraintWrapper(TextVectorWrapper):
    """Forbids actions, and tells everybody which.

    ``infos["action_mask"]`` (N, W), at `reset` and after each step, are the bits of what may come next in each row,
    W = ceil(V / 8) bytes, `np.packbits` of True = allowed; ``infos["_action_mask"]`` is False on rows whose episode
    is over (their next action is ignored, or must not be). A forbidden action is refused.

    Args:
        env: a vector text environment.
        constraint: what is allowed.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], constraint: Constraint) -> None:
        super().__init__(env)
        self.constraint = constraint
        self._joint = constraint_of(self) or constraint  # with those inside
        tell_leashes(env, constraint)
        self._masks: PackedMasks | None = None  # of the states that are now current, index (N,)
        self._ended = np.zeros(env.num_envs, dtype=np.bool_)
        self._replaying = False

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments; the infos tell the masks of all rows."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._ended[reset_rows(options)] = False
        return observations, self._with_masks(observations, infos)

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments with allowed actions; rows whose action is ignored are not checked.

        Raises:
            ValueError: a forbidden action; nothing has changed then.
        """
        if self._replaying:
            return self.env.step(actions)
        if self._masks is not None:
            actions = check_actions(actions, (self.num_envs,), self._masks.vocab_size)
            check_allowed(self._joint, self._masks, actions, ~self._ended)
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        self._ended = np.logical_or(terminations, truncations)
        if self.env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            self._ended = np.zeros_like(self._ended)
        return observations, rewards, terminations, truncations, self._with_masks(observations, infos)

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions may come next, (N, V), True = allowed; rows whose episode is over have some mask.

        Raises:
            gymnasium.error.ResetNeeded: no episodes are running.
        """
        if self._masks is None:
            raise gym.error.ResetNeeded("Masks are those of states, but no episodes are running: call reset() first.")
        return self._masks.unpacked()

    def plan_responses(self, _prompts: Sequence[Any], _state: Any) -> ConstraintWrapper:
        """Replay checks whole responses at once, so that no step of it needs a mask."""
        return self

    def enter(self, _rows: slice, _num_envs: int) -> None:
        """Stand aside: the responses of a replay come next."""
        self._replaying = True

    def leave(self) -> None:
        """Forbid again; `reset` comes next."""
        self._replaying, self._masks = False, None

    def _with_masks(self, observations: dict[str, Any], infos: dict[str, Any]) -> dict[str, Any]:
        self._masks = self._joint.next_masks(observations)
        bits = np.where(self._ended[:, None], np.uint8(0), self._masks.packed())  # (N, W)
        return {**infos, "action_mask": bits, "_action_mask": ~self._ended}


class MinLength(ConstraintWrapper):
    """The first `min_length` tokens are no stop ids; see `textenv.wrappers.MinLength`.

    Args:
        env: a vector text environment.
        min_length: from 1 to max_response_tokens - 1.

    Raises:
        ValueError: a length outside these bounds.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], min_length: int) -> None:
        super().__init__(env, min_length_constraint(env, min_length))


class ActionMask(ConstraintWrapper):
    """Only some tokens may be written; see `textenv.wrappers.ActionMask`.

    Args:
        env: a vector text environment.
        allowed_ids: token ids, the stop ids among them.
        top_k: how many of the most likely tokens of the reference.
        reference: whose; None for that of the task, or the one that an agent's policy brings.

    Raises:
        ValueError: none or both of `allowed_ids` and `top_k`, ids or a k that the task does not have, no reference.
        TypeError: a reference that knows chosen tokens only.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        allowed_ids: Iterable[int] | None = None,
        *,
        top_k: int | None = None,
        reference: Any = None,
    ) -> None:
        ids = None if allowed_ids is None else [int(i) for i in allowed_ids]
        super().__init__(env, action_mask_constraint(env, ids, top_k, reference))
        self._own_reference = reference is not None

    def attach_policy(self, _policy_logprobs: Any, reference: Any = None) -> None:
        """Rank tokens by the policy's own reference, unless one was given."""
        take_reference(self.constraint, None if self._own_reference else reference)
