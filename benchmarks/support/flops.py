"""Arithmetic that the update cannot do without, counted from a model's shape. Standard library alone.

N is the number of parameters that multiply: linear layers and the output head, no embeddings, no norms. A token costs

    2 N   forward
    4 N   forward and backward through frozen weights: backward is the gradient of the inputs alone
    6 N   forward and backward where the weights train

The trunk reads all P + T tokens, the head is needed on the T response tokens alone. Left out: attention's own products
of queries, keys and values (2% at 48 tokens), everything without weights, and what is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal["separate", "adapters"]


@dataclass(frozen=True)
class Shape:
    """Parameters that multiply.

    Attributes:
        trunk: of the linear layers.
        head: hidden size times vocabulary.
        adapters: of low-rank adapters on all linear layers.
    """

    trunk: int
    head: int
    adapters: int

    @classmethod
    def of_llama(cls, config: dict[str, Any], rank: int) -> Shape:
        """From the ``config.json`` of a Llama."""
        hidden, wide, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        width = config.get("head_dim") or hidden // config["num_attention_heads"]
        queries, keys = (width * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
        linear = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        linear += [(hidden, wide), (hidden, wide), (wide, hidden)]
        return cls(
            trunk=layers * sum(a * b for a, b in linear),
            head=hidden * config["vocab_size"],
            adapters=layers * rank * sum(a + b for a, b in linear),
        )


def pass_flops(shape: Shape, layout: Layout, tokens: int, head_tokens: int) -> float:
    """Forward and backward of the policy alone, once over a batch.

    Args:
        shape: parameters.
        layout: ``"separate"``: all weights train; ``"adapters"``: they alone train.
        tokens: prompt and response tokens of the batch.
        head_tokens: tokens that go through the output head.
    """
    if layout == "separate":
        return 6.0 * (shape.trunk * tokens + shape.head * head_tokens)
    return 4.0 * (shape.trunk * tokens + shape.head * head_tokens) + 6.0 * shape.adapters * tokens


def update_flops(shape: Shape, layout: Layout, tokens: int, head_tokens: int, epochs: int) -> float:
    """The update of one iteration; ``"separate"`` trains a value model, a trunk of the same size, beside the policy."""
    value = 6.0 * shape.trunk * tokens if layout == "separate" else 0.0
    return epochs * (pass_flops(shape, layout, tokens, head_tokens) + value)
