"""Runs of contenders on toys, and what they amount to over seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from support.yard_agents import Contender
from support.yard_toys import Toy

TARGET = 0.05
"""Nats from the optimum, at most."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A checkpoint of a run."""

    tokens: int
    seconds: float
    """Of sampling and training, without measuring."""
    distance: float
    score: float
    kl: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed's way through the budget."""

    seed: int
    points: list[Point]
    """The first is the reference; then one for each of the checkpoints, the last of them the end."""

    @property
    def last(self) -> Point:
        return self.points[-1]

    def reaches(self, distance: float, axis: str) -> float:
        """Tokens or seconds of the first checkpoint from which on the distance stays within a bound; inf if never."""
        outside = [number for number, point in enumerate(self.points) if not point.distance <= distance]
        after = outside[-1] + 1 if outside else 0
        return float(getattr(self.points[after], axis)) if after < len(self.points) else math.inf


def run(
    contender: Contender, toy: Toy, seed: int, budget: int, checkpoints: int, settings: dict[str, Any] | None = None
) -> Run:
    """Train from the reference until the next update would spend more than the budget.

    A checkpoint is the first update after each of as many equal shares of the budget; the end is the last one.
    """
    found = toy.measure(toy.language.reference_logprobs)
    points = [Point(0, 0.0, found.distance, found.score, found.kl)]
    table, tokens, seconds, unseen = None, 0, 0.0, False
    start = time.perf_counter()
    for after, trained in contender.train(toy, seed, budget, contender.settings if settings is None else settings):
        if after > budget:
            break
        seconds += time.perf_counter() - start
        unseen = int(after * checkpoints / budget) == int(tokens * checkpoints / budget)
        table, tokens = trained, after
        if not unseen:
            points.append(point(toy, tokens, seconds, table))
        start = time.perf_counter()
    if unseen:
        points.append(point(toy, tokens, seconds, table))
    return Run(seed, points)


def point(toy: Toy, tokens: int, seconds: float, table: Any) -> Point:
    """A checkpoint, measured exactly."""
    found = toy.measure(table)
    return Point(tokens, seconds, found.distance, found.score, found.kl)


def summary(runs: Sequence[Run], target: float = TARGET) -> dict[str, Any]:
    """Figures over seeds: the distance at the end, and what it took to come within the target for good."""
    ends = [one.last.distance for one in runs]
    spread = statistics.stdev(ends) if len(ends) > 1 else math.nan
    return {
        "seeds": len(runs),
        "median": statistics.median(ends),
        "mean": statistics.fmean(ends),
        "std": spread,
        "worst": max(ends),
        "score": statistics.fmean(one.last.score for one in runs),
        "kl": statistics.fmean(one.last.kl for one in runs),
        "tokens": statistics.median(one.last.tokens for one in runs),
        "seconds": statistics.median(one.last.seconds for one in runs),
        "tokens_to_target": statistics.median(one.reaches(target, "tokens") for one in runs),
        "seconds_to_target": statistics.median(one.reaches(target, "seconds") for one in runs),
        "within_target": sum(end <= target for end in ends),
    }


def search(contender: Contender, toy: Toy, seeds: Sequence[int], budget: int) -> list[dict[str, Any]]:
    """Each of the contender's settings on the same seeds, the best first: the smallest mean distance at the end."""
    rows = []
    for settings in contender.tried:
        ends = [run(contender, toy, seed, budget, 1, settings).last.distance for seed in seeds]
        rows.append({"settings": settings, "distance": statistics.fmean(ends)})
    return sorted(rows, key=lambda row: row["distance"])
