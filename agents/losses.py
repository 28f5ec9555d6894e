"""Losses and statistics over response tokens. Pure torch: knows no environment, policy or text.

Legend: B responses, T response tokens; `response_mask` is True on real tokens. What stands at masked positions, NaN
included, moves neither a value nor a gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LossMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
LOSS_MODES: tuple[str, ...] = get_args(LossMode)


class Counts(NamedTuple):
    """Denominators of a whole batch, so that shards of it add up to its mean."""

    tokens: float
    sequences: float

    @classmethod
    def of(cls, response_mask: Bool[Tensor, "B T"]) -> Counts:
        """Real tokens, and responses that have any."""
        return cls(float(response_mask.sum()), float(response_mask.any(-1).sum()))


def aggregate(
    x: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    mode: LossMode = "token-mean",
    counts: Counts | None = None,
) -> Float[Tensor, ""]:
    """One number from (B, T): the only mean that losses and metrics use.

    - ``"token-mean"``: every token weighs the same (long responses weigh more).
    - ``"seq-mean-token-mean"``: every response weighs the same, its tokens share that weight.
    - ``"seq-mean-token-sum"``: sums over tokens, averaged over responses (the policy gradient of whole responses).

    Args:
        x: values per token.
        response_mask: True on real tokens.
        mode: see above.
        counts: denominators of the whole batch when `x` is a shard of it; the shards' results add up to the whole's.

    Returns:
        A scalar; 0 where there is no real token.

    Raises:
        ValueError: an unknown mode.
    """
    tokens, sequences = counts or Counts.of(response_mask)
    x = torch.where(response_mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    if mode == "token-mean":
        return x.sum() / max(tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return x.sum() / max(sequences, 1.0)
    if mode == "seq-mean-token-mean":
        return (x.sum(-1) / response_mask.sum(-1).clamp_min(1)).sum() / max(sequences, 1.0)
    raise ValueError(f"`mode` should be one of {LOSS_MODES}, got {mode!r}.")


def response_means(x: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The mean over each response's tokens, at every one of them; 0 elsewhere."""
    real = torch.where(response_mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    means = real.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp_min(1)
    return means * response_mask


def log_ratio(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The log-ratio log pi - log pi_old, 0 (ratio 1) at masked positions."""
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return torch.where(response_mask, logprobs, zero) - torch.where(response_mask, old_logprobs, zero)


def clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "B T"]:
    """max(-A ratio, -A clip(ratio, 1 - clip_range, 1 + clip_range_high)) per token, to be minimised.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with the sign turned. The lower end of the range acts on tokens with
    A < 0 alone, the upper end on those with A > 0: a higher upper end lets rare good tokens grow further (DAPO, Yu et
    al. 2025, arXiv:2503.14476, section 3.1).

    Where A < 0 nothing bounds the loss from above: a token whose probability has grown tenfold pushes with ten times
    its advantage. `dual_clip` c makes the loss min(..., c |A|) there, so that beyond a ratio of c there is no gradient
    (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    Ratio 5, clip range 0.2 to both sides:

    ======  ================  ================
    A       without           dual_clip=3
    ======  ================  ================
    1       -1.2, clipped     -1.2, clipped
    -1      5.0, gradient 5   3.0, gradient 0
    ======  ================  ================

    Args:
        logprobs: under the policy that trains; the only input that gets a gradient.
        old_logprobs: under the policy that wrote the batch.
        advantages: per token.
        response_mask: True on real tokens.
        clip_range: how far the ratio of a token with A < 0 may fall below 1; above 0.
        clip_range_high: how far that of a token with A > 0 may rise above 1; None: as far as it may fall.
        dual_clip: c, above 1; None: no bound.

    Returns:
        Losses (B, T), 0 at masked positions.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    advantages = torch.where(response_mask, advantages, torch.zeros((), dtype=ratio.dtype, device=ratio.device))
    high = clip_range if clip_range_high is None else clip_range_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses


def clipped_value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    clip_range_vf: float | None = None,
) -> Float[Tensor, "B T"]:
    """0.5 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) per token, or 0.5 (V - G)^2 without a clip range.

    The clipping of OpenAI's baselines and of Ziegler et al. 2019's code. Andrychowicz et al. 2021 (arXiv:2006.05990,
    section 3.1) found that it hurts, hence off by default.

    Returns:
        Losses (B, T), 0 at masked positions.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    values, old_values, returns = (torch.where(response_mask, x, zero) for x in (values, old_values, returns))
    errors = (values - returns).square()
    if clip_range_vf is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range_vf, clip_range_vf)
        errors = torch.maximum(errors, (clipped - returns).square())
    return 0.5 * errors


def approx_kl(logratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """(ratio - 1) - log ratio per token: never negative, unbiased for KL(pi_old || pi) on pi_old's samples.

    Schulman 2020, http://joschu.net/blog/kl-approx.html, k3.
    """
    return torch.expm1(logratio) - logratio


def explained_variance(
    values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> float:
    """1 - Var(returns - values) / Var(returns) over real tokens; nan where the returns do not vary."""
    values, returns = values[response_mask].double(), returns[response_mask].double()
    variance = returns.var(correction=0) if returns.numel() else torch.tensor(0.0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else float("nan")
