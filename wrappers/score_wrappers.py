"""`MissingEOSPenalty`, `NormalizeScore` and `ClipScore` for one environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from textenv.wrappers.scores import Clip, Ends, MissingEOS, Normalize, ScoreShaper, shape_scores
from textenv.wrappers.tasks import need_texts


class ScoreWrapper(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Replaces the score inside the last reward by a shaped one; per-token rewards are left alone.

    Args:
        env: a text environment.
        shaper: scores, and the responses that they judge, to scores.
    """

    def __init__(self, env: gym.Env[Any, Any], shaper: ScoreShaper) -> None:
        need_texts(env, type(self).__name__)
        gym.Wrapper.__init__(self, env)
        self.shaper = shaper

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment; at an episode's end exchange the score."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if "score" in info:
            old = float(info.get("shaped_score", info["score"]))
            ends = Ends([info["finish_reason"]], np.array([info["response_length"]]), [info["response"]])
            new = float(shape_scores(self.shaper, np.array([old]), ends)[0])
            info = {**info, "shaped_score": new}
            reward = float(reward) + (new - old if np.isfinite(new) else 0.0)
        return observation, float(reward), terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return self.shaper.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.shaper.load_state_dict(state)


class MissingEOSPenalty(ScoreWrapper):
    """Lowers the score of responses that never stopped.

    Example:
        Scores 1.2 (stopped) and 1.2 (cut by the budget) become 1.2 and 0.2 with ``penalty=1.0``; with
        ``mode="replace"`` 1.2 and -1.0.

        >>> import numpy as np
        >>> from textenv.wrappers.scores import missing_eos_scores
        >>> missing_eos_scores(np.array([1.2, 1.2]), ["stop", "length"], 1.0, "replace").tolist()
        [1.2, -1.0]

    Args:
        env: a text environment.
        penalty: at least 0; it is subtracted.
        mode: ``"subtract"`` it from the score, or ``"replace"`` the score by its negative.

    Raises:
        ValueError: a negative or non-finite penalty, or an unknown mode.
    """

    def __init__(self, env: gym.Env[Any, Any], penalty: float = 1.0, mode: str = "subtract") -> None:
        RecordConstructorArgs.__init__(self, penalty=penalty, mode=mode)
        super().__init__(env, MissingEOS(penalty, mode))


class NormalizeScore(ScoreWrapper):
    """Scores of mean 0 and standard deviation 1, over fixed figures or all scores so far.

    Only the score is normalised, never the tolls beside it. Gymnasium's `NormalizeReward` divides by the deviation of
    discounted returns, which on episodes with one terminal reward depends on their length and on the autoreset mode.

    Args:
        env: a text environment.
        mean: fixed mean (of the reference's scores, say); None for the running one.
        std: fixed standard deviation; None for the running one.
    """

    def __init__(self, env: gym.Env[Any, Any], mean: float | None = None, std: float | None = None) -> None:
        RecordConstructorArgs.__init__(self, mean=mean, std=std)
        super().__init__(env, Normalize(mean, std))


class ClipScore(ScoreWrapper):
    """Scores no lower than `low` and no higher than `high`: a bound on what an outlier of the scorer can do.

    The order in the stack says what is clipped: above `NormalizeScore` deviations, below it the scorer's own numbers
    (and then the running figures are those of clipped scores). Tolls beside the score stay as they are.

    Example:
        >>> import numpy as np
        >>> from textenv.wrappers.scores import Clip, Ends
        >>> ends = Ends(["stop"] * 3, np.array([1, 2, 3]), ["a", "b", "c"])
        >>> Clip(-5.0, 5.0)(np.array([-40.0, 0.3, 7.0]), ends).tolist()
        [-5.0, 0.3, 5.0]

    Args:
        env: a text environment.
        low: the least score; -inf leaves this side open.
        high: the greatest; inf leaves this side open.

    Raises:
        ValueError: `low` not below `high`, or NaN.
    """

    def __init__(self, env: gym.Env[Any, Any], low: float, high: float) -> None:
        RecordConstructorArgs.__init__(self, low=low, high=high)
        super().__init__(env, Clip(low, high))
