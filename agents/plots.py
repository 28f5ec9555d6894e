"""Plots to files. No display, no state shared with the caller's own matplotlib figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("score", "score"),
    ("kl", "KL to the reference (nats)"),
    ("response_length", "response length (tokens)"),
)


def plot_training(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Score, KL and response length against episodes, one under the other.

    Args:
        rows: metrics of each iteration, as in metrics.jsonl.
        path: a PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 8), layout="constrained")
    FigureCanvasAgg(figure)
    episodes = [row["episodes"] for row in rows]
    for axis, (key, label) in zip(figure.subplots(len(PANELS), sharex=True), PANELS, strict=True):
        axis.plot(episodes, [float("nan") if row[key] is None else row[key] for row in rows], marker=".")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axis.set_xlabel("episodes")
    figure.savefig(path, dpi=120)
