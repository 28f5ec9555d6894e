"""The film-review part of the yardstick: frontier, speed, our PPO against Stable-Baselines3's, and the optimum."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from support.yard_policies import AGENTS, SB3_NAME, Returns, make_envs, make_policy, objectives, train
from support.yard_report import add, markdown_table, number, versions
from textenv import evaluate
from textenv.estimates import Estimate
from textenv.lm.precision import fast_dtype
from textenv.optimum_estimate import OptimumEstimate, distance, estimate_optimum
from textenv.optional import progress_bar
from textenv.plotting import new_figure, save_figure

EVALUATION_SEED, REFERENCE_SEED = 10_000, 20_000
"""Of prompts and samples that no training has."""
BEST_OF = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reviews:
    """Agents on film reviews with a language model, and our PPO against that of Stable-Baselines3."""

    agents: tuple[str, ...] = AGENTS
    """Who is measured."""
    seeds: int = 1
    """Runs of each, at the learning rate that its search found."""
    tokens: int = 15_000
    """Response tokens that a run may sample."""
    seconds: float = 600.0
    """Wall time of a run at most; a run that is cut by it is reported as it stands."""
    learning_rates: tuple[float, ...] = (3e-4, 6e-4, 1.2e-3)
    """What the search tries for every agent; one: no search."""
    search_tokens: int = 6_000
    """Tokens of each run of the search."""
    target_score: float | None = None
    """What both PPOs are timed to; None: nine tenths of the rise of our own, median over seeds."""
    model: str = "smollm2-135m"
    """Whose adapters are trained, and who is the reference: a name or a folder."""
    prompts: Annotated[Any, tyro.conf.Suppress] = None
    """None for the film-review openings."""
    scorer: Annotated[Any, tyro.conf.Suppress] = None
    """None for the embedded reward model."""
    max_response_tokens: int = 24
    """T."""
    kl_coef: float = 0.13
    """Price of a nat."""
    missing_eos_penalty: float = 1.0
    """Taken from the score of a response that the budget cuts."""
    num_envs: int = 48
    """Responses of an iteration."""
    lora_rank: int = 16
    """Of the adapters."""
    dtype: str = "auto"
    """Arithmetic."""
    share_prefixes: bool = True
    """Stable-Baselines3 reads states of one response in one pass."""
    eval_episodes: int = 192
    """Responses of the last evaluation."""
    optimum_prompts: int = 8
    """K of the estimate of the optimum; 0: none."""
    optimum_samples: int = 64
    """Reference samples of each."""
    name: str = "agents_reviews"
    """Of the files."""
    output: Path = Path(__file__).parent.parent / "results"
    """Their folder."""

    @property
    def arithmetic(self) -> str:
        """The network's arithmetic."""
        return fast_dtype() if self.dtype == "auto" else self.dtype


class Optimum(NamedTuple):
    """The estimate, and the prompts that it is of."""

    estimate: OptimumEstimate
    prompts: tuple[str, ...]


def reviews(options: Reviews, command: str) -> dict[str, Any]:
    """Measure, and put the rows into the files."""
    optimum: Optimum | None = None
    rows: list[dict[str, Any]] = []
    if options.optimum_prompts:
        reference = reference_samples(options)
        optimum = Optimum(estimate_optimum(reference.returns, options.kl_coef), reference.prompts)
        rows += [reference_row(reference.returns, optimum.estimate), *best_of_rows(reference.returns)]
    with progress_bar("Training ...", len(options.agents), True) as advance:
        for name in options.agents:
            rows.append(agent_row(name, options, optimum))
            report = add(options.output / f"{options.name}.json", command, rows, ("agent",))  # kept, whatever follows
            advance()
    (options.output / f"{options.name}.md").write_text(markdown(report, options))
    draw(report, options.output / f"{options.name}.png")
    return report


def agent_row(name: str, options: Reviews, optimum: Optimum | None) -> dict[str, Any]:
    """Search the learning rate, then train with every seed and measure what came of it."""
    tried = []
    for rate in options.learning_rates if len(options.learning_rates) > 1 else ():
        policy, records = train(name, options, 1000, rate, options.search_tokens)
        found = evaluate(policy, make_envs(options, options.num_envs), options.num_envs, seed=EVALUATION_SEED + 1)
        spent = records[-1]["seconds"] if records else None
        tried.append({"learning_rate": rate, "return": found.shaped_return.value, "seconds": spent})
    rate = max(tried, key=lambda row: row["return"])["learning_rate"] if tried else options.learning_rates[0]
    runs = [one_run(name, options, seed, rate, optimum) for seed in range(options.seeds)]
    return {"agent": name, "learning_rate": rate, "search": tried, "runs": runs, **means(runs)}


def one_run(name: str, options: Reviews, seed: int, rate: float, optimum: Optimum | None) -> dict[str, Any]:
    """One seed: its curve, and its figures on prompts and samples of the evaluation's own."""
    policy, records = train(name, options, seed, rate, options.tokens)
    envs = make_envs(options, options.num_envs)
    found = evaluate(policy, envs, options.eval_episodes, seed=EVALUATION_SEED)
    away: Estimate | None = None
    if optimum is not None:
        prompts = options.optimum_prompts
        own = objectives(policy, options, prompts, max(2, options.eval_episodes // prompts), REFERENCE_SEED)
        if own.prompts != optimum.prompts:
            raise RuntimeError("The policy answered other prompts than the reference did: J and J* are not comparable.")
        away = distance(optimum.estimate, own.returns)
    speed = records[-1]["tokens"] / records[-1]["seconds"] if records else math.nan
    return {
        "seed": seed,
        "score": list(found.score),
        "kl": list(found.kl),
        "return": list(found.shaped_return),
        "distance": None if away is None else list(away),
        "tokens_per_second": speed,
        "cut_by_time": bool(records) and records[-1]["tokens"] < options.tokens,
        "curve": records,
    }


def means(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and standard deviation over seeds of the last evaluations."""
    figures = {key: [one[key][0] for one in runs] for key in ("score", "kl", "return")}
    figures["tokens_per_second"] = [one["tokens_per_second"] for one in runs]
    spread = {f"{key}_std": float(np.std(x, ddof=1)) if len(x) > 1 else math.nan for key, x in figures.items()}
    return {key: statistics.fmean(x) for key, x in figures.items()} | spread


def reference_samples(options: Reviews) -> Returns:
    """Returns of the reference, which pays no toll."""
    policy = make_policy(options, 0)
    return objectives(policy, options, options.optimum_prompts, options.optimum_samples, REFERENCE_SEED)


def reference_row(samples: np.ndarray[Any, Any], optimum: OptimumEstimate) -> dict[str, Any]:
    """Where everybody starts, and how far it is from there."""
    gap = (optimum.at_least - float(samples.mean())) / optimum.kl_coef
    return {
        "agent": "reference",
        "score": float(samples.mean()),
        "kl": 0.0,
        "return": float(samples.mean()),
        "optimum": str(optimum),
        "optimum_value": list(optimum.optimum),
        "optimum_at_least": optimum.at_least,
        "effective_samples": optimum.effective_samples.tolist(),
        "at_least_away": gap,
    }


def best_of_rows(samples: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """Best of n of the reference's samples, each block of n giving one; KL is the bound of `best_of_n_kl`."""
    from textenv.rewards.overoptimisation import best_of_n_kl

    rows = []
    for n in (n for n in BEST_OF if n <= samples.shape[1]):
        blocks = samples[:, : samples.shape[1] // n * n].reshape(len(samples), -1, n)
        score, kl = float(blocks.max(-1).mean()), float(best_of_n_kl(n))
        rows.append({"agent": f"best of {n}", "score": score, "kl": kl})
    return rows


def first_to(records: list[dict[str, float]], score: float, kl: float) -> dict[str, float] | None:
    """The first record whose score, mean over it and its two neighbours before, is there at no more than a KL."""
    for end in range(1, len(records) + 1):
        recent = records[max(0, end - 3) : end]
        if statistics.fmean(r["score"] for r in recent) >= score and statistics.fmean(r["kl"] for r in recent) <= kl:
            return records[end - 1]
    return None


def race(report: dict[str, Any], target: float | None) -> dict[str, Any] | None:
    """Tokens and seconds of both PPOs to one score at one KL: that which ours has there, a quarter more at most."""
    rows = {row["agent"]: row for row in report["rows"] if row.get("runs")}
    if not {"PPO", SB3_NAME} <= set(rows):
        return None
    own = [one["curve"] for one in rows["PPO"]["runs"]]
    if target is None:
        start = statistics.median(curve[0]["score"] for curve in own)
        end = statistics.median(statistics.fmean(r["score"] for r in curve[-3:]) for curve in own)
        target = start + 0.9 * (end - start)
    at = [record for curve in own if (record := first_to(curve, target, math.inf))]
    kl = 1.25 * statistics.median(record["kl"] for record in at) if at else math.inf
    found: dict[str, Any] = {"score": target, "kl": kl}
    for name in ("PPO", SB3_NAME):
        curves = [one["curve"] for one in rows[name]["runs"]]
        reached = [first_to(curve, target, kl) for curve in curves]
        found[name] = {
            "reached": sum(record is not None for record in reached),
            "of": len(curves),
            **{
                key: statistics.median(math.inf if record is None else record[key] for record in reached)
                for key in ("tokens", "seconds")
            },
            "given": {key: max(curve[-1][key] for curve in curves if curve) for key in ("tokens", "seconds")},
        }
    return found


def race_text(found: dict[str, Any]) -> str:
    """The race in words."""
    lines = [f"To a score of {found['score']:.2f} at a KL of at most {found['kl']:.1f} nats (medians over seeds):", ""]
    for name in ("PPO", SB3_NAME):
        one = found[name]
        if math.isfinite(one["seconds"]):
            lines.append(f"- {name}: {one['tokens']:,.0f} tokens, {one['seconds']:.0f} s")
        else:
            given = one["given"]
            lines.append(f"- {name}: not reached within {given['seconds']:.0f} s and {given['tokens']:,.0f} tokens")
    return "\n".join(lines)


def markdown(report: dict[str, Any], options: Reviews) -> str:
    """Frontier and speed, the race, the optimum."""
    parts = [
        f"# Agents on film reviews, {Path(options.model).name}",
        f"kl_coef {options.kl_coef:g} in units of the score per nat; {options.tokens:,} tokens and {options.seconds:g} "
        "s a run at most; return: score less penalties and toll. Evaluated on prompts and samples of their own; best "
        "of n from the reference's samples, its KL an upper bound.",
    ]
    head = ("agent", "score", "std", "KL", "std", "return", "std", "nats from the optimum", "tokens/s", "learning rate")
    parts.append(markdown_table(head, [_cells(row) for row in report["rows"]]))
    found = race(report, options.target_score)
    if found is not None:
        parts.append(race_text(found))
    for row in report["rows"]:
        if "optimum" in row:
            parts.append(f"The optimum of {len(row['effective_samples'])} prompts: {row['optimum']}.")
    parts.append("\n".join(["Commands:", "", "```", *report["commands"], "```"]))
    parts.append("Versions: " + ", ".join(f"{name} {which}" for name, which in versions().items()) + ".")
    return "\n\n".join(parts) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    rate = row.get("learning_rate")
    return [
        row["agent"],
        *(number(row.get(key)) for key in ("score", "score_std", "kl", "kl_std", "return", "return_std")),
        away_text([one["distance"] for one in row.get("runs", ()) if one["distance"]]),
        number(row.get("tokens_per_second"), ".1f"),
        number(rate, "g"),
    ]


def away_text(found: list[list[float]]) -> str:
    """Distances of the seeds: the mean, or at least so far."""
    if not found:
        return "-"
    values = [one[0] for one in found]
    if any(value is None or not math.isfinite(value) for value in values):
        return f"at least {statistics.fmean(one[1] for one in found):.2f}"
    return f"{statistics.fmean(values):.2f} [{min(one[1] for one in found):.2f}, {max(one[2] for one in found):.2f}]"


def draw(report: dict[str, Any], path: Path) -> None:
    """Score against KL, and score against seconds."""
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for number_, row in enumerate(row for row in report["rows"] if row.get("runs")):
        for one in row["runs"]:
            curve, label = one["curve"], row["agent"] if one is row["runs"][0] else None
            colour = f"C{number_}"
            left.plot([r["kl"] for r in curve], [r["score"] for r in curve], color=colour, alpha=0.4)
            left.plot(one["kl"][0], one["score"][0], marker="o", linestyle="", color=colour, label=label)
            right.plot([r["seconds"] for r in curve], [r["score"] for r in curve], color=colour, label=label)
    best = [row for row in report["rows"] if row["agent"].startswith("best of")]
    left.plot([row["kl"] for row in best], [row["score"] for row in best], "k--", label="best of n")
    left.set(xlabel="KL (nats per response)", ylabel="score")
    right.set(xlabel="seconds", xscale="log")
    left.legend(fontsize="small")
    save_figure(figure, path)
