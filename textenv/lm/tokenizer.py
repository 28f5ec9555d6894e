"""Text to token ids and back, over a Hugging Face tokenizer that is only read, never changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class TextTokenizer:
    """What the environment needs of a tokenizer.

    Args:
        tokenizer: a transformers tokenizer. Its settings (padding side, pad token) are neither used nor edited.
        stop_ids: ids that end a response. Where not given, the tokenizer's end-of-sequence id.
        vocab_size: the model's output width V, at least ``len(tokenizer)``; ids from ``len(tokenizer)`` on are unnamed.
        context_length: tokens that the model can attend to, where known.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        context_length: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        if stop_ids is None:
            stop_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_ids = tuple(stop_ids)
        self.named_size = len(tokenizer)
        self.vocab_size = self.named_size if vocab_size is None else vocab_size

    @property
    def pad_id(self) -> int:
        """A harmless id to fill unused columns with. Masks never come from it: it may equal the EOS id."""
        for candidate in (self.tokenizer.pad_token_id, *self.stop_ids):
            if candidate is not None:
                return int(candidate)
        return 0

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence, where the tokenizer knows one."""
        return None if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a sequence, where the tokenizer knows one."""
        return None if self.tokenizer.eos_token_id is None else int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that starts a sequence: one BOS where the tokenizer uses one, no EOS that it appends.

        An EOS that the text itself ends with stays.
        """
        ids = list(self.tokenizer(text).input_ids)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        while bos is not None and ids[:2] == [bos, bos]:  # a template had already written it
            ids = ids[1:]
        written = _count_at_end(text, self.tokenizer.eos_token) if eos is not None else 0
        while eos is not None and ids[len(ids) - written - 1 :] == [eos] * (written + 1):  # the tokenizer appended one
            ids = ids[:-1]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """Text and ids of chat messages: the chat template applied once, the assistant's turn opened, one BOS.

        The BOS is the template's own, or the one that the tokenizer adds, never both. The text is what the template
        wrote, less a BOS that `encode` adds by itself, so that ``encode(text)`` gives the ids again.

        Args:
            messages: dicts with ``role`` and ``content``.

        Raises:
            ValueError: the tokenizer has no chat template, or it refuses these messages.
        """
        rendered = self.render_chat(messages)
        ids = self.encode(rendered)
        bare = rendered.removeprefix(self.tokenizer.bos_token or "")
        return (bare if self.encode(bare) == ids else rendered), ids

    def encode_turn(self, messages: Sequence[Mapping[str, Any]], answer: str) -> list[int] | None:
        """Ids of the assistant's answer as the chat template writes it, the stop id that ends its turn included.

        Args:
            messages: what is answered.
            answer: the assistant's.

        Returns:
            What follows the ids of `encode_chat`, up to the first stop id; None where the template writes an answer
            otherwise than behind the turn that it opened, or ends it with no stop id.

        Raises:
            ValueError: see `encode_chat`.
        """
        opened = self.encode_chat(messages)[1]
        turn = {"role": "assistant", "content": answer}
        ids = self.encode(self.render_chat([*messages, turn], open_turn=False))
        ends = [place for place in range(len(opened), len(ids)) if ids[place] in self.stop_ids]
        return ids[len(opened) : ends[0] + 1] if ends and ids[: len(opened)] == opened else None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], open_turn: bool = True) -> str:
        """What the chat template makes of messages, as it stands: a BOS that the template writes is in it.

        Args:
            messages: dicts with ``role`` and ``content``.
            open_turn: end with the mark that begins an assistant's turn.

        Raises:
            ValueError: the tokenizer has no chat template, or it refuses these messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "chat messages need a tokenizer with a chat template, got one without: how this model was told apart "
                "who speaks is not known (a base model never was). Pass the prompt as text, or the tokenizer of an "
                "instruction-tuned model."
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    copy.deepcopy(list(messages)), tokenize=False, add_generation_prompt=open_turn
                )
            )
        except ImportError:
            raise
        except Exception as error:  # templates raise whatever they like
            raise ValueError(
                f"the model's chat template should take these messages, but refused them: {error}. Many templates want "
                "user and assistant in turns and the system message, if they know one, first."
            ) from error

    def decode(self, ids: Sequence[int] | Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Iterable[int]]) -> list[str]:
        """The texts of several responses, special tokens left out."""
        rows = [[int(i) for i in ids if i < self.named_size] for ids in batch]
        return list(self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return frozenset(self.tokenizer.all_special_ids)

    def ids_of(self, strings: Sequence[str]) -> tuple[int, ...]:
        r"""Every id whose text, with or without the space around it, is one of `strings`.

        ``"."`` finds ``"."``, ``" ."`` and ``".\\n"``; ``"\\n"`` finds ``"\\n"`` alone. Special tokens count too.

        Raises:
            ValueError: no single token has that text, so that stopping there would never happen.
        """
        if not strings:
            return ()
        texts = self.tokenizer.batch_decode(
            [[i] for i in range(self.named_size)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = {
            wanted: [i for i, text in enumerate(texts) if wanted and wanted in (text, text.strip())]
            for wanted in strings
        }
        for wanted, ids in found.items():
            if not ids:
                raise ValueError(
                    f"`stop` should hold texts that are one token each, got {wanted!r}, which no token of this "
                    "vocabulary spells; no response would ever end with it."
                )
        return tuple(sorted({i for ids in found.values() for i in ids}))


def _count_at_end(text: str, piece: str) -> int:
    """How many times a text ends with a piece, one behind the other."""
    count = 0
    while piece and text.endswith(piece):
        text, count = text.removesuffix(piece), count + 1
    return count
