"""Policies with every kind of value function, and the reward models that some of them start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lm_helpers import ROWS, byte_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from textenv.agents import LanguageModelPolicy
from textenv.agents.value_models import VALUE_KINDS
from textenv.lm import LazyLanguageModel, load_tokenizer
from textenv.rewards import RewardModel

COMBINATIONS = [(value, lora_rank) for value in VALUE_KINDS for lora_rank in (4, None)]


def reward_on(trunk: str, width: int = 32) -> RewardModel:
    """A random head with a bias on a saved model."""
    tokenizer = load_tokenizer(trunk)
    lazy = LazyLanguageModel(trunk, named_size=tokenizer.named_size)
    return RewardModel(lazy, tokenizer, np.random.default_rng(5).normal(size=width), 0.75)


def head_file(trunk: str, width: int = 32) -> str:
    """The same as a file beside the model's folder, written once."""
    path = Path(trunk).with_name(f"{Path(trunk).name}-head.safetensors")
    if not path.exists():
        reward_on(trunk, width).save(path)
    return str(path)


def make_policy(folder: str, value: str, lora_rank: int | None = 4, **options) -> LanguageModelPolicy:
    """A policy whose reward model, where it needs one, reads the policy's own weights."""
    if value == "reward":
        options.setdefault("reward_model", head_file(folder))
    return LanguageModelPolicy.from_pretrained(folder, value=value, lora_rank=lora_rank, **options)


def save_classifier(folder: Path, kind=LlamaForSequenceClassification, config=None, tokenizer=None, labels=1) -> str:
    """A sequence classifier as transformers saves it, with the tiny models' tokenizer."""
    if config is None:
        config = LlamaConfig(
            vocab_size=ROWS,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(7)
        kind(config).save_pretrained(folder)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return str(folder)
