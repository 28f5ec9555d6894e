"""The classifier that reward training starts from: a causal model under a new head, or a trained classifier."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn

from textenv.lm.loading import load_causal_lm, resolve
from textenv.rewards.sequence_classification import is_decoder_type, load_classifier


def scoring_model(name: str | os.PathLike[str], device: str = "cpu") -> Any:
    """A frozen float32 sequence classifier with one label and a linear head on a causal trunk.

    A language model's weights are taken as they are, and its new head is 0: every text scores 0 until something was
    learned, and no random number is drawn.

    Args:
        name: an embedded name, a folder, or a Hugging Face hub id, of a language model or of a classifier.
        device: a torch device.

    Raises:
        ValueError: no model has the name, or its score is not linear in the last hidden state of a causal trunk.
    """
    if _is_classifier(resolve(name)):
        model = load_classifier(resolve(name), device, "float32")
    else:
        model = _under_new_head(load_causal_lm(name, device))
    if not is_decoder_type(model):
        raise ValueError(
            f"{os.fspath(name)!r} should be a causal model, scored by one linear head at the last token, got "
            f"{type(model).__name__}. Score with it through SequenceClassificationReward, or train a causal model."
        )
    if model.score.out_features != 1:
        raise ValueError(
            f"{os.fspath(name)!r} should have one label, whose logit is the score, got {model.score.out_features}. "
            "Start from the language model that it was made of."
        )
    return model


def _is_classifier(source: str) -> bool:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        return False  # loading it as a language model says what is wrong
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def empty_classifier(config: Any) -> Any:
    """A sequence classifier of a configuration without weights: its tensors are on torch's device "meta".

    Raises:
        ValueError: transformers has no sequence classifier for this kind of model.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"transformers has no sequence classifier for models of type {config.model_type!r}, in which a reward "
            f"model could be kept. Take another model. Cause: {error}"
        ) from error


def _under_new_head(language_model: Any) -> Any:
    """A classifier on a language model's own trunk."""
    config = copy.deepcopy(language_model.config)
    config.num_labels = 1
    model = empty_classifier(config)
    trunk = language_model.base_model
    setattr(model, model.base_model_prefix, trunk)
    if isinstance(getattr(model, "score", None), nn.Linear):
        weight = trunk.get_input_embeddings().weight
        model.score = nn.utils.skip_init(nn.Linear, model.score.in_features, 1, bias=False, device=weight.device)
        nn.init.zeros_(model.score.weight)
    return model.eval().requires_grad_(False)
