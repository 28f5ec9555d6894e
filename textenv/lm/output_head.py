"""The map from hidden states to the distribution that tokens are sampled from, and what may not be sampled.

Legend: M tokens, H hidden size, V vocabulary, W bytes of a packed mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from textenv.packed_masks import PackedMasks


@dataclass(frozen=True)
class OutputHead:
    """The map from a hidden state to the distribution that tokens are sampled from.

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        temperature: logits are divided by it. It belongs to the distribution, so it is applied everywhere or nowhere.
        named_size: ids from here on have embedding rows but no token; they get probability 0.
        softcap: Gemma's final logit soft-capping, ``cap * tanh(logits / cap)``.
        product: gives ``hidden @ weight.T + bias`` in a faster way; None for the plain one.
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    named_size: int | None = None
    softcap: float | None = None
    product: Callable[[Tensor], Tensor] | None = None

    def logits(self, hidden: Tensor, action_masks: PackedMasks | None = None) -> Tensor:
        """Logits (M, V) of the sampling distribution, float32, from hidden states (M, H); -inf on forbidden tokens."""
        with torch.autocast(hidden.device.type, enabled=False):
            if self.product is not None:
                logits = self.product(hidden.float())
            else:
                bias = None if self.bias is None else self.bias.float()
                logits = torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            if self.temperature != 1.0:
                logits = logits / self.temperature
            if self.named_size is not None and self.named_size < logits.shape[-1]:
                unnamed = torch.arange(logits.shape[-1], device=logits.device) >= self.named_size
                logits = logits.masked_fill(unnamed, -torch.inf)
            if action_masks is not None:
                logits = forbid(logits, action_masks)
        return logits

    def has_holes(self, action_masks: PackedMasks | None) -> bool:
        """Whether some logits are -inf."""
        return action_masks is not None or (self.named_size is not None and self.named_size < len(self.weight))


def allowed_tokens(action_masks: PackedMasks, device: torch.device) -> Tensor:
    """The masks (..., V) of some states as bools; the bits are unpacked on the device."""
    packed = torch.as_tensor(action_masks.packed(), device=device)  # (..., W)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
    bits = (packed[..., None] >> shifts) & 1
    return bits.flatten(-2)[..., : action_masks.vocab_size].bool()


def forbid(logits: Tensor, action_masks: PackedMasks) -> Tensor:
    """Logits (..., V) with -inf on the tokens that are not allowed, in a tensor of its own."""
    return logits.masked_fill(~allowed_tokens(action_masks, logits.device), -torch.inf)
