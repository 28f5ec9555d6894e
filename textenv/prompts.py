"""Where prompts come from: texts or token ids, encoded and checked once, drawn uniformly. Knows nothing of models."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """Text to ids and back. `decode_batch` (several responses at once) is used where it exists."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text that starts a sequence."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out."""
        ...


class EncodedPrompt(NamedTuple):
    """A prompt as `encode_prompt` gives it. Used as a prompt again, text and ids stay as they are."""

    text: str
    ids: tuple[int, ...]


Prompt = str | EncodedPrompt | Sequence[int] | NDArray[np.integer]
"""A prompt as a text or as token ids."""


@dataclass(frozen=True)
class PromptSet:
    """Encoded prompts, ready to be drawn.

    Attributes:
        texts: what the scorer and the infos show.
        ids: token ids of each, 1 to P of them.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]

    @classmethod
    def encode(
        cls, prompts: Sequence[Prompt], tokenizer: Tokenizer, vocab_size: int, max_prompt_tokens: int | None = None
    ) -> PromptSet:
        """Encode prompts and refuse those that cannot be used, before any work is done.

        Args:
            prompts: texts or token ids, mixed as one likes.
            tokenizer: encodes the texts; texts of id prompts come from its `decode`.
            vocab_size: V.
            max_prompt_tokens: P, or None for the longest of the prompts.

        Raises:
            ValueError: no prompts, an empty one, one over the budget, or ids outside the vocabulary; the row is named.
        """
        if isinstance(prompts, str):
            raise ValueError(
                f"`prompts` should be a list of texts, got the single text {prompts!r}, which would become one prompt "
                f"per character. Write prompts=[{prompts!r}]."
            )
        if len(prompts) == 0:
            raise ValueError(
                "`prompts` should hold at least one prompt, got none. An episode starts from a prompt; check the file "
                "or filter that they came from."
            )
        encoded = [encode_prompt(p, tokenizer, vocab_size, f"prompts[{row}]") for row, p in enumerate(prompts)]
        for row, (text, ids) in enumerate(encoded):
            if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
                raise ValueError(
                    f"prompts[{row}] should have at most max_prompt_tokens={max_prompt_tokens} tokens, got {len(ids)}: "
                    f"{_shortened(text)!r}. Raise max_prompt_tokens, or shorten the prompt."
                )
        return cls(tuple(text for text, _ in encoded), tuple(ids for _, ids in encoded))

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self.texts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))

    def draw(self, rng: np.random.Generator) -> EncodedPrompt:
        """One prompt, every one equally likely."""
        row = int(rng.integers(len(self.texts)))
        return EncodedPrompt(self.texts[row], self.ids[row])


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, name: str) -> EncodedPrompt:
    """Text and ids of one prompt.

    Raises:
        ValueError: it is neither text nor ids, is empty, or holds ids outside the vocabulary. `name` says which it is.
    """
    if isinstance(prompt, EncodedPrompt):
        return prompt
    ids = _as_ids(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, name)
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(
            f"{name} should hold token ids in [0, {vocab_size}), got {outside[:5]}. They have no embedding; encode the "
            "prompt with the tokenizer of the model."
        )
    if not ids:
        raise ValueError(
            f"{name} should have at least one token, got {prompt!r}. A language model needs a token to start from; use "
            "its beginning-of-sequence token, or a word."
        )
    return EncodedPrompt(prompt if isinstance(prompt, str) else tokenizer.decode(ids), ids)


def _as_ids(values: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ValueError(
            f"{name} should be a text or a list of token ids (integers), got {values!r}. Pass the text itself, or "
            "its ids."
        ) from error


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """Decode many responses at once, in one call where the tokenizer can."""
    batch = getattr(tokenizer, "decode_batch", None)
    return batch if batch is not None else lambda rows: [tokenizer.decode(row) for row in rows]


def _shortened(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
