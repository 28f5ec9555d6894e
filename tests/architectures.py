"""Tiny random models of many architectures, far enough from uniform for a wrong prefix to show."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

VOCAB = 97
WINDOW = 5
"""Of sliding attention: shorter than the rows of the tests."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
GEMMA = {**GROUPED, **MIXED, "head_dim": 8}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GROUPED}),
    "qwen2": ("Qwen2", {**GROUPED}),
    "qwen2-sliding": ("Qwen2", {**GROUPED, **MIXED, "use_sliding_window": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2", GPT2),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3", {**GEMMA}),
    "mistral-sliding": ("Mistral", {**GROUPED, "sliding_window": WINDOW}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "phi": ("Phi", {}),
    "phi3-sliding": ("Phi3", {**GROUPED, "sliding_window": WINDOW}),
    "olmo": ("Olmo", {**GROUPED}),
    "olmo2": ("Olmo2", {**GROUPED}),
    "gpt-neox": ("GPTNeoX", {}),
}
"""Name: the prefix of its classes, and what its configuration adds to `COMMON`."""

RECURRENT = {"state_size": 4, "hidden_size": 32, "vocab_size": VOCAB, "num_hidden_layers": 2, "initializer_range": 0.4}


def tiny(name: str, seed: int = 0, attention: str = "sdpa") -> Any:
    """A frozen model of that architecture."""
    prefix, options = ARCHITECTURES[name]
    suffix = "TextConfig" if prefix == "Gemma3" else "Config"
    config = getattr(tf, prefix + suffix)(**{**COMMON, **options}, attn_implementation=attention)
    model_class = getattr(tf, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config).eval().requires_grad_(False)


def mamba(seed: int = 0) -> Any:
    """A recurrent model: no attention, no keys and values."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tf.MambaForCausalLM(tf.MambaConfig(**RECURRENT)).eval().requires_grad_(False)
