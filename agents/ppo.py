"""Proximal policy optimisation on text environments (Schulman et al. 2017, arXiv:1707.06347; Ziegler et al. 2019).

One iteration is that of `OnPolicy`, whose siblings differ from each other in what follows. PPO's own:

    5. advantages      GAE over tokens, whitened over the batch
    6. optimise        clipped policy loss, and the value loss
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from textenv.agents.advantages import gae, whiten
from textenv.agents.config import PPOConfig
from textenv.agents.losses import clipped_value_loss
from textenv.agents.on_policy import OnPolicy, Terms
from textenv.agents.types import PolicyOutput, Rollout


class PPO(OnPolicy):
    """Token-level PPO with a value head. `learn`, `predict`, `save` and `load` are those of `Agent`.

    Arguments and errors are those of `OnPolicy`.
    """

    config_class = PPOConfig
    config: PPOConfig

    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Step 5: generalised advantage estimates, and advantages plus values as returns."""
        config = self.config
        advantages, returns = gae(rewards, values, response_mask, config.gamma, config.gae_lambda)
        return whiten(advantages, response_mask) if config.whiten_advantages else advantages, returns

    def loss_terms(
        self,
        batch: Rollout,
        output: PolicyOutput,
        old_logprobs: Tensor,
        weights: Tensor | None,
        mean: Callable[[Tensor], Tensor],
    ) -> Terms:
        """Policy loss + vf_coef * value loss."""
        config = self.config
        errors = clipped_value_loss(
            output.values, batch.values, batch.returns, batch.response_mask, config.clip_range_vf
        )
        terms = super().loss_terms(batch, output, old_logprobs, weights, mean)
        return {**terms, "value_loss": (config.vf_coef, mean(errors))}
