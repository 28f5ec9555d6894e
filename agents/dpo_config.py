"""`DPOConfig`: every setting of DPO, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from textenv.agents.offline_config import OfflineConfig, is_number
from textenv.agents.preference_losses import PreferenceLoss, check_preference_loss


@dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Settings of `DPO`: those of `OfflineConfig`, a batch being one of pairs, and the loss.

    Raises:
        ValueError: a value that could not train; the message says what it would have done.
    """

    beta: float = 0.1
    """`kl_coef` of the objective whose optimum DPO looks for: how many units of the score a nat of KL costs. Small
    values let the policy go far from the reference. Give it the `kl_coef` of the environments to compare with agents
    that learn there."""

    loss: PreferenceLoss = "sigmoid"
    """``"sigmoid"`` is DPO, ``"ipo"`` IPO; see `textenv.agents.preference_losses`."""

    label_smoothing: float = 0.0
    """How likely a label is the wrong way round, 0 up to and without 1/2: above 0 conservative DPO."""

    batch_size: int = 32
    """Pairs per optimiser step. The last step of an epoch takes what is left."""

    learning_rate: float = 1e-4
    """Of AdamW, its highest. 5e-5 to 5e-4 suits adapters and small policies, 5e-7 to 5e-6 all weights of a language
    model."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        check_preference_loss(self.beta, self.loss)
        check_label_smoothing(self.label_smoothing)


def check_label_smoothing(label_smoothing: float) -> None:
    """Refuse a probability of wrong labels that leaves nothing to learn.

    Raises:
        ValueError: it is below 0, or 1/2 and more.
    """
    if not is_number(label_smoothing) or not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"`label_smoothing` should be at least 0 and below 0.5, got {label_smoothing!r}: where every other label "
            "is wrong, comparisons say nothing, and beyond that the opposite of what they are called."
        )
