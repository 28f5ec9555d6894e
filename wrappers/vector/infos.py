"""Reading and extending vector infos in every autoreset mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray


def end_infos(infos: dict[str, Any]) -> dict[str, Any]:
    """Where the end-of-episode entries are: in ``final_info`` under SAME_STEP, else in the infos themselves."""
    ends: dict[str, Any] = infos.get("final_info", infos)
    return ends


def end_rows(ends: dict[str, Any], rows: NDArray[np.int64], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The entries `keys` of some rows' ends, as single environments have them; what a row lacks is left out."""
    present = [key for key in keys if key in ends]
    return [{key: ends[key][row] for key in present if ends[f"_{key}"][row]} for row in rows]


def with_end_infos(infos: dict[str, Any], columns: dict[str, NDArray[Any]], ended: NDArray[np.bool_]) -> dict[str, Any]:
    """Infos with (N,) `columns` added for the rows that ended; the given infos are not edited."""
    added = {key: np.where(ended, values, np.zeros_like(values)) for key, values in columns.items()}
    masks = {f"_{key}": ended.copy() for key in columns}
    if "final_info" in infos:
        return {**infos, "final_info": {**infos["final_info"], **added, **masks}}
    return {**infos, **added, **masks}


def reset_rows(options: dict[str, Any] | None) -> Any:
    """Index of the rows that a reset concerns: the reset mask, or everything."""
    mask = (options or {}).get("reset_mask")
    return slice(None) if mask is None else mask


def resets_next_step(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether the step after an episode's end ignores its action and resets the row."""
    return env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
