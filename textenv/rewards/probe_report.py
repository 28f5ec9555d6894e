"""`ProbeReport`: what degenerate answers are worth to a scorer, as `probe` finds it."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from textenv.estimates import Estimate
from textenv.optional import require
from textenv.rewards.plain_json import write_json


class Example(NamedTuple):
    """One genuine answer, one variant of it, and what the scorer gave for each."""

    prompt: str
    genuine: str
    variant: str
    genuine_score: float
    variant_score: float


@dataclass(frozen=True, kw_only=True)
class VariantResult:
    """How one kind of degenerate answer fares against genuine ones."""

    name: str
    compared: int
    """Answers that the variant changed. The others, such as a single word that cannot be shuffled, tell nothing."""
    win_rate: Estimate
    """Share of them in which the variant scores higher than the genuine answer, a tie counting one half; Wilson's
    interval."""
    gap: Estimate
    """Mean of the variant's score minus the genuine answer's, in the scorer's units."""
    gap_in_std: float
    """The same in standard deviations of genuine answers' scores; nan where they are all equal."""
    example: Example | None
    """The pair in which the variant gains most; None where nothing was compared."""

    @property
    def verdict(self) -> str:
        """What the interval of the win rate says.

        ``"preferred"``: above one half with all of it, a blind spot that training would find. ``"rejected"``: below.
        ``"not told apart"``: one half is inside; for a scorer of content that is a finding too, more answers may settle
        it. ``"nothing compared"`` where the variant changed no answer.
        """
        if self.compared == 0:
            return "nothing compared"
        if self.win_rate.low > 0.5:
            return "preferred"
        return "rejected" if self.win_rate.high < 0.5 else "not told apart"


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeReport:
    """A scorer against genuine answers and their degenerate variants."""

    scorer: str
    """What was probed."""
    score: Estimate
    """Mean score of the genuine answers."""
    score_std: float
    """Standard deviation of the same, with n in its denominator."""
    length_pearson: Estimate
    """Correlation of genuine answers' scores with their number of words; nan where one of the two does not vary."""
    length_spearman: Estimate
    """The same of ranks."""
    variants: tuple[VariantResult, ...]
    scores: NDArray[np.float64]
    """(n,) of the genuine answers."""
    lengths: NDArray[np.int64]
    """(n,) words of the genuine answers."""
    confidence: float

    @property
    def answers(self) -> int:
        """n, genuine answers."""
        return len(self.scores)

    def variant(self, name: str) -> VariantResult:
        """The result of one variant.

        Raises:
            KeyError: no variant of that name was tried.
        """
        for result in self.variants:
            if result.name == name:
                return result
        raise KeyError(f"No variant {name!r} was tried, only {', '.join(repr(v.name) for v in self.variants)}.")

    @property
    def preferred(self) -> tuple[str, ...]:
        """Names of the variants that the scorer prefers to genuine answers."""
        return tuple(variant.name for variant in self.variants if variant.verdict == "preferred")

    def as_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers."""
        return {
            "scorer": self.scorer,
            "answers": self.answers,
            "confidence": self.confidence,
            "score": self.score._asdict(),
            "score_std": self.score_std,
            "length_pearson": self.length_pearson._asdict(),
            "length_spearman": self.length_spearman._asdict(),
            "variants": [
                {
                    "name": variant.name,
                    "compared": variant.compared,
                    "win_rate": variant.win_rate._asdict(),
                    "gap": variant.gap._asdict(),
                    "gap_in_std": variant.gap_in_std,
                    "verdict": variant.verdict,
                    "example": None if variant.example is None else variant.example._asdict(),
                }
                for variant in self.variants
            ],
            "scores": self.scores.tolist(),
            "lengths": self.lengths.tolist(),
        }

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict` as JSON; figures that are not finite become null."""
        write_json(path, self.as_dict())

    def table(self) -> Any:
        """A rich table, one row per variant.

        Raises:
            ImportError: rich is not installed.
        """
        require("rich", "train", "A table")
        from rich.markup import escape
        from rich.table import Table

        colours = {"preferred": "red", "rejected": "green"}
        table = Table("variant", "win rate", "mean gap", "in std", "verdict")
        table.title = f"{escape(self.scorer)}: {self.answers} genuine answers"
        for variant in self.variants:
            verdict = variant.verdict
            figures = [str(variant.win_rate), str(variant.gap), f"{variant.gap_in_std:+.2f}"]
            table.add_row(escape(variant.name), *figures, f"[{colours.get(verdict, 'default')}]{verdict}[/]")
        table.caption = (
            f"Genuine: score {self.score}, standard deviation {self.score_std:.3g}. Score with length in words: "
            f"Pearson {self.length_pearson}, Spearman {self.length_spearman}."
        )
        return table

    def __str__(self) -> str:
        """The table as plain text."""
        require("rich", "train", "A table")
        from rich.console import Console

        page = io.StringIO()
        Console(file=page, width=110, color_system=None).print(self.table())
        return page.getvalue()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw win rates, and scores against lengths, as a PNG.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from textenv.rewards.figures import plot_probe

        plot_probe(self, path)
