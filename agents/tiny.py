"""`tiny_transformer`: a language model small enough to train from scratch in seconds, for tasks over byte ids."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from textenv.agents.language_model import LanguageModelPolicy
from textenv.bytes import ByteTokenizer
from textenv.lm import LanguageModel


def tiny_transformer(
    vocab_size: int | np.integer[Any] = ByteTokenizer.vocab_size,
    *,
    seed: int = 0,
    hidden_size: int = 32,
    num_layers: int = 1,
    context_length: int = 128,
    temperature: float = 1.0,
) -> LanguageModelPolicy:
    """Make a random Llama of some 25,000 weights as a policy: all of them train, their first values are the reference.

    It starts near the uniform distribution (logits with a standard deviation of about 0.6) and knows nothing; SmolLM2
    goes through the very same code. `PPO.save` writes its weights, and `PPO.load` wants another one to read them into:
    ``PPO.load(folder, envs, policy=tiny_transformer(...))``.

    Args:
        vocab_size: V of the environment, ``envs.single_action_space.n``.
        seed: of the weights; the process's random state is left alone.
        hidden_size: H, an even number that two attention heads can share.
        num_layers: transformer blocks.
        context_length: prompt and response tokens that it can attend to, at least.
        temperature: of the distribution that is sampled, trained and compared with the reference.

    Raises:
        ValueError: a size that is not an integer of at least 1, or a `hidden_size` that is not a multiple of 4.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "context_length": context_length,
    }
    _check_sizes(sizes)
    module = _random_llama(seed, **{name: int(size) for name, size in sizes.items()})
    common: dict[str, Any] = {"source": f"tiny-transformer-{seed}", "temperature": temperature}
    reference = LanguageModel(copy.deepcopy(module).requires_grad_(False), **common)
    tokenizer: Any = ByteTokenizer()
    return LanguageModelPolicy(LanguageModel(module, **common), reference, tokenizer, settings={})


def _random_llama(seed: int, *, vocab_size: int, hidden_size: int, num_layers: int, context_length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        initializer_range=0.1,  # 0.02, the default, is for wide models: prompts would look alike at width 32
        tie_word_embeddings=False,  # tied, the likeliest next token would be the last one again
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def _check_sizes(sizes: dict[str, Any]) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(
                f"`{name}` should be an integer of at least 1, got {size!r}: there would be no model. Take the "
                "vocabulary's size from the environment, `envs.single_action_space.n`, the others from the defaults."
            )
    if sizes["hidden_size"] % 4:
        raise ValueError(
            f"`hidden_size` should be a multiple of 4, got {sizes['hidden_size']}. Two attention heads share it, and "
            "rotary positions turn pairs of numbers within each. Use 32."
        )
