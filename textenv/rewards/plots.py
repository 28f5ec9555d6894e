"""Plots of reward models to files. No display, no state shared with the caller's own matplotlib figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from textenv.plotting import new_figure, save_figure
from textenv.rewards.learning_curves import CurvePoint
from textenv.rewards.preference_evaluation import Calibration, PreferenceEvaluation


def _axes(size: tuple[float, float] = (6, 5)) -> tuple[Any, Any]:
    """A figure and its only axes."""
    figure = new_figure(*size)
    axis = figure.subplots()
    axis.grid(alpha=0.3)
    return figure, axis


def plot_calibration(calibration: Calibration, path: str | os.PathLike[str], title: str = "") -> None:
    """Observed win rate against sigmoid(|gap|), with intervals; on the diagonal a score keeps its word.

    Args:
        calibration: of `calibration_curve`.
        path: a PNG.
        title: of the plot.
    """
    figure, axis = _axes()
    filled = calibration.counts > 0
    x, y = calibration.confidence[filled], calibration.win_rate[filled]
    spread = np.clip([y - calibration.low[filled], calibration.high[filled] - y], 0, None)
    axis.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", label="calibrated")
    axis.errorbar(x, y, yerr=spread, marker="o", capsize=3, label=f"observed, error {calibration.error:.3f}")
    for place, rate, count in zip(x, y, calibration.counts[filled], strict=True):
        axis.annotate(str(count), (place, rate), textcoords="offset points", xytext=(5, -10), fontsize=7)
    axis.set(xlabel="claimed: sigmoid(|gap|)", ylabel="share in which the higher score won", title=title)
    axis.legend()
    save_figure(figure, path)


def plot_scores(report: PreferenceEvaluation, path: str | os.PathLike[str], title: str = "") -> None:
    """Histograms of the scores of preferred and of other responses.

    Args:
        report: of `evaluate_preferences`.
        path: a PNG.
        title: of the plot.
    """
    figure, axis = _axes()
    edges = np.histogram_bin_edges(np.concatenate([report.chosen, report.rejected]), 40)
    axis.hist(report.chosen, edges, alpha=0.6, label="preferred")
    axis.hist(report.rejected, edges, alpha=0.6, label="the other")
    axis.set(xlabel="score", ylabel="responses", title=title)
    axis.legend()
    save_figure(figure, path)


def plot_learning_curve(
    points: Sequence[CurvePoint], path: str | os.PathLike[str], ceiling: float | None = None, title: str = ""
) -> None:
    """Held-out accuracy against the number of comparisons, one dot per fit and a line through their means.

    Args:
        points: of `learning_curve`.
        path: a PNG.
        ceiling: a line to compare with, such as the accuracy that is possible on these comparisons.
        title: of the plot.
    """
    figure, axis = _axes()
    sizes = sorted({point.comparisons for point in points})
    means = [np.mean([p.accuracy.value for p in points if p.comparisons == size]) for size in sizes]
    axis.plot([p.comparisons for p in points], [p.accuracy.value for p in points], "o", alpha=0.4)
    axis.plot(sizes, means, marker=".", label="mean of the fits")
    if ceiling is not None:
        axis.axhline(ceiling, color="grey", linestyle="--", label=f"ceiling {ceiling:.3f}")
    axis.set(xscale="log", xlabel="comparisons", ylabel="held-out accuracy", title=title)
    axis.legend()
    save_figure(figure, path)
