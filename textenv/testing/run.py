"""One run of `check_text_env`: what is checked, with which tokens, and what was found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from textenv.testing.choosing import Chooser
from textenv.testing.episodes import Contract, broken_rules
from textenv.testing.report import Findings, Report
from textenv.testing.subject import Subject
from textenv.testing.walking import Episode

OF_EPISODES = ("observations", "prompt columns", "response columns", "ends", "rewards", "infos")
"""The checks that `broken_rules` makes on every episode."""


@dataclass
class Run:
    """What the checks share.

    Attributes:
        findings: what was found so far.
        subject: what is checked.
        chooser: draws the tokens.
        seed: of the episodes.
        tolerance: for floats.
        history: rewards through the wrappers depend on earlier episodes, as those of running statistics do.
        finished: how episodes finished so far: True by a stop id, False by the budget.
    """

    findings: Findings
    subject: Subject
    chooser: Chooser
    seed: int
    tolerance: float
    history: bool = False
    finished: set[bool] = field(default_factory=set)

    @property
    def in_order(self) -> bool:
        """Whether prompts are not drawn: row i of N takes prompts i, i + N, and so on."""
        return self.subject.task.prompts.schedule.order == "sequential"

    def one_row_only(self, bare: bool) -> str | None:
        """Why only one row can equal a single environment, without wrappers (`bare`) or with all; None if N can."""
        if self.history and not bare:
            return "rewards through the wrappers depend on earlier episodes"
        return "the rows share out prompts in sequential order" if self.in_order else None

    @property
    def broken(self) -> int:
        """Violations so far."""
        return len(self.findings.violations)

    def judge(self, where: str, contract: Contract, episode: Episode) -> None:
        """Hold an episode to the rules."""
        self.findings.ran.update(OF_EPISODES)
        if any(text is not None for text in episode.renders):
            self.findings.ran.add("render")
        if episode.ended:
            self.finished.add(bool(self.subject.task.mdp.is_stop[episode.actions[-1]]))
        for check, message in broken_rules(contract, episode):
            self.findings.add(check, f"{where}: {message}")
        if not contract.observations:
            self.findings.skip("observations (through the wrappers)", "a wrapper transforms them")
        if not contract.texts:
            self.findings.skip("infos (through the wrappers)", "a wrapper takes the texts out of them")

    def report(self) -> Report:
        """What was found, with a reason for everything that was not reached.

        Raises:
            ConformanceError: at least one rule does not hold.
        """
        for name, reason in self.subject.reasons.items():
            self.findings.skip(name, reason)
        for by_stop, what in ((True, "by a stop id"), (False, "by the budget")):
            if by_stop not in self.finished:
                self.findings.skip(f"ends ({what})", self._why_never(by_stop))
        for name in self.findings.consequences:
            if name not in self.findings.ran and name not in self.findings.skipped:
                self.findings.skip(name, self._why_not(name))
        return self.findings.report(self.subject.name)

    def _why_never(self, by_stop: bool) -> str:
        if not self.finished:
            return "no episode reached its end"
        if by_stop and not self.subject.task.mdp.stop_ids:
            return "the task has no stop ids"
        kind = "stop id" if by_stop else "id that is no stop id"
        return f"no episode finished so: the constraints or the vocabulary left no {kind} to choose in time"

    def _why_not(self, name: str) -> str:
        if name == "render":
            return 'render_mode is not "ansi"'
        kind = "vector" if name.startswith("vector") or name in ("row seeds", "replay") else "single"
        return self.subject.reasons.get(kind, f"no {kind} environment could be walked")
