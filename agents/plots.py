"""Plots of training, to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textenv.plotting import new_figure, save_figure

PANELS = (
    ("score", "eval/score", "score"),
    ("kl", "eval/kl", "KL to the reference (nats)"),
    ("response_length", "eval/length", "response length (tokens)"),
)


def plot_training(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Score, KL and response length against episodes, one under the other; those of evaluations beside training's.

    Args:
        rows: metrics of each iteration, as in metrics.jsonl.
        path: a PNG.
    """
    figure = new_figure(7, 8)
    for axis, (key, held_out, label) in zip(figure.subplots(len(PANELS), sharex=True), PANELS, strict=True):
        axis.plot(*curve(rows, key), marker=".", label="training")
        if any(held_out in row for row in rows):
            axis.plot(*curve(rows, held_out), marker="o", label="evaluation")
            axis.legend()
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axis.set_xlabel("episodes")
    save_figure(figure, path)


def curve(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Episodes and values of one figure, of the rows that have it; nan where it was not defined."""
    points = [(row["episodes"], row[key]) for row in rows if key in row]
    return [x for x, _ in points], [float("nan") if y is None else y for _, y in points]
