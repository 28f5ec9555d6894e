"""Where prompts come from: texts, token ids, chats, files and datasets, encoded and checked once. Knows no models.

`load_prompts` reads them, `PromptSet` encodes, chooses and splits them; see docs/prompts.md.
"""

from textenv.prompts.demonstrations import Demonstration, load_demonstrations
from textenv.prompts.encoding import (
    EncodedPrompt,
    Prompt,
    PromptRecord,
    Tokenizer,
    context_columns,
    decoder,
    encode_prompt,
)
from textenv.prompts.load import is_source, load_prompts
from textenv.prompts.prompt_set import PromptSet, check_context
from textenv.prompts.schedule import Curriculum

__all__ = [
    "Curriculum",
    "Demonstration",
    "EncodedPrompt",
    "Prompt",
    "PromptRecord",
    "PromptSet",
    "Tokenizer",
    "check_context",
    "context_columns",
    "decoder",
    "encode_prompt",
    "is_source",
    "load_demonstrations",
    "load_prompts",
]
