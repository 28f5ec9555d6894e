"""Reports as JSON that any reader takes: JSON has no word for nan and inf, so they become null."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: str | os.PathLike[str], report: Any) -> None:
    """Write dicts, lists, texts and numbers to a file.

    Args:
        path: the file; it is replaced.
        report: what to write. Figures that are not finite become null.
    """
    Path(path).write_text(json.dumps(plain(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def plain(report: Any) -> Any:
    """The same with None in place of numbers that are not finite.

    >>> plain({"low": [1.0, math.inf]})
    {'low': [1.0, None]}
    """
    if isinstance(report, dict):
        return {key: plain(value) for key, value in report.items()}
    if isinstance(report, list | tuple):
        return [plain(value) for value in report]
    return None if isinstance(report, float) and not math.isfinite(report) else report
