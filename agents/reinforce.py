"""REINFORCE on text environments (Williams 1992, doi:10.1007/BF00992696), with a baseline that costs nothing.

One iteration is that of `OnPolicy`. REINFORCE's own:

    5. advantages      what each token still earns, minus what the other responses of the batch earn from there on
    6. optimise        one step on the whole batch: ratios are 1, so that the clipped loss is -A log pi

With a value head as baseline it is `PPO` with ``gae_lambda=1``, ``epochs=1`` and ``whiten_advantages=False``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from textenv.agents.advantages import leave_one_out, returns_to_go
from textenv.agents.losses import LossMode
from textenv.agents.on_policy import OnPolicy
from textenv.agents.on_policy_config import OnPolicyConfig


@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig(OnPolicyConfig):
    """Settings of `REINFORCE`. With the defaults the expected gradient is that of the objective, exactly."""

    epochs: int = 1
    """Passes over each batch. From the second on, ratios leave 1 and the clip range acts, as in PPO."""

    baseline: Literal["batch", "none"] = "batch"
    """``"batch"``: the mean return to go of the other responses at the same position. ``"none"``: nothing is taken off;
    unbiased as well, and noisier."""

    loss_mode: LossMode = "seq-mean-token-sum"
    """How tokens are averaged, see `aggregate`; sums over responses give the gradient of the objective."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        self._check_choice("baseline", ("batch", "none"))


class REINFORCE(OnPolicy):
    """Policy gradient with a leave-one-out baseline over the batch. Values are not used.

    Arguments and errors are those of `OnPolicy`.
    """

    config_class = REINFORCEConfig
    config: REINFORCEConfig

    def advantages(self, rewards: Tensor, values: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Step 5: returns to go minus the baseline, and returns to go."""
        returns = returns_to_go(rewards, response_mask, self.config.gamma)
        if self.config.baseline == "none":
            return returns, returns
        return leave_one_out(returns, response_mask), returns
