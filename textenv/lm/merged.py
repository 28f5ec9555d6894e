"""A model with its adapters merged in: its weights one tensor at a time, as engines are given them, and as a folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WRAPPED = ".base_layer."
ADAPTER_PARTS = ("lora_A", "lora_B", "lora_embedding", "lora_magnitude")


@torch.no_grad()
def merged_weights(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint that the model would be without adapters and with the same distribution.

    A merged weight is W + scaling * B A, added up in float32 and rounded to W's precision; it lives until the next one
    is asked for, so that no second model is held. Weights without adapters are the model's own tensors, not copies.
    Tied weights come once, under the first of their names.

    Args:
        model: a transformers causal model, with or without `peft` adapters.
        dtype: of merged weights; None: W's own.

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
            yield plain, (tensor.float() + delta).to(dtype or tensor.dtype)


def save_merged(model: Any, folder: str | os.PathLike[str]) -> None:
    """Write the plain model that a model with adapters is, as `from_pretrained` of transformers and vLLM read it.

    Weights are float32, whatever they were kept in: in bfloat16 most of an adapter would be rounded away. Those that
    are tied to another are left out, as transformers does.

    Args:
        model: a transformers causal model, with or without `peft` adapters.
        folder: is made where it is missing; config.json, generation_config.json and model.safetensors.

    Raises:
        FileExistsError: it holds a model already, which may be the one that was loaded.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise FileExistsError(
            f"{folder} holds a model already; it is not overwritten, because other runs may name it as their start. "
            "Choose another folder."
        )
    weights = {
        name: tensor.to(torch.float32).cpu().contiguous() for name, tensor in merged_weights(model, torch.float32)
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = torch.float32, [_class_of(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _class_of(model: Any) -> type:
    """The class of transformers that a model's checkpoint is read with."""
    return next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
