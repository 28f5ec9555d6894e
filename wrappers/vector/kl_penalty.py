"""`KLPenalty` for vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.constraints import constraint_of
from textenv.wrappers.kl import Logprobs, own_copy, task_reference
from textenv.wrappers.kl_leash import KLLeash
from textenv.wrappers.vector.infos import reset_rows, resets_next_step, with_end_infos
from textenv.wrappers.vector.wrapper import TextVectorWrapper


class KLPenalty(TextVectorWrapper):
    """Subtracts ``kl_coef * (log pi(a) - log pi_ref(a))`` from every token's reward; see `textenv.wrappers.KLPenalty`.

    Args:
        env: a vector text environment.
        ref_logprobs: ``(observations, actions) -> (N,)`` under the reference; None for the reference of the task.
        policy_logprobs: the same under the policy that acts; see `attach_policy`.
        kl_coef: at least 0.
        target_kl: nats per response to steer to; None for a fixed coefficient.
        episodes_per_update: the controller moves once per so many finished episodes; None: N.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"exact"`` or ``"cross_entropy"``, see `kl_estimators`.

    Raises:
        ValueError: kl_coef negative or NaN, target_kl not positive, or an unknown estimator.
        TypeError: a model that the estimator or the masks need more from than log-probabilities of chosen tokens.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        ref_logprobs: Logprobs | None = None,
        policy_logprobs: Logprobs | None = None,
        *,
        kl_coef: float = 0.05,
        target_kl: float | None = None,
        episodes_per_update: int | None = None,
        estimator: str = "k1",
    ) -> None:
        super().__init__(env)
        self.leash = KLLeash(
            env.num_envs,
            ref_logprobs,
            task_reference(env),
            policy_logprobs,
            kl_coef,
            target_kl,
            episodes_per_update,
            estimator,
        )
        constraint = constraint_of(env)
        if constraint is not None:
            self.leash.constrain(constraint)
        self._observations: dict[str, Any] = {}
        self._resetting = np.zeros(env.num_envs, dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments and the KL of the rows concerned."""
        rows = reset_rows(options)
        observations, infos = self.env.reset(seed=seed, options=options)
        self._observations = own_copy(observations)
        self.leash.restart(rows)
        self._resetting[rows] = False
        return observations, infos

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments and charge the tolls; a row that only resets pays none."""
        before, live = self._observations, ~self._resetting
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        self._observations = own_copy(observations)
        tolls = self.leash.tolls(before, np.asarray(actions), live)
        ended = np.logical_or(terminations, truncations)
        if ended.any():
            columns = {}
            for key, values in self.leash.finish(np.flatnonzero(ended)).items():
                columns[key] = np.zeros(self.num_envs)
                columns[key][ended] = values
            infos = with_end_infos(infos, columns, ended)
        if resets_next_step(self.env):
            self._resetting = ended
        return observations, rewards - tolls, terminations, truncations, infos

    def attach_policy(self, policy_logprobs: Logprobs, reference: Logprobs | None = None) -> None:
        """Take log-probabilities from the acting policy, and from its own reference unless `ref_logprobs` was given."""
        self.leash.attach(policy_logprobs, reference)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return self.leash.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.leash.load_state_dict(state)
