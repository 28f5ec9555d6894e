"""`OfflineConfig`: settings of agents that learn from a fixed set of data, checked when made; the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

LRSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Settings of passes over a set of data.

    Raises:
        ValueError: a value that could not train; the message says what it would have done.
    """

    epochs: int = 1
    """Passes over the data, each in another order."""

    batch_size: int = 16
    """Demonstrations or pairs per optimiser step. The last step of an epoch takes what is left."""

    micro_batch_tokens: int | None = None
    """Tokens, prompts included, that go through the policy at once, rows of like length together; gradients accumulate
    over a step. It changes memory and speed, not the gradient. None: what suits the policy: 1,024 for a language model
    on a CPU, 16,384 on a GPU, everything for others."""

    learning_rate: float = 2e-4
    """Of AdamW, its highest. 1e-4 to 1e-3 suits adapters and small policies, 1e-6 to 1e-5 all weights of a language
    model."""

    lr_schedule: LRSchedule = "linear"
    """What follows the warm-up: ``"linear"`` and ``"cosine"`` fall to 0 at the end of the last epoch."""

    warmup_fraction: float = 0.03
    """Share of all steps in which the learning rate rises linearly to its highest."""

    weight_decay: float = 0.0
    """Of AdamW."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("epochs", "batch_size", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is None and name == "micro_batch_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` should be an integer of at least 1, got {value!r}: nothing would be trained."
                )
        for name in ("learning_rate", "max_grad_norm"):
            if not is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(
                    f"`{name}` should be a positive number, got {getattr(self, name)!r}: the policy would never move."
                )
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise ValueError(
                f"`weight_decay` should be a number of at least 0, got {self.weight_decay!r}: weights would grow."
            )
        if not is_number(self.warmup_fraction) or not 0 <= self.warmup_fraction < 1:
            raise ValueError(
                f"`warmup_fraction` should be at least 0 and below 1, got {self.warmup_fraction!r}: the learning rate "
                "would never reach its highest."
            )
        check_choice("lr_schedule", self.lr_schedule, get_args(LRSchedule))


def learning_rate_at(step: int, total: int, config: OfflineConfig) -> float:
    """The learning rate of one step.

    Args:
        step: steps taken before, from 0.
        total: steps of the whole run.
        config: the settings.

    Example:
        Two steps up, then down to what would be 0 in the step after the last:

        >>> config = OfflineConfig(learning_rate=1.0, warmup_fraction=0.5)
        >>> [learning_rate_at(step, 4, config) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    warmup = round(config.warmup_fraction * total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    if config.lr_schedule == "linear":
        return config.learning_rate * (1 - done)
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate


def is_number(value: Any) -> bool:
    """Whether a setting is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse a setting that is none of those that are known.

    Raises:
        ValueError: it is none of them.
    """
    if value not in known:
        raise ValueError(f"`{name}` should be one of {known}, got {value!r}. Choose one of them.")
