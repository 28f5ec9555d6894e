"""Learning a score from comparisons: the Bradley-Terry loss. Knows tensors only, neither models nor texts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None) -> Tensor:
    r"""-log sigmoid(chosen - rejected - margin), averaged over comparisons.

    Under the model of Bradley & Terry (1952), "Rank analysis of incomplete block designs I", the probability that a
    person prefers one response to another is the sigmoid of the difference of their scores; this is the negative log
    likelihood of what people chose. Only differences count: a constant added to every score changes nothing. It is
    eq. 1 of Christiano et al. (2017, arXiv:1706.03741) with certain labels, and eq. 1 of Ouyang et al. (2022,
    arXiv:2203.02155) for two responses.

    Args:
        chosen: (B,) scores of the preferred responses.
        rejected: (B,) scores of the others.
        margin: by how much the preferred one should win, (B,) or one number; None is 0.

    Returns:
        A scalar in nats; log 2 where all scores are equal.

    Raises:
        ValueError: the shapes differ or there is no comparison.

    >>> chosen, rejected = torch.tensor([2.0, 0.5, -1.0, 3.0]), torch.tensor([1.0, 1.5, 0.0, 1.0])
    >>> round(bradley_terry_loss(chosen, rejected).item(), 4)
    0.7667
    """
    _check(chosen, rejected)
    difference = chosen - rejected  # (B,)
    if margin is not None:
        difference = difference - margin
    return -logsigmoid(difference).mean()  # log(sigmoid(x)) would be -inf from about x = -104 on in float32


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
