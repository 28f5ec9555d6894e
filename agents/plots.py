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
LIKELIHOOD_PANELS = (
    ("nll", "eval/nll", "negative log-likelihood (nats per token)"),
    ("perplexity", "eval/perplexity", "perplexity"),
)
PREFERENCE_PANELS = (
    ("loss", "eval/loss", "loss"),
    ("accuracy", "eval/accuracy", "accuracy of the implicit reward"),
    ("margin", "eval/margin", "margin (units of the score)"),
)


def plot_training(
    rows: Sequence[Mapping[str, Any]], path: Path, panels: Sequence[tuple[str, str, str]] = PANELS
) -> None:
    """Figures against episodes, one under the other, those of evaluations beside training's: score, KL and length.

    Args:
        rows: metrics of each iteration, as in metrics.jsonl.
        path: a PNG.
        panels: names of a figure in training and in evaluations, and what to call it; at least two.
    """
    figure = new_figure(7, 2 + 2 * len(panels))
    for axis, (key, held_out, label) in zip(figure.subplots(len(panels), sharex=True), panels, strict=True):
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
