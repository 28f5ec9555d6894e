"""What a conformance run found: what held, what could not be reached and why, what was violated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN_PER_CHECK = 3


class Violation(NamedTuple):
    """One rule that did not hold."""

    check: str
    """The name of the check, one of `textenv.testing.CHECKS`."""
    message: str
    """What was expected, what came."""


@dataclass(frozen=True)
class Report:
    """What `check_text_env` could say.

    Attributes:
        subject: what was checked.
        passed: names of the checks that held, in order.
        skipped: what could not be reached, with the reason. A check may be both passed and skipped in part: the key is
            then its name with the part in brackets.
    """

    subject: str
    passed: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        """One line per check."""
        lines = [f"Conformance of {self.subject}: {len(self.passed)} checks passed, {len(self.skipped)} not reached"]
        lines += [f"  passed   {name}" for name in self.passed]
        lines += [f"  skipped  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A text environment breaks rules that agents rely on; the message lists them all.

    Attributes:
        violations: every rule that did not hold.
        report: the rest.
    """

    def __init__(self, violations: tuple[Violation, ...], report: Report, consequences: Mapping[str, str]) -> None:
        self.violations, self.report, self.consequences = violations, report, dict(consequences)
        super().__init__(violations, report, consequences)

    def __str__(self) -> str:
        """Violations grouped by check, each group with what it would break in training, and what was not reached."""
        broken = {violation.check for violation in self.violations}
        names = [name for name in self.consequences if name in broken]
        lines = [f"{self.report.subject} breaks {len(names)} of the rules of a text environment."]
        for name in names:
            messages = [violation.message for violation in self.violations if violation.check == name]
            lines.append(f"\n[{name}] Otherwise {self.consequences[name]}.")
            lines += [f"  - {message}" for message in messages[:SHOWN_PER_CHECK]]
            if len(messages) > SHOWN_PER_CHECK:
                lines.append(f"  - and {len(messages) - SHOWN_PER_CHECK} more of the kind")
        if self.report.skipped:
            lines.append("\nNot reached:")
            lines += [f"  - {name}: {reason}" for name, reason in self.report.skipped.items()]
        return "\n".join(lines)


@dataclass
class Findings:
    """Collects while checks run.

    Attributes:
        consequences: name of each check to what its violation would break, as the end of "Otherwise ...".
    """

    consequences: Mapping[str, str]
    violations: list[Violation] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)

    def add(self, check: str, message: str) -> None:
        """Note a violation; the same one from several places once."""
        violation = Violation(check, message)
        if violation not in self.violations:
            self.violations.append(violation)

    def skip(self, name: str, reason: str) -> None:
        """Note what could not be reached; the first reason stays."""
        self.skipped.setdefault(name, reason)

    @contextmanager
    def checking(self, *checks: str, where: str) -> Iterator[Callable[[str], None]]:
        """Run checks whose own exceptions are violations of the first of them.

        Yields:
            A function that notes a violation of that check.
        """
        self.ran.update(checks)

        def violated(message: str) -> None:
            self.add(checks[0], f"{where}: {message}")

        try:
            yield violated
        except Exception as error:
            violated(f"this should run without an exception, got {type(error).__name__}: {error}")

    def report(self, subject: str) -> Report:
        """The report; raises instead if a rule was violated.

        Raises:
            ConformanceError: at least one rule did not hold.
        """
        broken = {violation.check for violation in self.violations}
        passed = tuple(name for name in self.consequences if name in self.ran and name not in broken)
        never_ran = [name for name in self.consequences if name not in self.ran and name not in self.skipped]
        assert not never_ran, f"neither ran nor skipped: {never_ran}"
        report = Report(subject, passed, dict(self.skipped))
        if self.violations:
            raise ConformanceError(tuple(self.violations), report, self.consequences)
        return report
