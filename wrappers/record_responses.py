"""`RecordResponses` for one environment."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs

from textenv.wrappers.records import EpisodeFile
from textenv.wrappers.tasks import need_texts


class RecordResponses(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Writes every finished episode to a file as one line of JSON; rewards pass as they are.

    The keys are ``episode`` (its number in the file, from 0), ``prompt, response, score, shaped_score, finish_reason,
    response_length, kl`` (null where no layer below says it; a dropped sample's scores are null), ``score/name`` for
    each part of a score that has several (see `WeightedReward`), and ``return``, the sum of its rewards. Rewards and
    infos are those of the layers below: put it outermost to record all of them.
    Episodes that are given up, or cut from outside by a `TimeLimit`, have no score and are not written.

    The file is open only while a line is written, so there is nothing to flush or to close, a crash of the program
    loses no line, and a deep copy or an unpickled one goes on in the same file (whose numbers then may occur twice). An
    environment that is made from this one's `spec` appends, too, whatever `mode` says: it would refuse, or empty, the
    file of the first.

    Read it with ``pandas.read_json(path, lines=True)`` or `json.loads`, line by line.

    Args:
        env: a text environment.
        path: the file.
        mode: ``"x"`` refuses a file that exists, ``"w"`` empties it, ``"a"`` goes on in it.

    Raises:
        FileExistsError: the file exists, in mode ``"x"``.
        ValueError, TypeError, IsADirectoryError: an unknown mode, no path, or a folder.
    """

    def __init__(self, env: gym.Env[Any, Any], path: str | os.PathLike[str], mode: str = "x") -> None:
        need_texts(env, type(self).__name__)
        gym.Wrapper.__init__(self, env)
        self.file = EpisodeFile(path, mode)
        RecordConstructorArgs.__init__(self, path=str(self.file.path), mode="a")
        self._return = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and the episode's return."""
        self._return = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; write the episode where it finishes."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        if "score" in info:
            self.file.write([self._return], [info])
        return observation, reward, terminated, truncated, info
