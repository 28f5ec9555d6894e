"""The weights of a model with its adapters merged in, one tensor at a time: what engines are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

WRAPPED = ".base_layer."
ADAPTER_PARTS = ("lora_A", "lora_B", "lora_embedding", "lora_magnitude")


@torch.no_grad()
def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint that the model would be without adapters and with the same distribution.

    A merged weight is W + scaling * B A, added up in float32 and rounded to W's precision; it lives until the next one
    is asked for, so that no second model is held. Weights without adapters are the model's own tensors, not copies.
    Tied weights come once, under the first of their names.

    Args:
        model: a transformers causal model, with or without `peft` adapters.

    Yields:
        A checkpoint name (no trace of adapters in it) and its tensor.
    """
    merged = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in model.named_parameters():
        if any(part in name for part in ADAPTER_PARTS):
            continue
        owner, is_wrapped, rest = name.partition(WRAPPED)
        layer = merged.get(owner) if is_wrapped and rest == "weight" else None
        plain = name.replace(WRAPPED, ".")
        if layer is None:
            yield plain, tensor.detach()
        else:
            delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
            yield plain, (tensor.float() + delta).to(tensor.dtype)
