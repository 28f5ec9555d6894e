"""Language models: loading them, token log-probabilities, low-rank adapters. Knows torch and transformers, not Gymnasium."""

from textenv.lm.loading import load_causal_lm, load_tokenizer, resolve
from textenv.lm.logprobs import OutputHead, token_logprobs
from textenv.lm.model import LanguageModel, LazyLanguageModel
from textenv.lm.tokenizer import TextTokenizer

__all__ = [
    "LanguageModel",
    "LazyLanguageModel",
    "OutputHead",
    "TextTokenizer",
    "load_causal_lm",
    "load_tokenizer",
    "resolve",
    "token_logprobs",
]
