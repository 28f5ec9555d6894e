"""`SFTConfig`: every setting of SFT, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from textenv.agents.losses import LOSS_MODES, LossMode
from textenv.agents.offline_config import OfflineConfig, check_choice


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """Settings of `SFT`: those of `OfflineConfig`, a batch being one of demonstrations, and how the loss is averaged.

    Raises:
        ValueError: a value that could not train; the message says what it would have done.
    """

    loss_mode: LossMode = "token-mean"
    """How tokens are averaged, see `aggregate`. ``"token-mean"`` is the likelihood of all tokens;
    ``"seq-mean-token-mean"`` lets short responses weigh as much as long ones."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        check_choice("loss_mode", self.loss_mode, LOSS_MODES)
