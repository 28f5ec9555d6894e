"""`RecordResponses` for vector environments."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.wrappers.records import EpisodeFile, info_keys
from textenv.wrappers.tasks import need_texts
from textenv.wrappers.vector.infos import end_infos, end_rows, reset_rows, resets_next_step
from textenv.wrappers.vector.wrapper import TextVectorWrapper


class RecordResponses(TextVectorWrapper):
    """Writes every finished episode to a file as one line of JSON; see `textenv.wrappers.RecordResponses`.

    Episodes that finish in one step are written together, by row. A replay's episodes are written, too.

    Args:
        env: a vector text environment.
        path: the file.
        mode: ``"x"`` refuses a file that exists, ``"w"`` empties it, ``"a"`` goes on in it.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], path: str | os.PathLike[str], mode: str = "x") -> None:
        need_texts(env, type(self).__name__)
        super().__init__(env)
        self.file = EpisodeFile(path, mode)
        self._returns = np.zeros(env.num_envs)
        self._resetting = np.zeros(env.num_envs, dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments and the returns of the rows concerned."""
        results = self.env.reset(seed=seed, options=options)
        rows = reset_rows(options)
        self._returns[rows] = 0.0
        self._resetting[rows] = False
        return results

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments; write the episodes that finish."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        self._returns += np.where(self._resetting, 0.0, rewards)
        ended = np.logical_or(terminations, truncations)
        ends = end_infos(infos)
        if "score" in ends:
            rows = np.flatnonzero(ends["_score"])
            self.file.write(self._returns[rows].tolist(), end_rows(ends, rows, info_keys(ends)))
        self._returns[ended] = 0.0
        if resets_next_step(self.env):
            self._resetting = ended
        return observations, rewards, terminations, truncations, infos
