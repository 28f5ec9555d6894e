"""`ByteTokenizer`: text as UTF-8 bytes, and one more id that ends a text. Needs no vocabulary file and no model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ByteTokenizer:
    r"""Ids 0 to 255 are the bytes of UTF-8 text; id 256 ends a text and leaves none.

    Any sequence of ids decodes: bytes that are no UTF-8 become U+FFFD, one for each broken sequence. An ASCII id always
    decodes to its own character, whatever stands around it; that is what scores of decoded bytes should count on.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("hi")
        [104, 105]
        >>> tokenizer.decode([104, 105, 256])
        'hi'
        >>> tokenizer.decode([0xC3, 0xA9]), tokenizer.decode([0xC3, 104])
        ('é', '\ufffdh')
    """

    stop_id: ClassVar[int] = 256
    """The end-of-text id, which stops a response."""
    vocab_size: ClassVar[int] = 257
    """V: the bytes and the end of text."""

    def encode(self, text: str) -> list[int]:
        """The bytes of a text, without an end-of-text id.

        Raises:
            ValueError: the text holds a lone surrogate, which UTF-8 cannot write.
        """
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"A text should be writable as UTF-8, got a lone surrogate at character {error.start} of {text!r}. No "
                'bytes stand for it. Clean the text first: text.encode(errors="replace").decode().'
            ) from error

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """The text of some ids; the end-of-text id leaves none.

        Raises:
            ValueError: an id outside 0 to 256.
        """
        return _text(ids)

    def decode_batch(self, batch: Iterable[Sequence[int] | NDArray[np.integer[Any]]]) -> list[str]:
        """The texts of several responses; see `decode`."""
        return [_text(ids) for ids in batch]


def _text(ids: Iterable[Any]) -> str:
    plain = [operator.index(i) for i in ids]
    outside = [i for i in plain if not 0 <= i <= ByteTokenizer.stop_id]
    if outside:
        raise ValueError(
            f"Token ids should be in 0 to {ByteTokenizer.stop_id}, got {outside[:5]}. They stand for no byte. Use a "
            f"policy with vocab_size={ByteTokenizer.vocab_size}."
        )
    return bytes(i for i in plain if i != ByteTokenizer.stop_id).decode(errors="replace")
