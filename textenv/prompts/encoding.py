"""One prompt, however it was written, as text and token ids. Knows nothing of models, files or sets of prompts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textenv.prompts.chat import check_messages, is_chat


class Tokenizer(Protocol):
    """Text to ids and back.

    Used where they exist: ``decode_batch`` (several responses at once), ``encode_chat`` (messages to text and ids),
    ``named_size`` (ids from there on have no token), ``bos_id``, ``context_length``.
    """

    def encode(self, text: str) -> list[int]:
        """Ids of a text that starts a sequence."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out."""
        ...


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as `encode_prompt` gives it. Used as a prompt again, it stays as it is.

    Attributes:
        text: what scorers and infos see.
        ids: token ids, what the policy sees.
        context: what goes along to the scorer, by column.
    """

    text: str
    ids: tuple[int, ...]
    context: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and what is known of it.

    Attributes:
        prompt: a text, token ids or chat messages.
        context: what goes along to the scorer, by column: ``{"reference_answer": "4"}``.
        weight: how often it is drawn, relative to the others; None where no record has one.
        place: where it comes from (``"train.jsonl line 3"``), for messages.
    """

    prompt: Any
    context: Mapping[str, Any] = field(default_factory=dict, hash=False)
    weight: float | None = None
    place: str = ""


Prompt = str | EncodedPrompt | PromptRecord | Sequence[int] | NDArray[np.integer] | Sequence[Mapping[str, Any]]
"""A prompt as a text, as token ids, as chat messages (``{"role": ..., "content": ...}``), or with its context."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, name: str) -> EncodedPrompt:
    """Text and ids of one prompt.

    Chat messages go through the tokenizer's chat template, once; their text is what the template makes of them.

    Raises:
        ValueError: it is no prompt, is empty, cannot be encoded, or holds ids that have no embedding or no token.
            `name` says which it is.
    """
    if isinstance(prompt, PromptRecord):
        encoded = encode_prompt(prompt.prompt, tokenizer, vocab_size, name_of(prompt, name))
        return EncodedPrompt(encoded.text, encoded.ids, dict(prompt.context) or encoded.context)
    if isinstance(prompt, EncodedPrompt):
        _check_ids(prompt.ids, tokenizer, vocab_size, name, prompt.text)
        return prompt
    if isinstance(prompt, str):
        text, ids = prompt, _as_ids(_encode(prompt, tokenizer, name), name)
    elif is_chat(prompt):
        text, chat_ids = _encode_chat(prompt, tokenizer, name)
        ids = _as_ids(chat_ids, name)
    else:
        text, ids = None, _as_ids(prompt, name)
    _check_ids(ids, tokenizer, vocab_size, name, prompt)
    return EncodedPrompt(tokenizer.decode(ids) if text is None else text, ids)


def name_of(prompt: Any, name: str) -> str:
    """What to call a prompt in a message: its name, and where it comes from if that is known."""
    place = getattr(prompt, "place", "")
    return f"{name} ({place})" if place else name


def context_columns(prompts: Sequence[EncodedPrompt]) -> dict[str, list[Any]]:
    """What goes along with B prompts as keyword arguments of a scorer: a list of B values per column.

    >>> context_columns([EncodedPrompt("1+1=", (1,), {"answer": "2"}), EncodedPrompt("2+2=", (2,), {"answer": "4"})])
    {'answer': ['2', '4']}
    """
    columns = prompts[0].context if prompts else {}
    return {column: [prompt.context[column] for prompt in prompts] for column in columns}


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """Decode many responses at once, in one call where the tokenizer can."""
    batch = getattr(tokenizer, "decode_batch", None)
    return batch if batch is not None else lambda rows: [tokenizer.decode(row) for row in rows]


def shortened(text: str, width: int = 80) -> str:
    """A text that fits into a message."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _encode(text: str, tokenizer: Tokenizer, name: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} should be text that UTF-8 can write, got half of a surrogate pair at character {error.start} of "
            f"{shortened(text)!r}. Tokenizers fail on it; it often comes from a text that was cut inside an escape."
        ) from error
    return tokenizer.encode(text)


def _encode_chat(prompt: Any, tokenizer: Tokenizer, name: str) -> tuple[str, list[int]]:
    messages = check_messages(prompt, name)
    encode_chat = getattr(tokenizer, "encode_chat", None)
    if encode_chat is None:
        raise ValueError(
            f"{name} holds chat messages, but {type(tokenizer).__name__} has no `encode_chat` to make them one text. "
            "Pass texts, or a textenv.lm.TextTokenizer whose tokenizer has a chat template."
        )
    try:
        text, ids = encode_chat(messages)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return text, ids


def _as_ids(values: Any, name: str) -> tuple[int, ...]:
    try:
        if isinstance(values, bytes | Mapping):  # they would iterate as numbers, or as their keys
            raise TypeError
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ValueError(
            f"{name} should be a text or a list of token ids (integers) or chat messages, got {values!r}. Pass the "
            "text itself, or its ids; rows of columns go through textenv.prompts.load_prompts."
        ) from error


def _check_ids(ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int, name: str, prompt: Any) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(
            f"{name} should hold token ids in [0, {vocab_size}), got {outside[:5]}. They have no embedding; encode the "
            "prompt with the tokenizer of the model."
        )
    named = getattr(tokenizer, "named_size", None)
    unnamed = [i for i in ids if named is not None and i >= named]
    if unnamed:
        raise ValueError(
            f"{name} should hold ids that the tokenizer names, in [0, {named}), got {unnamed[:5]}. The embedding has "
            f"rows for them ({vocab_size} in all), but no text leads there and no training has been there; encode the "
            "prompt with the tokenizer of the model."
        )
    if not ids:
        raise ValueError(
            f"{name} should have at least one token, got {prompt!r}. A language model needs a token to start from; use "
            "its beginning-of-sequence token, or a word."
        )
