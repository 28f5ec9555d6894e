"""Attention of single new tokens as grouped matrix products, for decoding on a CPU.

Legend: N rows, A attention heads, G groups of heads that share keys, K keys of a row, D size of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "textenv_grouped"
"""Under which transformers knows it."""


@contextlib.contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Let a model's attention on a CPU be `attend` inside the block; its configuration is as before after it.

    torch multiplies a single query with each head's keys one by one, or copies the keys for each head of a group.
    Against 48 keys that takes 3 times as long with 64 rows of SmolLM2, against 200 keys 5 times. Models whose attention
    is not ``"sdpa"`` (written out because it does more) stay as they are.

    Args:
        model: a transformers model.
    """
    config = model.config
    before = config._attn_implementation
    if before != "sdpa" or next(model.parameters()).device.type != "cpu":
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Softmax attention in transformers' interface; what has more than one query goes to torch's own.

    Args:
        module: the layer.
        query: (N, A, 1, D).
        key: (N, G, K, D).
        value: (N, G, K, D).
        attention_mask: (N, 1, 1, K), True where a key is seen.
        dropout: for torch's own.
        scaling: of the scores; None: 1 / sqrt(D).
        **options: for torch's own.

    Returns:
        (N, 1, A, D), and None where other implementations have their weights.
    """
    rows, heads, queries, size = query.shape
    if queries > 1 or attention_mask is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped @ key.transpose(2, 3)).float() * (size**-0.5 if scaling is None else scaling)  # (N, G, A / G, K)
    weights = torch.softmax(scores.masked_fill_(~attention_mask, -torch.inf), -1)
    return (weights.to(value.dtype) @ value).reshape(rows, 1, heads, size), None
