"""A causal trunk without an output head, read as `LanguageModel` reads one: hidden states, packed where that works."""

from __future__ import annotations

from typing import Any

from textenv.lm.model import LanguageModel


class HeadlessModel(LanguageModel):
    """Hidden states of a transformers model that has no output head; whatever needs logits is not there.

    Args:
        trunk: a transformers model such as ``LlamaModel``, or the ``base_model`` of one with a head.
        dtype: arithmetic, ``"float32"`` or ``"bfloat16"``.
    """

    def __init__(self, trunk: Any, dtype: str) -> None:
        self.model, self.dtype = trunk, dtype  # the construction of `LanguageModel` would look at the output head
        config = trunk.config.get_text_config()
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.vocab_size = trunk.get_input_embeddings().weight.shape[0]
