"""How far an engine's log-probabilities are from the trainer's, and the weight that corrects for it. Pure torch.

An engine of its own (vLLM) computes the same distribution with other kernels, other batch shapes, sometimes another
precision. Tokens are drawn from the engine's mu, gradients are the trainer's pi. Each iteration logs the gap; with
``logprobs_from="engine"`` a truncated importance weight corrects for it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from textenv.agents.losses import log_ratio
from textenv.agents.types import Rollout

MISMATCH = ("mismatch_q01", "mismatch_q50", "mismatch_q99", "mismatch_max", "mismatch_outside")
LARGEST = 1_000_000
"""Gaps that quantiles look at, evenly spaced."""


def mismatch_figures(
    logprobs: Float[Tensor, "B T"] | None,
    engine_logprobs: Float[Tensor, "B T"] | None,
    response_mask: Bool[Tensor, "B T"],
) -> dict[str, float]:
    """Figures of log pi - log mu over real tokens; nan where one of the two is unknown.

    Args:
        logprobs: the trainer's, under the weights that the engine had.
        engine_logprobs: the engine's.
        response_mask: True on real tokens.

    Returns:
        Quantiles 0.01, 0.5 and 0.99, nats; the largest absolute value; and the share of ratios pi / mu outside 0.9 to
        1.1.
    """
    if logprobs is None or engine_logprobs is None or not response_mask.any():
        return dict.fromkeys(MISMATCH, math.nan)
    gaps = (logprobs - engine_logprobs)[response_mask].float().cpu()
    ratio = gaps.exp()
    seen = gaps[:: max(1, len(gaps) // LARGEST)]
    low, middle, high = torch.quantile(seen, torch.tensor([0.01, 0.5, 0.99])).tolist()
    outside = float(((ratio < 0.9) | (ratio > 1.1)).float().mean())
    return dict(zip(MISMATCH, (low, middle, high, float(gaps.abs().max()), outside), strict=True))


class Proximal:
    """The log-probabilities that ratios are taken against, and a weight per token.

    With the trainer's own log-probabilities both are plain: those of the rollout, and no weight. With the engine's, no
    pass has computed the trainer's before the update, so the first pass that trains on a token gives them: pi_k, under
    the weights that the batch began with where the batch is one minibatch, else under those of that minibatch. The
    objective is then that of decoupled PPO (Hilton et al. 2022, arXiv:2110.00641, eq. 2): ratios pi / pi_k are clipped,
    and min(pi_k / mu, clip) corrects for who wrote, truncated as in Yao et al. 2025 ("Your efficient RL framework
    secretly brings you off-policy RL training", TIS).

    Args:
        rollout: the batch; its `logprobs` are mu where they are the engine's.
        importance_clip: the largest weight; None where the rollout's log-probabilities are the trainer's.
    """

    def __init__(self, rollout: Rollout, importance_clip: float | None) -> None:
        self._rollout, self._clip = rollout, importance_clip
        self._seen = torch.full((len(rollout.logprobs),), importance_clip is None, device=rollout.logprobs.device)
        self._logprobs = rollout.logprobs.clone() if importance_clip is not None else rollout.logprobs

    def of(self, rows: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities to compare with (b, T), and weights (b, T) or None.

        Args:
            rows: (b,) numbers of episodes.
            logprobs: (b, T), the policy's present ones for them; remembered when these episodes are new.
        """
        if self._clip is None:
            return self._logprobs[rows], None
        new = rows[~self._seen[rows]]
        self._logprobs[new] = logprobs.detach()[~self._seen[rows]].float()
        self._seen[new] = True
        old, mask = self._logprobs[rows], self._rollout.response_mask[rows]
        return old, log_ratio(old, self._rollout.logprobs[rows], mask).exp().clamp_max(self._clip)

    def figures(self) -> dict[str, float]:
        """Figures of the mismatch of this batch; episodes that no pass has seen are left out."""
        mask = self._rollout.response_mask & self._seen[:, None]
        return mismatch_figures(self._logprobs, self._rollout.engine_logprobs, mask)
