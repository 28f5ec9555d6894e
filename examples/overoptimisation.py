"""Over-optimisation, watched: proxies learned from few comparisons are optimised, and a gold scorer looks on.

The gold scorer is the packaged reward model, learned from all the ratings of the training sentences. Proxies learn from
100, 500 and 2,000 comparisons of single raters. Best-of-n and PPO raise each proxy's score; the gold score follows for
a while, and then it does not (Gao et al. 2022, arXiv:2210.10760). The smallest proxy is also trained with
retraining: fresh comparisons on the policy's own samples, labelled by the gold scorer, are added and the proxy is
fitted again.

    python examples/overoptimisation.py              # a quarter of an hour or two on two cores
    python examples/overoptimisation.py --help

Writes runs/<name>/: overoptimisation.png (both optimisers, each proxy), one PNG and JSON file for each curve, and
report.json with the KL at which each gold score peaks.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from laboratory import Arguments, Laboratory, Point
from rich.console import Console
from rich.progress import track
from rich.table import Table

from textenv.agents import PPO, PPOConfig, sample_preferences
from textenv.plotting import new_figure, save_figure
from textenv.rewards import (
    EarlyStopping,
    OverOptimisation,
    Preference,
    RewardModel,
    fit_head_to,
    preferences_from_ratings,
)


def train(
    laboratory: Laboratory, proxy: RewardModel, refits: int = 0, known: Sequence[Preference] = ()
) -> tuple[OverOptimisation, dict[str, Any]]:
    """PPO against a proxy, measured as it goes, and what early stopping on the gold score would have kept.

    Args:
        laboratory: the task.
        proxy: what PPO raises.
        refits: how often, evenly spread over the run, a new proxy takes its place, which has also learned from as many
            fresh comparisons of the policy's own samples.
        known: the comparisons that the first proxy has learned from; with `refits`.
    """
    arguments, policy = laboratory.arguments, laboratory.policy()
    iterations = np.array_split(range(-(-arguments.episodes // arguments.num_envs)), refits + 1)
    points: list[Point] = []
    known = list(known)
    for part, numbers in enumerate(iterations):
        if part:
            envs = laboratory.envs(laboratory.openings, laboratory.gold, arguments.num_envs)
            fresh = sample_preferences(policy, None, envs, None, len(known), arguments.seed + part, noise=1.0)
            known += fresh.preferences
            proxy = fit_head_to(known, like=laboratory.head)
        config = PPOConfig(
            learning_rate=arguments.learning_rate, epochs=2, num_minibatches=3, gamma=1.0, check_start=part == 0
        )
        envs = laboratory.envs(laboratory.openings, proxy, arguments.num_envs)
        agent = PPO(policy, envs, config, seed=arguments.seed + part)
        measure = laboratory.measure_of(policy, proxy)
        for number in track(numbers.tolist(), description=f"PPO on {proxy.metadata['comparisons']} comparisons"):
            if number % arguments.eval_every == 0 or number == numbers[0]:
                points.append(measure(f"iteration {number}"))
            agent.step()
    points.append(measure(f"iteration {number + 1}"))
    return _curve(points), _early_stopping(points)


def _curve(points: Sequence[Point]) -> OverOptimisation:
    """The measurements by rising KL. That of the reference itself is 0, give or take what sampling does."""
    rising: list[Point] = []
    for point in sorted(points, key=lambda point: max(point.kl, 0.0)):
        if not rising or point.kl > max(rising[-1].kl, 0.0):
            rising.append(point)
    return OverOptimisation(
        kl=np.array([max(point.kl, 0.0) for point in rising]),
        proxy=np.stack([point.proxy for point in rising], axis=1),
        gold=np.stack([point.gold for point in rising], axis=1),
        labels=tuple(point.label for point in rising),
    )


def _early_stopping(points: Sequence[Point]) -> dict[str, Any]:
    """Where training would have ended with a look at the gold score at each measurement, and what that is worth."""
    stopping = EarlyStopping(patience=3)
    for number, point in enumerate(points):
        if stopping(number, float(point.gold.mean())):
            break
    best = points[stopping.best_iteration or 0]
    return {
        "stops_at": points[stopping.state.iteration or 0].label if stopping.stop else None,
        "keeps": best.label,
        "gold_kept": float(best.gold.mean()),
        "gold_at_the_end": float(points[-1].gold.mean()),
    }


def draw(best: list[OverOptimisation], trained: list[OverOptimisation], names: list[str], path: Path) -> None:
    """Proxy and gold score of both optimisers against the square root of KL, one panel for each run."""
    figure = new_figure(5 * len(names), 4.5)
    for axis, name, *curves in zip(figure.subplots(1, len(names), squeeze=False)[0], names, best, trained, strict=True):
        for colour, label, curve in zip(("C0", "C1"), ("best-of-n", "PPO"), curves, strict=True):
            root = np.sqrt(curve.kl)
            axis.plot(root, curve.proxy.mean(0), "--", color=colour, label=f"proxy, {label}")
            axis.plot(root, curve.gold.mean(0), "-", marker=".", color=colour, label=f"gold, {label}")
        axis.set(title=name, xlabel="square root of KL (nats)", ylabel="score, standard deviations of the reference")
        axis.grid(alpha=0.3)
        axis.legend()
    save_figure(figure, path)


def main(arguments: Arguments) -> dict[str, Any]:
    console = Console()
    folder = Path("runs") / (arguments.name or f"overoptimisation-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    folder.mkdir(parents=True)
    laboratory = Laboratory(arguments)
    rng = np.random.default_rng(arguments.seed)
    drawn = preferences_from_ratings(laboratory.train, max(arguments.comparisons), rng)
    runs = [(f"{count} comparisons", count, 0) for count in sorted(arguments.comparisons)]
    if arguments.refits:
        runs.insert(1, (f"{runs[0][1]} comparisons, retrained", runs[0][1], arguments.refits))
    report: dict[str, Any] = {}
    best, trained = [], []
    for name, count, refits in runs:
        proxy = fit_head_to(drawn[:count], like=laboratory.head)
        best.append(laboratory.best_of_n(proxy))
        curve, stopping = train(laboratory, proxy, refits, drawn[:count])
        trained.append(curve)
        report[name] = {"best_of_n": best[-1].as_dict(), "ppo": curve.as_dict(), "early_stopping": stopping}
        for kind, one in (("best-of-n", best[-1]), ("ppo", curve)):
            one.plot(folder / f"{kind}-{name.replace(', ', '-').replace(' ', '-')}.png")
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")  # a crash loses the run under way
    draw(best, trained, [name for name, *_ in runs], folder / "overoptimisation.png")
    console.print(summary(report))
    console.print(f"Wrote {folder}.")
    return report


def summary(report: dict[str, Any]) -> Table:
    """Where the gold score peaks, and how much of it is lost by going on."""
    table = Table("proxy", "optimiser", "gold peaks at KL", "gold there", "lost by the end", "early stopping keeps")
    for name, run in report.items():
        for optimiser, key in (("best-of-n", "best_of_n"), ("PPO", "ppo")):
            peak = run[key]["peak"]
            kl = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**peak["kl"])
            lost = "{value:+.2f} [{low:+.2f}, {high:+.2f}]".format(**peak["fall"])
            kept = run["early_stopping"]
            text = f"{kept['keeps']}: {kept['gold_kept']:+.2f}" if key == "ppo" else ""
            table.add_row(name, optimiser, kl, f"{peak['gold']['value']:+.2f}", lost, text)
    return table


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
