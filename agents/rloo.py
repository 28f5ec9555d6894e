"""REINFORCE leave-one-out on text environments (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

One iteration is that of `OnPolicy`. RLOO's own:

    1. rollout         a group of responses to each prompt
    5. advantages      a response's shaped return minus the mean of its group's other returns, for each of its tokens
    6. optimise        one step on the whole batch: ratios are 1, so that the clipped loss is -A log pi
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from textenv.agents.advantages import returns_to_go, rloo
from textenv.agents.losses import LossMode
from textenv.agents.on_policy import OnPolicy
from textenv.agents.on_policy_config import OnPolicyConfig


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(OnPolicyConfig):
    """Settings of `RLOO`. With the defaults the expected gradient is that of the objective, exactly."""

    samples_per_prompt: int = 4
    """Responses to each prompt, at least 2: each one's baseline is the mean of the others. The paper takes 2 and 4."""

    epochs: int = 1
    """Passes over each batch. From the second on, ratios leave 1 and the clip range acts, as in PPO."""

    loss_mode: LossMode = "seq-mean-token-sum"
    """How tokens are averaged, see `aggregate`; sums over responses give the gradient of the objective."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        self._check_group()


class RLOO(OnPolicy):
    """Policy gradient with the rest of the group as baseline. Values are not used.

    Arguments and errors are those of `OnPolicy`.
    """

    config_class = RLOOConfig
    config: RLOOConfig

    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Step 5: one advantage for all tokens of a response, and returns to go."""
        config = self.config
        returns = returns_to_go(rewards, response_mask, config.gamma)
        advantages = rloo(returns[:, 0], response_mask.any(-1), config.samples_per_prompt)
        return advantages[:, None] * response_mask, returns
