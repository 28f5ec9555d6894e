"""Where two recordings differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

TIMED = ("episode", "_episode")
"""Info keys of `RecordEpisodeStatistics`, which hold seconds."""


def difference(left: Any, right: Any, tolerance: float, at: str = "") -> str | None:
    """The first place where two nested recordings differ, or None.

    Args:
        left: dicts, sequences, arrays, numbers, texts, at any depth.
        right: the same.
        tolerance: for floats; NaN equals NaN. Everything else must be equal.
        at: where both come from.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return _of_mappings(left, right, tolerance, at)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and left.dtype != object:
        return _of_arrays(left, right, tolerance, at)
    if isinstance(left, list | tuple | np.ndarray) and isinstance(right, list | tuple | np.ndarray):
        if len(left) != len(right):
            return f"{at} has {len(left)} and {len(right)} entries"
        found = (difference(*pair, tolerance, f"{at}[{i}]") for i, pair in enumerate(zip(left, right, strict=True)))
        return next(filter(None, found), None)
    if isinstance(left, float | np.floating) and isinstance(right, float | np.floating):
        return None if np.isclose(left, right, rtol=0, atol=tolerance, equal_nan=True) else f"{at}: {left} and {right}"
    return None if _equal(left, right) else f"{at}: {left!r} and {right!r}"


def _of_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], tolerance: float, at: str) -> str | None:
    keys, others = ([key for key in side if key not in TIMED] for side in (left, right))
    if set(keys) != set(others):
        return f"{at} has the keys {sorted(map(str, keys))} and {sorted(map(str, others))}"
    found = (difference(left[key], right[key], tolerance, f"{at}[{key!r}]") for key in keys)
    return next(filter(None, found), None)


def _of_arrays(left: Any, right: Any, tolerance: float, at: str) -> str | None:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{at}: {left.dtype} of shape {left.shape} and {right.dtype} of shape {right.shape}"
    floats = left.dtype.kind == "f"
    same = np.isclose(left, right, rtol=0, atol=tolerance, equal_nan=True) if floats else left == right
    return None if same.all() else f"{at}: {left.tolist()} and {right.tolist()}"


def _equal(left: Any, right: Any) -> bool:
    if hasattr(left, "numpy") and hasattr(right, "numpy"):  # tensors of a converting wrapper
        left, right = np.asarray(left), np.asarray(right)
    return bool(np.all(left == right))
