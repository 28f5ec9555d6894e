"""Advantages over response tokens. Pure torch: knows no environment, policy or text.

Legend: B responses, T response tokens. A response's tokens are the first of its row; `response_mask` is True on them.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ScaleBy = Literal["group", "batch", "none"]
SCALE_BY: tuple[str, ...] = get_args(ScaleBy)
FLAT = 1e-6
"""Spreads below this share of the largest entry count as none: rounding leaves equal entries a spread of 1e-8 of their
size, and dividing by it would make noise of size 1."""


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  G_t = A_t + V_t.

    The value beyond a response's last token is 0, whether a stop id or the budget ended it: the budget belongs to the
    task, so nothing is bootstrapped there.

    Args:
        rewards: per token.
        values: V of the state in which each token was chosen.
        response_mask: True on real tokens; entries elsewhere are not read.
        gamma: discount. 1 is right for scores of whole responses: a discount would make short responses worth more.
        gae_lambda: 0 gives one-step advantages, 1 Monte Carlo returns minus values.

    Returns:
        advantages and returns (B, T), 0 where the mask is False.
    """
    zero = torch.zeros((), dtype=rewards.dtype, device=rewards.device)
    rewards = torch.where(response_mask, rewards, zero)
    values = torch.where(response_mask, values, zero)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(response_mask[:, t], delta + gamma * gae_lambda * next_advantage, zero)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, torch.where(response_mask, advantages + values, zero)


def whiten(x: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], epsilon: float = 1e-8) -> Float[Tensor, "B T"]:
    """Mean 0 and (population) standard deviation 1 over the real tokens of the whole batch, 0 elsewhere.

    Equal entries become 0, not NaN.
    """
    real = x[response_mask]
    if real.numel() == 0:
        return torch.zeros_like(x)
    centred = real - real.mean()
    std = centred.square().mean().sqrt()
    flat = std <= FLAT * real.abs().max()
    whitened = torch.zeros_like(centred) if flat else centred / (std + epsilon)
    return torch.zeros_like(x).masked_scatter(response_mask, whitened)


def returns_to_go(
    rewards: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """G_t = r_t + gamma G_{t+1} per token, 0 where the mask is False; the first column is that of whole responses."""
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma, gae_lambda=1.0)[1]


def leave_one_out(returns: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Each token's return minus the mean of the other responses' at the same position; a lone one keeps its return.

    A baseline that depends on other samples only, so that the policy gradient stays unbiased (Williams 1992, section 4;
    Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!").

    Args:
        returns: per token, to go.
        response_mask: True on real tokens.
    """
    returns = torch.where(response_mask, returns, torch.zeros_like(returns))
    others = (response_mask.sum(0) - 1).clamp_min(1)
    baseline = (returns.sum(0) - returns) / others
    return torch.where(response_mask, returns - baseline, torch.zeros_like(returns))


def rloo(returns: Float[Tensor, B], kept: Bool[Tensor, B], samples_per_prompt: int) -> Float[Tensor, B]:  # noqa: F821
    """A_i = R_i - mean of the group's other returns (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

    A group's returns 1, 2, 6 give 1 - 4 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5.

    Args:
        returns: of whole responses; the responses to one prompt are next to each other.
        kept: False on dropped samples, which take part in nothing.
        samples_per_prompt: G.

    Returns:
        Advantages; 0 for dropped samples and for those without another one in their group.
    """
    centred, counts = _centred(returns, kept, samples_per_prompt)
    return (centred * counts / (counts - 1).clamp_min(1)).flatten()


def grpo(
    returns: Float[Tensor, B],  # noqa: F821
    kept: Bool[Tensor, B],  # noqa: F821
    samples_per_prompt: int,
    scale_by: ScaleBy = "group",
    epsilon: float = 1e-8,
) -> Float[Tensor, B]:  # noqa: F821
    """A_i = (R_i - mean of the group) / std of the group (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A group's returns 1, 2, 6: mean 3, sample standard deviation sqrt(7) = 2.65, advantages -0.76, -0.38, 1.13.

    Dividing by the group's own standard deviation makes prompts on which all responses are alike count as much as those
    on which they differ: the gradient is that of another objective (Liu et al. 2025, arXiv:2503.20783, section 3.1).
    The group's mean contains the response itself, so that without scaling the expected gradient is (G - 1) / G of the
    exact one: its direction is right.

    Args:
        returns: of whole responses; the responses to one prompt are next to each other.
        kept: False on dropped samples, which take part in nothing.
        samples_per_prompt: G.
        scale_by: ``"group"``: as above. ``"batch"``: one standard deviation, of all the centred returns. ``"none"``:
            no division (Dr. GRPO, arXiv:2503.20783).
        epsilon: added to standard deviations.

    Returns:
        Advantages; 0 for dropped samples and where all returns of a group (or of the batch) are equal.

    Raises:
        ValueError: an unknown `scale_by`.
    """
    if scale_by not in SCALE_BY:
        raise ValueError(f"`scale_by` should be one of {SCALE_BY}, got {scale_by!r}.")
    centred, counts = _centred(returns, kept, samples_per_prompt)
    size = torch.where(kept, returns, torch.zeros_like(returns)).abs().view_as(centred)
    squares, free, largest = centred.square().sum(-1, keepdim=True), counts - 1, size.amax(-1, keepdim=True)
    if scale_by == "none":
        return centred.flatten()
    if scale_by == "batch":
        squares, free, largest = squares.sum(), kept.sum() - 1, largest.max()
    std = (squares / free.clamp_min(1)).sqrt()
    return torch.where(std > FLAT * largest, centred / (std + epsilon), torch.zeros_like(centred)).flatten()


def _centred(
    returns: Float[Tensor, B],  # noqa: F821
    kept: Bool[Tensor, B],  # noqa: F821
    samples_per_prompt: int,
) -> tuple[Float[Tensor, "P G"], Float[Tensor, "P 1"]]:
    """Returns minus their group's mean, 0 for dropped samples, and how many a group has kept."""
    grouped, there = returns.view(-1, samples_per_prompt), kept.view(-1, samples_per_prompt)
    zero = torch.zeros((), dtype=returns.dtype, device=returns.device)
    counts = there.sum(-1, keepdim=True).to(returns.dtype)
    mean = torch.where(there, grouped, zero).sum(-1, keepdim=True) / counts.clamp_min(1)
    return torch.where(there, grouped - mean, zero), counts
