"""Linear layers for decoding: adapters merged, weights packed while a batch is written; the model itself untouched.

A layer's forward pass is replaced by a product with a tensor of ours. On a CPU that tensor is in the blocked layout of
oneDNN, which multiplies few rows 1.4 to 3 times as fast as a plain matrix does (one that torch lays out anew at each
call) with float32 accuracy, whatever the process's precision of float32 products is; and a layer's two low-rank
products are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from textenv.lm.merged import merged_weights
from textenv.lm.output_head import OutputHead

Forward = Callable[[Tensor], Tensor]


@torch.no_grad()
def fast_forwards(model: Any, dtype: torch.dtype) -> list[tuple[nn.Module, Forward]]:
    """The trunk's linear layers and what they compute with merged and packed weights, for `replaced`.

    This is a second copy of those layers' weights (float32 SmolLM2-135M: 425 MB, bfloat16: 212 MB); drop it when the
    batch is written. Training's activations, gradients and optimiser want more at another time. On a GPU only layers
    with adapters are copied, and nothing is packed.

    In bfloat16 a merged weight is rounded to bfloat16, adapters included. On SmolLM2 with adapters of rank 16 whose B
    is normal(0, 0.02), log-probabilities are off the trainer's full pass by 0.016 nats in the median and 0.16 at the
    99th percentile, against 0.015 and 0.11 where adapters are multiplied on their own: most of it is bfloat16's
    rounding in another order, which no engine can avoid, so weights are merged there too. In float32 it is 5e-5 at
    most either way.

    Args:
        model: a transformers causal model, with or without adapters.
        dtype: of the products.
    """
    return list(_forwards(model, dtype))


@contextlib.contextmanager
def replaced(forwards: Sequence[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Let layers compute something else inside the block. Not around passes of the reference: its adapters are off."""
    done: list[nn.Module] = []
    try:
        for layer, forward in forwards:
            layer.forward = forward  # of this object alone
            done.append(layer)
        yield
    finally:
        for layer in done:
            del layer.forward


def _forwards(model: Any, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """See `fast_forwards`, one at a time."""
    from transformers.pytorch_utils import Conv1D

    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    for name, weight in merged_weights(model):
        layer = modules.get(name.removesuffix(".weight"))
        if layer is None or layer is head or "forward" in vars(layer):  # the last is somebody else's hook
            continue
        base: Any = getattr(layer, "base_layer", layer)
        if not name.endswith(".weight") or type(base) not in (nn.Linear, Conv1D):
            continue
        matrix = weight.T if isinstance(base, Conv1D) else weight
        if can_pack(matrix.device, dtype):
            yield layer, packed_product(matrix, base.bias, dtype)
        elif base is not layer:
            yield layer, functools.partial(nn.functional.linear, weight=matrix, bias=base.bias)


@torch.no_grad()
def fast_head(head: OutputHead) -> OutputHead:
    """The output head with its weight packed, where it can be: another copy of it (SmolLM2-135M: 113 MB)."""
    if not can_pack(head.weight.device, torch.float32):
        return head
    return dataclasses.replace(head, product=packed_product(head.weight, head.bias, torch.float32))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch and this processor multiply with packed matrices."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, PRODUCT):
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


PRODUCT = "_linear_pointwise"
"""What `torch.compile` makes of linear layers on a CPU."""


def packed_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Forward:
    """A function that multiplies by a matrix (out, in) in oneDNN's layout and adds a bias (out,)."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous())
    added = None if bias is None else bias.detach().to(dtype)

    def forward(inputs: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), packed, added, "none", [], "")
        return product

    return forward
