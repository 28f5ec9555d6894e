"""Early stopping on a score that training does not see: a gold score, or a held-out proxy. Knows no agent."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Watched:
    """What early stopping remembers.

    Attributes:
        best: the highest score that counted as an improvement; -inf before the first.
        best_iteration: where it was seen; None before the first.
        waited: scores since then.
        iteration: of the last score; None before the first.
    """

    best: float = -math.inf
    best_iteration: int | None = None
    waited: int = 0
    iteration: int | None = None


def watch(state: Watched, iteration: int, score: float, min_delta: float = 0.0) -> Watched:
    """The state after one more score.

    Args:
        state: before it.
        iteration: of training, higher than the last one.
        score: higher is better.
        min_delta: how much more than the best a score has to be to count as an improvement. Rises too small to count
            leave the best where it is, so that a slow rise counts as soon as it has added up.

    Raises:
        ValueError: a score that is not finite, or an iteration that is not later than the last.
    """
    if not math.isfinite(score):
        raise ValueError(
            f"`score` should be finite, got {score!r} at iteration {iteration}: it is neither better nor worse than "
            "others, and waiting would end for no reason. Leave that iteration out, or mend its scorer."
        )
    if state.iteration is not None and iteration <= state.iteration:
        raise ValueError(
            f"`iteration` should be later than the last one, {state.iteration}, got {iteration}: the same score would "
            "count twice. Start another run with another EarlyStopping."
        )
    if state.best_iteration is None or score > state.best + min_delta:
        return Watched(float(score), iteration, 0, iteration)
    return Watched(state.best, state.best_iteration, state.waited + 1, iteration)


class EarlyStopping:
    """Says when a score has stopped rising, and where it was highest.

    A learned reward goes on rising under optimisation long after the score that it stands for has turned (Gao et al.
    2022, arXiv:2210.10760), so stop on another one: a gold score, or a reward model trained on other comparisons.
    ``learn(eval_envs=..., early_stopping=EarlyStopping(3))`` stops on the score of the evaluations; in a loop of one's
    own call it with each score.

    Args:
        patience: how many scores in a row may fail to improve before it says stop, at least 1.
        min_delta: see `watch`, at least 0. Set it to the noise of the score: a lucky draw is no improvement.

    Raises:
        ValueError: a patience or min_delta that means nothing.

    >>> stopping = EarlyStopping(patience=2)
    >>> [stopping(iteration, score) for iteration, score in enumerate([0.1, 0.5, 0.4, 0.5], start=1)]
    [False, False, False, True]
    >>> stopping.best_iteration
    2
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(
                f"`patience` should be an integer of at least 1, got {patience!r}: training would stop at its first "
                "score, or never."
            )
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ValueError(
                f"`min_delta` should be a finite number of at least 0, got {min_delta!r}: a lower score would count as "
                "an improvement."
            )
        self.patience, self.min_delta = patience, min_delta
        self.state = Watched()

    def __call__(self, iteration: int, score: float) -> bool:
        """Take note of a score; True where training should stop. See `watch`."""
        self.state = watch(self.state, iteration, score, self.min_delta)
        return self.stop

    @property
    def stop(self) -> bool:
        """Whether `patience` scores in a row did not improve."""
        return self.state.waited >= self.patience

    @property
    def best_iteration(self) -> int | None:
        """Where the best score was seen, whose checkpoint is the one to keep; None before the first."""
        return self.state.best_iteration

    @property
    def best(self) -> float:
        """The best score; -inf before the first."""
        return self.state.best

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, for a checkpoint."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.state = Watched(**state)
