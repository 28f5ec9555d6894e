"""Rows of text, JSON-lines and CSV files, plain or gzipped, each with the place it comes from. Knows no prompts."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, dict[str, Any]]
"""Where a row comes from (``"train.jsonl line 3"``), and its columns."""

TEXT_COLUMN = "prompt"
"""What the only column of a text file is called."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, by what its name ends with.

    Text: one prompt a line; JSON lines: an object a line; CSV: a header, then a record each. Lines with nothing on them
    are left out. UTF-8, with or without a byte-order mark.

    Raises:
        ValueError: an unknown ending, a file that is not what its ending says (the line is named), or one without rows.
    """
    reader = READERS.get(suffix_of(path))
    if reader is None:
        raise ValueError(
            f"{path} should end in one of {', '.join(READERS)} (each with or without .gz), or be a dataset's .parquet, "
            f".arrow or folder, got {path.suffix!r}. Rename it if it is one of these, or pass its rows as a list of "
            "dicts."
        )
    with _explained(path), _open(path) as file:
        rows = list(reader(file, path))
    if not rows:
        raise ValueError(
            f"{path} should hold at least one prompt, got a file without rows. Check where it was written."
        )
    return rows


def suffix_of(path: Path) -> str:
    """What a file's name ends with, less ``.gz``."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def _text_rows(file: io.TextIOBase, path: Path) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"{path.name} line {number}", {TEXT_COLUMN: line.rstrip("\r\n")}


def _json_rows(file: io.TextIOBase, path: Path) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"{path.name} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place} should be one JSON object, got {line.strip()[:80]!r}, which is none: {error.msg} at "
                f"character {error.pos}. JSON lines hold one object on each line; an object may not go over several."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f'{place} should be a JSON object {{"prompt": ...}}, got {type(row).__name__} ({line.strip()[:80]!r}). '
                "Columns have names; put the value into an object."
            )
        yield place, row


def _csv_rows(file: io.TextIOBase, path: Path) -> Iterator[Row]:
    reader = csv.reader(file, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            place = f"{path.name} line {reader.line_num}"
            if not cells:
                continue
            if header is None:
                header = _checked_header(cells, place)
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{place} should have {len(header)} cells, one for each of the columns {header}, got {len(cells)}: "
                    f"{str(cells)[:80]}. Cells with a comma or a line break in them need quotes around them."
                )
            yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{path.name} line {reader.line_num} should be CSV, with quotes doubled inside quoted cells: {error}. "
            "Write the file with a CSV library."
        ) from error


def _checked_header(cells: list[str], place: str) -> list[str]:
    twice = sorted({cell for cell in cells if cells.count(cell) > 1})
    if twice:
        raise ValueError(
            f"{place} should name each column once, got {twice[0]!r} more than once. The first line of a CSV file is "
            "its header. Rename one."
        )
    return cells


READERS: dict[str, Callable[[Any, Path], Iterator[Row]]] = {
    ".txt": _text_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".csv": _csv_rows,
}


def _open(path: Path) -> Any:
    binary = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    # csv wants line ends as they are; elsewhere a line ends at \n, \r\n or \r, never at what str.splitlines knows more.
    return io.TextIOWrapper(binary, "utf-8-sig", newline="" if suffix_of(path) == ".csv" else None)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors below the level of lines, as errors that say what to do."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} should be UTF-8 text, got the byte {error.object[error.start]:#04x} ({error.reason}). Convert it, "
            "for example with iconv."
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} should be a whole gzip file, as its name says, got one that cannot be read: {error}. Fetch it "
            "again, or rename it if it is not compressed."
        ) from error
