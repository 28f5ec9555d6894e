"""Full next-token distributions of log-probability models: restricted to allowed tokens, compared, block by block.

Knows the methods that a model may have (see `textenv.task.LogprobModel`), and no model.

Legend: N rows, B responses, T response tokens, L columns, V vocabulary. Log-probabilities are in nats.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.packed_masks import PackedMasks

BLOCK_BYTES = 2**26
"""Bounds a block of whole-response distributions: 64 MB of float32, 13 responses of 24 tokens over 50k words."""


def renormalised(log_pi: NDArray[Any], action_masks: PackedMasks) -> NDArray[Any]:
    """Give log pi(a | a allowed) = log pi(a) - log sum of pi over the allowed tokens, -inf on the others.

    Args:
        log_pi: (..., V).
        action_masks: of the same states.

    Returns:
        (..., V), in an array of its own.

    Raises:
        ValueError: a distribution gives every allowed token probability 0.
    """
    log_pi = np.where(action_masks.unpacked(), log_pi, -np.inf)
    top = log_pi.max(axis=-1, keepdims=True)
    if np.isneginf(top).any():
        raise ValueError(
            "A model should give some token that the constraints allow a probability above 0, got 0 for all of them: "
            "there is nothing to renormalise. Allow tokens that the model can write."
        )
    log_pi -= top
    log_pi -= np.log(np.exp(log_pi).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(log_pi.dtype)
    return log_pi


def chosen(log_pi: NDArray[Any], actions: NDArray[Any]) -> NDArray[np.float64]:
    """Give log pi(action) (...,), float64, from distributions (..., V)."""
    index = np.asarray(actions, dtype=np.int64)[..., None]
    return np.take_along_axis(log_pi, index, axis=-1)[..., 0].astype(np.float64)


def kl_divergence(log_pi: NDArray[Any], log_ref: NDArray[Any]) -> NDArray[np.float64]:
    """KL(pi || ref) = sum_a pi(a) (log pi(a) - log ref(a)) (...,), in float64; rounding below 0 is cut.

    Args:
        log_pi: (..., V), where -inf adds 0.
        log_ref: (..., V); -inf where pi is above 0 makes the divergence infinite.
    """
    pi = np.exp(log_pi)
    with np.errstate(invalid="ignore"):
        terms = np.where(pi > 0, pi * (log_pi - log_ref), 0.0)
    return np.maximum(terms.sum(axis=-1, dtype=np.float64), 0.0)


def stepper_of(model: Any) -> Any:
    """The model, or what reads prefixes that grow by a token in its place: a cache of its own for whoever steps."""
    return model.stepper() if hasattr(model, "stepper") else model


def takes_action_masks(function: Any) -> bool:
    """Whether a function has a parameter `action_masks` (or takes any keyword)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "action_masks" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_gives_distributions(model: Any, name: str, why: str) -> None:
    """Refuse a model that knows chosen tokens only.

    Args:
        model: any log-probability model.
        name: what it is, the start of a sentence.
        why: what it would be needed for, the end of one.

    Raises:
        TypeError: it has no ``next_logprobs``.
    """
    if not hasattr(model, "next_logprobs"):
        raise TypeError(
            f"{name} should have next_logprobs(observations) -> (N, V), got {type(model).__name__}, which tells the "
            f"log-probabilities of chosen tokens only. {why} Add that method, or use a LanguageModel or a ToyReference."
        )


def next_distributions(
    model: Any, observations: Mapping[str, NDArray[Any]], action_masks: PackedMasks | None = None
) -> NDArray[Any]:
    """Log-distributions (N, V) after each prefix, over the allowed tokens where there are masks."""
    log_pi = np.asarray(model.next_logprobs(observations))
    return log_pi if action_masks is None else renormalised(log_pi, action_masks)


def whole_distributions(
    model: Any, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int, vocab_size: int
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Log-distributions (b, T, V) that tokens of whole responses were drawn from, a bounded block of rows at a time.

    One call of the model per block (`BLOCK_BYTES`) where it has ``response_distributions``, else one per column that
    is in use. What stands beyond a response's end means nothing.

    Args:
        model: has ``next_logprobs``, and perhaps ``response_distributions``.
        input_ids: (B, L).
        attention_mask: (B, L).
        response_tokens: T.
        vocab_size: V.

    Yields:
        The rows of a block, and its distributions.
    """
    rows = max(1, BLOCK_BYTES // (4 * response_tokens * vocab_size))
    for start in range(0, len(input_ids), rows):
        block = slice(start, start + rows)
        ids, mask = np.asarray(input_ids[block]), np.asarray(attention_mask[block])
        if hasattr(model, "response_distributions"):
            yield block, np.asarray(model.response_distributions(ids, mask, response_tokens))
        else:
            yield block, prefix_distributions(model, ids, mask, response_tokens)


def prefix_distributions(
    model: Any, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
) -> NDArray[Any]:
    """Log-distributions (b, T, V) from ``next_logprobs``, a column at a time; ended rows repeat their last state."""
    first = input_ids.shape[1] - response_tokens
    lengths = attention_mask[:, first:].sum(axis=1)
    columns, steps = np.arange(input_ids.shape[1]), []
    for token in range(int(lengths.max())):
        seen = columns < first + np.minimum(token, lengths - 1)[:, None]
        prefix = {
            "input_ids": np.where(seen, input_ids, 0).astype(np.int32),
            "attention_mask": np.where(seen, attention_mask, 0).astype(np.int8),
        }
        steps.append(np.asarray(model.next_logprobs(prefix)))
    steps += steps[-1:] * (response_tokens - len(steps))
    return np.stack(steps, axis=1)
