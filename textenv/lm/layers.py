"""The decoder layers of a transformers model: how their passes trade time for memory. Numbers stay what they are.

- `checkpoint_layers` keeps only each layer's input for the backward pass, and computes the layer again there: a third
  more computation, activations of one layer instead of all.
- `compile_layers` lets `torch.compile` fuse what lies between the matrix products. All layers share one compiled graph;
  the first pass takes a minute or so, and again where shapes leave what was compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers itself would checkpoint, in order.

    Raises:
        ValueError: there are none that we know of.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that transformers knows how to checkpoint, so that checkpointing "
            "and compiling would do nothing. Load the model without them."
        )
    return layers


def checkpoint_layers(model: nn.Module) -> None:
    """Compute layers again in the backward pass instead of keeping their activations, from now on and in place.

    Unlike transformers' own switch it works in evaluation mode, where dropout is off. Passes without gradient are left
    alone.

    Raises:
        ValueError: see `decoder_layers`.
    """
    for layer in decoder_layers(model):
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def compile_layers(model: nn.Module) -> None:
    """Compile each layer, from its first pass on and in place.

    Raises:
        ValueError: see `decoder_layers`.
    """
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def check_switches(checkpointing: bool, compiled: bool) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: both are on.
    """
    if compiled and checkpointing:
        raise ValueError(
            "`compiled` and `checkpointing` should not come together, got both: torch's compiler cannot trace layers "
            "that are computed again. Take checkpointing where memory is short, else compiled."
        )


def switch_layers(model: nn.Module, checkpointing: bool, compiled: bool) -> None:
    """Turn on what is asked for, from now on and in place; see `checkpoint_layers` and `compile_layers`."""
    if checkpointing:
        checkpoint_layers(model)
    if compiled:
        compile_layers(model)
