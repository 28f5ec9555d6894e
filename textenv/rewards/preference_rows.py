"""From the rows of a source to comparisons, one row at a time, by the format that the rows have."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textenv.prompts.chat import check_fields
from textenv.prompts.files import NO_OBJECT, RowError, Scanned, scan_rows, suffix_of
from textenv.prompts.hf_datasets import FILES, HUB_ID, dataset_rows, is_dataset, load_hub, load_local, one_split
from textenv.rewards.preference_chat import (
    APART,
    EMPTY,
    EQUAL,
    UNRENDERED,
    Messages,
    Rendering,
    check_turns,
    is_transcript,
    parse_transcript,
    split_conversations,
    transcript_text,
)
from textenv.rewards.preferences import Preference

FORMATS = ("explicit", "implicit", "whole", "hh", "chat")
COLUMNS = ("prompt", "chosen", "rejected", "margin")
NO_VALUE, WRONG_TYPE, BAD_MARGIN, HALF = "no value", "wrong type", "bad margin", "half a surrogate pair"


def source_rows(
    source: Any, columns: Sequence[str], split: str | None, config: str | None
) -> tuple[str, Sequence[Scanned]]:
    """What a source is called, and its rows.

    Args:
        source: see `load_preferences`.
        columns: those that are needed.
        split: of a dataset that has several.
        config: of a dataset on the hub.

    Raises:
        ValueError: it is no source, is not there, or cannot be read at all.
        ImportError: a dataset is asked for, and `datasets` is not installed.
    """
    if is_dataset(source):
        return "the dataset", dataset_rows(one_split(source, split, "the dataset"), columns, "dataset")
    if isinstance(source, str | os.PathLike):
        return _rows_at(os.fspath(source), columns, split, config)
    if not isinstance(source, list | tuple):
        raise ValueError(
            "`source` should be a path, the id of a dataset on the hub, a datasets.Dataset or a list of dicts, got "
            f"{type(source).__name__}."
        )
    _check_unused(split, config, "a list")
    return "the list", [(f"row {number}", _as_row(row, f"row {number}")) for number, row in enumerate(source)]


def _rows_at(
    source: str, columns: Sequence[str], split: str | None, config: str | None
) -> tuple[str, Sequence[Scanned]]:
    path = Path(source)
    if path.is_dir() or (path.exists() and path.suffix in FILES):
        _check_unused(None, config, source)
        return path.name, dataset_rows(load_local(path, split), columns, path.name)
    if path.exists():
        _check_unused(split, config, source)
        return path.name, scan_rows(path)
    if HUB_ID.fullmatch(source) and suffix_of(path) not in (".jsonl", ".ndjson", ".json", ".csv", *FILES):
        return source, dataset_rows(load_hub(source, config, split, "comparisons"), columns, source)
    raise ValueError(
        f"There should be a file or folder {source!r} to read comparisons from, got none (from {Path.cwd()}); nor is "
        "it the id of a dataset on the hub, owner/name. Mend the path."
    )


def _check_unused(split: str | None, config: str | None, name: str) -> None:
    for option, value in (("split", split), ("config", config)):
        if value is not None:
            raise ValueError(f"`{option}` chooses among those of a dataset, got {value!r} for {name}. Leave it out.")


def _as_row(row: Any, place: str) -> dict[str, Any] | RowError:
    if isinstance(row, Mapping):
        return dict(row)
    return RowError(f"{place} should be a dict of columns, got {type(row).__name__} ({row!r:.80}).", NO_OBJECT)


def detected_format(rows: Sequence[Scanned], columns: Mapping[str, str]) -> str:
    """The one format that all rows of a source are read as; a row of another is refused, not guessed at.

    Lists of messages anywhere: ``"chat"``; a prompt anywhere: ``"explicit"``; a text that begins with a speaker:
    ``"hh"``; else ``"implicit"``.
    """
    found = [row for _, row in rows if not isinstance(row, RowError)]
    texts = [row.get(columns[name]) for row in found for name in ("chosen", "rejected")]
    prompts = [row.get(columns["prompt"]) for row in found]
    if any(isinstance(value, list | tuple) for value in [*texts, *prompts]):
        return "chat"
    if any(prompt is not None for prompt in prompts):
        return "explicit"
    return "hh" if any(isinstance(text, str) and is_transcript(text) for text in texts) else "implicit"


@dataclass(frozen=True)
class RowReader:
    """Makes a `Preference` of a row.

    Attributes:
        format: one of `FORMATS`.
        columns: what each of `COLUMNS` is called in the source.
        render: of conversations; None: transcripts as transcripts, and lists of messages are refused.
        later_turns: see `split_conversations`.
    """

    format: str
    columns: Mapping[str, str]
    render: Rendering | None
    later_turns: str

    def read(self, place: str, row: dict[str, Any] | RowError) -> Preference:
        """The comparison of a row.

        Raises:
            RowError: it holds none, or could not even be read.
        """
        if isinstance(row, RowError):
            raise row
        chosen, rejected = self._value(row, "chosen", place), self._value(row, "rejected", place)
        margin = _margin(row.get(self.columns["margin"]), place)
        if self.format == "chat":
            texts = self._conversations(row.get(self.columns["prompt"]), chosen, rejected, place)
            return _preference(*texts, margin, place)
        for name, value in (("chosen", chosen), ("rejected", rejected)):
            self._check_text(name, value, place)
        if self.format == "hh":
            turns = [parse_transcript(text, f"{place}, {name}") for name, text in _named(chosen, rejected)]
            return _preference(*self._rendered(turns[0], turns[1], place, alternate=True), margin, place)
        if self.format == "explicit":
            prompt = self._value(row, "prompt", place)
            self._check_text("prompt", prompt, place)
        else:
            prompt = common_prompt(chosen, rejected) if self.format == "implicit" and chosen != rejected else ""
        cut = len(prompt) if self.format == "implicit" else 0
        return _preference(prompt, chosen[cut:], rejected[cut:], margin, place)

    def _value(self, row: Mapping[str, Any], name: str, place: str) -> Any:
        column = self.columns[name]
        if row.get(column) is not None:
            return row[column]
        found = "no value there" if column in row else f"the columns {', '.join(map(repr, row)) or 'none'}"
        raise RowError(
            f"{place} should have a value in the column {column!r}, got {found}. Name the column with "
            f"columns={{{name!r}: ...}}, or leave the row out.",
            NO_VALUE,
        )

    def _check_text(self, name: str, value: Any, place: str) -> None:
        if not isinstance(value, str):
            raise RowError(
                f"{place} should have a text in the column {self.columns[name]!r} (format {self.format!r}), got "
                f"{type(value).__name__}: {value!r:.80}. Lists of messages are read with format='chat'.",
                WRONG_TYPE,
            )

    def _conversations(self, prompt: Any, chosen: Any, rejected: Any, place: str) -> tuple[str, str, str]:
        """Texts of the prompt and the two responses of a row of messages."""
        start = [] if prompt is None else _messages(prompt, "user", f"{place}, prompt")
        whole = []
        for name, value in _named(chosen, rejected):
            messages = _messages(value, "assistant", f"{place}, {name}")
            whole.append(_joined(start, messages, isinstance(prompt, str), f"{place}, {name}"))
        return self._rendered(whole[0], whole[1], place, alternate=False)

    def _rendered(self, chosen: Messages, rejected: Messages, place: str, alternate: bool) -> tuple[str, str, str]:
        for name, messages in _named(chosen, rejected):
            check_turns(messages, f"{place}, {name}", alternate)
        prompt, *responses = split_conversations(chosen, rejected, place, self.later_turns)
        render = self.render or transcript_text
        try:
            (text, better), (other, worse) = (render(prompt, response) for response in responses)
        except ValueError as error:
            raise RowError(f"{place}: {error}", UNRENDERED) from error
        if text != other:
            raise RowError(
                f"{place}: `render` should write a prompt in one way, got {text[-80:]!r} before the chosen and "
                f"{other[-80:]!r} before the rejected response.",
                UNRENDERED,
            )
        return text, better, worse


def common_prompt(chosen: str, rejected: str) -> str:
    """What both texts begin with, up to the word in which they part; the space before it goes with the responses.

    >>> common_prompt("The sky is blue.", "The sky is black.")
    'The sky is'
    """
    shorter = min(len(chosen), len(rejected))
    end = next((place for place in range(shorter) if chosen[place] != rejected[place]), shorter)
    inside = any(end < len(text) and not text[end].isspace() for text in (chosen, rejected))
    while inside and end > 0 and not chosen[end - 1].isspace():  # back to where the word begins
        end -= 1
    return chosen[: end - 1] if inside and end > 0 and chosen[end - 1] == " " else chosen[:end]


def _named(chosen: Any, rejected: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("chosen", chosen), ("rejected", rejected)


def _messages(value: Any, role: str, name: str) -> Messages:
    """Messages of a list, or of a text that somebody of this role says."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | tuple) or not value:
        raise RowError(
            f"{name} should be a text or a list of messages, got {type(value).__name__}: {value!r:.80}.", WRONG_TYPE
        )
    try:
        return check_fields(value, name)
    except ValueError as error:
        raise RowError(str(error), WRONG_TYPE) from error


def _joined(start: Messages, messages: Messages, is_text: bool, name: str) -> Messages:
    """A whole conversation: the prompt's messages before the response's, unless these bring the prompt along."""
    if messages[0]["role"] == "assistant" or not start:
        return [*start, *messages]
    said = [message["content"] for message in messages[:-1]]
    agrees = start[0]["content"] in said if is_text else messages[: len(start)] == start
    if not agrees:
        raise RowError(
            f"{name} should begin with the row's prompt, or with the assistant's answer to it, got another beginning: "
            f"{messages[0]['content'][:80]!r}, where the prompt is {start[0]['content'][:80]!r}.",
            APART,
        )
    return messages


def _margin(value: Any, place: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowError(f"{place} should have a finite number or nothing as margin, got {value!r:.80}.", BAD_MARGIN)
    return margin


def _preference(prompt: str, chosen: str, rejected: str, margin: float | None, place: str) -> Preference:
    for text in (prompt, chosen, rejected):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"{place} should be text that UTF-8 can write, got half of a surrogate pair at character "
                f"{error.start} of {text[:80]!a}. Tokenizers fail on it; it often comes from a cut inside an escape.",
                HALF,
            ) from error
    try:
        return Preference(prompt, chosen, rejected, margin)
    except ValueError as error:
        kind = EQUAL if chosen == rejected and chosen.strip() else EMPTY
        raise RowError(f"{place}: {error}", kind) from error
