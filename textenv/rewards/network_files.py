"""A trained reward network as files: a transformers classifier checkpoint, or a small file of what trained.

The checkpoint is what `SequenceClassificationReward` and ``AutoModelForSequenceClassification`` load, adapters merged.
transformers finds the last token of a text by comparing ids with the padding id, and misses it where that is the
end-of-sequence id and a text ends in it; so a checkpoint gets a padding id apart from it wherever its vocabulary has
room for one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from textenv.lm.loading import portable_name, quiet_progress
from textenv.lm.merged import merged_weights
from textenv.rewards.network import RewardNetwork
from textenv.rewards.network_start import empty_classifier
from textenv.rewards.reward_model import with_sorted_header
from textenv.rewards.sequence_classification import SCORE_OFFSET

FILM_REVIEWS = "film_review_adapters.safetensors"
PAD = "<|pad|>"
FORMAT = "textenv reward network 1"


def save_classifier(network: RewardNetwork, folder: str | os.PathLike[str], dtype: str = "float32") -> None:
    """Write a folder that transformers loads as a sequence classifier with one label, and with equal scores.

    A centred network keeps its constant in the configuration (``score_offset``), because transformers' heads on
    decoders have no bias: `SequenceClassificationReward` adds it, transformers' own logits lack it. Differences of
    scores are the same for both. A template stays behind; give it to `SequenceClassificationReward` again.

    Args:
        network: any; it is left as it is.
        folder: made where it is not there.
        dtype: of the weights, ``"float32"`` or ``"bfloat16"``, which halves the files and rounds the scores.
    """
    config = copy.deepcopy(network.classifier.config)
    tokenizer, config.pad_token_id = padding_apart(network.tokenizer, network.classifier)
    config.num_labels = 1
    if network.offset:
        setattr(config, SCORE_OFFSET, network.offset)
    elif hasattr(config, SCORE_OFFSET):
        delattr(config, SCORE_OFFSET)
    kind = getattr(torch, dtype)
    model = empty_classifier(config)
    weights = {name: tensor.to("cpu", kind) for name, tensor in merged_weights(network.classifier)}
    report = model.load_state_dict(weights, strict=False, assign=True)
    if report.missing_keys or report.unexpected_keys:
        raise RuntimeError(f"The classifier's weights do not fit it: {report.missing_keys + report.unexpected_keys}.")
    with quiet_progress():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def padding_apart(tokenizer: Any, classifier: Any) -> tuple[Any, int | None]:
    """A tokenizer (a copy where it changes) and the id to pad with, one that ends no text wherever there is one.

    Taken is the tokenizer's own padding token; where that also ends or begins texts, its token for unknown words, which
    byte-level vocabularies never write; else a new token, if the embeddings have a row that no token names. Where they
    have none, the padding stays as it was.
    """
    taken = {tokenizer.eos_token_id, tokenizer.bos_token_id, None}
    if tokenizer.pad_token_id not in taken:
        return tokenizer, tokenizer.pad_token_id
    named, rows = len(tokenizer), classifier.get_input_embeddings().weight.shape[0]
    if tokenizer.unk_token_id in taken and named >= rows:
        return tokenizer, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": PAD if tokenizer.unk_token_id in taken else tokenizer.unk_token})
    return tokenizer, tokenizer.pad_token_id


def save_adapters(
    network: RewardNetwork, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write what trained to one safetensors file: adapters in bfloat16, the head in float32, and the trunk's name.

    Args:
        network: one whose trunk is frozen.
        path: the file.
        metadata: what is known of it, such as held-out figures.

    Raises:
        ValueError: all weights trained; that is a checkpoint.
    """
    from safetensors.torch import save

    if network.settings["train"] == "all":
        raise ValueError("A network whose weights all trained is no small file: write it with save_classifier.")
    tensors = {
        name: parameter.detach()
        .cpu()
        .to(torch.float32 if name.endswith("score.weight") else torch.bfloat16)
        .contiguous()
        for name, parameter in network.trained_state().items()
    }
    settings = {**network.settings, "model": portable_name(network.settings["model"])}
    known = {**(metadata or {}), "format": FORMAT, "settings": json.dumps(settings), "offset": repr(network.offset)}
    Path(path).write_bytes(with_sorted_header(save(tensors, metadata=known)))


def load_adapters(
    path: str | os.PathLike[str], *, device: str = "cpu", dtype: str = "float32", template: Any = None
) -> tuple[RewardNetwork, dict[str, str]]:
    """The network that `save_adapters` wrote, on its trunk, and what is known of it.

    Args:
        path: the file.
        device: a torch device.
        dtype: arithmetic, ``"float32"`` or ``"bfloat16"``.
        template: see `RewardNetwork`.

    Raises:
        ValueError: there is no such file, or its trunk cannot be found.
    """
    tensors, settings, offset, known = read_adapters(path)
    network = RewardNetwork.from_pretrained(**settings | {"device": device, "dtype": dtype}, template=template)
    with torch.no_grad():
        for name, parameter in network.trained_state().items():
            parameter.copy_(tensors[name])
    network.offset = offset
    return network, known


def read_adapters(
    path: str | os.PathLike[str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any], float, dict[str, str]]:
    """What `save_adapters` wrote: tensors by name, the network's settings and offset, and what is known of it.

    Raises:
        ValueError: there is no such file, or it is of another kind.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            known = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"`path` should be a file that save_adapters wrote, got {os.fspath(path)!r}: {error}"
        ) from error
    if known.pop("format", None) != FORMAT:
        raise ValueError(f"`path` should be a file that save_adapters wrote, got {os.fspath(path)!r}, another kind.")
    return tensors, json.loads(known.pop("settings")), float(known.pop("offset")), known


def film_review_network(device: str = "cpu", dtype: str = "float32") -> RewardNetwork:
    """The network that the default reward model is, `film_review_reward`, with its adapters apart, to be trained on.

    Args:
        device: a torch device.
        dtype: arithmetic, ``"float32"`` or ``"bfloat16"``.
    """
    with resources.as_file(resources.files("textenv.assets").joinpath(FILM_REVIEWS)) as path:
        return load_adapters(path, device=device, dtype=dtype)[0]
