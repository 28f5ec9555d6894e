"""Rows of text, JSON-lines and CSV files, plain or gzipped, each with the place it comes from. Knows no prompts."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = tuple[str, dict[str, Any]]
"""Where a row comes from (``"train.jsonl line 3"``), and its columns."""


class RowError(ValueError):
    """A row that cannot be read; the others of its file can. The message begins with its place.

    Args:
        message: what was expected, what came.
        kind: a few words that faults of this kind share, for counting.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


Scanned = tuple[str, dict[str, Any] | RowError]
"""Where a row comes from, and its columns or what is wrong with it."""

BROKEN, UNDECODABLE, NO_OBJECT = "broken line", "not UTF-8", "no object"

TEXT_COLUMN = "prompt"
"""What the only column of a text file is called."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, by what its name ends with.

    Text: one prompt a line; JSON lines: an object a line; CSV: a header, then a record each. Lines with nothing on them
    are left out. UTF-8, with or without a byte-order mark.

    Raises:
        ValueError: an unknown ending, a file that is not what its ending says (the line is named), or one without rows.
    """
    rows: list[Row] = []
    with _explained(path), _open(path, "strict") as file:
        for place, row in _reader_of(path, READERS)(file, path):
            if isinstance(row, RowError):
                raise row
            rows.append((place, row))
    if not rows:
        raise ValueError(
            f"{path} should hold at least one prompt, got a file without rows. Check where it was written."
        )
    return rows


def scan_rows(path: Path) -> list[Scanned]:
    """Every row of a JSON-lines, JSON or CSV file, those that cannot be read as errors in their places.

    As `read_rows`, less text files. JSON is a list of objects, or JSON lines under another name. Of a CSV record with a
    fault in its quotes the lines up to the fault make one row.

    Raises:
        ValueError: an unknown ending, a file that cannot be read at all (not packed as its name says, JSON that is not
            whole, a header that names a column twice), or one without rows.
    """
    with _explained(path), _open(path, "surrogateescape") as file:
        rows = list(_reader_of(path, SCANNERS)(file, path))
    if not rows:
        raise ValueError(f"{path} should hold at least one row, got none. Check where it was written.")
    return rows


def _reader_of(path: Path, readers: Mapping[str, Reader]) -> Reader:
    reader = readers.get(suffix_of(path))
    if reader is None:
        raise ValueError(
            f"{path} should end in one of {', '.join(readers)} (each with or without .gz), or be a dataset's .parquet, "
            f".arrow or folder, got {path.suffix!r}. Rename it if it is one of these, or pass its rows as a list of "
            "dicts."
        )
    return reader


def suffix_of(path: Path) -> str:
    """What a file's name ends with, less ``.gz``."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def _text_rows(file: io.TextIOBase, path: Path) -> Iterator[Scanned]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"{path.name} line {number}", {TEXT_COLUMN: line.rstrip("\r\n")}


def _json_lines(file: Iterable[str], path: Path) -> Iterator[Scanned]:
    for number, line in enumerate(file, 1):
        if line.strip():
            place = f"{path.name} line {number}"
            yield place, _parsed_line(line, place)


def _parsed_line(line: str, place: str) -> dict[str, Any] | RowError:
    if fault := _undecodable([line], place):
        return fault
    try:
        row = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueErrors are JSON's own, and numbers of too many digits
        why = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        fault = RowError(
            f"{place} should be one JSON object, got {line.strip()[:80]!r}, which is none: {why}. JSON lines hold one "
            "object on each line; an object may not go over several.",
            BROKEN,
        )
        fault.__cause__ = error
        return fault
    return _object(row, place)


def _json_list(file: io.TextIOBase, path: Path) -> Iterator[Scanned]:
    """A list of objects; or JSON lines, which many files of this name hold."""
    text = file.read()
    if not text.lstrip().startswith("["):
        yield from _json_lines(io.StringIO(text), path)  # splits at \n alone, which \r\n has become
        return
    try:
        rows = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} should be one JSON list of objects, but could not be read: {error}. Where one row of a list is "
            "broken none can be told apart; write JSON lines, an object a line, to lose no more than the broken one."
        ) from error
    whole = _undecodable([text], str(path)) is None
    for number, row in enumerate(rows):
        place = f"{path.name} row {number}"
        fault = None if whole else _undecodable([json.dumps(row, ensure_ascii=False)], place)
        yield place, fault or _object(row, place)


def _object(row: Any, place: str) -> dict[str, Any] | RowError:
    if isinstance(row, dict):
        return row
    return RowError(
        f'{place} should be a JSON object {{"prompt": ...}}, got {type(row).__name__} ({json.dumps(row)[:80]!r}). '
        "Columns have names; put the value into an object.",
        NO_OBJECT,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ; Python alone would keep the last of two values and say nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return found


def _undecodable(texts: Iterable[str], place: str) -> RowError | None:
    """What is wrong with texts that were opened with ``surrogateescape``, where a byte of them was not UTF-8."""
    for text in texts:
        wrong = next((char for char in text if "\udc80" <= char <= "\udcff"), None) if not text.isascii() else None
        if wrong is not None:
            return RowError(
                f"{place} should be UTF-8 text, got the byte {ord(wrong) - 0xDC00:#04x} in {text.strip()[:80]!a}. "
                "Convert the file, for example with iconv.",
                UNDECODABLE,
            )
    return None


def _csv_rows(file: io.TextIOBase, path: Path) -> Iterator[Scanned]:
    reader = csv.reader(file, strict=True)
    header: list[str] | None = None
    while True:
        begins = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # the reader goes on at the next line
            broken = _broken_record(path, begins, reader.line_num, error)
            if header is None:
                raise broken[1] from error
            yield broken
            continue
        place = f"{path.name} line {reader.line_num}"
        if not cells:
            continue
        if header is None:
            header = _checked_header(cells, place)
            continue
        if len(cells) != len(header):
            yield (
                place,
                RowError(
                    f"{place} should have {len(header)} cells, one for each of the columns {header}, got {len(cells)}: "
                    f"{ascii(cells)[:80]}. Cells with a comma or a line break in them need quotes around them.",
                    BROKEN,
                ),
            )
            continue
        yield place, _undecodable(cells, place) or dict(zip(header, cells, strict=True))


def _broken_record(path: Path, begins: int, ends: int, error: csv.Error) -> tuple[str, RowError]:
    place = f"{path.name} line {ends}"
    since = f" (of a record that begins in line {begins})" if begins < ends else ""
    fault = RowError(
        f"{place} should be CSV, with quotes doubled inside quoted cells: {error}{since}. Write the file with a CSV "
        "library.",
        BROKEN,
    )
    fault.__cause__ = error
    return place, fault


def _checked_header(cells: list[str], place: str) -> list[str]:
    twice = sorted({cell for cell in cells if cells.count(cell) > 1})
    if twice:
        raise ValueError(
            f"{place} should name each column once, got {twice[0]!r} more than once. The first line of a CSV file is "
            "its header. Rename one."
        )
    return cells


Reader = Callable[[Any, Path], Iterator[Scanned]]

READERS: dict[str, Reader] = {".txt": _text_rows, ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows}

SCANNERS: dict[str, Reader] = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list, ".csv": _csv_rows}


def _open(path: Path, errors: str) -> Any:
    binary = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    # csv wants line ends as they are; elsewhere a line ends at \n, \r\n or \r, never at what str.splitlines knows more.
    return io.TextIOWrapper(binary, "utf-8-sig", errors, newline="" if suffix_of(path) == ".csv" else None)


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
