"""`ScoreEvery` for vector environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.mdp import TokenState
from textenv.prompts import EncodedPrompt
from textenv.wrappers.prefix_scores import Potentials, PrefixPlan, prefix_scores, running_scores
from textenv.wrappers.tasks import task_of
from textenv.wrappers.vector.infos import end_infos, reset_rows, resets_next_step
from textenv.wrappers.vector.wrapper import TextVectorWrapper


class ScoreEvery(TextVectorWrapper):
    """Pays the score as it comes, without changing which response is best; see `textenv.wrappers.ScoreEvery`.

    The prefixes of a step are scored in one call, those of all responses of a replay too.

    Args:
        env: a vector text environment.
        every: k, tokens between two scores.
        gamma: the discount that the agent learns with.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], every: int, gamma: float = 1.0) -> None:
        super().__init__(env)
        self._task = task_of(env, type(self).__name__)
        self.potentials = Potentials(env.num_envs, every, gamma)
        self._resetting = np.zeros(env.num_envs, dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments and the potentials of the rows concerned."""
        rows = reset_rows(options)
        observations, infos = self.env.reset(seed=seed, options=options)
        self.potentials.restart(rows)
        self._resetting[rows] = False
        return observations, infos

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments and add the changes of the potentials; a row that only resets has none."""
        live = ~self._resetting
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        ended = np.logical_or(terminations, truncations)
        finished = end_infos(infos).get("_score", np.zeros_like(ended)) & ended
        shaping = self.potentials.shaping(live, finished, lambda rows: running_scores(self.env.unwrapped, rows))
        self.potentials.restart(ended)
        if resets_next_step(self.env):
            self._resetting = ended
        return observations, rewards + shaping, terminations, truncations, infos

    def plan_responses(self, prompts: Sequence[EncodedPrompt], state: TokenState) -> PrefixPlan:
        """What replay tells this layer of B whole responses; see `textenv.replay`."""
        return PrefixPlan(self.potentials, prefix_scores(self._task, prompts, state, self.potentials.every))
