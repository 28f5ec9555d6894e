"""`KLPenalty` for one environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from textenv.constraints import constraint_of
from textenv.wrappers.kl import Logprobs, own_copy, task_reference
from textenv.wrappers.kl_leash import KLLeash


class KLPenalty(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Subtracts ``kl_coef * (log pi(a) - log pi_ref(a))`` from every token's reward (estimator k1).

    The optimum of the shaped task is the reference tilted by exp(score / kl_coef). At an episode's end ``info["kl"]``
    is the sum of log pi - log pi_ref over its tokens in nats, whatever the estimator, so that figures compare;
    ``info["kl_toll"]`` is what was charged in all, and ``info["kl_coef"]`` the coefficient that it was charged with.

    Where `MinLength` or `ActionMask` are in the stack, above or below, both models are renormalised over the allowed
    tokens; they need ``next_logprobs`` for it. A `policy_logprobs` without it must give the masked ones itself.

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
        estimator: what the toll is made of: ``"k1"``, the one whose use as a reward has the exact gradient of score -
            kl_coef * KL; ``"k2"``, ``"k3"``, ``"exact"``, each with a bias that `kl_estimators` states; or
            ``"cross_entropy"``, -log pi_ref alone, for maximum-entropy agents that bring the entropy half themselves.
            It needs no policy (``info["kl"]`` is then nan).

    Raises:
        ValueError: kl_coef negative or NaN, target_kl not positive, or an unknown estimator.
        TypeError: a model that the estimator or the masks need more from than log-probabilities of chosen tokens.
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
        estimator: str = "k1",
    ) -> None:
        # Callables hold models: they are not part of the spec, which must survive a trip through JSON.
        RecordConstructorArgs.__init__(
            self, kl_coef=kl_coef, target_kl=target_kl, episodes_per_update=episodes_per_update, estimator=estimator
        )
        gym.Wrapper.__init__(self, env)
        self.leash = KLLeash(
            1, ref_logprobs, task_reference(env), policy_logprobs, kl_coef, target_kl, episodes_per_update, estimator
        )
        constraint = constraint_of(env)
        if constraint is not None:
            self.leash.constrain(constraint)
        self._observation: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and the episode's KL."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._observation = own_copy(observation)
        self.leash.restart()
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment and charge the toll."""
        before = {key: value[None] for key, value in self._observation.items()}
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._observation = own_copy(observation)
        toll = float(self.leash.tolls(before, np.asarray(action)[None], np.array([True]))[0])
        if terminated or truncated:
            ends = self.leash.finish(np.array([0]))
            info = {**info, **{key: float(values[0]) for key, values in ends.items()}}
        return observation, float(reward) - toll, terminated, truncated, info

    def attach_policy(self, policy_logprobs: Logprobs, reference: Logprobs | None = None) -> None:
        """Take log-probabilities from the acting policy, and from its own reference unless `ref_logprobs` was given."""
        self.leash.attach(policy_logprobs, reference)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return self.leash.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.leash.load_state_dict(state)
