"""What `learn` looks at between iterations besides its log: the alarm, and the score that early stopping watches."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from textenv.agents.alarm import Alarm, RewardHackingWarning
from textenv.agents.run_log import RunLog
from textenv.agents.types import IterationStats
from textenv.rewards.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from textenv.agents.agent import Agent
    from textenv.evaluation import Evaluation

BEST = "best"
"""Folder beside ``checkpoint`` for the iteration with the best evaluation."""


@dataclass(frozen=True)
class Watch:
    """An alarm and early stopping around the iterations of one run. Neither changes what is learned.

    Attributes:
        alarm: None for none.
        early_stopping: None for none.
        folder: the run's; None: nothing is written.
    """

    alarm: Alarm | None
    early_stopping: EarlyStopping | None
    folder: Path | None

    def begin(self, agent: Agent, log: RunLog) -> None:
        """Bring both up to where a resumed run stands.

        Raises:
            ValueError: one of them has seen iterations that the agent has not done: it is another run's.
        """
        seen = {
            "alarm": None if self.alarm is None else self.alarm.iteration,
            "early_stopping": None if self.early_stopping is None else self.early_stopping.state.iteration,
        }
        for name, iteration in seen.items():
            if iteration is not None and iteration > agent.iteration:
                raise ValueError(
                    f"`{name}` should be new or of this run, got one that has seen iteration {iteration} of a run, and "
                    f"the agent is at {agent.iteration}. Make a new one."
                )
        if self.alarm is not None:
            self.alarm.catch_up(log.rows)
        if self.early_stopping is not None:
            last = self.early_stopping.state.iteration
            for row in log.rows:
                score = row.get("eval/score")
                if score is not None and (last is None or row["iteration"] > last):
                    self.early_stopping(row["iteration"], score)

    def evaluated(self, agent: Agent, evaluation: Evaluation | None) -> None:
        """Tell early stopping a score, and keep the agent that had the best one."""
        if self.early_stopping is None or evaluation is None or not math.isfinite(evaluation.score.value):
            return
        self.early_stopping(agent.iteration, evaluation.score.value)
        if self.folder is not None and self.early_stopping.best_iteration == agent.iteration:
            agent.save(self.folder / BEST)

    def sound(self, stats: IterationStats, log: RunLog) -> None:
        """Show an iteration to the alarm, and warn of what it sees."""
        for notice in [] if self.alarm is None else self.alarm(stats):
            log.alarm(str(notice))
            warnings.warn(str(notice), RewardHackingWarning, stacklevel=4)

    @property
    def stop(self) -> bool:
        """Whether early stopping says that it is enough."""
        return self.early_stopping is not None and self.early_stopping.stop

    @property
    def reason(self) -> str:
        """Why it stopped, in a line."""
        assert self.early_stopping is not None
        state = self.early_stopping.state
        where = "" if self.folder is None else f", kept in {self.folder / BEST}"
        return (
            f"Stopped early: the evaluation's score was best after iteration {state.best_iteration} "
            f"({state.best:.3f}{where}) and has not risen in {state.waited} evaluations since."
        )
