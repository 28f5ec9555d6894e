"""Low-rank adapters on a causal model, and the model that it is with its adapters off."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from textenv.lm.cache import Place, RowCache
from textenv.lm.merged import ADAPTER_PARTS
from textenv.lm.model import LanguageModel

TRAINED, KEPT = "default", "kept"
"""Names of the adapters that train, and of those that a model was loaded with."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def add_lora(model: Any, rank: int, alpha: int, seed: int) -> None:
    """Put trainable adapters on every linear layer but the output head (Hu et al. 2021, arXiv:2106.09685).

    They start as the identity (B = 0), are float32 whatever the trunk is, and have no dropout. Adapters that the model
    has already, see `keep_adapter`, act as before.

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
    kept = active_adapters(model)
    with torch.random.fork_rng(), _one_more_adapter():
        torch.manual_seed(seed)
        model.add_adapter(config)
    for layer in _layers(model) if kept else ():  # adding one turns the others off
        layer.set_adapter([*kept, TRAINED])
        for name in kept:
            layer.set_requires_grad(name, False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    from textenv.lm.fused_adapters import fuse_adapters
    from textenv.lm.fused_mlp import slim_mlps

    fuse_adapters(model)
    slim_mlps(model)


def keep_adapter(model: Any, folder: str | os.PathLike[str]) -> None:
    """Put saved low-rank adapters on a model, frozen: what it is from then on, with trainable ones or without.

    Args:
        model: a transformers model without adapters, changed in place.
        folder: what `save_pretrained` of a model with adapters, or of `peft`, wrote: adapter_config.json and
            adapter_model.safetensors. Adapters of other formats are not read.

    Raises:
        ValueError: the folder holds no low-rank adapter, or one of another model.
    """
    from peft import LoraConfig, PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    path = Path(folder)
    if not all((path / name).is_file() for name in ADAPTER_FILES):
        raise ValueError(
            f"{path} should be a folder with a low-rank adapter ({' and '.join(ADAPTER_FILES)}), got one without. "
            "`save_pretrained` of a policy with lora_rank writes it; a whole model is loaded by its name instead."
        )
    config = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{path} should hold a low-rank adapter, got one of the kind {config.peft_type}.")
    config.inference_mode = True
    with _one_more_adapter():
        model.add_adapter(config, KEPT)
    for name, parameter in model.named_parameters():
        if f".{KEPT}." in name:
            parameter.data = parameter.data.float()  # whatever the trunk is, as adapters that train
    try:
        result: Any = set_peft_model_state_dict(model, load_file(path / ADAPTER_FILES[1]), KEPT)
        missing = [name for name in result.missing_keys if f".{KEPT}." in name]
    except RuntimeError as error:  # other shapes
        raise ValueError(f"{path} should hold an adapter of this model, got another's: {error}") from error
    if missing or result.unexpected_keys:
        raise ValueError(
            f"{path} should hold an adapter of this model, got another's: {len(missing)} weights are missing and "
            f"{len(result.unexpected_keys)} have no place, such as {[*missing, *result.unexpected_keys][0]!r}."
        )
    model.eval().requires_grad_(False)


@contextlib.contextmanager
def _one_more_adapter() -> Iterator[None]:
    """Without `peft`'s warning that a model now has several adapters: it is what is wanted here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        yield


def active_adapters(model: Any) -> tuple[str, ...]:
    """Names of the adapters that act in a model, in order."""
    return tuple(dict.fromkeys(name for layer in _layers(model) for name in layer.active_adapters))


def _layers(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def round_frozen_layers(model: Any) -> None:
    """Store the linear layers' weights in bfloat16, in place. Embeddings, norms, the output head and adapters stay in
    float32, so that the residual stream and the logits keep their precision.
    """  # noqa: D205
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and not any(part in name for part in ADAPTER_PARTS):
            module.to(torch.bfloat16)


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The base model inside the block; the adapters are as before after it.

    It sets what `peft`'s layers read in their forward pass. The public switch also walks through all their parameters
    to freeze them and thaw them again: 10 ms for 210 layers, a sixth of a decoding step.
    """
    layers = [(layer, layer._disable_adapters) for layer in _layers(model)]
    try:
        for layer, _ in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in layers:
            layer._disable_adapters = disabled


@contextlib.contextmanager
def only_adapters(model: Any, names: Sequence[str]) -> Iterator[None]:
    """The model with some of its adapters inside the block, none: the base model; all as before after it."""
    if not names:
        with adapters_off(model):
            yield
        return
    layers = [(layer, layer._active_adapter) for layer in _layers(model)]
    try:
        for layer, _ in layers:
            layer._active_adapter = list(names)
        yield
    finally:
        for layer, active in layers:
            layer._active_adapter = active


class AdapterFree(LanguageModel):
    """A model with adapters, seen without those that train: the reference of a low-rank policy at no cost in memory.

    Args:
        model: with adapters.
        kept: names of adapters that belong to it, see `keep_adapter`.
        **options: those of `LanguageModel`.
    """

    def __init__(self, model: Any, kept: Sequence[str] = (), **options: Any) -> None:
        self.kept = tuple(kept)
        super().__init__(model, **options)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See `LanguageModel.hidden_states`."""
        with only_adapters(self.model, self.kept):
            return super().hidden_states(input_ids, attention_mask)

    def extend(self, input_ids: Tensor, cache: RowCache, place: Place) -> Tensor:
        """See `LanguageModel.extend`."""
        with only_adapters(self.model, self.kept):
            return super().extend(input_ids, cache, place)
