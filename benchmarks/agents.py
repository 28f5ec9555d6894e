"""The yardstick: every agent on the same environments, from the same budget, measured against the optimum.

On toy languages the optimum is exact, and so is the distance of a policy to it, (J* - J) / kl_coef in nats. On film
reviews with SmolLM2 the score-KL frontier takes its place, with an estimate of the optimum or the word that none can be
given. Each part writes <name>.json, .md and .png into the folder of results; parts that are run one after another are
put together in them.

    python benchmarks/agents.py toys                              # the standard toy, ten seeds, about ten minutes
    python benchmarks/agents.py toys --toys 16x12 64x16 256x24 --seeds 3
    python benchmarks/agents.py search                            # the settings that `toys` takes
    python benchmarks/agents.py reviews --help
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.markdown import Markdown
from support import yard_report
from support.yard_agents import CONTENDERS
from support.yard_reviews import Reviews, reviews
from support.yard_runs import run, search
from support.yard_toys import best_of_n, listable, make_toy

from textenv.optional import progress_bar

RESULTS = Path(__file__).parent / "results"
BEST_OF = (16, 1024)
"""The n whose best-of-n is measured beside the agents."""
SEARCH_SEED = 1000
"""The first seed of the search; those of the tables begin at 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toys:
    """Every agent on toy languages."""

    toys: tuple[str, ...] = ("standard",)
    """``standard``, or VxT: V tokens, at most T of them in a response."""
    kl_coefs: tuple[float, ...] = (0.1,)
    """Prices of a nat."""
    agents: tuple[str, ...] = tuple(CONTENDERS)
    """Who is measured."""
    seeds: int = 10
    """Runs of each agent."""
    tokens: int = 400_000
    """Response tokens that a run may sample."""
    checkpoints: int = 40
    """Points of the learning curves."""
    name: str = "agents_toys"
    """Of the files."""
    output: Path = RESULTS
    """Their folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Each agent's settings: the grid of each on seeds of the search's own, the same number of points for all."""

    toy: str = "standard"
    """See `toys`."""
    kl_coef: float = 0.1
    """Price of a nat."""
    agents: tuple[str, ...] = tuple(CONTENDERS)
    """Whose settings are looked for."""
    seeds: int = 1
    """Runs of each point."""
    tokens: int = 400_000
    """Response tokens of a run."""
    name: str = "agents_search"
    """Of the file."""
    output: Path = RESULTS
    """Its folder."""


def toys(arguments: Toys) -> dict[str, Any]:
    """Measure, and put the rows into the files."""
    pairs = [(name, kl_coef) for name in arguments.toys for kl_coef in arguments.kl_coefs]
    path, keys = arguments.output / f"{arguments.name}.json", ("toy", "kl_coef", "agent")
    total = len(pairs) * len(arguments.agents) * arguments.seeds
    with progress_bar("Training ...", total, sys.stderr.isatty()) as advance:
        for toy in (make_toy(*pair) for pair in pairs):
            for name in arguments.agents:
                runs = []
                for seed in range(arguments.seeds):
                    runs.append(run(CONTENDERS[name], toy, seed, arguments.tokens, arguments.checkpoints))
                    advance()
                row = yard_report.toy_row(toy, name, arguments.tokens, CONTENDERS[name].settings, runs)
                yard_report.add(path, command(), [row], keys)  # what is measured stays, whatever comes after
            report = yard_report.add(path, command(), untrained(toy), keys)
    notes = {name: contender.note for name, contender in CONTENDERS.items() if contender.note}
    text = yard_report.toy_markdown(report, notes)
    (arguments.output / f"{arguments.name}.md").write_text(text)
    yard_report.draw_toys(report, arguments.output / f"{arguments.name}.png")
    Console().print(Markdown(text))
    return report


def untrained(toy: Any) -> list[dict[str, Any]]:
    """The reference, and the best of n of its samples where its responses can be listed: exact, no seed in them."""
    found = {"reference": toy.measure(toy.language.reference_logprobs)}
    if listable(toy.language):
        found |= {f"best of {n}": best_of_n(toy, n) for n in BEST_OF}
    head = {"toy": toy.name, "kl_coef": toy.kl_coef, "budget": 0}
    return [
        {**head, "agent": name, "median": one.distance, "score": one.score, "kl": one.kl} for name, one in found.items()
    ]


def search_all(arguments: Search) -> dict[str, Any]:
    """Search, and write what was found."""
    toy, rows = make_toy(arguments.toy, arguments.kl_coef), []
    seeds = range(SEARCH_SEED, SEARCH_SEED + arguments.seeds)
    with progress_bar("Searching ...", len(arguments.agents), sys.stderr.isatty()) as advance:
        for name in arguments.agents:
            found = search(CONTENDERS[name], toy, seeds, arguments.tokens)
            rows.append({"agent": name, "toy": toy.name, "kl_coef": toy.kl_coef, "best": found[0], "tried": found})
            advance()
    path = arguments.output / f"{arguments.name}.json"
    report = yard_report.add(path, command(), rows, ("toy", "kl_coef", "agent"))
    for row in rows:
        Console().print(row["agent"], json.dumps(row["best"]), soft_wrap=True)
    return report


def command() -> str:
    """The command that this process was started with."""
    return shlex.join(["python", "benchmarks/agents.py", *sys.argv[1:]])


def main() -> None:
    chosen = tyro.cli(
        Annotated[Toys, tyro.conf.subcommand("toys")]
        | Annotated[Search, tyro.conf.subcommand("search")]
        | Annotated[Reviews, tyro.conf.subcommand("reviews")],
        description=__doc__,
    )
    if isinstance(chosen, Reviews):
        reviews(chosen, command())
        return
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    if isinstance(chosen, Toys):
        toys(chosen)
    else:
        search_all(chosen)


if __name__ == "__main__":
    main()
