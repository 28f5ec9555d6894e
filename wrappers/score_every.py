"""`ScoreEvery` for one environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from textenv.wrappers.prefix_scores import Potentials, running_scores
from textenv.wrappers.tasks import task_of


class ScoreEvery(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Pays the score as it comes: every token earns what the score of the text so far has changed by.

    Every k-th token the scorer judges the unfinished text; that number is the potential Phi until the next time. Phi is
    0 at the start and at the end. Adding ``gamma * Phi(s') - Phi(s)`` to the reward leaves the best policy what it was
    (Ng, Harada and Russell 1999): over an episode the additions cancel, so that at gamma = 1 its rewards sum to the
    score, and the value of a prefix falls by its Phi whatever is written next. What changes is when the reward is seen,
    which helps where the score of a prefix says something of the whole.

    Paying Phi itself at each step would be another task: a response would be paid for being long while its prefixes
    look good.

    Example:
        Prefixes scored 0.5, 0.2 and the response 1.2 after three tokens, k = 1: rewards 0.5, -0.3, 1.0, whose sum is
        1.2.

        >>> potentials, yes, no = Potentials(1, every=1, gamma=1.0), np.array([True]), np.array([False])
        >>> prefixes = iter([0.5, 0.2])
        >>> shaping = [potentials.shaping(yes, end, lambda _: np.array([next(prefixes)])) for end in (no, no, yes)]
        >>> (np.array([0.0, 0.0, 1.2]) + np.concatenate(shaping)).round(6).tolist()
        [0.5, -0.3, 1.0]

    Args:
        env: a text environment. Wrappers of the score may be below or above: the sum is the shaped score.
        every: k, tokens between two calls of the scorer, which must be able to judge unfinished responses.
        gamma: the discount that the agent learns with.

    Raises:
        ValueError: `every` below 1, or gamma outside (0, 1].
        TypeError: no text environment below.
        ScorerError: the scorer cannot judge a prefix; with ``scorer_errors="drop"`` Phi stays as it was.
    """

    def __init__(self, env: gym.Env[Any, Any], every: int, gamma: float = 1.0) -> None:
        RecordConstructorArgs.__init__(self, every=every, gamma=gamma)
        gym.Wrapper.__init__(self, env)
        task_of(env, type(self).__name__)
        self.potentials = Potentials(1, every, gamma)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and the potential."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.potentials.restart()
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment and add the change of the potential."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        finished = np.array(["score" in info])  # not where a TimeLimit cuts: the response could go on there
        shaping = self.potentials.shaping(np.array([True]), finished, lambda _rows: running_scores(self.env.unwrapped))
        return observation, float(reward) + float(shaping[0]), terminated, truncated, info
