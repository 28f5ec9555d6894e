"""Figures that are drawn to files: no display, no state shared with the caller's own matplotlib figures."""

from __future__ import annotations

import os
from typing import Any

from textenv.optional import require

DPI = 120


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure that pyplot knows nothing of.

    Args:
        width: inches.
        height: inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", "train", "A plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=DPI, format="png")
