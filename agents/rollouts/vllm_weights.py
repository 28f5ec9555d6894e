"""A policy's architecture and weights as vLLM takes them: a config.json, and checkpoint tensors. No weights on a disk.

Rows of the embeddings that the tokenizer does not name are left out of both. The engine's vocabulary then ends where
the tokenizer's does, so that such ids have probability 0 in sampling and in log-probabilities, at no cost.

Legend: V rows of the embeddings, H hidden size.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from textenv.lm.merged import WRAPPED, merged_weights


def engine_vocab_size(policy: Any) -> int:
    """Ids that the engine knows: those that the tokenizer names, or all V where it does not say."""
    named = policy.lm.named_size
    return int(policy.lm.vocab_size if named is None else min(named, policy.lm.vocab_size))


def context_length(policy: Any) -> int | None:
    """Tokens that the model attends to by its own configuration; None where that does not say."""
    length = getattr(policy.lm.model.config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def write_config(policy: Any, folder: str | os.PathLike[str]) -> None:
    """Write config.json alone: no weights, no tokenizer, and no generation_config for vLLM to sample by.

    It names no end-of-text id either: the task's stop ids come with each request.

    Args:
        policy: a `LanguageModelPolicy`.
        folder: that exists.
    """
    model = policy.lm.model
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        part.bos_token_id = part.eos_token_id = part.pad_token_id = None
    config.get_text_config().vocab_size = engine_vocab_size(policy)
    config.save_pretrained(folder)


def engine_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors for vLLM, adapters merged on the fly, one tensor at a time; see `merged_weights`.

    Args:
        policy: a `LanguageModelPolicy`.
    """
    model, size = policy.lm.model, engine_vocab_size(policy)
    head = model.get_output_embeddings()
    by_vocab = {id(x) for x in (model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None))}
    names = {name.replace(WRAPPED, ".") for name, parameter in model.named_parameters() if id(parameter) in by_vocab}
    for name, tensor in merged_weights(model):
        yield name, tensor[:size] if name in names else tensor
