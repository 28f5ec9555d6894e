"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and the variants that mend its biases.

One iteration is that of `OnPolicy`. GRPO's own:

    1. rollout         a group of responses to each prompt
    5. advantages      a response's shaped return, centred and scaled within its group, for each of its tokens
    6. optimise        clipped policy loss on ratios of tokens, or of whole responses

=======================  ===============================================================================================
as published             ``GRPOConfig()``; with the published KL, ``kl_loss_coef=0.04, kl_loss_estimator="k3"`` in
                         environments without a toll. k3 in the loss has the gradient of the other KL, see `kl_loss`.
Dr. GRPO                 ``scale_by="none", loss_mode="seq-mean-token-sum"`` (arXiv:2503.20783): no bias towards prompts
                         that are easy or hard, nor towards long bad responses. Up to (G - 1) / G it is `RLOO`.
DAPO's loss              ``clip_range_high=0.28, loss_mode="token-mean"`` (arXiv:2503.14476).
GSPO's ratio             ``ratio_level="sequence", clip_range=3e-4, clip_range_high=4e-4`` (arXiv:2507.18071).
=======================  ===============================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from textenv.agents.advantages import SCALE_BY, ScaleBy, grpo, returns_to_go
from textenv.agents.losses import LossMode, response_means
from textenv.agents.on_policy import OnPolicy, Terms
from textenv.agents.on_policy_config import OnPolicyConfig
from textenv.agents.types import PolicyOutput, Rollout


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(OnPolicyConfig):
    """Settings of `GRPO`."""

    samples_per_prompt: int = 4
    """Responses to each prompt, at least 2. The paper takes 64."""

    epochs: int = 1
    """Passes over each batch, the paper's mu."""

    scale_by: ScaleBy = "group"
    """What centred returns are divided by: the standard deviation of their ``"group"``, of the ``"batch"``, or
    ``"none"``. See `textenv.agents.advantages.grpo` for the bias of the first."""

    ratio_level: Literal["token", "sequence"] = "token"
    """``"sequence"``: all tokens of a response share one ratio, the geometric mean of theirs, which is clipped as one
    (GSPO, arXiv:2507.18071, eq. 7). Its values stay nearer to 1: it wants a far smaller clip range."""

    loss_mode: LossMode = "seq-mean-token-mean"
    """How tokens are averaged, see `aggregate`. The published one gives each response the same weight: its tokens share
    it, so that a bad response loses less per token the longer it is (arXiv:2503.20783, section 3.1)."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        self._check_group()
        self._check_choice("scale_by", SCALE_BY)
        self._check_choice("ratio_level", ("token", "sequence"))


class GRPO(OnPolicy):
    """Clipped policy gradient on advantages relative to a group. Values are not used.

    Arguments and errors are those of `OnPolicy`.
    """

    config_class = GRPOConfig
    config: GRPOConfig

    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Step 5: one advantage for all tokens of a response, and returns to go."""
        config = self.config
        returns = returns_to_go(rewards, response_mask, config.gamma)
        advantages = grpo(returns[:, 0], response_mask.any(-1), config.samples_per_prompt, config.scale_by)
        return advantages[:, None] * response_mask, returns

    def loss_terms(
        self,
        batch: Rollout,
        output: PolicyOutput,
        old_logprobs: Tensor,
        weights: Tensor | None,
        mean: Callable[[Tensor], Tensor],
    ) -> Terms:
        """The clipped policy loss, on ratios of tokens or of whole responses."""
        if self.config.ratio_level == "sequence":
            logprobs = response_means(output.logprobs, batch.response_mask)
            output = dataclasses.replace(output, logprobs=logprobs)
            old_logprobs = response_means(old_logprobs, batch.response_mask)
        return super().loss_terms(batch, output, old_logprobs, weights, mean)
