"""Pictures of what the instruments of this room measure, to PNG files. Computes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from textenv.plotting import new_figure, save_figure

if TYPE_CHECKING:
    from textenv.estimates import Estimate
    from textenv.rewards.overoptimisation_curve import OverOptimisation
    from textenv.rewards.probe_report import ProbeReport


def plot_overoptimisation(
    curve: OverOptimisation, path: str | os.PathLike[str], proxy_label: str, gold_label: str
) -> None:
    """Proxy and gold against the square root of KL, as in figure 1 of Gao et al. (2022), with the gold score's peak."""
    figure = new_figure(7, 5)
    axis = figure.subplots()
    distance = np.sqrt(curve.kl)
    for label, means, style in (
        (proxy_label, curve.means("proxy"), "--"),
        (gold_label, curve.means("gold"), "-"),
    ):
        [line] = axis.plot(distance, [mean.value for mean in means], style, marker=".", label=label)
        bounds = np.array([(mean.low, mean.high) for mean in means])  # (K, 2)
        if np.isfinite(bounds).all():
            axis.fill_between(distance, *bounds.T, color=line.get_color(), alpha=0.2, linewidth=0)
    peak = curve.peak()
    axis.axvline(peak.kl.value**0.5, color="0.5", linewidth=1, label=f"{gold_label} peaks at KL {peak.kl.value:.2f}")
    if np.isfinite(peak.kl.high):
        axis.axvspan(peak.kl.low**0.5, peak.kl.high**0.5, color="0.5", alpha=0.12, linewidth=0)
    axis.set_xlabel("square root of KL to the reference (nats)")
    axis.set_ylabel("score")
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path)


def plot_probe(report: ProbeReport, path: str | os.PathLike[str]) -> None:
    """Win rate of each variant, and the score of genuine answers against their length."""
    figure = new_figure(11, 4.5)
    rates, scatter = figure.subplots(1, 2)
    _forest(rates, [(variant.name, variant.win_rate) for variant in report.variants])
    scatter.plot(report.lengths, report.scores, ".", alpha=0.6)
    scatter.set_xlabel("words of a genuine answer")
    scatter.set_ylabel("score")
    scatter.set_title(f"rank correlation {report.length_spearman}")
    scatter.grid(alpha=0.3)
    save_figure(figure, path)


def _forest(axis: Any, rows: list[tuple[str, Estimate]]) -> None:
    """One line per variant: its win rate and interval, and the even chance that it should stay below."""
    for place, (_, rate) in enumerate(rows):
        axis.plot([rate.low, rate.high], [place, place], color="C0")
        axis.plot(rate.value, place, "o", color="C0")
    axis.axvline(0.5, color="0.5", linewidth=1)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(-0.03, 1.03)
    axis.set_xlabel("win rate against the genuine answer")
    axis.grid(alpha=0.3, axis="x")
