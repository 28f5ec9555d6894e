"""`PPOConfig`: every setting of PPO, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from textenv.agents.losses import LOSS_MODES, LossMode


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of `PPO`. The KL coefficient is not among them: it belongs to the environment's `KLPenalty`.

    Raises:
        ValueError: a value that could not train; the message says what it would have done.
    """

    episodes_per_iteration: int | None = None
    """Episodes that each iteration collects; None: as many as there are environments."""

    epochs: int = 4
    """Passes over each batch."""

    num_minibatches: int = 1
    """Optimiser steps per pass. With 1 the first pass of each iteration starts from ratios of exactly 1."""

    micro_batch_size: int | None = None
    """Episodes that go through the policy at once; gradients accumulate over a minibatch. None: all of them. It changes
    memory and speed, not the gradient: denominators are those of the minibatch."""

    learning_rate: float = 3e-4
    """Of AdamW. 1e-4 to 1e-3 suits adapters and small policies, 1e-6 to 1e-5 all weights of a language model."""

    lr_schedule: Literal["constant", "linear"] = "constant"
    """``"linear"`` falls to 0 at the end of `learn`."""

    weight_decay: float = 0.0
    """Of AdamW."""

    gamma: float = 1.0
    """Discount. 1, because the score judges the whole response: less would make short responses worth more."""

    gae_lambda: float = 0.95
    """Between one-step advantages (0) and Monte Carlo returns (1)."""

    clip_range: float = 0.2
    """Ratios beyond 1 +- this get no further gradient."""

    clip_range_vf: float | None = None
    """The same for values; None: off (arXiv:2006.05990 found that it hurts)."""

    vf_coef: float = 0.1
    """Weight of the value loss."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    whiten_advantages: bool = True
    """Mean 0 and standard deviation 1 over the batch's tokens."""

    loss_mode: LossMode = "token-mean"
    """How tokens are averaged, see `aggregate`."""

    check_start: bool = True
    """Check before the first update that the policy is the reference and that ratios are 1. Turn it off for a policy
    that is meant to start elsewhere."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("episodes_per_iteration", "epochs", "num_minibatches", "micro_batch_size"):
            value = getattr(self, name)
            optional = name in ("episodes_per_iteration", "micro_batch_size")
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (value is None and optional) and not (whole and value >= 1):
                raise ValueError(
                    f"`{name}` should be an integer of at least 1, got {value!r}: nothing would be trained."
                )
        for name in ("learning_rate", "max_grad_norm", "clip_range"):
            if not self._is_number(name) or getattr(self, name) <= 0:
                raise ValueError(
                    f"`{name}` should be a positive number, got {getattr(self, name)!r}: the policy would never move."
                )
        for name in ("gamma", "gae_lambda"):
            if not self._is_number(name) or not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"`{name}` should be in [0, 1], got {getattr(self, name)!r}: returns would grow without bound."
                )
        for name in ("vf_coef", "weight_decay"):
            if not self._is_number(name) or getattr(self, name) < 0:
                raise ValueError(f"`{name}` should be a number of at least 0, got {getattr(self, name)!r}.")
        if self.clip_range_vf is not None and (not self._is_number("clip_range_vf") or self.clip_range_vf <= 0):
            raise ValueError(f"`clip_range_vf` should be positive or None, got {self.clip_range_vf!r}.")
        for name in ("whiten_advantages", "check_start"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` should be True or False, got {getattr(self, name)!r}.")
        if self.loss_mode not in LOSS_MODES:
            raise ValueError(f"`loss_mode` should be one of {LOSS_MODES}, got {self.loss_mode!r}.")
        if self.lr_schedule not in ("constant", "linear"):
            raise ValueError(f"`lr_schedule` should be 'constant' or 'linear', got {self.lr_schedule!r}.")

    def _is_number(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
