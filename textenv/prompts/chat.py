"""Chat messages as prompts: what they look like, and what is refused. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages (and not of token ids)."""
    return isinstance(prompt, list | tuple) and any(isinstance(message, Mapping) for message in prompt)


def check_fields(messages: Sequence[Any], name: str) -> list[dict[str, Any]]:
    """Messages of any roles as a list of dicts of their own.

    Raises:
        ValueError: one has no text or no role. `name` says whose they are.
    """
    for place, message in enumerate(messages):
        fields = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f'{name}: message {place} should be a dict {{"role": ..., "content": ...}} of two texts, got '
                f"{message!r}. The chat template would leave it out or write it as something else. Mend it, or pass "
                "the text itself."
            )
    return [dict(message) for message in messages]


def check_messages(messages: Sequence[Any], name: str) -> list[dict[str, Any]]:
    """Messages to answer as a list of dicts of their own.

    Raises:
        ValueError: one has no text or no role, or the last is the assistant's own. `name` says whose they are.
    """
    checked = check_fields(messages, name)
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{name}: the last message should be one to answer, got one of the assistant: {messages[-1]!r}. The policy "
            "would answer its own answer. Leave it out of the prompt; as a reference answer it can go into the context."
        )
    return checked
