"""What a run leaves behind and shows: metrics, TensorBoard, sample texts, a plot, and a live table.

metrics.jsonl  one line per iteration, figures of evaluations among them as eval/<name>
tensorboard/   the same for TensorBoard
samples.txt    responses to read, per iteration
alarms.txt     what an alarm saw, where it sounded
training.png   score, KL and length against episodes, in training and in evaluations
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from textenv.agents.plots import plot_training
from textenv.agents.run_folder import RunFolder
from textenv.agents.types import IterationStats, Sample

if TYPE_CHECKING:
    from textenv.evaluation import Evaluation

COLUMNS = ("iteration", "episodes", "score", "kl", "length", "ended", "distinct-2", "tokens/s")
EVAL_COLUMN = "eval/score"
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
        evaluates: show a column for the scores of evaluations.
        notice: a line to print first.

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
        evaluates: bool = False,
        notice: str | None = None,
    ) -> None:
        self._notice = notice
        self.folder, self.total, self.start = folder, total_episodes, episodes
        self.files = RunFolder(folder, iteration, goes_on)
        if folder is not None and self.files.continued:
            _keep_samples(folder / "samples.txt", iteration)
            _keep_alarms(folder / "alarms.txt", iteration)
        self._columns = (*COLUMNS, EVAL_COLUMN) if evaluates else COLUMNS
        self._recent: deque[list[str]] = deque(maxlen=ROWS)
        self._progress = progress

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of metrics so far."""
        return self.files.rows

    def __enter__(self) -> RunLog:
        """Start the display."""
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._shows = self._progress and self._console.is_terminal
        if self._progress and self._notice is not None:
            self._say(self._notice)
        if self._shows:
            self._live.start()
            self._live.update("The first iteration is running ...", refresh=True)
        elif self._progress:
            self._print_row(self._columns)
        return self

    def record_start(self, evaluation: Evaluation) -> None:
        """Log an evaluation before the first iteration: a line of iteration 0."""
        self.files.write({"iteration": 0, "episodes": 0, **eval_figures(evaluation)})
        self._write_samples("== evaluation before training", eval_samples(evaluation))
        cells = ["0", "0", *[""] * (len(COLUMNS) - 2), f"{evaluation.score.value:.3f}"]
        self._recent.append(cells)
        if self._progress and not self._shows:
            self._print_row(cells)

    def record(self, stats: IterationStats, evaluation: Evaluation | None = None) -> None:
        """Log one iteration everywhere, and the evaluation that followed it."""
        cells = _cells(stats)
        self.files.write(stats.metrics() | ({} if evaluation is None else eval_figures(evaluation)))
        self._write_samples(f"== iteration {stats.iteration}, episodes {stats.episodes}", stats.samples)
        if evaluation is not None:
            self._write_samples(f"== evaluation after iteration {stats.iteration}", eval_samples(evaluation))
            cells.append(f"{evaluation.score.value:.3f}")
        self._recent.append(cells)
        if self._shows:
            self._live.update(self._view(stats), refresh=True)
        elif self._progress:
            self._print_row(cells)
            if stats.iteration % SAMPLE_EVERY == 1:
                self._say(sample_lines(stats.samples))

    def alarm(self, line: str) -> None:
        """Keep a line that begins with its iteration's number."""
        if self.folder is not None:
            with (self.folder / "alarms.txt").open("a") as file:
                file.write(line + "\n")

    def note(self, line: str) -> None:
        """Show a line."""
        if self._progress:
            self._say(line)

    def _write_samples(self, title: str, samples: Sequence[Sample]) -> None:
        if self.folder is not None:
            with (self.folder / "samples.txt").open("a") as file:
                file.write(f"{title}\n{sample_lines(samples)}\n")

    def _print_row(self, cells: Sequence[str]) -> None:
        """One plain line, for output that is not a terminal."""
        self._say(" ".join(f"{cell:>10}" for cell in cells))

    def _view(self, stats: IterationStats) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(*self._columns, title=f"{stats.episodes} of {self.total} episodes", expand=False)
        for cells in self._recent:
            table.add_row(*cells)
        bar = ProgressBar(total=self.total - self.start, completed=stats.episodes - self.start, width=60)
        return Group(table, Padding(bar, (0, 0, 1, 0)), Text(sample_lines(stats.samples)))

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop the display, draw the plot, and say where things are."""
        if self._shows:
            self._live.stop()
        if self.folder is None:
            return
        self.files.close()
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


def eval_figures(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation's figures under the names they have in logs."""
    return {f"eval/{name}": value for name, value in evaluation.metrics().items()}


def eval_samples(evaluation: Evaluation) -> list[Sample]:
    """An evaluation's samples."""
    return [Sample(*sample) for sample in evaluation.samples]


def sample_lines(samples: Sequence[Sample]) -> str:
    """Samples as lines: score, prompt, what was written."""
    return "\n".join(f"{s.score:+.2f}  {s.prompt} |{_one_line(s.response)}" for s in samples)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _keep_samples(path: Path, iteration: int) -> None:
    """Cut the samples of iterations that a resumed run writes anew."""
    if path.exists():
        kept = path.read_text().partition(f"== iteration {iteration + 1},")[0]
        path.write_text(kept)


def _keep_alarms(path: Path, iteration: int) -> None:
    """Cut the alarms of iterations that a resumed run goes through anew."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if int(line.split()[1].rstrip(",")) <= iteration))
