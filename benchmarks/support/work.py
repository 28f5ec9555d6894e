"""The work that all sides are given: a model, a classifier on it, and prompts of equal length. Needs textenv."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from textenv.lm import load_tokenizer, resolve
from textenv.lm.loading import quiet_progress

NAMES = ("smollm2", "tiny")

TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""A random Llama of 15.5 million weights: heads of 64, 8/3 as wide within, and the tokenizer, as SmolLM2 has them."""


def model_folder(name: str, scratch: Path) -> str:
    """The folder of a model by its name in `NAMES`; the tiny one is made in `scratch`."""
    if name == "smollm2":
        return resolve("smollm2-135m")
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = scratch / "model"
    with torch.random.fork_rng(), quiet_progress():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("smollm2-135m")).save_pretrained(folder)
    return os.fspath(folder)


def classifier_folder(model: str, scratch: Path) -> str:
    """A classifier of one logit, its trunk the model's and its head random: reward model here, value model there."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder = scratch / "classifier"
    with torch.random.fork_rng(), quiet_progress():
        torch.manual_seed(0)
        trunk: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32").base_model
        trunk.config.num_labels = 1
        classifier: Any = AutoModelForSequenceClassification.from_config(trunk.config)
        classifier.base_model.load_state_dict(trunk.state_dict())
        classifier.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return os.fspath(folder)


def film_prompts(model: str, count: int, tokens: int) -> list[list[int]]:
    """The first `tokens` ids of film-review sentences, `count` of them, that their texts encode to again."""
    from textenv.rewards import load_ratings

    tokenizer = load_tokenizer(model)
    prompts: list[list[int]] = []
    for sentence in load_ratings():
        ids = list(tokenizer.encode(sentence.text))[:tokens]
        if len(ids) == tokens and list(tokenizer.encode(tokenizer.decode(ids))) == ids:
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    raise ValueError(f"`tokens` should leave {count} prompts, {tokens} leave {len(prompts)}. Ask for shorter ones.")
