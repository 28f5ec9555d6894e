"""Several reward models as one that is careful where they disagree. Knows no model: any scorers will do.

Legend: M members, B responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from textenv.scoring import call_scorer

Pessimism = Literal["std", "variance", "min"]
PESSIMISMS: tuple[str, ...] = get_args(Pessimism)


def pessimistic(scores: ArrayLike, k: float = 1.0, by: Pessimism = "std") -> NDArray[np.float64]:
    """Combine the scores of M members into one that is low where they disagree.

    - ``"std"``: mean - k * standard deviation, a lower confidence bound in the score's own unit.
    - ``"variance"``: mean - k * variance, the uncertainty-weighted optimisation of Coste et al. (2023,
      arXiv:2310.02743).
    - ``"min"``: the smallest, their worst-case optimisation; k has no say.

    Deviations have M in their denominator, as theirs.

    Args:
        scores: (M, B).
        k: how careful to be, at least 0; 0 is the mean.
        by: see above.

    Returns:
        scores (B,).

    Raises:
        ValueError: fewer than two members, a negative k, or an unknown way.

    Example:
        >>> pessimistic([[1.0, 2.0], [3.0, 2.0]], k=0.5)
        array([1.5, 2. ])
    """
    x = np.asarray(scores, np.float64)
    _check(k, by)
    if x.ndim != 2 or len(x) < 2:
        raise ValueError(f"`scores` should have shape (M, B) with at least two members, got {x.shape}.")
    if by == "min":
        return x.min(0)
    spread = x.std(0) if by == "std" else x.var(0)
    combined: NDArray[np.float64] = x.mean(0) - k * spread
    return combined


class RewardEnsemble:
    """Scores responses by several scorers and takes a pessimistic view of them; see `pessimistic`. A scorer.

    Reward models that learned from comparisons differ in a constant that means nothing, and their disagreement would be
    mostly that: `centred` takes it out. Members that differ in the seed of their adapters and in the order of the data
    disagree less than ones whose trunks were trained apart (Eisenstein et al. 2023, arXiv:2312.09244).

    Args:
        scorers: at least two.
        k: how careful to be; see `pessimistic`.
        by: ``"std"``, ``"variance"`` or ``"min"``.
        offsets: (M,) added to each member's scores; None: nothing.

    Raises:
        ValueError: fewer than two scorers, another number of offsets, a negative k, or an unknown way.
    """

    def __init__(
        self,
        scorers: Sequence[Callable[..., Any]],
        k: float = 1.0,
        *,
        by: Pessimism = "std",
        offsets: ArrayLike | None = None,
    ) -> None:
        _check(k, by)
        if len(scorers) < 2:
            raise ValueError(
                f"`scorers` should be at least two, got {len(scorers)}: one alone has nobody to disagree with. Use it "
                "as it is."
            )
        self.scorers, self.k, self.by = list(scorers), k, by
        self.offsets = np.zeros(len(scorers)) if offsets is None else np.array(offsets, np.float64)
        if self.offsets.shape != (len(scorers),) or not np.isfinite(self.offsets).all():
            raise ValueError(f"`offsets` should be {len(scorers)} finite numbers, one per scorer, got {offsets!r}.")

    @classmethod
    def centred(
        cls,
        scorers: Sequence[Callable[..., Any]],
        prompts: Sequence[str],
        responses: Sequence[str],
        k: float = 1.0,
        *,
        by: Pessimism = "std",
    ) -> RewardEnsemble:
        """An ensemble whose members have a mean score of 0 on given texts, such as samples of the reference.

        Args:
            scorers: at least two.
            prompts: of these texts, at least one.
            responses: of these texts.
            k: see the class.
            by: see the class.

        Raises:
            ValueError: there is no text.
        """
        if not prompts:
            raise ValueError("`prompts` should hold at least one text to centre on, got none.")
        plain = cls(scorers, k, by=by)
        return cls(scorers, k, by=by, offsets=-plain.member_scores(prompts, responses).mean(1))

    def member_scores(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Scores (M, B) of all members, their offsets added.

        Raises:
            ScorerError: a member fails, see `textenv.scoring.call_scorer`.
        """
        rows = [call_scorer(scorer, prompts, responses, context=context) for scorer in self.scorers]
        scores: NDArray[np.float64] = np.stack(rows) + self.offsets[:, None]
        return scores

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Score finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: handed to every member.

        Returns:
            scores (B,), float64.

        Raises:
            ScorerError: a member fails.
        """
        return pessimistic(self.member_scores(prompts, responses, **context), self.k, self.by)


def _check(k: float, by: str) -> None:
    if by not in PESSIMISMS:
        raise ValueError(f"`by` should be one of {PESSIMISMS}, got {by!r}.")
    if not 0 <= k < np.inf:
        raise ValueError(f"`k` should be at least 0, got {k}: below 0 disagreement would be rewarded.")
