"""From measurements to rows, from rows to tables, targets beside what was measured."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from support.contenders import CONTENDERS, TARGETS, UPDATE_TARGETS
from support.flops import Shape, pass_flops, update_flops
from support.update_cases import CASES, Case

Results = dict[str, list[dict[str, Any]]]
"""What each process measured, one entry per round."""

PHASES = ("generate", "forward", "update")


def ceilings(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Median GFLOP/s of each arithmetic over all rounds."""
    return {name: statistics.median(x for one in rounds for x in one["gflops"][name]) for name in rounds[0]["gflops"]}


def limit(ceilings: dict[str, float], arithmetic: str) -> float:
    """GFLOP/s that an arithmetic can reach; for float32 through the better of its two libraries."""
    return ceilings["bf16"] if arithmetic == "bf16" else max(ceilings["float32"], ceilings["medium"])


def ceiling_line(ceilings: dict[str, float]) -> str:
    """What large matrix products reach."""
    return "Matrix products, GFLOP/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ceilings.items())


def step_rows(results: Results, ceilings: dict[str, float], shape: Shape, job: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per contender and minibatch setting: medians over all iterations of all rounds.

    ``share`` counts what the update cannot do without; ``share_performed`` what TRL makes its output head compute,
    logits of all P + T positions.
    """
    rows = []
    responses, length = job["batch_size"] * job["response_tokens"], job["prompt_tokens"] + job["response_tokens"]
    tokens = job["batch_size"] * length
    for key, rounds in results.items():
        name, minibatches = key.split("/")
        contender = CONTENDERS[name]
        iterations = [iteration for one in rounds for iteration in one["iterations"]]
        phases = {phase: statistics.median(x[phase] for x in iterations) for phase in PHASES}
        total = statistics.median(sum(x.values()) for x in iterations)

        def share(head_tokens: int, c: Any = contender, update: float = phases["update"]) -> float:
            needed = update_flops(shape, c.layout, tokens, head_tokens, job["epochs"])
            return needed / update / 1e9 / limit(ceilings, c.ceiling)

        rows.append(
            {
                "contender": name,
                "minibatches": int(minibatches),
                "tokens_per_second": responses / total,
                "seconds": total,
                **phases,
                "peak_memory": statistics.median(one["peak_memory"] for one in rounds),
                "share": share(responses),
                "share_performed": share(tokens) if name.startswith("trl") else None,
                "iterations": len(iterations),
            }
        )
    return rows


def print_steps(console: Console, rows: list[dict[str, Any]], is_target_model: bool) -> None:
    """A table per minibatch setting, then the targets where they are defined."""
    for minibatches in dict.fromkeys(row["minibatches"] for row in rows):
        group = {row["contender"]: row for row in rows if row["minibatches"] == minibatches}
        table = Table(title=f"PPO iteration, {minibatches} minibatch{'es' if minibatches > 1 else ''}")
        table.add_column("contender", no_wrap=True)
        for column in ("tokens/s", "x TRL", "s", *PHASES, "peak GB", "share", "as TRL"):
            table.add_column(column, justify="right")
        for name, row in group.items():
            table.add_row(CONTENDERS[name].label, *_step_cells(row, group.get("trl")))
        console.print(table)
        if is_target_model and minibatches == 1:
            _print_targets(console, group)
    console.print(
        "share: of the ceiling, reached by what the update cannot do without (6 N a token, 4 N through frozen weights, "
        "the head on response tokens); as TRL: with its head on all tokens. bf16 rows against the bf16 ceiling."
    )


def _step_cells(row: dict[str, Any], trl: dict[str, Any] | None) -> list[str]:
    times = "-" if trl is None else f"{row['tokens_per_second'] / trl['tokens_per_second']:.2f}"
    performed = "" if row["share_performed"] is None else f"{row['share_performed']:.0%}"
    return [
        f"{row['tokens_per_second']:.1f}",
        times,
        f"{row['seconds']:.2f}",
        *(f"{row[phase]:.2f}" for phase in PHASES),
        f"{row['peak_memory'] / 1e9:.2f}",
        f"{row['share']:.0%}",
        performed,
    ]


def target_rows(group: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets whose two contenders were both measured; those with vLLM are held against the same."""
    rows = []
    for target in TARGETS:
        for name in (target.contender, f"{target.contender}-vllm"):
            if name in group and target.against in group:
                ratio = group[name][target.figure] / group[target.against][target.figure]
                rows.append({"contender": name, "target": target, "ratio": ratio, "holds": target.holds(ratio)})
    return rows


def _print_targets(console: Console, group: dict[str, dict[str, Any]]) -> None:
    rows = target_rows(group)
    if not rows:
        return
    table = Table(title="Targets, SmolLM2-135M, 1 minibatch")
    for column in ("figure", "of", "over", "target", "measured", "holds"):
        table.add_column(column, justify="left" if column in ("figure", "of", "over") else "right")
    for row in rows:
        target = row["target"]
        table.add_row(
            "peak memory" if target.is_ceiling else "response tokens/s",
            CONTENDERS[row["contender"]].label,
            CONTENDERS[target.against].label,
            f"{'at most' if target.is_ceiling else 'at least'} {target.bound:g}",
            f"{row['ratio']:.2f}",
            "yes" if row["holds"] else "no",
        )
    console.print(table)


def update_rows(
    results: Results, ceilings: dict[str, float], shape: Shape, job: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per case: medians over rounds; the first round's profile."""
    tokens = job["batch_size"] * (job["prompt_tokens"] + job["response_tokens"])
    head_tokens = job["batch_size"] * job["response_tokens"]
    rows = []
    for name, rounds in results.items():
        case = CASES[name]
        seconds = statistics.median(one["seconds"] for one in rounds)
        rate = pass_flops(shape, case.layout, tokens, head_tokens) / seconds / 1e9
        rows.append(
            {
                "case": name,
                "seconds": seconds,
                "optimiser_seconds": statistics.median(one["optimiser_seconds"] for one in rounds),
                "gflops": rate,
                "share": rate / limit(ceilings, case.ceiling),
                "peak_memory": statistics.median(one["peak_memory"] for one in rounds),
                "profile": next(one["profile"] for one in rounds if "profile" in one),
            }
        )
    return rows


def print_update(console: Console, rows: list[dict[str, Any]], is_target_model: bool) -> None:
    """GFLOP/s and share of the ceiling, then where the time goes."""
    table = _table("Forward and backward of one batch", "s", "optimiser, s", "GFLOP/s", "share", "target", "peak GB")
    for row in rows:
        case = CASES[row["case"]]
        table.add_row(
            *_names(case),
            f"{row['seconds']:.3f}",
            f"{row['optimiser_seconds']:.3f}",
            f"{row['gflops']:.0f}",
            f"{row['share']:.0%}",
            f"{UPDATE_TARGETS[case.ceiling]:.0%}" if case.ours and is_target_model else "",
            f"{row['peak_memory'] / 1e9:.2f}",
        )
    console.print(table)
    console.print(
        "share: of the ceiling, 6 N a token counted, or 4 N through frozen weights and 6 N of adapters, the head on "
        "response tokens; what is computed twice does not count. bf16 rows against the bf16 ceiling."
    )
    _print_profile(console, rows)


def _print_profile(console: Console, rows: list[dict[str, Any]]) -> None:
    groups = list(dict.fromkeys(group for row in rows for group in row["profile"]))
    table = _table("Where the time goes: one profiled pass and step, s", *groups)
    for row in rows:
        total = sum(row["profile"].values())
        spent = [row["profile"].get(group, 0.0) for group in groups]
        table.add_row(*_names(CASES[row["case"]]), *(f"{x:.2f} ({x / total:.0%})" for x in spent))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """A table whose rows begin with `_names`."""
    table = Table(title=title)
    for column in ("trains", "arithmetic", "who"):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _names(case: Case) -> tuple[str, str, str]:
    return "all" if case.layout == "separate" else "adapters", case.ceiling, case.label
