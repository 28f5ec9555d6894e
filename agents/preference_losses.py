"""Losses on comparisons: what a policy learns from "this response rather than that one". Pure torch.

Everything is a function of one number per pair, the difference of the two responses' log-ratios in nats:

    h = (log pi(chosen) - log ref(chosen)) - (log pi(rejected) - log ref(rejected))

    sigmoid   -log sigma(beta h)            DPO: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7
    ipo       (h - 1 / (2 beta))^2          IPO: Azar et al. 2023 (arXiv:2310.12036), eq. 17, its tau is our beta

`beta` is the `kl_coef` of the objective E[score] - kl_coef KL(pi || ref), in units of the score per nat.

**Sums, not averages.** A log-probability here is that of the whole response, the sum over its tokens, as in both
papers: a language model is a distribution over responses, and only with sums is the optimum one of the objective above.
Some libraries divide by the number of tokens in IPO. Then 1 / (2 beta) is a gap per token, the nats between two
responses grow with their length, and a `beta` that was chosen for one convention is wrong in the other by that factor.

**Labels that err.** With probability `label_smoothing` e the label is the wrong way round, and the loss is the mean
over both readings, (1 - e) l(h) + e l(-h): for ``"sigmoid"`` the conservative DPO of Mitchell 2023 ("A note on DPO
with noisy preferences and relationship to IPO", https://ericmitchell.ai/cdpo.pdf), which stops at sigma(beta h) = 1 - e
instead of driving h without end; for ``"ipo"`` a parabola around (1 - 2 e) / (2 beta). One e per pair says how sure
each label is. With e = sigma(-(score_chosen - score_rejected)), the probability that somebody who judges as Bradley and
Terry (1952) errs, ``"sigmoid"`` is the expected DPO loss, without the noise of drawn labels: h is then led to the
difference of the scores over beta, pair by pair.

Legend: N pairs.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceLoss = Literal["sigmoid", "ipo"]
PREFERENCE_LOSSES: tuple[str, ...] = get_args(PreferenceLoss)

PerPair = Float[Tensor, "N"]


def log_ratio_gap(
    chosen_logprobs: PerPair,
    rejected_logprobs: PerPair,
    ref_chosen_logprobs: PerPair,
    ref_rejected_logprobs: PerPair,
) -> PerPair:
    """The h of each pair, nats: how much further the policy has raised the chosen response than the rejected one.

    Example:
        The chosen response has doubled in probability and the other halved, so h = log 4:

        >>> logs = [torch.tensor([p]).log() for p in (0.5, 0.1, 0.25, 0.2)]
        >>> log_ratio_gap(*logs).exp().round(decimals=4)
        tensor([4.])
    """
    return (chosen_logprobs - ref_chosen_logprobs) - (rejected_logprobs - ref_rejected_logprobs)


def dpo_loss(
    chosen_logprobs: PerPair,
    rejected_logprobs: PerPair,
    ref_chosen_logprobs: PerPair,
    ref_rejected_logprobs: PerPair,
    beta: float,
    loss: PreferenceLoss = "sigmoid",
    label_smoothing: float | PerPair = 0.0,
) -> PerPair:
    """The loss of each pair; see above for the formulas.

    At the start of training policy and reference agree, h is 0, and whatever the labels are the loss is log 2 for
    ``"sigmoid"`` and 1 / (4 beta^2) for ``"ipo"``. h = log 4 at beta = 1/2 and 1/10, and with one label in five wrong:

    =========  ======  ===  ================================  =======
    loss       beta    e                                       value
    =========  ======  ===  ================================  =======
    sigmoid    0.5     0    -log(2/3)                          0.4055
    sigmoid    0.5     0.2  -0.8 log(2/3) - 0.2 log(1/3)       0.5441
    ipo        0.5     0    (1.3863 - 1)^2                     0.1492
    ipo        0.1     0    (1.3863 - 5)^2                     13.0589
    ipo        0.5     0.2  0.8 * 0.3863^2 + 0.2 * 2.3863^2    1.2583
    =========  ======  ===  ================================  =======

    Example:
        >>> logs = [torch.tensor([p]).log() for p in (0.5, 0.1, 0.25, 0.2)]
        >>> dpo_loss(*logs, beta=0.5), dpo_loss(*logs, beta=0.5, loss="ipo")
        (tensor([0.4055]), tensor([0.1492]))

    Args:
        chosen_logprobs: of the whole chosen response under the policy, summed over its tokens.
        rejected_logprobs: of the rejected one.
        ref_chosen_logprobs: of the chosen one under the reference.
        ref_rejected_logprobs: of the rejected one.
        beta: `kl_coef`, above 0.
        loss: see above.
        label_smoothing: how likely a label is wrong, 0 to 1; one for all pairs or (N,). Beyond 1/2 the labels say the
            opposite of what they are called.

    Raises:
        ValueError: an unknown loss, a `beta` that is not positive, or a smoothing outside 0 to 1.
    """
    check_preference_loss(beta, loss)
    gap = log_ratio_gap(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    smoothing = torch.as_tensor(label_smoothing, dtype=gap.dtype, device=gap.device)
    if not bool(((smoothing >= 0) & (smoothing <= 1)).all()):
        raise ValueError(
            f"`label_smoothing` should be a probability, 0 to 1, got {label_smoothing}: one of the two readings of a "
            "label would weigh less than nothing."
        )
    if loss == "sigmoid":
        right, wrong = -logsigmoid(beta * gap), -logsigmoid(-beta * gap)
    else:
        right, wrong = (gap - 0.5 / beta).square(), (gap + 0.5 / beta).square()
    return (1 - smoothing) * right + smoothing * wrong


def check_preference_loss(beta: float, loss: str) -> None:
    """Refuse settings that give no loss.

    Raises:
        ValueError: an unknown loss, or a `beta` that is not positive and finite.
    """
    if loss not in PREFERENCE_LOSSES:
        raise ValueError(f"`loss` should be one of {PREFERENCE_LOSSES}, got {loss!r}. Choose one of them.")
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < float("inf"):
        raise ValueError(
            f"`beta` should be a positive number, got {beta!r}. It is the price of a nat of KL (`kl_coef`) in units of "
            "the score: at 0 leaving the reference costs nothing, and comparisons alone have no optimum."
        )
