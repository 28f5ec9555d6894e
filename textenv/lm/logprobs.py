"""Log-probabilities of chosen tokens straight from hidden states, in chunks: (B, L, V) is never kept.

Legend: M tokens, H hidden size, V vocabulary. Knows nothing of models, only of their output head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of the sampling distribution, float32, from hidden states (M, H)."""
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
        return logits


def token_logprobs(hidden: Tensor, targets: Tensor, head: OutputHead, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Give log pi(target | hidden) and the entropy of pi, chunk by chunk, differentiable in the log-probabilities.

    Args:
        hidden: (M, H).
        targets: (M,) token ids.
        head: the output head; where its weight is frozen, the backward pass costs no second look at the logits.
        chunk: tokens per chunk; memory is chunk * V.

    Returns:
        logprobs (M,) and entropies (M,), float32, in nats. Entropies carry no gradient.
    """
    trains = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    fused = not head.weight.requires_grad and head.softcap is None
    logprobs, entropies = [], []
    for start in range(0, hidden.shape[0], chunk):
        rows, ids = hidden[start : start + chunk], targets[start : start + chunk]
        if not trains:
            parts = _chunk_logprobs(rows, ids, head)
        elif fused:
            parts = _FrozenHead.apply(rows, ids, head)
        else:
            parts = checkpoint(_chunk_logprobs, rows, ids, head, use_reentrant=False)
        logprobs.append(parts[0])
        entropies.append(parts[1])
    if not logprobs:
        empty = hidden.sum(-1).float()
        return empty, empty.detach()
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(hidden: Tensor, targets: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden)  # (m, V)
    log_z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropies = _entropies((logits - log_z[:, None]).exp_(), logits, log_z, head)
    return chosen - log_z, entropies


def _entropies(probabilities: Tensor, logits: Tensor, log_z: Tensor, head: OutputHead) -> Tensor:
    """Entropies log Z - E[logit] (m,), with 0 * -inf of unnamed ids read as 0."""
    if head.named_size is not None and head.named_size < logits.shape[-1]:
        logits = logits.clamp_min(torch.finfo(logits.dtype).min)
    return log_z - torch.linalg.vecdot(probabilities, logits)


class _FrozenHead(torch.autograd.Function):
    """d log pi(y) / d hidden = (W[y] - E_pi[W]) / temperature, computed while the chunk's logits are at hand."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
        logits = head.logits(hidden)  # (m, V)
        log_z = torch.logsumexp(logits, -1)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        probabilities = (logits - log_z[:, None]).exp_()
        entropies = _entropies(probabilities, logits, log_z, head)
        weight = head.weight.float()
        with torch.autocast(hidden.device.type, enabled=False):
            gradient = (weight[targets] - probabilities @ weight) / head.temperature  # (m, H)
        ctx.save_for_backward(gradient.to(hidden.dtype))
        ctx.mark_non_differentiable(entropies)
        return chosen - log_z, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropies: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (grad_logprobs[:, None] * gradient).to(gradient.dtype), None, None
