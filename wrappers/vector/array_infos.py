"""`ArrayInfos` for vector environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from textenv.wrappers.array_infos import numeric
from textenv.wrappers.vector.wrapper import TextVectorWrapper


class ArrayInfos(TextVectorWrapper):
    """Leaves in the infos only what arrays can hold; see `textenv.wrappers.ArrayInfos`.

    ``final_obs`` (SAME_STEP), an array of N objects, becomes observations of N rows as `step` gives them, 0 where
    ``_final_obs`` is False.

    Args:
        env: a vector text environment.
    """

    hides_texts = True

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return observations, numeric(infos)

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        if isinstance(infos.get("final_obs"), np.ndarray) and infos["final_obs"].dtype == object:
            infos = {**infos, "final_obs": self._stacked(infos["final_obs"])}
        return observations, rewards, terminations, truncations, numeric(infos)

    def _stacked(self, final_obs: NDArray[Any]) -> Any:
        """N objects, None where a row did not end, as one observation of N rows."""
        space = self.single_observation_space
        stacked: Any = create_empty_array(space, self.num_envs)
        blanks = iterate(self.observation_space, create_empty_array(space, self.num_envs))
        rows = [blank if row is None else row for row, blank in zip(final_obs, blanks, strict=True)]
        return concatenate(space, rows, stacked)
