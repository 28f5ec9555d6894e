"""`MinLength` and `ActionMask` for one environment."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from textenv.checks import check_actions
from textenv.constraint_kinds import AllowedIds, NoStopBefore, TopK
from textenv.constraints import Constraint, PackedMasks, check_allowed, constraint_of
from textenv.layers import layers
from textenv.wrappers.kl import task_reference
from textenv.wrappers.tasks import task_of


class ConstraintWrapper(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Forbids actions, and tells everybody which.

    ``info["action_mask"]``, at `reset` and after each step that does not end the episode, says what may come next: V
    bits, `np.packbits` of True = allowed, together with the other constraints inside. A forbidden action is refused.

    Args:
        env: a text environment.
        constraint: what is allowed.
    """

    def __init__(self, env: gym.Env[Any, Any], constraint: Constraint) -> None:
        gym.Wrapper.__init__(self, env)
        self.constraint = constraint
        self._joint = constraint_of(self) or constraint  # with those inside
        tell_leashes(env, constraint)
        self._masks: PackedMasks | None = None  # of the state that is now current, index (1,)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; the info tells the first token's mask."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "action_mask": self._look(observation)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment with an allowed action.

        Raises:
            ValueError: a forbidden one; nothing has changed then.
        """
        if self._masks is not None:
            actions = check_actions(action, (), self._masks.vocab_size)[None]
            check_allowed(self._joint, self._masks, actions, np.array([True]))
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self._masks = None
        else:
            info = {**info, "action_mask": self._look(observation)}
        return observation, float(reward), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions may come next, (V,), True = allowed: what sb3-contrib's MaskablePPO asks for.

        ``env.action_space.sample(mask)`` wants the same as int8: ``env.action_masks().astype(np.int8)``. From outside
        a stack: ``env.get_wrapper_attr("action_masks")()``.

        Raises:
            gymnasium.error.ResetNeeded: no episode is running.
        """
        if self._masks is None:
            raise gym.error.ResetNeeded("Masks are those of a state, but no episode is running: call reset() first.")
        masks: NDArray[np.bool_] = self._masks.unpacked()[0]
        return masks

    def _look(self, observation: dict[str, Any]) -> NDArray[np.uint8]:
        batch = {key: np.asarray(value)[None] for key, value in observation.items()}
        self._masks = self._joint.next_masks(batch)
        bits: NDArray[np.uint8] = self._masks.packed()[0]
        return bits


class MinLength(ConstraintWrapper):
    """The first `min_length` tokens are no stop ids: impossible for policy, reference and engine alike.

    A response then has at least `min_length` tokens and a stop id, or is cut by the budget. Everything is renormalised
    over the tokens that are left, so that ratios start at 1 and the KL stays a KL.

    Example:
        With ``min_length=2`` and stop id 0 the responses (3, 4, 0) and (3, 4, 5, ...) can be written, (0) and (3, 0)
        cannot.

    Args:
        env: a text environment.
        min_length: from 1 to max_response_tokens - 1.

    Raises:
        ValueError: a length outside these bounds.
    """

    def __init__(self, env: gym.Env[Any, Any], min_length: int) -> None:
        RecordConstructorArgs.__init__(self, min_length=min_length)
        super().__init__(env, min_length_constraint(env, min_length))


class ActionMask(ConstraintWrapper):
    """Only some tokens may be written: given ids, or the k that the reference finds most likely in each state.

    Args:
        env: a text environment.
        allowed_ids: token ids, the stop ids among them (a warning says so if not).
        top_k: how many of the most likely tokens. Stopping is possible where a stop id is among them.
        reference: whose, with ``next_logprobs``; None for the reference of the task, or the one that an agent's policy
            brings.

    Raises:
        ValueError: none or both of `allowed_ids` and `top_k`, ids or a k that the task does not have, no reference.
        TypeError: a reference that knows chosen tokens only.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        allowed_ids: Iterable[int] | None = None,
        *,
        top_k: int | None = None,
        reference: Any = None,
    ) -> None:
        ids = None if allowed_ids is None else [int(i) for i in allowed_ids]
        RecordConstructorArgs.__init__(self, allowed_ids=ids, top_k=top_k)
        super().__init__(env, action_mask_constraint(env, ids, top_k, reference))
        self._own_reference = reference is not None

    def attach_policy(self, _policy_logprobs: Any, reference: Any = None) -> None:
        """Rank tokens by the policy's own reference, unless one was given."""
        take_reference(self.constraint, None if self._own_reference else reference)


def min_length_constraint(env: Any, min_length: int) -> Constraint:
    """The constraint of `MinLength` on an environment, single or vector."""
    task = task_of(env, "MinLength")
    return NoStopBefore(task.mdp, min_length, task.named_size)


def action_mask_constraint(env: Any, allowed_ids: list[int] | None, top_k: int | None, reference: Any) -> Constraint:
    """The constraint of `ActionMask` on an environment, single or vector."""
    task = task_of(env, "ActionMask")
    if (allowed_ids is None) == (top_k is None):
        raise ValueError(
            f"ActionMask should have `allowed_ids` or `top_k`, got allowed_ids={allowed_ids} and top_k={top_k}. Give "
            "one; for both wrap twice."
        )
    if allowed_ids is not None:
        fixed = AllowedIds(task.mdp, allowed_ids, task.named_size)
        if task.mdp.stop_ids and not fixed.can_stop:
            warnings.warn(
                f"None of the stop ids {task.mdp.stop_ids} is among the allowed_ids: every response will be cut by the "
                "budget. Add one to them.",
                UserWarning,
                stacklevel=4,
            )
        return fixed
    assert top_k is not None
    reference = task_reference(env) if reference is None else reference
    if reference is None:
        raise ValueError(
            "ActionMask(top_k=...) should have a reference that ranks the tokens, but the task has none. Pass "
            "reference=, a LanguageModel for example."
        )
    return TopK(task.mdp, reference, top_k, task.named_size)


def take_reference(constraint: Constraint, reference: Any) -> None:
    """Let a top-k constraint rank by another reference; nothing happens to others, or with None."""
    if reference is not None and isinstance(constraint, TopK):
        constraint.reference = reference


def tell_leashes(env: Any, constraint: Constraint) -> None:
    """Tell every `KLPenalty` inside about a constraint outside of it: its models are renormalised too."""
    for layer in layers(env):
        if "leash" in vars(layer):
            layer.leash.constrain(constraint)
