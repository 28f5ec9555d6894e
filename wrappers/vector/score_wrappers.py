"""`MissingEOSPenalty`, `NormalizeScore` and `ClipScore` for vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from textenv.wrappers.scores import Clip, Ends, MissingEOS, Normalize, ScoreShaper, shape_scores
from textenv.wrappers.tasks import need_texts
from textenv.wrappers.vector.infos import end_infos, with_end_infos
from textenv.wrappers.vector.wrapper import TextVectorWrapper


class ScoreWrapper(TextVectorWrapper):
    """Replaces the score inside each last reward by a shaped one; per-token rewards are left alone.

    Args:
        env: a vector text environment.
        shaper: scores, and the responses that they judge, to scores; called once per step with all rows that end in it.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], shaper: ScoreShaper) -> None:
        need_texts(env, type(self).__name__)
        super().__init__(env)
        self.shaper = shaper

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments; where episodes end exchange the scores."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        ends = end_infos(infos)
        if "score" in ends:
            ended = ends["_score"]
            old = np.asarray(ends.get("shaped_score", ends["score"]), dtype=np.float64)
            new = np.zeros(self.num_envs)
            finished = Ends(*(ends[key][ended] for key in ("finish_reason", "response_length", "response")))
            new[ended] = shape_scores(self.shaper, old[ended], finished)
            infos = with_end_infos(infos, {"shaped_score": new}, ended)
            rewards = rewards + np.where(ended & np.isfinite(new), new - np.nan_to_num(old), 0.0)
        return observations, rewards, terminations, truncations, infos

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on."""
        return self.shaper.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.shaper.load_state_dict(state)


class MissingEOSPenalty(ScoreWrapper):
    """Lowers the score of responses that never stopped; see `textenv.wrappers.MissingEOSPenalty`.

    Args:
        env: a vector text environment.
        penalty: at least 0; it is subtracted.
        mode: ``"subtract"`` it from the score, or ``"replace"`` the score by its negative.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], penalty: float = 1.0, mode: str = "subtract") -> None:
        super().__init__(env, MissingEOS(penalty, mode))


class NormalizeScore(ScoreWrapper):
    """Scores of mean 0 and standard deviation 1; see `textenv.wrappers.NormalizeScore`.

    Args:
        env: a vector text environment.
        mean: fixed mean; None for the running one.
        std: fixed standard deviation; None for the running one.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], mean: float | None = None, std: float | None = None) -> None:
        super().__init__(env, Normalize(mean, std))


class ClipScore(ScoreWrapper):
    """Scores no lower than `low` and no higher than `high`; see `textenv.wrappers.ClipScore`.

    Args:
        env: a vector text environment.
        low: the least score.
        high: the greatest.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], low: float, high: float) -> None:
        super().__init__(env, Clip(low, high))
