"""Language models: loading, token log-probabilities, low-rank adapters. Knows torch and transformers, not Gymnasium."""

from textenv.optional import require

for _module in ("torch", "transformers"):
    require(_module, "train", "textenv.lm")

from textenv.lm.lazy import LazyLanguageModel  # noqa: E402
from textenv.lm.loading import load_causal_lm, load_tokenizer, resolve  # noqa: E402
from textenv.lm.logprobs import token_logprobs  # noqa: E402
from textenv.lm.model import LanguageModel  # noqa: E402
from textenv.lm.output_head import OutputHead  # noqa: E402
from textenv.lm.stepping import Stepper  # noqa: E402
from textenv.lm.tokenizer import TextTokenizer  # noqa: E402

__all__ = [
    "LanguageModel",
    "LazyLanguageModel",
    "OutputHead",
    "Stepper",
    "TextTokenizer",
    "load_causal_lm",
    "load_tokenizer",
    "resolve",
    "token_logprobs",
]
