"""The KL to the reference as a term of the loss, and what its gradient really is. Pure torch.

The usual place of the KL is the reward (`KLPenalty`), where its k1 estimate, a constant to the optimiser, gives the
exact gradient of E[score] - kl_coef * KL(pi || pi_ref) over whole responses. This is the other place: an estimate per
token, differentiated. With u = log pi(y) - log pi_ref(y) for a token y drawn from pi after a prefix s:

=========  ====================  ==================  =====================================================
estimator  value                 gradient            expected gradient over y ~ pi(. | s)
=========  ====================  ==================  =====================================================
k1         u                     d log pi            0: on average it does nothing, it only adds noise
k2         u^2 / 2               u d log pi          that of KL(pi(. | s) || pi_ref(. | s)), exactly
k3         exp(-u) - 1 + u       (1 - exp(-u)) d ..  that of KL(pi_ref(. | s) || pi(. | s)): the other KL
=========  ====================  ==================  =====================================================

(Schulman 2020, http://joschu.net/blog/kl-approx.html, names the three. The values of k1 and k3 are unbiased estimates
of KL(pi || pi_ref), that of k2 is biased: an unbiased value and an unbiased gradient are two things.)

Two limits hold for all of them:

- **Later tokens are left out.** A token's choice decides which prefixes come next, and so how much KL they will cost.
  The gradient of the KL of whole responses has that part; a loss summed over tokens holds the prefixes fixed and does
  not. With one token the two agree, and so they do where no choice changes the KL still to come; from two tokens on
  they differ in general. k1 in the reward has that part. So a policy trained with the KL in the loss settles where
  every token is its own tilt of the reference, pi(y | s) ~ pi_ref(y | s) exp(Q(s, y) / coefficient) with Q the
  expected score alone, and not at the optimum of score - coefficient * KL.
- **On-policy samples.** The expectations are over the policy that trains. From the second optimiser step of an
  iteration on the tokens are those of an older policy, and the expected gradient is off in proportion to the ratios'
  distance from 1. Weighting each token's term by its ratio, held constant, would put k2 right for given prefixes.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from textenv.agents.losses import log_ratio

KLLossEstimator = Literal["k1", "k2", "k3"]
KL_LOSS_ESTIMATORS: tuple[str, ...] = get_args(KLLossEstimator)


def kl_loss(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    estimator: KLLossEstimator = "k2",
) -> Float[Tensor, "B T"]:
    """u, u^2 / 2 or exp(-u) - 1 + u per token with u = log pi - log pi_ref, to be differentiated and minimised.

    Worked example, a token with pi = 0.5 and pi_ref = 0.25, so u = log 2 = 0.693: k1 is 0.693 with the gradient 1 in
    log pi, k2 0.240 with 0.693, k3 0.193 with 0.5.

    Args:
        logprobs: under the policy that trains; the only input that gets a gradient.
        ref_logprobs: under the reference.
        response_mask: True on real tokens.
        estimator: ``"k2"`` has the right gradient per token; see the module for what the others do.

    Returns:
        Losses (B, T) in nats, 0 at masked positions.

    Raises:
        ValueError: an unknown estimator.
    """
    u = log_ratio(logprobs, ref_logprobs, response_mask)
    if estimator == "k1":
        return u
    if estimator == "k2":
        return 0.5 * u.square()
    if estimator == "k3":
        return torch.expm1(-u) + u
    raise ValueError(f"`estimator` should be one of {KL_LOSS_ESTIMATORS}, got {estimator!r}.")
