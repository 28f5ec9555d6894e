"""What a run on a fixed set of data leaves behind and shows: metrics, TensorBoard, a plot, and a progress bar.

metrics.jsonl  one line per step, figures of held-out data among them as eval/<name>
tensorboard/   the same for TensorBoard
training.png   the agent's figures against rows seen, in training and held out
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from textenv.agents.plots import plot_training
from textenv.agents.run_folder import RunFolder

if TYPE_CHECKING:
    from textenv.agents.offline import OfflineAgent, OfflineStats

LINES = 20
"""Lines of progress that a run prints where the output is no terminal, besides those of measurements."""


class OfflineLog:
    """Writes a run's files and shows its progress; a context manager around the training loop.

    Args:
        folder: where files go; None: nowhere.
        agent: whose run it is; it says what its figures are called.
        goes_on: the run in the folder, if there is one, is the one that goes on.
        progress: show the bar.

    Raises:
        FileExistsError: the folder holds another run.
    """

    def __init__(self, folder: Path | None, agent: OfflineAgent[Any, Any], goes_on: bool, progress: bool) -> None:
        self.files = RunFolder(folder, agent.iteration, goes_on)
        self.folder, self.agent, self.total, self._progress = folder, agent, agent.total_steps, progress
        self._held_out = ""

    def __enter__(self) -> OfflineLog:
        """Start the display."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=self._console)
        self._shows = self._progress and self._console.is_terminal
        if self._shows:
            self._bar.start()
            self._task = self._bar.add_task(type(self.agent).__name__, total=self.total, completed=self.agent.iteration)
        return self

    def record_start(self, measured: Any) -> None:
        """Log the held-out data before the first step: a line of iteration 0."""
        self.files.write({"iteration": 0, "episodes": 0, **_figures(measured)})
        self._say_measured(0, measured)

    def record(self, stats: OfflineStats, measured: Any) -> None:
        """Log one step, and the measurement that followed it."""
        self.files.write(stats.metrics() | ({} if measured is None else _figures(measured)))
        if measured is not None:
            self._say_measured(stats.iteration, measured)
        line = f"{self.agent.headline(stats)}{self._held_out}"
        if self._shows:
            self._bar.update(self._task, completed=stats.iteration, description=line)
        elif self._progress and stats.iteration % max(1, self.total // LINES) == 0:
            self._say(
                f"step {stats.iteration} of {self.total}: {line}, {stats.metrics()['tokens_per_second']:.0f} tok/s"
            )

    def _say_measured(self, iteration: int, measured: Any) -> None:
        self._held_out = f", held out {self.agent.headline(measured)}"
        if self._progress:
            self._say(f"step {iteration} of {self.total}: {self.agent.sentence(measured)}")

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop the display, draw the plot, and say where things are."""
        if self._shows:
            self._bar.stop()
        if self.folder is None:
            return
        self.files.close()
        if self.files.rows:
            plot_training(self.files.rows, self.folder / "training.png", self.agent.panels)
        if kind is not None:
            self._say(f"Stopped by {kind.__name__}; the last checkpoint is {self.folder}/checkpoint.")
        elif self._progress:
            self._say(f"Metrics, plot and checkpoint are in {self.folder}/")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def _figures(measured: Any) -> dict[str, Any]:
    """Held-out figures under the names they have in logs."""
    return {f"eval/{name}": value for name, value in measured.metrics().items()}
