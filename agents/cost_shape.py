"""How large a language model is, read from its configuration alone: no weight is loaded. Knows nothing of training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What memory and compute follow from. Counts are numbers of weights.

    Attributes:
        name: of the model.
        layers: transformer blocks.
        hidden_size: H, the width of the residual stream.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_size: width of a head.
        mlp_size: F, the width inside a block's MLP.
        vocab_size: V, the rows of the output head.
        linear: weights of all linear layers but the output head.
        linear_layers: how many these are.
        linear_ends: inputs plus outputs of these layers, summed: adapters of rank r have r times as many weights.
        head: weights of the output head.
        tied: whether they are the input embedding too.
        embeddings: weights that are only looked up: learned positions, and the input embedding where it is not tied.
        other: norms and biases.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    linear: int
    linear_layers: int
    linear_ends: int
    head: int
    tied: bool
    embeddings: int
    other: int

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: seven linear layers in a block, q, k, v, o, gate, up and down."""
        return self.linear_layers == 7 * self.layers

    @property
    def total(self) -> int:
        """All weights, a tied one once."""
        return self.linear + self.head + self.embeddings + self.other

    @property
    def multiplying(self) -> int:
        """N: the weights that a token is multiplied by, the output head included, lookups left out."""
        return self.linear + self.head


def shape_named(name: str | os.PathLike[str]) -> ModelShape:
    """The shape of a model by its name.

    Args:
        name: an embedded name, a folder, or a Hugging Face hub id; only its configuration is read.

    Raises:
        ValueError: the name leads to no configuration of a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from textenv.lm.loading import EMBEDDED, resolve

    try:
        config = AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
        with torch.device("meta"):  # shapes without memory
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No configuration of a causal language model could be read from {os.fspath(name)!r}. It should be an "
            f"embedded name ({', '.join(EMBEDDED)}), a folder with config.json, or a Hugging Face hub id (which needs "
            f"a network the first time). Cause: {error}"
        ) from error
    return shape_of(module, os.fspath(name))


def shape_of(module: Any, name: str = "") -> ModelShape:
    """The shape of a transformers causal language model, on any device; adapters on it are not counted.

    Args:
        module: the model.
        name: for the tables; empty: that of its class.
    """
    from transformers.pytorch_utils import Conv1D

    config = module.config.get_text_config()
    head = module.get_output_embeddings()
    ends, looked_up = [], 0
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Embedding) and layer.weight is not head.weight:
            looked_up += layer.weight.numel()
        elif isinstance(layer, nn.Linear | Conv1D) and layer is not head and "lora_" not in path:
            ends.append(tuple(layer.weight.shape))
    linear = sum(first * second for first, second in ends)
    total = sum(p.numel() for path, p in module.named_parameters() if "lora_" not in path)
    heads = config.num_attention_heads
    mlp_size = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return ModelShape(
        name=name or type(module).__name__,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        mlp_size=mlp_size or 4 * config.hidden_size,
        vocab_size=head.weight.shape[0],
        linear=linear,
        linear_layers=len(ends),
        linear_ends=sum(map(sum, ends)),
        head=head.weight.numel(),
        tied=module.get_input_embeddings().weight is head.weight,
        embeddings=looked_up,
        other=total - linear - head.weight.numel() - looked_up,
    )
