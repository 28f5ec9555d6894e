"""`load_preferences`, `save_preferences`, `split_preferences`: comparisons from files and datasets, and back."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from textenv.optional import progress_bar
from textenv.prompts.files import RowError, Scanned
from textenv.rewards.preference_chat import LATER_TURNS, Rendering
from textenv.rewards.preference_report import BadPreferencesError, BadRow, PreferenceReport
from textenv.rewards.preference_rows import COLUMNS, FORMATS, RowReader, detected_format, source_rows
from textenv.rewards.preferences import Preference
from textenv.rewards.ratings import hash_of_words

ON_BAD_ROW = ("raise", "skip")
LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""What some readers of lines take for the end of one, and JSON allows to stand in a text."""


@overload
def load_preferences(
    source: Any,
    *,
    on_bad_row: Literal["raise"] = "raise",
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    render: Rendering | None = None,
    later_turns: str = "refuse",
    split: str | None = None,
    config: str | None = None,
    progress: bool = False,
) -> list[Preference]: ...


@overload
def load_preferences(
    source: Any,
    *,
    on_bad_row: Literal["skip"],
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    render: Rendering | None = None,
    later_turns: str = "refuse",
    split: str | None = None,
    config: str | None = None,
    progress: bool = False,
) -> tuple[list[Preference], PreferenceReport]: ...


def load_preferences(
    source: Any,
    *,
    on_bad_row: Literal["raise", "skip"] = "raise",
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    render: Rendering | None = None,
    later_turns: str = "refuse",
    split: str | None = None,
    config: str | None = None,
    progress: bool = False,
) -> list[Preference] | tuple[list[Preference], PreferenceReport]:
    r"""Read comparisons. Every row becomes one, or is refused with its place; none is left out unseen.

    Args:
        source: a path to JSON lines (``.jsonl``), JSON (``.json``) or CSV (``.csv``), each also gzipped (``.gz``); a
            dataset's ``.parquet``, ``.arrow`` or folder (``save_to_disk``); the id of a dataset on the Hugging Face
            hub, ``"owner/name"``; a `datasets.Dataset`; or a list of dicts.
        on_bad_row: ``"raise"``, or ``"skip"``: leave rows out that are no comparison, and return a report with them.
        format: what all rows are. ``"explicit"``: texts ``prompt``, ``chosen`` and ``rejected``; ``"implicit"``: texts
            ``chosen`` and ``rejected`` that begin with the same prompt; ``"whole"``: texts compared without a prompt;
            ``"hh"``: two transcripts ``"\n\nHuman: ...\n\nAssistant: ..."``; ``"chat"``: lists of messages, with a
            prompt (a text, or messages) or without; ``"auto"``: one of these, see `detected_format`.
        columns: what the source calls our columns, where it differs: ``{"chosen": "better"}``; also ``margin``.
        render: messages as text, for ``"chat"`` and ``"hh"``: `transcript_text`, ``ChatTemplate(tokenizer)``, or a
            function of one's own. Transcripts stay transcripts without one; lists of messages need one.
        later_turns: ``"refuse"`` conversations that part and then go on for several turns, or ``"keep"`` all that
            follows as the response, what the human says in it included.
        split: which split of a dataset that has several.
        config: which configuration of a dataset on the hub that has several.
        progress: show a bar.

    Returns:
        The comparisons in their order; with ``on_bad_row="skip"`` also the report.

    Raises:
        BadPreferencesError: rows that are no comparisons; its message counts them by kind and names the first.
        ValueError: an unknown option, a source that cannot be read at all, a named column that no row has, or messages
            without a rendering.
        ImportError: a dataset is asked for, and `datasets` is not installed.

    >>> load_preferences([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    [Preference(prompt='1+1=', chosen='2', rejected='3', margin=None)]
    """
    _check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    _check_choice("format", format, ("auto", *FORMATS))
    _check_choice("later_turns", later_turns, LATER_TURNS)
    named = _column_names(columns or {})
    source_name, rows = source_rows(source, list(named.values()), split, config)
    _check_columns(rows, columns or {}, source_name)
    found = detected_format(rows, named) if format == "auto" else format
    if found == "chat" and render is None:
        raise ValueError(
            f"{source_name} holds lists of messages, and how they become text should be said, got render=None: a "
            "reward model must read what it will be asked to score. Pass render=ChatTemplate(tokenizer), or "
            "render=transcript_text."
        )
    reader = RowReader(found, named, render, later_turns)
    preferences: list[Preference] = []
    refused: list[BadRow] = []
    with progress_bar(f"Reading {len(rows):,} rows", len(rows), progress) as advance:
        for number, (place, row) in enumerate(rows):
            try:
                preferences.append(reader.read(place, row))
            except RowError as error:
                refused.append(BadRow(number, place, error.kind, str(error)))
            advance()
    report = PreferenceReport(source_name, found, len(rows), len(preferences), tuple(refused))
    if on_bad_row == "skip":
        return preferences, report
    if refused:
        raise BadPreferencesError(report)
    return preferences


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"`{name}` should be one of {tuple(known)}, got {value!r}. Choose one of them.")


def _column_names(columns: Mapping[str, str]) -> dict[str, str]:
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise ValueError(
            f"`columns` should say what the source calls {', '.join(map(repr, COLUMNS))}, got {unknown[0]!r}. Write "
            "{our name: the source's name}, for example columns={'chosen': 'better'}."
        )
    return {name: columns.get(name, name) for name in COLUMNS}


def _check_columns(rows: Sequence[Scanned], columns: Mapping[str, str], name: str) -> None:
    """Refuse a column that was asked for and is nowhere: a margin whose name is mistyped would be read as none."""
    read = [row for _, row in rows if not isinstance(row, RowError)]
    for ours, theirs in columns.items():
        if read and not any(theirs in row for row in read):
            raise ValueError(
                f"{name} should have the column {theirs!r} that `columns` names for {ours!r}, got none in any row; the "
                f"first has {', '.join(map(repr, read[0])) or 'none'}. Mend the name."
            )


def save_preferences(preferences: Sequence[Preference], path: str | os.PathLike[str]) -> None:
    """Write comparisons as JSON lines (gzipped where the path ends in ``.gz``), which `load_preferences` reads back.

    What is read is equal to what was written, every character. Line separators within a text are escaped, so that
    readers which end lines there see one line per comparison, too. Nothing is written unless everything can be.

    Raises:
        ValueError: a path that does not end in ``.jsonl`` or ``.jsonl.gz``, no comparisons, or a text that UTF-8 cannot
            write; the comparison is named.
    """
    path = Path(path)
    if not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"`path` should end in .jsonl or .jsonl.gz, got {path.name!r}: nobody could tell what it is.")
    if not preferences:
        raise ValueError(f"`preferences` should hold at least one comparison to write to {path}, got none.")
    packed = b"".join(_line(preference, f"preferences[{row}]") for row, preference in enumerate(preferences))
    path.write_bytes(gzip.compress(packed, mtime=0) if path.suffix.lower() == ".gz" else packed)


def _line(preference: Preference, name: str) -> bytes:
    row: dict[str, Any] = {key: getattr(preference, key) for key in ("prompt", "chosen", "rejected")}
    if preference.margin is not None:
        row["margin"] = float(preference.margin)
    try:
        return (json.dumps(row, ensure_ascii=False).translate(LINE_ENDS) + "\n").encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} should be text that UTF-8 can write, got half of a surrogate pair in {preference!a:.120}. It "
            "often comes from a text that was cut inside an escape; mend it."
        ) from error


def split_preferences(
    preferences: Sequence[Preference], held_out: float = 0.1
) -> tuple[list[Preference], list[Preference]]:
    """Divide comparisons into (train, held out), always the same way, with no prompt on both sides.

    A hash of the prompt's words decides, not a generator: a prompt's side stays the same when comparisons come or go,
    and prompts that differ in case, spaces or punctuation alone are on the same side.

    Args:
        preferences: with prompts. Those of one prompt stay together.
        held_out: expected share of the prompts that are held out, above 0 and below 1.

    Raises:
        ValueError: a share outside (0, 1), or a side that would be empty, as where there are no prompts.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"`held_out` should be a share between 0 and 1, got {held_out!r}. One side would be empty.")
    held = [int.from_bytes(hash_of_words(p.prompt), "big") / 2**64 < held_out for p in preferences]
    if all(held) or not any(held):
        prompts = len({hash_of_words(p.prompt) for p in preferences})
        empty = "training" if held and held[0] else "the held-out side"
        raise ValueError(
            f"Both sides of a split should have comparisons, got none for {empty}: {len(held)} comparisons have "
            f"{prompts} different prompts, of which a share of {held_out} is expected to be held out. Where texts are "
            "compared without prompts, split the texts before they are paired (human ratings: split_ratings); else "
            "bring more prompts, or change the share."
        )
    sides: tuple[list[Preference], list[Preference]] = ([], [])
    for preference, is_held in zip(preferences, held, strict=True):
        sides[is_held].append(preference)
    return sides
