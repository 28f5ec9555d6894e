"""Learning a score from comparisons: the Bradley-Terry loss. Knows tensors only, neither models nor texts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float | None = None,
    *,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    r"""-log sigmoid(chosen - rejected - margin), averaged over comparisons.

    Under the model of Bradley & Terry (1952), "Rank analysis of incomplete block designs I", the probability that a
    person prefers one response to another is the sigmoid of the difference of their scores; this is the negative log
    likelihood of what people chose. Only differences count: a constant added to every score changes nothing. It is
    eq. 1 of Christiano et al. (2017, arXiv:1706.03741) with certain labels, and eq. 1 of Ouyang et al. (2022,
    arXiv:2203.02155) for two responses; with margins, eq. 2 of Touvron et al. (2023, arXiv:2307.09288).

    Label smoothing (Szegedy et al. 2016, arXiv:1512.00567, section 7; for reward models Wang et al. 2024,
    arXiv:2401.06080) takes each label for wrong with that probability: the loss is
    (1 - eps) * -log sigmoid(d) + eps * -log sigmoid(-d), smallest at d = log((1 - eps) / eps) instead of at infinity.

    Args:
        chosen: (B,) scores of the preferred responses.
        rejected: (B,) scores of the others.
        margin: by how much the preferred one should win, (B,) or one number; None is 0.
        label_smoothing: eps, at least 0 and below 0.5.
        weight: (B,) of each comparison, in place of 1 / B; for sums over parts of a batch.

    Returns:
        A scalar in nats; log 2 where all scores are equal.

    Raises:
        ValueError: the shapes differ, there is no comparison, or a smoothing that would turn labels round.

    >>> chosen, rejected = torch.tensor([2.0, 0.5, -1.0, 3.0]), torch.tensor([1.0, 1.5, 0.0, 1.0])
    >>> round(bradley_terry_loss(chosen, rejected).item(), 4)
    0.7667
    """
    _check(chosen, rejected)
    check_smoothing(label_smoothing)
    difference = chosen - rejected  # (B,)
    if margin is not None:
        difference = difference - margin
    losses = -logsigmoid(difference)  # log(sigmoid(x)) would be -inf from about x = -104 on in float32
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * logsigmoid(-difference)
    return losses.mean() if weight is None else (weight * losses).sum()


def centering_loss(chosen: Tensor, rejected: Tensor, weight: Tensor | None = None) -> Tensor:
    """(chosen + rejected)^2, averaged over comparisons: it holds the mean of two scores near 0.

    Eisenstein et al. (2023, arXiv:2312.09244): added to the Bradley-Terry loss with a small coefficient it
    says what comparisons leave open, the constant in the scores, so that several reward models can be averaged.

    Args:
        chosen: (B,) scores.
        rejected: (B,) scores.
        weight: (B,) of each comparison, in place of 1 / B.

    Raises:
        ValueError: the shapes differ or there is no comparison.
    """
    _check(chosen, rejected)
    squares = (chosen + rejected).square()
    return squares.mean() if weight is None else (weight * squares).sum()


def check_smoothing(label_smoothing: float) -> None:
    """Refuse a smoothing under which the wrong response would be preferred.

    Raises:
        ValueError: it is not at least 0 and below 0.5.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"`label_smoothing` should be at least 0 and below 0.5, got {label_smoothing}: it is the probability that "
            "a label is wrong, and at 0.5 comparisons say nothing."
        )


def preference_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Share of comparisons in which the preferred response has the higher score; a tie counts one half.

    Args:
        chosen: (B,) scores of the preferred responses.
        rejected: (B,) scores of the others.

    Returns:
        A scalar in [0, 1]; 0.5 for a model that gives every response the same score.

    Raises:
        ValueError: the shapes differ or there is no comparison.
    """
    _check(chosen, rejected)
    return (torch.sign(chosen - rejected) + 1).mean() / 2


def _check(chosen: Tensor, rejected: Tensor) -> None:
    if chosen.ndim != 1 or chosen.shape != rejected.shape or len(chosen) == 0:
        raise ValueError(
            "`chosen` and `rejected` should both have shape (B,) with B of at least 1, got "
            f"{tuple(chosen.shape)} and {tuple(rejected.shape)}. Shapes that broadcast would compare every response "
            "with every other one."
        )
