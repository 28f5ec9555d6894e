"""Low-rank adapters on a causal model, and the model that it is with its adapters off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from textenv.lm.cache import Place, RowCache
from textenv.lm.model import LanguageModel


def add_lora(model: Any, rank: int, alpha: int, seed: int) -> None:
    """Put trainable adapters on every linear layer but the output head (Hu et al. 2021, arXiv:2106.09685).

    They start as the identity (B = 0), are float32 whatever the trunk is, and have no dropout.

    Args:
        model: a transformers model, changed in place.
        rank: of the adapters.
        alpha: they are scaled by alpha / rank.
        seed: of A's random start; torch's global generator is left as it was.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's transposed layers
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    from textenv.lm.fused_adapters import fuse_adapters
    from textenv.lm.fused_mlp import slim_mlps

    fuse_adapters(model)
    slim_mlps(model)


def round_frozen_layers(model: Any) -> None:
    """Store the linear layers' weights in bfloat16, in place. Embeddings, norms and the output head stay in float32, so
    that the residual stream and the logits keep their precision.
    """  # noqa: D205
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.to(torch.bfloat16)


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The base model inside the block; the adapters are as before after it.

    It sets what `peft`'s layers read in their forward pass. The public switch also walks through all their parameters
    to freeze them and thaw them again: 10 ms for 210 layers, a sixth of a decoding step.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(layer, layer._disable_adapters) for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    try:
        for layer, _ in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in layers:
            layer._disable_adapters = disabled


class AdapterFree(LanguageModel):
    """A model with adapters, seen without them: the reference of a low-rank policy at no cost in memory."""

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See `LanguageModel.hidden_states`."""
        with adapters_off(self.model):
            return super().hidden_states(input_ids, attention_mask)

    def extend(self, input_ids: Tensor, cache: RowCache, place: Place) -> Tensor:
        """See `LanguageModel.extend`."""
        with adapters_off(self.model):
            return super().extend(input_ids, cache, place)
