"""What the yardstick leaves behind: JSON that later parts are added to, Markdown and a figure made from it."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from support.yard_runs import TARGET, Run, summary
from textenv.plotting import new_figure, save_figure

PACKAGES = ("torch", "transformers", "stable-baselines3", "gymnasium", "numpy")


def versions() -> dict[str, str]:
    """Of Python and of what decides the figures."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def read(path: Path) -> dict[str, Any]:
    """Earlier parts, or none."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"commands": [], "versions": versions(), "rows": []}


def add(path: Path, command: str, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Put rows into the file, in the place of those that agree in `keys`, and give everything that is there now."""
    report = read(path)
    fresh = {tuple(row[key] for key in keys) for row in rows}
    kept = [row for row in report["rows"] if tuple(row[key] for key in keys) not in fresh]
    commands = report["commands"] + ([command] if command not in report["commands"] else [])
    report = {"commands": commands, "versions": versions(), "rows": kept + list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(report), indent=1) + "\n")
    return report


def finite(x: Any) -> Any:
    """The same with None for numbers that JSON does not have, others to six digits."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x


def toy_row(toy: Any, name: str, budget: int, settings: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """One agent on one toy: figures over seeds, and the learning curve."""
    count = min(len(one.points) for one in runs)
    columns = [[one.points[i] for one in runs] for i in range(count)]
    return {
        "toy": toy.name,
        "kl_coef": toy.kl_coef,
        "agent": name,
        "budget": budget,
        "settings": settings,
        **summary(runs),
        "ends": [one.last.distance for one in runs],
        "curve": [
            {
                "tokens": statistics.median(point.tokens for point in column),
                "seconds": statistics.median(point.seconds for point in column),
                "median": statistics.median(point.distance for point in column),
                "low": min(point.distance for point in column),
                "high": max(point.distance for point in column),
            }
            for column in columns
        ],
    }


def number(x: float | None, form: str = ".3f", missing: str = "-") -> str:
    """A cell; what is not there is said in a word."""
    return missing if x is None or not math.isfinite(x) else format(x, form)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def toy_markdown(report: dict[str, Any], notes: dict[str, str]) -> str:
    """The tables of all toys, the best agent of each first."""
    parts = [
        "# Agents on toy languages: the distance to the optimum",
        "(J* - J) / kl_coef in nats, exact, after a budget of response tokens that is the same for all. Medians over "
        f"seeds; target: at most {TARGET:g}. Tokens and seconds to the target: the median over seeds of the first "
        "checkpoint from which on the run stays there; one thread. Learning rates and epochs are those of the search "
        "(`search`), whose seeds are not among these.",
    ]
    groups = sorted({(row["toy"] != "standard", row["toy"], row["kl_coef"]) for row in report["rows"]}, key=str)
    for _, toy, kl_coef in groups:
        rows = [row for row in report["rows"] if (row["toy"], row["kl_coef"]) == (toy, kl_coef)]
        rows.sort(key=lambda row: row["median"])
        trained = [row for row in rows if row["budget"]]
        budget = f"{trained[0]['budget']:,} tokens, {trained[0]['seeds']} seeds" if trained else "nothing trained"
        parts.append(f"## {toy}, kl_coef {kl_coef:g} ({budget})")
        head = ("agent", "median", "mean", "std", "worst", "within", "score", "KL", "tokens to", "s to", "s in all")
        parts.append(markdown_table(head, [_toy_cells(row) for row in rows]))
        missed = [row for row in rows if row["median"] > TARGET and row["agent"] in notes]
        if missed:
            parts.append("Not within the target:")
            parts.append("\n".join(f"- {row['agent']}: {notes[row['agent']]}." for row in missed))
    parts.append("\n".join(["Commands:", "", "```", *report["commands"], "```"]))
    parts.append("Versions: " + ", ".join(f"{name} {which}" for name, which in report["versions"].items()) + ".")
    return "\n\n".join(parts) + "\n"


def _toy_cells(row: dict[str, Any]) -> list[str]:
    if not row["budget"]:  # known without training: no seeds
        return [row["agent"], number(row["median"]), *["-"] * 4, number(row["score"]), number(row["kl"]), *["-"] * 3]
    return [
        row["agent"],
        *(number(row[key]) for key in ("median", "mean", "std", "worst")),
        f"{row['within_target']}/{row['seeds']}",
        number(row["score"]),
        number(row["kl"]),
        number(row["tokens_to_target"], ",.0f"),
        number(row["seconds_to_target"], ".1f"),
        number(row["seconds"], ".1f"),
    ]


def draw_toys(report: dict[str, Any], path: Path) -> None:
    """Distance against tokens and against seconds, a row of panels per toy."""
    groups = list(dict.fromkeys((row["toy"], row["kl_coef"]) for row in report["rows"] if row["budget"]))
    if not groups:
        return
    names = list(dict.fromkeys(row["agent"] for row in report["rows"] if row["budget"]))
    figure = new_figure(11, 3.6 * len(groups))
    axes = figure.subplots(len(groups), 2, squeeze=False, sharey="row")
    for line, group in zip(axes, groups, strict=True):
        for axis, key in zip(line, ("tokens", "seconds"), strict=True):
            for row in report["rows"]:
                if (row["toy"], row["kl_coef"]) == group and row["budget"]:
                    colour = f"C{names.index(row['agent'])}"
                    x = [point[key] for point in row["curve"]]
                    axis.plot(x, [point["median"] for point in row["curve"]], color=colour, label=row["agent"])
                    bounds = ([point[end] for point in row["curve"]] for end in ("low", "high"))
                    axis.fill_between(x, *bounds, color=colour, alpha=0.12, linewidth=0)
            axis.axhline(TARGET, color="black", linestyle=":", linewidth=1)
            axis.set(yscale="log", xlabel="response tokens" if key == "tokens" else "seconds")
            axis.grid(alpha=0.3)
        line[0].set(ylabel="nats from the optimum", title=f"{group[0]}, kl_coef {group[1]:g}")
    axes[0][1].legend(fontsize="small")
    save_figure(figure, path)
