"""`LengthPenalty` and `RepetitionPenalty` for vector environments."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv

from textenv.wrappers.response_penalties import Length, Repetition
from textenv.wrappers.tasks import task_of
from textenv.wrappers.vector.score_wrappers import ScoreWrapper


class LengthPenalty(ScoreWrapper):
    """Lowers the score of long responses; see `textenv.wrappers.LengthPenalty`.

    Args:
        env: a vector text environment.
        coef: at least 0; it is subtracted.
        mode: ``"linear"`` or ``"soft-overlong"``.
        cache: tokens of the ramp, only in mode soft-overlong.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], coef: float, mode: str = "linear", cache: int | None = None
    ) -> None:
        budget = task_of(env, type(self).__name__).mdp.max_response_tokens
        super().__init__(env, Length(coef, mode, cache, budget))


class RepetitionPenalty(ScoreWrapper):
    """Lowers the score of responses that repeat themselves; see `textenv.wrappers.RepetitionPenalty`.

    Args:
        env: a vector text environment.
        coef: at least 0; it is subtracted.
        n: words per n-gram.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], coef: float = 1.0, n: int = 3) -> None:
        super().__init__(env, Repetition(coef, n))
