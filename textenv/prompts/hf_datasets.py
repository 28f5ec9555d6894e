"""Rows of Hugging Face datasets: objects, saved folders, Parquet and Arrow files, the hub. No script is ever run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textenv.optional import require
from textenv.prompts.files import Row

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = (".parquet", ".arrow")


def is_dataset(source: object) -> bool:
    """Whether this is a `datasets.Dataset`, or a dict of them, without importing the library."""
    return hasattr(source, "column_names") and hasattr(source, "with_format")


def load_local(path: Path, split: str | None) -> Any:
    """A folder that ``save_to_disk`` wrote, or a Parquet or Arrow file.

    Raises:
        ValueError: the folder or file holds no dataset.
        ImportError: datasets is not installed.
    """
    require("datasets", "data", f"Reading {path}")
    import datasets

    if path.is_dir():
        try:
            return one_split(datasets.load_from_disk(str(path)), split, str(path))
        except FileNotFoundError as error:
            raise ValueError(
                f"{path} should be a folder that `Dataset.save_to_disk` wrote, got one without its files. For a folder "
                "of text, CSV or JSON-lines files name one of the files."
            ) from error
    if split is not None:
        raise ValueError(f"{path} is one file without splits, got split={split!r}. Leave it out.")
    try:
        if path.suffix == ".arrow":
            return datasets.Dataset.from_file(str(path))
        import pyarrow.parquet

        return datasets.Dataset(pyarrow.parquet.read_table(path))
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ValueError(f"{path} should be {path.suffix[1:].capitalize()}, but could not be read: {error}") from error


def load_hub(hub_id: str, config: str | None, split: str | None, what: str = "prompts") -> Any:
    """A dataset of the hub. `what` it is hoped to hold, for messages.

    Raises:
        ValueError: it could not be had, or has several splits and none was chosen.
        ImportError: datasets is not installed.
    """
    require("datasets", "data", f"Reading {what} from {hub_id!r}")
    import datasets

    try:
        loaded = datasets.load_dataset(hub_id, config, split=split)
    except Exception as error:
        raise ValueError(
            f"No {what} could be had from {hub_id!r}. There is no file or folder of that name here, and as a dataset "
            f"of the Hugging Face hub{'' if split is None else f' (split {split!r})'} it could not be loaded, which "
            "needs a network the first time. Check the name, or where there is no network save it elsewhere with "
            f"`save_to_disk` and pass the folder. Cause: {error}"
        ) from error
    return one_split(loaded, None, hub_id)


def one_split(dataset: Any, split: str | None, name: str) -> Any:
    """One `datasets.Dataset` of what was loaded.

    Raises:
        ValueError: there are several and none was chosen, or not the one asked for; or it cannot be counted.
    """
    if isinstance(dataset, Mapping):
        if split is None and len(dataset) == 1:
            return one_split(next(iter(dataset.values())), None, name)
        if split not in dataset:
            raise ValueError(
                f"{name} has the splits {', '.join(map(repr, dataset))}, got split={split!r}. Choose one of them."
            )
        return one_split(dataset[split], None, name)
    if split is not None:
        raise ValueError(f"{name} is one dataset without splits, got split={split!r}. Leave it out.")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{name} should be a dataset of known length, got {type(dataset).__name__}, which is streamed: its rows "
            "are all read and checked before anything begins. Take some of it: list(dataset.take(10000))."
        )
    return dataset


def dataset_rows(dataset: Any, columns: Sequence[str], name: str) -> list[Row]:
    """Rows of a dataset with those of the columns that it has; others (pictures, say) are not even decoded."""
    wanted = [column for column in dict.fromkeys(columns) if column in dataset.column_names]
    plain = dataset.select_columns(wanted or dataset.column_names[:1]).with_format(None)
    return [(f"{name} row {number}", dict(row)) for number, row in enumerate(plain)]
