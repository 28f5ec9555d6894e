"""What was left out of preference data, and why: every row is accounted for. Knows no formats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

SHOWN = 5
"""Bad rows of a kind that a message names."""


@dataclass(frozen=True)
class BadRow:
    """A row that is no comparison.

    Attributes:
        row: its number among the rows of the source, from 0.
        place: where it stands, for people: ``"train.jsonl line 3"``.
        kind: a few words that faults of this kind share (``"empty response"``).
        reason: what was expected, what came, and what to do.
    """

    row: int
    place: str
    kind: str
    reason: str


@dataclass(frozen=True)
class PreferenceReport:
    """How many rows a source had, and what became of them: ``rows == parsed + len(refused)``.

    Attributes:
        source: what was read.
        format: what it was read as, see `load_preferences`.
        rows: in all. Lines with nothing on them are no rows.
        parsed: rows that became a `Preference`.
        refused: the others, in their order.

    Raises:
        ValueError: the numbers do not add up.
    """

    source: str
    format: str
    rows: int
    parsed: int
    refused: tuple[BadRow, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a report that would hide a row."""
        if self.rows != self.parsed + len(self.refused):
            raise ValueError(
                f"`rows` should be parsed + refused, got {self.rows} and {self.parsed} + {len(self.refused)}: a row "
                "would be lost unseen."
            )

    @property
    def counts(self) -> dict[str, int]:
        """Refused rows by kind, the most frequent first."""
        return dict(Counter(bad.kind for bad in self.refused).most_common())

    def of_kind(self, kind: str) -> tuple[BadRow, ...]:
        """The refused rows of one kind."""
        return tuple(bad for bad in self.refused if bad.kind == kind)

    def __str__(self) -> str:
        """A line in all and a line per kind, with the first places of each."""
        lines = [
            f"{self.source} (format {self.format!r}): {self.rows} rows, {self.parsed} comparisons, "
            f"{len(self.refused)} left out"
        ]
        for kind, count in self.counts.items():
            places = [bad.place for bad in self.of_kind(kind)[:SHOWN]]
            lines.append(f"  {count} x {kind}: {', '.join(places)}{', ...' if count > SHOWN else ''}")
        return "\n".join(lines)


class BadPreferencesError(ValueError):
    """A source holds rows that are no comparisons, and nothing was said of leaving them out.

    Args:
        report: on all rows of the source, kept as ``report``.
    """

    def __init__(self, report: PreferenceReport) -> None:
        first = "\n".join(f"  {bad.reason}" for bad in report.refused[:SHOWN])
        super().__init__(
            f"Every row should be a comparison, got {len(report.refused)} of {report.rows} that are none.\n{report}\n"
            f"The first of them:\n{first}\nMend them; or load with on_bad_row='skip', which leaves such rows out and "
            f"returns the comparisons with this report. If most rows are refused, say what they are: format=... "
            f"(read as {report.format!r}), columns=...."
        )
        self.report = report
