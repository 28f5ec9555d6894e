"""Log-probabilities of chosen tokens straight from hidden states, in chunks: (B, L, V) is never kept.

Legend: M tokens, H hidden size, V vocabulary. Knows nothing of models, only of their output head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from textenv.packed_masks import PackedMasks

CHUNK = 128
"""Tokens per chunk: at 50k words 25 MB of float32 logits, which large processor caches hold."""


@dataclass(frozen=True)
class OutputHead:
    """The map from a hidden state to the distribution that tokens are sampled from.

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        temperature: logits are divided by it. It belongs to the distribution, so it is applied everywhere or nowhere.
        named_size: ids from here on have embedding rows but no token; they get probability 0.
        softcap: Gemma's final logit soft-capping, ``cap * tanh(logits / cap)``.
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    named_size: int | None = None
    softcap: float | None = None

    def logits(self, hidden: Tensor, action_masks: PackedMasks | None = None) -> Tensor:
        """Logits (M, V) of the sampling distribution, float32, from hidden states (M, H); -inf on forbidden tokens."""
        with torch.autocast(hidden.device.type, enabled=False):
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


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    chunk: int = CHUNK,
    *,
    entropy_grad: bool = False,
    action_masks: PackedMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Give log pi(target | hidden) and the entropy of pi, chunk by chunk, differentiable in the log-probabilities.

    Args:
        hidden: (M, H).
        targets: (M,) token ids.
        head: the output head; where its weight is frozen, the backward pass costs no second look at the logits.
        chunk: tokens per chunk; memory is chunk * V.
        entropy_grad: make the entropies differentiable too; it costs a frozen head another look at the weights.
        action_masks: index (M,); pi is renormalised over the allowed tokens. Unpacked chunk by chunk.

    Returns:
        logprobs (M,) and entropies (M,), float32, in nats. Entropies carry no gradient without `entropy_grad`.
    """
    trains = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    fused = not head.weight.requires_grad and head.softcap is None
    logprobs, entropies = [], []
    for start in range(0, hidden.shape[0], chunk):
        rows, ids = hidden[start : start + chunk], targets[start : start + chunk]
        masks = None if action_masks is None else action_masks[start : start + chunk]
        if not trains:
            parts = _chunk_logprobs(rows, ids, head, masks)
        elif fused:
            parts = _FrozenHead.apply(rows, ids, head, masks, entropy_grad)
        else:
            parts = checkpoint(_chunk_logprobs, rows, ids, head, masks, entropy_grad, use_reentrant=False)
        logprobs.append(parts[0])
        entropies.append(parts[1])
    if not logprobs:
        empty = hidden.sum(-1).float()
        return empty, empty.detach()
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    action_masks: PackedMasks | None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden, action_masks)  # (m, V)
    log_z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        holes = head.has_holes(action_masks)
        entropies = _entropies((logits - log_z[:, None]).exp_(), logits, log_z, holes)
    return chosen - log_z, entropies


def _entropies(probabilities: Tensor, logits: Tensor, log_z: Tensor, holes: bool) -> Tensor:
    """Entropies log Z - E[logit] (m,), with 0 * -inf of unnamed and forbidden ids (`holes`) read as 0."""
    if holes:
        logits = logits.clamp_min(-1e30)  # not the lowest float: its product with a gradient must stay finite
    return log_z - torch.linalg.vecdot(probabilities, logits)


class _FrozenHead(torch.autograd.Function):
    """d log pi(y) / d hidden = (W[y] - E_pi[W]) / temperature, computed while the chunk's logits are at hand.

    And where it is asked for, with H the entropy, d H / d hidden = -E_pi[(log pi + H) W] / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: OutputHead,
        action_masks: PackedMasks | None,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = head.logits(hidden, action_masks)  # (m, V)
        log_z = torch.logsumexp(logits, -1)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        probabilities = (logits - log_z[:, None]).exp_()
        entropies = _entropies(probabilities, logits, log_z, head.has_holes(action_masks))
        weight = head.weight.float()
        with torch.autocast(hidden.device.type, enabled=False):
            gradient = (weight[targets] - probabilities @ weight) / head.temperature  # (m, H)
            saved = [gradient.to(hidden.dtype)]
            if entropy_grad:
                logprobs = torch.where(probabilities > 0, logits - log_z[:, None], 0.0)
                weighted = probabilities.mul_(logprobs.add_(entropies[:, None]))  # (m, V)
                saved.append((-(weighted @ weight) / head.temperature).to(hidden.dtype))
        ctx.save_for_backward(*saved)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return chosen - log_z, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, *entropy_gradient = ctx.saved_tensors
        total = grad_logprobs[:, None] * gradient
        for extra in entropy_gradient:
            total = total + grad_entropies[:, None] * extra
        return total.to(gradient.dtype), None, None, None, None
