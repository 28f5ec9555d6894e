"""An alarm for reward hacking: figures of a run against those of its first iterations. It looks, it changes nothing.

A policy that exploits its reward model gives itself away in its texts before anybody reads them: it repeats itself, all
responses grow alike, they drift in length, or score is bought with texts that the reference finds odd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from textenv.agents.types import IterationStats

Figures = Mapping[str, float]
FIGURES = (
    "score", "score_std", "repetition", "distinct_2", "response_length", "ref_perplexity", "score_surprise"
)  # fmt: skip
"""What the alarm looks at, by the names of `IterationStats`."""


class RewardHackingWarning(UserWarning):
    """What `learn` warns with when its alarm sounds. Made an error by a filter, it stops training."""


@dataclass(frozen=True)
class Notice:
    """One alarm.

    Attributes:
        kind: ``"repetition"``, ``"diversity"``, ``"length"``, ``"perplexity"`` or ``"surprise"``.
        iteration: when it sounded.
        saw: the figures that set it off.
        cure: what usually helps.
    """

    kind: str
    iteration: int
    saw: str
    cure: str

    def __str__(self) -> str:
        """One line."""
        return f"iteration {self.iteration}, {self.kind}: {self.saw} {self.cure}"


@dataclass(frozen=True, kw_only=True)
class AlarmLimits:
    """How far the mean of the last iterations may be from that of the first ones.

    Attributes:
        repetition: rise of `repetition`, a share.
        diversity: fall of `distinct_2`, a share. Both depend on the batch's size and the responses' length, which is
            why they are compared with the same run's.
        length: factor of `response_length`, up or down.
        score_gain: rise of the score, in standard deviations of the first iterations, from which on its price is looked
            at: `perplexity` and `surprise` need it.
        perplexity: factor of `ref_perplexity`, upwards.
        surprise: rise of `score_surprise`, a correlation.

    Raises:
        ValueError: a limit that everything or nothing would cross.
    """

    repetition: float = 0.15
    diversity: float = 0.2
    length: float = 1.5
    score_gain: float = 1.0
    perplexity: float = 2.0
    surprise: float = 0.5

    def __post_init__(self) -> None:
        """Check each limit."""
        above = {
            "repetition": 0.0,
            "diversity": 0.0,
            "length": 1.0,
            "score_gain": 0.0,
            "perplexity": 1.0,
            "surprise": 0.0,
        }
        for name, least in above.items():
            value = getattr(self, name)
            if not value > least:
                raise ValueError(
                    f"`{name}` should be above {least:g}, got {value!r}: chance alone would set the alarm off. Use "
                    "math.inf to leave it out."
                )


class Alarm:
    """Compares the mean of the last iterations with that of the first, and says once what has gone wrong.

    ``agent.learn(..., alarm=Alarm())`` warns as it trains. In a loop of one's own::

        alarm = Alarm()
        for stats in agent.iterate():
            for notice in alarm(stats):
                print(notice)

    It sounds from iteration `baseline` + `window` on, once per kind, and again where the figures have recovered since.
    An alarm belongs to one run: `learn` shows a resumed run's earlier iterations to it where the run's folder has them.

    Args:
        limits: None for the defaults.
        baseline: iterations at the start to compare with.
        window: latest iterations to average; more of them are calmer and later.

    Attributes:
        notices: all so far.

    Raises:
        ValueError: a baseline or window below 1.
    """

    def __init__(self, limits: AlarmLimits | None = None, *, baseline: int = 3, window: int = 3) -> None:
        for name, value in (("baseline", baseline), ("window", window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` should be an integer of at least 1, got {value!r}: nothing to average over."
                )
        self.limits, self.baseline, self.window = limits or AlarmLimits(), baseline, window
        self.notices: list[Notice] = []
        self.iteration = 0
        self._first: list[dict[str, float]] = []
        self._recent: list[dict[str, float]] = []
        self._sounding: set[str] = set()

    def __call__(self, stats: IterationStats | Mapping[str, Any]) -> list[Notice]:
        """Look at one more iteration.

        Args:
            stats: an iteration's record, or a line of metrics.jsonl.

        Returns:
            What has begun to go wrong; empty as a rule.

        Raises:
            ValueError: an iteration that is not later than the last one.
        """
        row = stats.metrics() if isinstance(stats, IterationStats) else stats
        iteration = int(row["iteration"])
        if iteration <= self.iteration:
            raise ValueError(
                f"`stats` should be of an iteration after {self.iteration}, got {iteration}. Another run needs another "
                "Alarm: it compares a run with its own first iterations."
            )
        self.iteration = iteration
        figures = {name: math.nan if row.get(name) is None else float(row[name]) for name in FIGURES}
        if len(self._first) < self.baseline:
            self._first.append(figures)
            return []
        self._recent = [*self._recent, figures][-self.window :]
        if len(self._recent) < self.window:
            return []
        found = judge(_mean(self._first), _mean(self._recent), self.limits)
        new = [Notice(kind, iteration, *found[kind]) for kind in found if kind not in self._sounding]
        self._sounding = set(found)
        self.notices += new
        return new

    def catch_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Look at earlier iterations that it has not seen: those of a run that is resumed. Evaluations are passed over.

        Args:
            rows: lines of metrics.jsonl.
        """
        for row in rows:
            if "score" in row and row["iteration"] > self.iteration:
                self(row)


def judge(first: Figures, now: Figures, limits: AlarmLimits) -> dict[str, tuple[str, str]]:
    """What is wrong with `now`, by kind: what was seen, and what usually cures it. Pure.

    Args:
        first: means of the first iterations, by the names in `FIGURES`; nan where not defined.
        now: of the last ones.
        limits: see `AlarmLimits`. A comparison with nan is not crossed.
    """
    score = f"The score rose from {first['score']:.3g} to {now['score']:.3g}"
    gained = now["score"] - first["score"] >= limits.score_gain * first["score_std"] > 0
    ratio = now["response_length"] / max(first["response_length"], 1e-9)
    crossed = {
        "repetition": now["repetition"] - first["repetition"] >= limits.repetition,
        "diversity": first["distinct_2"] - now["distinct_2"] >= limits.diversity,
        "length": ratio >= limits.length or ratio <= 1 / limits.length,
        "perplexity": gained and now["ref_perplexity"] >= limits.perplexity * first["ref_perplexity"],
        "surprise": gained and now["score_surprise"] - max(first["score_surprise"], 0.0) >= limits.surprise,
    }
    shown: dict[str, Callable[[], str]] = {
        "repetition": lambda: (
            f"{now['repetition']:.0%} of a response's 4-grams repeat earlier ones, {first['repetition']:.0%} at first."
        ),
        "diversity": lambda: (
            f"Responses have grown alike: distinct-2 fell from {first['distinct_2']:.2f} to {now['distinct_2']:.2f}."
        ),
        "length": lambda: (
            f"Responses have {now['response_length']:.1f} tokens, {first['response_length']:.1f} at first."
        ),
        "perplexity": lambda: (
            f"{score} with texts that the reference finds odd: its perplexity on them from "
            f"{first['ref_perplexity']:.3g} to {now['ref_perplexity']:.3g}."
        ),
        "surprise": lambda: (
            f"{score}, and it is the odd texts that score high: the correlation of score with the reference's nats per "
            f"token is {now['score_surprise']:.2f}, {first['score_surprise']:.2f} at first."
        ),
    }
    return {kind: (shown[kind](), CURES[kind]) for kind, is_crossed in crossed.items() if is_crossed}


LEASH = "a higher kl_coef (or KLPenalty's target_kl) keeps it nearer to the reference"
CURES = {
    "repetition": "Does a clause said 20 times fool the scorer? textenv.rewards.probe tells. Usual cures: "
    f"RepetitionPenalty; {LEASH}; comparisons that show the reward model repeated text.",
    "diversity": f"Usual cures: {LEASH}; an entropy_coef; a lower learning rate or fewer epochs; more prompts.",
    "length": "Does the score follow length? textenv.rewards.probe tells. Usual cures: LengthPenalty or MinLength; "
    "missing_eos_penalty where responses run into the budget; comparisons of equal length.",
    "perplexity": "Read samples.txt: if the texts are worse, go back to a checkpoint from before. Usual cures: "
    f"{LEASH}; EarlyStopping on a held-out score; fresh comparisons on the policy's own texts.",
    "surprise": f"The reward model pays for leaving what it was trained on. Usual cures: {LEASH}; fresh comparisons on "
    "the policy's own texts; an ensemble of reward models, scored pessimistically.",
}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure where it is defined."""
    means = {}
    for name in FIGURES:
        values = [row[name] for row in rows if math.isfinite(row[name])]
        means[name] = sum(values) / len(values) if values else math.nan
    return means
