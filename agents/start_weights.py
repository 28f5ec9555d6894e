"""What trains in a language model and what it is compared with: new adapters, or all weights beside a frozen copy."""

from __future__ import annotations

import copy
import os
from typing import Any

from textenv.agents.value_models import Adapters
from textenv.lm import LanguageModel, load_causal_lm, resolve
from textenv.lm.adapters import AdapterFree, active_adapters, add_lora, keep_adapter, round_frozen_layers
from textenv.lm.offload import Offloaded


def load_start(model: Any, adapter: Any, device: str, rounded: bool) -> tuple[Any, str]:
    """The frozen model that training starts from, a kept adapter included, and where its weights came from.

    Args:
        model: a name, folder or hub id.
        adapter: the folder of an adapter to keep, or None.
        device: a torch device.
        rounded: store the linear layers in bfloat16, see `round_frozen_layers`.
    """
    module, source = load_causal_lm(model, device), resolve(model)
    if rounded:
        round_frozen_layers(module)
    if adapter is not None:
        keep_adapter(module, adapter)
        source = f"{source} with the adapter {os.fspath(adapter)}"
    return module, source


def start_training(module: Any, adapters: Adapters | None, offload: bool, options: dict[str, Any]) -> LanguageModel:
    """Let a model's weights or new adapters train, and give the reference that it was."""
    if adapters is not None:
        kept = active_adapters(module)
        add_lora(module, adapters.rank, adapters.alpha, adapters.seed)
        return AdapterFree(module, kept, **options)
    reference = (Offloaded if offload else LanguageModel)(copy.deepcopy(module), **options)
    module.requires_grad_(True)
    return reference


def check_adapters(lora_rank: Any, lora_alpha: Any, adapter: Any) -> None:
    """Refuse adapters that could not train.

    Raises:
        ValueError: a rank or alpha below 1, or a kept adapter where all weights train.
    """
    for name, given, none in (
        ("lora_rank", lora_rank, "train all weights"),
        ("lora_alpha", lora_alpha, "use twice the rank"),
    ):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise ValueError(f"`{name}` should be an integer of at least 1, or None to {none}, got {given!r}.")
    if adapter is not None and lora_rank is None:
        raise ValueError(
            f"`adapter` is kept beside adapters that train, got adapter={os.fspath(adapter)!r} with lora_rank=None. To "
            "train all weights, merge it first: LanguageModelPolicy.merged(folder), then load that folder."
        )


def check_one_adapter(module: Any) -> None:
    """Refuse to export adapters where two act.

    Raises:
        ValueError: an earlier one is kept beside the one that trains.
    """
    if len(active_adapters(module)) > 1:
        raise ValueError(
            "A policy with a kept adapter should be exported whole, got save_pretrained, which writes one adapter: "
            "without the other it would be another model. Use save_merged(folder)."
        )
