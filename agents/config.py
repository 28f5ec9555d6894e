"""`PPOConfig`: every setting of PPO, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from textenv.agents.on_policy_config import OnPolicyConfig


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Settings of `PPO`: those of `OnPolicyConfig`, and what advantages and the value head need.

    Raises:
        ValueError: a value that could not train; the message says what it would have done.
    """

    gae_lambda: float = 0.95
    """Between one-step advantages (0) and Monte Carlo returns (1)."""

    clip_range_vf: float | None = None
    """Values further than this from those of the rollout get no further gradient; None: off (arXiv:2006.05990 found
    that it hurts)."""

    vf_coef: float = 0.1
    """Weight of the value loss."""

    whiten_advantages: bool = True
    """Mean 0 and standard deviation 1 over the batch's tokens."""

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The agent's part of a published set-up; `textenv.agents.Preset` has the environment's and the policy's too.

        Args:
            name: ``"instructgpt"``, ``"summarize"``, ``"n_plus"`` or ``"ziegler"``. The function of that name in
                `textenv.agents.presets` tells the source of every value.
            **overrides: fields that take another value than the published one.

        Raises:
            ValueError: there is no preset of that name, or an override that could not train.
        """
        from textenv.agents.presets import Preset

        return cls(**{**Preset(name).settings, **overrides})

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        self._check_shares("gae_lambda")
        self._check_weights("vf_coef")
        self._check_bounds("clip_range_vf")
        self._check_switches("whiten_advantages")
