"""What a run leaves behind and shows: metrics, TensorBoard, sample texts, a plot, and a live table.

metrics.jsonl  one line per iteration
tensorboard/   the same for TensorBoard
samples.txt    responses to read, per iteration
training.png   score, KL and length against episodes
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from textenv.agents.plots import plot_training
from textenv.agents.types import IterationStats

COLUMNS = ("iteration", "episodes", "score", "kl", "length", "ended", "distinct-2", "tokens/s")
ROWS = 12
"""Iterations that the live table shows."""
SAMPLE_EVERY = 5
"""Iterations between samples where the output is not a terminal; the live table shows those of each."""


class RunLog:
    """Writes a run's files and shows its progress; a context manager around the training loop.

    Args:
        folder: where files go; None: nowhere.
        total_episodes: the goal.
        iteration: completed before (a resumed run); later lines of an earlier attempt are dropped.
        episodes: seen before.
        progress: show the live table.
        goes_on: the run in the folder, if there is one, is the one that goes on.

    Raises:
        FileExistsError: the folder holds another run.
    """

    def __init__(
        self,
        folder: Path | None,
        total_episodes: int,
        iteration: int = 0,
        episodes: int = 0,
        progress: bool = True,
        goes_on: bool = False,
    ) -> None:
        self.folder, self.total, self.start = folder, total_episodes, episodes
        self.rows: list[dict[str, Any]] = []
        self._recent: deque[IterationStats] = deque(maxlen=ROWS)
        self._progress = progress
        if folder is not None:
            self._open(folder, iteration, goes_on)

    def _open(self, folder: Path, iteration: int, goes_on: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        metrics = folder / "metrics.jsonl"
        if metrics.exists():
            if not goes_on:
                raise FileExistsError(
                    f"{folder} already holds a run, whose metrics would be lost. Choose another run_dir, or go on with "
                    f"that run: load({str(folder)!r}, envs)."
                )
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            self.rows = [row for row in lines if row["iteration"] <= iteration]
            _keep_samples(folder / "samples.txt", iteration)
        folder.mkdir(parents=True, exist_ok=True)
        metrics.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1 if iteration else None)

    def __enter__(self) -> RunLog:
        """Start the display."""
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._shows = self._progress and self._console.is_terminal
        if self._shows:
            self._live.start()
            self._live.update("The first iteration is running ...", refresh=True)
        elif self._progress:
            self._print_row(COLUMNS)
        return self

    def record(self, stats: IterationStats) -> None:
        """Log one iteration everywhere."""
        row = {key: value if math.isfinite(value) else None for key, value in stats.metrics().items()}
        self.rows.append(row)
        self._recent.append(stats)
        if self.folder is not None:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            for key, value in row.items():
                if value is not None:
                    self._tensorboard.add_scalar(key, value, stats.iteration)
            with (self.folder / "samples.txt").open("a") as file:
                file.write(f"== iteration {stats.iteration}, episodes {stats.episodes}\n{sample_lines(stats)}\n")
        if self._shows:
            self._live.update(self._view(stats), refresh=True)
        elif self._progress:
            self._print_row(_cells(stats))
            if stats.iteration % SAMPLE_EVERY == 1:
                self._say(sample_lines(stats))

    def _print_row(self, cells: Sequence[str]) -> None:
        """One plain line, for output that is not a terminal."""
        self._say(" ".join(f"{cell:>10}" for cell in cells))

    def _view(self, stats: IterationStats) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS, title=f"{stats.episodes} of {self.total} episodes", expand=False)
        for recent in self._recent:
            table.add_row(*_cells(recent))
        bar = ProgressBar(total=self.total - self.start, completed=stats.episodes - self.start, width=60)
        return Group(table, Padding(bar, (0, 0, 1, 0)), Text(sample_lines(stats)))

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop the display, draw the plot, and say where things are."""
        if self._shows:
            self._live.stop()
        if self.folder is None:
            return
        self._tensorboard.close()
        if self.rows:
            plot_training(self.rows, self.folder / "training.png")
        if kind is not None:
            self._say(f"Stopped by {kind.__name__}; the last checkpoint is {self.folder}/checkpoint.")
        elif self._progress:
            self._say(f"Metrics, samples, plot and checkpoint are in {self.folder}/")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def _cells(stats: IterationStats) -> list[str]:
    return [
        f"{stats.iteration}",
        f"{stats.episodes}",
        f"{stats.score:.3f}",
        f"{stats.kl:.2f}",
        f"{stats.response_length:.1f}",
        f"{stats.eos_rate:.0%}",
        f"{stats.distinct_2:.2f}",
        f"{stats.tokens_per_second['total']:.0f}",
    ]


def sample_lines(stats: IterationStats) -> str:
    """The samples as lines: score, prompt, what was written."""
    return "\n".join(f"{s.score:+.2f}  {s.prompt} |{_one_line(s.response)}" for s in stats.samples)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _keep_samples(path: Path, iteration: int) -> None:
    """Cut the samples of iterations that a resumed run writes anew."""
    if path.exists():
        kept = path.read_text().partition(f"== iteration {iteration + 1},")[0]
        path.write_text(kept)
