"""Advantages over response tokens. Pure torch: knows no environment, policy or text.

Legend: B responses, T response tokens. A response's tokens are the first of its row; `response_mask` is True on them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
    # Rounding leaves equal entries a spread of 1e-8 of their size: dividing by it would make noise of size 1.
    flat = std <= 1e-6 * real.abs().max()
    whitened = torch.zeros_like(centred) if flat else centred / (std + epsilon)
    return torch.zeros_like(x).masked_scatter(response_mask, whitened)
