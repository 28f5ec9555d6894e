"""`load_prompts`: prompts with their context from files, datasets and lists of rows, columns by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textenv.prompts.encoding import PromptRecord
from textenv.prompts.files import TEXT_COLUMN, Row, read_rows, suffix_of
from textenv.prompts.hf_datasets import FILES, HUB_ID, dataset_rows, is_dataset, load_hub, load_local, one_split


def load_prompts(
    source: Any,
    *,
    prompt: str = "prompt",
    context: Sequence[str] = (),
    weight: str | None = None,
    split: str | None = None,
    config: str | None = None,
) -> list[PromptRecord]:
    """Read prompts, and what goes along to the scorer.

    A prompt is a text, a list of token ids, or a list of chat messages. A scorer that wants to see the messages
    themselves gets them as context: ``load_prompts(path, prompt="messages", context=["messages"])``.

    Args:
        source: a path to text (``.txt``, one prompt a line), JSON lines (``.jsonl``) or CSV (``.csv``), each also
            gzipped (``.gz``); a dataset's ``.parquet``, ``.arrow`` or folder (``save_to_disk``); the id of a dataset on
            the Hugging Face hub, ``"owner/name"``; a `datasets.Dataset`; or a list of dicts.
        prompt: the column that holds the prompts.
        context: columns whose values the scorer gets, as keyword arguments of their names.
        weight: a column of weights, see `PromptSet.encode`.
        split: which split of a dataset that has several.
        config: which configuration of a dataset on the hub that has several.

    Returns:
        Records, which ``prompts=`` of ``RLHF-v0`` and `TextTask.build` take.

    Raises:
        ValueError: the source is not there, cannot be read, has no rows, or lacks a column; file and line are named.
        ImportError: a dataset is asked for, and `datasets` is not installed.

    >>> load_prompts([{"question": "1+1=", "answer": "2"}], prompt="question", context=["answer"])
    [PromptRecord(prompt='1+1=', context={'answer': '2'}, weight=None, place='row 0')]
    """
    if isinstance(context, str):
        raise ValueError(f"`context` should be a list of columns, got {context!r}. Write context=[{context!r}].")
    columns = [prompt, *context, *([] if weight is None else [weight])]
    rows = _rows(source, columns, split, config)
    return [_record(place, row, prompt, context, weight) for place, row in rows]


def is_source(prompts: Any) -> bool:
    """Whether these are prompts that `load_prompts` has to read first."""
    if isinstance(prompts, str | os.PathLike) or is_dataset(prompts):
        return True
    return isinstance(prompts, list | tuple) and len(prompts) > 0 and all(isinstance(row, Mapping) for row in prompts)


def _rows(source: Any, columns: Sequence[str], split: str | None, config: str | None) -> list[Row]:
    if isinstance(source, str | os.PathLike):
        return _rows_at(os.fspath(source), columns, split, config)
    if config is not None:
        raise ValueError(f"`config` chooses among those of a dataset on the hub, got {config!r}. Leave it out.")
    if is_dataset(source):
        return _some(dataset_rows(one_split(source, split, "the dataset"), columns, "dataset"), "The dataset")
    if split is not None:
        raise ValueError(f"`split` chooses among those of a dataset, got split={split!r} for a list. Leave it out.")
    if not isinstance(source, list | tuple) or not all(isinstance(row, Mapping) for row in source):
        raise ValueError(
            "`source` should be a path, the id of a dataset on the hub, a datasets.Dataset or a list of dicts, got "
            f"{type(source).__name__}. Prompts without columns need no loading: pass them as prompts=[...]."
        )
    return _some([(f"row {number}", dict(row)) for number, row in enumerate(source)], "`source`")


def _rows_at(source: str, columns: Sequence[str], split: str | None, config: str | None) -> list[Row]:
    path = Path(source)
    here = path.exists()
    if config is not None and (here or not HUB_ID.fullmatch(source)):
        raise ValueError(f"`config` chooses among those of a dataset on the hub, got {config!r} for {source!r}.")
    if here and (path.is_dir() or path.suffix in FILES):
        return _some(dataset_rows(load_local(path, split), columns, path.name), source)
    if here:
        if split is not None:
            raise ValueError(f"{source} is one file without splits, got split={split!r}. Leave it out.")
        rows = read_rows(path)
        if suffix_of(path) == ".txt" and list(columns) != [TEXT_COLUMN]:
            raise ValueError(
                f"{source} is a text file, one prompt a line, which has no columns, got {list(columns)}. Leave them "
                "out, or use JSON lines or CSV."
            )
        return rows
    if HUB_ID.fullmatch(source) and suffix_of(path) not in (".txt", ".jsonl", ".ndjson", ".csv", *FILES):
        return _some(dataset_rows(load_hub(source, config, split), columns, source), source)
    raise ValueError(
        f"There should be a file or folder {source!r} to read prompts from, got none (from {Path.cwd()}); nor is it "
        "the id of a dataset on the hub, owner/name. Mend the path; if it is the prompt itself, write "
        f"prompts=[{source!r}]."
    )


def _some(rows: list[Row], name: str) -> list[Row]:
    if not rows:
        raise ValueError(f"{name} should hold at least one prompt, got no rows. Check the filter that they came from.")
    return rows


def _record(
    place: str, row: Mapping[str, Any], prompt: str, context: Sequence[str], weight: str | None
) -> PromptRecord:
    for column, option, of_rlhf in (
        (prompt, "prompt", "prompt_column"),
        *((column, "context", "context_columns") for column in context),
        (weight, "weight", "weight_column"),
    ):
        if column is not None and row.get(column) is None:
            found = "no value there" if column in row else f"the columns {', '.join(map(repr, row)) or 'none'}"
            if {"role", "content"} <= set(row):
                found += " (one chat is one prompt: write prompts=[messages])"
            raise ValueError(
                f"{place} should have a value in the column {column!r}, got {found}. Every prompt needs one; name the "
                f"column with {option}=... (of RLHF-v0: {of_rlhf}=...), or fill the gap."
            )
    return PromptRecord(row[prompt], {column: row[column] for column in context}, _weight(row, weight, place), place)


def _weight(row: Mapping[str, Any], column: str | None, place: str) -> float | None:
    if column is None:
        return None
    try:
        return float(row[column])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place} should have a number as weight in the column {column!r}, got {row[column]!r}. Use 1 for an "
            "ordinary prompt."
        ) from error
