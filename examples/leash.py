"""The KL leash at work: the same run twice, with the coefficient at 0 and at its default, side by side.

Without the leash the score ends higher, since nothing else is asked for. The policy pays for it in text: it finds the
few phrases that the reward model likes best and writes them after every prompt.

    python examples/leash.py                 # some fifteen minutes on two cores
    python examples/leash.py --help

Writes runs/<name>/: leash.png, samples.txt, leash.json, and for each run what examples/align_reviews.py leaves.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import align_reviews
import tyro
from rich.console import Console
from rich.table import Table

from textenv.plotting import new_figure, save_figure

LOOSE, HELD = "without the leash", "on the leash"
PANELS = (("score", "score"), ("kl", "KL to the reference (nats)"), ("distinct_2", "distinct-2 of the batch"))


@dataclasses.dataclass(frozen=True)
class Arguments(align_reviews.Arguments):
    """Settings of both runs; `kl_coef` is that of the run on the leash."""


def main(arguments: Arguments) -> dict[str, Any]:
    if not arguments.kl_coef > 0:
        raise SystemExit(f"--kl-coef should be above 0, got {arguments.kl_coef}: the two runs would be one.")
    console = Console()
    name = arguments.name or f"leash-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder = Path("runs") / name
    reports, curves = {}, {}
    for label, kl_coef in ((LOOSE, 0.0), (HELD, arguments.kl_coef)):
        console.rule(f"{label}: kl_coef = {kl_coef:g}")
        run = f"{name}/kl-coef-{kl_coef:g}"
        settings = dataclasses.asdict(arguments) | {"kl_coef": kl_coef, "name": run}
        reports[label] = align_reviews.main(align_reviews.Arguments(**settings))
        lines = (Path("runs") / run / "metrics.jsonl").read_text().splitlines()
        curves[label] = [json.loads(line) for line in lines]
    figures = compare(reports[LOOSE], reports[HELD])
    (folder / "leash.json").write_text(json.dumps({"figures": figures, "reports": reports}, indent=2) + "\n")
    (folder / "samples.txt").write_text(side_by_side(reports))
    draw(curves, reports[HELD]["before"], folder / "leash.png")
    show(console, reports, figures)
    console.print(f"The plot is {folder}/leash.png, more texts are in {folder}/samples.txt", soft_wrap=True)
    return figures


def compare(loose: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, float]:
    """What letting go of the leash changed, from the reports of both runs on the same held-out random numbers.

    Returns:
        score_gap: how much higher the score ends without the leash.
        kl_ratio: how many times the KL of the run on the leash.
        distinct_2_gap: how much more distinct-2 falls.
    """
    fall = {label: r["before"]["distinct_2"] - r["after"]["distinct_2"] for label, r in ((LOOSE, loose), (HELD, held))}
    return {
        "score_gap": loose["after"]["score"] - held["after"]["score"],
        "kl_ratio": loose["after"]["kl"] / held["after"]["kl"],
        "distinct_2_gap": fall[LOOSE] - fall[HELD],
    }


def side_by_side(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Texts to the same prompts: of the reference, and of both trained policies."""
    columns = {"reference": reports[HELD]["before"]} | {label: report["after"] for label, report in reports.items()}
    rows = zip(*(side["samples"] for side in columns.values()), strict=True)
    return "".join(
        "".join(f"{label:>17}: {text!r}\n" for label, text in zip(columns, row, strict=True)) + "\n" for row in rows
    )


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]], reference: Mapping[str, Any], path: Path) -> None:
    """Score, KL and distinct-2 of both runs against the iteration, and what the reference has as a dotted line."""
    figure = new_figure(7, 8)
    for axis, (key, label) in zip(figure.subplots(len(PANELS), sharex=True), PANELS, strict=True):
        for run, rows in curves.items():
            axis.plot([row["iteration"] for row in rows], [row[key] for row in rows], marker=".", label=run)
        axis.axhline(reference[key], color="grey", linestyle=":", label="reference")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axis.set_xlabel("iteration")
    axis.legend()
    save_figure(figure, path)


def show(console: Console, reports: Mapping[str, Mapping[str, Any]], figures: Mapping[str, float]) -> None:
    """Print the comparison, and how it came out."""
    before = reports[HELD]["before"]
    table = Table("", "reference", *reports)
    for label, key, style in (
        ("score", "score", "{:+.2f}"),
        ("KL to the reference, nats per response", "kl", "{:.2f}"),
        ("distinct-2, per batch of training size", "distinct_2", "{:.2f}"),
        ("length, tokens", "length", "{:.1f}"),
    ):
        table.add_row(label, style.format(before[key]), *(style.format(r["after"][key]) for r in reports.values()))
    console.print(table)
    console.print(
        f"Without the leash the score ends {figures['score_gap']:+.2f} from where it ends on it, the KL at "
        f"{figures['kl_ratio']:.1f} times, and distinct-2 falls by {figures['distinct_2_gap']:+.2f} more."
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
