"""The text of toy episodes: token ids as decimal numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from textenv.toy_checks import IntArray, as_id

_DECIMAL_ID = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class ToyTokenizer:
    """Token ids as text: decimal numbers, each written with a space before it, lossless.

    The leading space makes a prompt's text and its response's text read on when they are put together, as the texts of
    byte-level vocabularies do.

    Example:
        >>> ToyTokenizer().decode([3, 3, 0])
        ' 3 3 0'
        >>> ToyTokenizer().encode(" 3 3 0")
        [3, 3, 0]
    """

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Ids to text; no ids to the empty text. Nothing is left out, the stop token included."""
        return "".join(f" {as_id(token, None, 'Every token id')}" for token in ids)

    def encode(self, text: str) -> list[int]:
        """Text to ids, whatever whitespace is between and around them; the empty text to no ids.

        Raises:
            ValueError: A word that `decode` could not have written, such as a sign or a leading zero.
        """
        words = text.split()
        wrong = [word for word in words if not _DECIMAL_ID.fullmatch(word)]
        if wrong:
            raise ValueError(
                f"A toy text should be decimal ids with whitespace between them, such as ' 3 3 0', got {wrong[0]!r} in "
                f"{text!r}. Other spellings would not survive decoding. Write ids without signs or leading zeros."
            )
        return [int(word) for word in words]
