"""Log-probabilities of chosen tokens straight from hidden states, in chunks: (B, L, V) is never kept.

Legend: M tokens, H hidden size, V vocabulary. Knows nothing of models, only of their output head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from textenv.lm.output_head import OutputHead
from textenv.packed_masks import PackedMasks

CHUNK = 128
"""Tokens per chunk, at most: at 50k words 25 MB of float32 logits, which large processor caches hold."""

CHUNK_LOGITS = CHUNK * 49152
"""Logits per chunk, at most: with a larger vocabulary a chunk has fewer tokens, so that memory does not grow with V."""


def chunk_tokens(vocab_size: int) -> int:
    """How many tokens a chunk has."""
    return max(1, min(CHUNK, CHUNK_LOGITS // vocab_size))


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    chunk: int | None = None,
    *,
    entropy_grad: bool = False,
    action_masks: PackedMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Give log pi(target | hidden) and the entropy of pi, chunk by chunk, differentiable in the log-probabilities.

    Args:
        hidden: (M, H).
        targets: (M,) token ids.
        head: the output head; where its weight is frozen, the backward pass costs no second look at the logits.
        chunk: tokens per chunk; None: `chunk_tokens`, which keeps memory flat in V.
        entropy_grad: make the entropies differentiable too; it costs a frozen head another look at the weights.
        action_masks: index (M,); pi is renormalised over the allowed tokens. Unpacked chunk by chunk.

    Returns:
        logprobs (M,) and entropies (M,), float32, in nats. Entropies carry no gradient without `entropy_grad`.
    """
    trains = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    chunk = chunk or max(1, chunk_tokens(len(head.weight)) // (1 if trains else 2))  # without gradient half is quicker
    arguments = targets, head, chunk, action_masks
    if not trains:
        return _without_gradient(hidden, *arguments)
    if head.softcap is not None or (head.weight.requires_grad and (entropy_grad or head.bias is not None)):
        return _recomputed(hidden, *arguments, entropy_grad)
    if head.weight.requires_grad:
        return _TrainedHead.apply(hidden, head.weight, *arguments)
    return _FrozenHead.apply(hidden, *arguments, entropy_grad)


def _chunks(
    hidden: Tensor, targets: Tensor, chunk: int, action_masks: PackedMasks | None
) -> Iterator[tuple[slice, Tensor, Tensor, PackedMasks | None]]:
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        yield rows, hidden[rows], targets[rows], None if action_masks is None else action_masks[rows]


def _without_gradient(
    hidden: Tensor, targets: Tensor, head: OutputHead, chunk: int, action_masks: PackedMasks | None
) -> tuple[Tensor, Tensor]:
    logprobs, entropies = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2))
    for rows, states, ids, masks in _chunks(hidden, targets, chunk, action_masks):
        logits = head.logits(states, masks)
        logprobs[rows], log_z, probabilities = _read(logits, ids)
        entropies[rows] = _entropies(probabilities, logits, log_z, head.has_holes(masks))
        del logits, probabilities  # before the next chunk makes its own
    return logprobs, entropies


def _recomputed(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    chunk: int,
    action_masks: PackedMasks | None,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Whatever the head is: each chunk's logits are computed again in the backward pass."""
    parts = [
        checkpoint(_chunk_logprobs, states, ids, head, masks, entropy_grad, use_reentrant=False)
        for _, states, ids, masks in _chunks(hidden, targets, chunk, action_masks)
    ]
    if not parts:
        empty = hidden.sum(-1).float()
        return empty, empty.detach()
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk_logprobs(
    hidden: Tensor, targets: Tensor, head: OutputHead, action_masks: PackedMasks | None, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden, action_masks)  # (m, V)
    log_z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probabilities = (logits - log_z[:, None]).exp_()
        entropies = _entropies(probabilities, logits, log_z, head.has_holes(action_masks))
    return chosen - log_z, entropies


def _read(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log pi(target) (m,), log Z (m,) and probabilities (m, V) of logits (m, V), in few passes over them."""
    probabilities = torch.softmax(logits, -1)
    top, index = logits.max(-1)
    # log Z from the likeliest token, whose probability is at least 1 / V and so has full relative precision.
    log_z = top - probabilities.gather(-1, index[:, None]).squeeze(-1).log()
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    return chosen - log_z, log_z, probabilities


def _entropies(probabilities: Tensor, logits: Tensor, log_z: Tensor, holes: bool) -> Tensor:
    """Entropies log Z - E[logit] (m,), with 0 * -inf of unnamed and forbidden ids (`holes`) read as 0."""
    if holes:
        logits = logits.clamp_min(-1e30)  # not the lowest float: its product with a gradient must stay finite
    return log_z - torch.bmm(probabilities[:, None], logits[:, :, None]).flatten()  # vecdot holds all products


_rounded_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of frozen head weights: the version that was rounded, and what it became. Rounding takes as long as a chunk."""


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A frozen weight in another precision, kept until the weight changes or goes."""
    if weight.dtype == dtype:
        return weight
    version, kept = _rounded_weights.get(weight, (None, None))
    if version != (weight._version, weight.data_ptr(), dtype):
        kept = weight.to(dtype)
        _rounded_weights[weight] = (weight._version, weight.data_ptr(), dtype), kept
    assert kept is not None
    return kept


def _product_type(hidden: Tensor) -> torch.dtype:
    """The precision of a gradient's products: autocast's where it is on. Logits are float32 either way."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


def _slopes(
    states: Tensor, targets: Tensor, head: OutputHead, weight: Tensor, masks: PackedMasks | None, entropy_grad: bool
) -> tuple[Tensor, ...]:
    """Log-probabilities (m,), entropies (m,), and their gradients (m, H); what is (m, V) ends with the call."""
    logits = head.logits(states, masks)
    logprobs, log_z, probabilities = _read(logits, targets)
    if entropy_grad or head.bias is not None:
        entropies = _entropies(probabilities, logits, log_z, head.has_holes(masks))
    expected = (probabilities.to(weight.dtype) @ weight).float()  # (m, H)
    slope = (head.weight[targets].float() - expected) / head.temperature
    if not entropy_grad:
        if head.bias is None:  # E[logit] is linear in E[W], which is at hand: no further look at the logits
            entropies = log_z - torch.linalg.vecdot(states.float(), expected) / head.temperature
        return logprobs, entropies, slope
    log_pi = probabilities.log().clamp_min(-1e30)
    weighted = probabilities.mul_(log_pi.add_(entropies[:, None]))  # (m, V)
    return logprobs, entropies, slope, -(weighted.to(weight.dtype) @ weight).float() / head.temperature


class _FrozenHead(torch.autograd.Function):
    """d log pi(y) / d hidden = (W[y] - E_pi[W]) / temperature, computed while a chunk's logits are at hand.

    And where it is asked for, with H the entropy, d H / d hidden = -E_pi[(log pi + H) W] / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: OutputHead,
        chunk: int,
        action_masks: PackedMasks | None,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        weight = _rounded(head.weight, _product_type(hidden))
        logprobs, entropies = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(2))
        gradients = [torch.empty_like(hidden) for _ in range(1 + entropy_grad)]
        for rows, states, ids, masks in _chunks(hidden, targets, chunk, action_masks):
            with torch.autocast(hidden.device.type, enabled=False):
                logprobs[rows], entropies[rows], *slopes = _slopes(states, ids, head, weight, masks, entropy_grad)
            for gradient, slope in zip(gradients, slopes, strict=True):
                gradient[rows] = slope.to(hidden.dtype)
        ctx.save_for_backward(*gradients)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *entropy_gradient = ctx.saved_tensors
        total = grad_logprobs[:, None] * gradient
        for extra in entropy_gradient:
            total = total + grad_entropies[:, None] * extra
        return total.to(gradient.dtype), None, None, None, None, None


class _TrainedHead(torch.autograd.Function):
    """With g = dLoss / d log pi(y): d logits = g (1[y] - pi) / temperature, from logits computed again chunk by chunk.

    The weight's gradient is added up in one (V, H) buffer, where autograd would make one per chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: OutputHead,
        chunk: int,
        action_masks: PackedMasks | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _without_gradient(hidden, targets, head, chunk, action_masks)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.head, ctx.chunk, ctx.action_masks, ctx.kind = head, chunk, action_masks, _product_type(hidden)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        head, kind = ctx.head, ctx.kind
        factor = weight.to(kind)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for rows, states, ids, masks in _chunks(hidden, targets, ctx.chunk, ctx.action_masks):
            scale = grad_logprobs[rows, None] / head.temperature
            slopes = torch.softmax(head.logits(states, masks), -1).mul_(-scale)  # (m, V)
            slopes.scatter_add_(-1, ids[:, None], scale)
            with torch.autocast(hidden.device.type, enabled=False):
                grad_weight.addmm_(slopes.T, states.float())  # bounded by memory: rounding its factors saves nothing
                grad_hidden[rows] = (slopes.to(kind) @ factor).to(hidden.dtype)
            del slopes  # before the next chunk makes its own
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
