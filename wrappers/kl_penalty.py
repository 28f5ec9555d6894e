"""`KLPenalty` for one environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from textenv.wrappers.kl import KLLeash, Logprobs, task_reference


class KLPenalty(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Subtracts ``kl_coef * (log pi(a) - log pi_ref(a))`` from every token's reward.

    The optimum of the shaped task is the reference tilted by exp(score / kl_coef). At an episode's end ``info["kl"]``
    is the sum over its tokens in nats, and ``info["kl_coef"]`` the coefficient that it was charged with.

    Example:
        A token of probability 0.5 where the reference gave 0.25, at coefficient 0.1, costs 0.1 * log 2 = 0.069:

        >>> import numpy as np
        >>> from textenv.wrappers.kl import kl_toll
        >>> round(float(kl_toll(np.log(0.5), np.log(0.25), 0.1)), 3)
        0.069

    Args:
        env: a text environment.
        ref_logprobs: ``(observations, actions) -> (N,)`` under the reference; None for the reference of the task.
        policy_logprobs: the same under the policy that acts. Agents hand theirs over with `attach_policy`; with none
            the policy is taken to be the reference (toll 0), and one warning says so.
        kl_coef: at least 0.
        target_kl: nats per response to steer to with the controller of Ziegler et al. 2019; None keeps the coefficient.
        episodes_per_update: the controller moves once per so many finished episodes; None: every one.

    Raises:
        ValueError: kl_coef negative or NaN, target_kl not positive.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        ref_logprobs: Logprobs | None = None,
        policy_logprobs: Logprobs | None = None,
        *,
        kl_coef: float = 0.05,
        target_kl: float | None = None,
        episodes_per_update: int | None = None,
    ) -> None:
        # Callables hold models: they are not part of the spec, which must survive a trip through JSON.
        RecordConstructorArgs.__init__(
            self, kl_coef=kl_coef, target_kl=target_kl, episodes_per_update=episodes_per_update
        )
        gym.Wrapper.__init__(self, env)
        self.leash = KLLeash(
            1, ref_logprobs, task_reference(env), policy_logprobs, kl_coef, target_kl, episodes_per_update
        )
        self._observation: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and the episode's KL."""
        self._observation, info = self.env.reset(seed=seed, options=options)
        self.leash.restart()
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment and charge the toll."""
        before = {key: np.asarray(value)[None] for key, value in self._observation.items()}
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        kl_coef = self.leash.kl_coef
        toll = float(self.leash.tolls(before, np.asarray(action)[None], np.array([True]))[0])
        if terminated or truncated:
            info = {**info, "kl": float(self.leash.finish(np.array([0]))[0]), "kl_coef": kl_coef}
        return self._observation, float(reward) - toll, terminated, truncated, info

    def attach_policy(self, policy_logprobs: Logprobs, reference: Logprobs | None = None) -> None:
        """Take log-probabilities from the acting policy, and from its own reference unless `ref_logprobs` was given."""
        self.leash.attach(policy_logprobs, reference)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return self.leash.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.leash.load_state_dict(state)
