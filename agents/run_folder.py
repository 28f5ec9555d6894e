"""The files of a run that every agent writes: metrics as JSON lines, and the same for TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunFolder:
    """A run's metrics, in memory and on disk.

    Args:
        folder: where files go; None: nowhere.
        iteration: completed before (a resumed run); later lines of an earlier attempt are dropped.
        goes_on: the run in the folder, if there is one, is the one that goes on.

    Raises:
        FileExistsError: the folder holds another run.
    """

    def __init__(self, folder: Path | None, iteration: int = 0, goes_on: bool = False) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        """Lines of metrics so far, those of the run that goes on included."""
        self.continued = False
        """Whether the folder held a run already."""
        if folder is not None:
            self._open(folder, iteration, goes_on)

    def _open(self, folder: Path, iteration: int, goes_on: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        metrics = folder / "metrics.jsonl"
        if metrics.exists():
            if not goes_on:
                raise FileExistsError(
                    f"{folder} already holds a run, whose metrics would be lost. Choose another run_dir, or go on with "
                    f"that run: load({str(folder)!r}, ...)."
                )
            self.continued = True
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            self.rows = [row for row in lines if row["iteration"] <= iteration]
        folder.mkdir(parents=True, exist_ok=True)
        metrics.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1 if iteration else None)

    def write(self, figures: Mapping[str, float]) -> None:
        """One line of metrics, and the same for TensorBoard."""
        row = {key: value if math.isfinite(value) else None for key, value in figures.items()}
        self.rows.append(row)
        if self.folder is not None:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            for key, value in row.items():
                if value is not None:
                    self._tensorboard.add_scalar(key, value, row["iteration"])

    def close(self) -> None:
        """Let go of what is open."""
        if self.folder is not None:
            self._tensorboard.close()
