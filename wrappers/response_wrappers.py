"""`LengthPenalty` and `RepetitionPenalty` for one environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs

from textenv.wrappers.response_penalties import Length, Repetition
from textenv.wrappers.score_wrappers import ScoreWrapper
from textenv.wrappers.tasks import task_of


class LengthPenalty(ScoreWrapper):
    """Lowers the score of long responses: by each token, or only near the budget.

    ``mode="linear"``: score - coef * length. ``mode="soft-overlong"``: nothing up to `cache` tokens before the budget,
    then a ramp that reaches `coef` at the budget, where responses are cut (Yu et al. 2025, DAPO, arXiv:2503.14476,
    eq. 13). Lengths are ``info["response_length"]``: tokens, the stop id included.

    Example:
        A response of 9 tokens scored 2.0, budget 10: linear at 0.1 a token leaves 1.1; with a cache of 4 the ramp is at
        three quarters, and 2.0 - 1.0 * 0.75 = 1.25:

        >>> import numpy as np
        >>> from textenv.wrappers.scores import Ends
        >>> score, ends = np.array([2.0]), Ends(["stop"], np.array([9]), ["..."])
        >>> Length(0.1, "linear", None, budget=10)(score, ends).round(6).tolist()
        [1.1]
        >>> Length(1.0, "soft-overlong", 4, budget=10)(score, ends).tolist()
        [1.25]

    Args:
        env: a text environment.
        coef: at least 0; score per token (linear), or at the budget (soft-overlong). It is subtracted.
        mode: ``"linear"`` or ``"soft-overlong"``.
        cache: tokens of the ramp, 1 to the budget; only in mode soft-overlong. The paper takes a fifth of the budget.

    Raises:
        ValueError: a negative or non-finite coefficient, an unknown mode, or a cache that does not fit.
        TypeError: no text environment below.
    """

    def __init__(self, env: gym.Env[Any, Any], coef: float, mode: str = "linear", cache: int | None = None) -> None:
        RecordConstructorArgs.__init__(self, coef=coef, mode=mode, cache=cache)
        budget = task_of(env, type(self).__name__).mdp.max_response_tokens
        super().__init__(env, Length(coef, mode, cache, budget))


class RepetitionPenalty(ScoreWrapper):
    """Lowers the score by `coef` times the share of the response's word n-grams that repeat an earlier one.

    The share is seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319); Yeo et al. 2025 (arXiv:2502.03373) use it against
    models that repeat themselves to grow long. It is read from the text, words in lower case between blanks: languages
    that are written without blanks have few words, and need a scorer that knows them.

    Example:
        "so good so good so good" has the pairs (so good) (good so) (so good) (good so) (so good): two are distinct, the
        other three repeat them. The share is 3/5, and a score of 1.0 becomes 1.0 - 0.5 * 0.6 = 0.7:

        >>> import numpy as np
        >>> from textenv.wrappers.scores import Ends
        >>> ends = Ends(["stop"], np.array([7]), ["so good so good so good"])
        >>> Repetition(0.5, 2)(np.array([1.0]), ends).round(6).tolist()
        [0.7]

    Args:
        env: a text environment.
        coef: at least 0: what a response that does nothing but repeat loses at most.
        n: words per n-gram.

    Raises:
        ValueError: a negative or non-finite coefficient, or n below 1.
    """

    def __init__(self, env: gym.Env[Any, Any], coef: float = 1.0, n: int = 3) -> None:
        RecordConstructorArgs.__init__(self, coef=coef, n=n)
        super().__init__(env, Repetition(coef, n))
