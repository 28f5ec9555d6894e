"""Potential-based shaping by the scores of prefixes: the formula, its state, and the prefixes of whole responses.

Legend: N rows, B whole responses, T response tokens at most, Phi the potential.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.mdp import TokenState
from textenv.prompts import EncodedPrompt
from textenv.scoring import ScorerError
from textenv.task import TextTask


class Potentials:
    """Phi of N rows: the score of the last prefix whose length is a multiple of `every`, 0 before the first.

    A step pays ``gamma * Phi(s') - Phi(s)``, with Phi = 0 where the response is finished (Ng, Harada and Russell 1999,
    "Policy invariance under reward transformations", theorem 1). A prefix without a score (dropped) leaves Phi as it
    was.

    Args:
        num_rows: N.
        every: tokens between two scores, at least 1.
        gamma: the discount, in (0, 1].

    Raises:
        ValueError: `every` or `gamma` out of range.
    """

    def __init__(self, num_rows: int, every: int, gamma: float) -> None:
        if isinstance(every, bool) or not isinstance(every, int | np.integer) or every < 1:
            raise ValueError(
                f"`every` should be a number of tokens of at least 1, got {every!r}. No prefix would be scored. 1 "
                "scores after each token; more costs fewer calls of the scorer."
            )
        if not (isinstance(gamma, int | float | np.number) and math.isfinite(gamma) and 0 < gamma <= 1):
            raise ValueError(
                f"`gamma` should be in (0, 1], got {gamma!r}. It must be the discount that the agent learns with, else "
                "the shaping changes which response is best. textenv's agents use 1."
            )
        self.every, self.gamma = int(every), float(gamma)
        self.values = np.zeros(num_rows)
        self._tokens = np.zeros(num_rows, dtype=np.int64)
        self._planned: NDArray[np.float64] | None = None

    def restart(self, rows: Any = slice(None)) -> None:
        """Begin new episodes on some rows."""
        self.values[rows] = 0.0
        self._tokens[rows] = 0

    def shaping(
        self,
        live: NDArray[np.bool_],
        finished: NDArray[np.bool_],
        score: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        """What one step pays (N,), 0 on rows that are not live.

        Args:
            live: (N,) True where a token was appended.
            finished: (N,) True where it finished the response.
            score: indices of rows to the scores of their prefixes; called at most once, with all rows that are due.
        """
        self._tokens += live
        before = self.values.copy()
        due = np.flatnonzero(live & ~finished & (self._tokens % self.every == 0))
        if len(due):
            scores = score(due) if self._planned is None else self._planned[due, self._columns(due)]
            self.values[due] = np.where(np.isfinite(scores), scores, before[due])
        after = np.where(finished, 0.0, self.values)
        return np.where(live, self.gamma * after - before, 0.0)

    def plan(self, scores: NDArray[np.float64] | None) -> None:
        """Enter replay with the (N, T) scores of the coming prefixes, column t after t + 1 tokens; None leaves it."""
        self._planned = scores

    def _columns(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Columns of the plan; rows whose response has ended are stepped on, and what they pay is not looked at."""
        assert self._planned is not None
        return np.minimum(self._tokens[rows], self._planned.shape[1]) - 1


@dataclass(frozen=True)
class PrefixPlan:
    """What replay tells `Potentials`: the scores (B, T) of the prefixes of all its responses."""

    potentials: Potentials
    scores: NDArray[np.float64]

    def enter(self, rows: slice, num_envs: int) -> None:
        """The responses of `rows` come next, in as many environments."""
        scores = self.scores[rows]
        self.potentials.plan(np.pad(scores, ((0, num_envs - len(scores)), (0, 0))))

    def leave(self) -> None:
        """Back to stepping."""
        self.potentials.plan(None)


def prefix_scores(
    task: TextTask, prompts: Sequence[EncodedPrompt], state: TokenState, every: int
) -> NDArray[np.float64]:
    """Scores (B, T) of the prefixes that `Potentials` asks for, from one call of the scorer; 0 in other columns.

    Args:
        task: whose scorer.
        prompts: B.
        state: the final states of B whole responses.
        every: tokens between two scores.

    Raises:
        ScorerError: the scorer cannot judge one of them.
    """
    columns = np.arange(task.mdp.max_response_tokens)
    due = ((columns + 1) % every == 0) & (columns + 1 < state.response_lengths[:, None])  # the end has the real score
    scores = np.zeros(due.shape)
    rows, ends = np.nonzero(due)
    if len(rows):
        prefixes = TokenState(state.input_ids[rows], state.attention_mask[rows], ends + 1)
        texts = task.response_texts(prefixes, range(len(rows)))
        with _explained():
            scores[due] = task.score([prompts[row] for row in rows], texts)
    return scores


def running_scores(env: Any, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Scores of what a text environment's rows have written so far, in one call; (1,) for a single environment.

    Raises:
        ScorerError: the scorer cannot judge one of them.
    """
    with _explained():
        return np.array([env.score_so_far()]) if rows is None else env.score_so_far(rows)


@contextmanager
def _explained() -> Iterator[None]:
    """Says in a scorer's errors that they are about unfinished responses."""
    try:
        yield
    except ScorerError as error:
        raise ScorerError(
            f"ScoreEvery asks the scorer about responses that are still being written. {error} A scorer that only "
            "knows finished responses should be used without ScoreEvery."
        ) from error
