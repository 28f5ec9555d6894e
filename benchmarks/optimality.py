"""How near PPO comes to the exact optimum of the toy language.

For each KL coefficient the table shows J(reference), J* (by backward induction), the median J of PPO over seeds, the
share of the gap between them that PPO closed, and the distance (J* - J) / kl_coef: the KL to the optimal policy in
nats.

    python benchmarks/optimality.py            # about two minutes on one core
    python benchmarks/optimality.py --help
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path

import gymnasium as gym
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import textenv  # noqa: F401 - registers textenv/Toy-v0
from textenv.agents import PPO, PPOConfig, TablePolicy
from textenv.oracle import evaluate, solve
from textenv.toy import standard_toy


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the benchmark."""

    kl_coefs: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)
    """Coefficients to solve for."""
    seeds: int = 5
    """Runs per coefficient."""
    episodes: int = 60_000
    """Responses per run."""
    num_envs: int = 512
    """Responses per iteration."""
    output: Path | None = None
    """Where to write the rows as JSON."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One coefficient, medians over seeds."""

    kl_coef: float
    reference: float
    optimum: float
    ppo: float
    gap_closed: float
    worst_gap_closed: float
    distance: float
    seconds: float


def train(kl_coef: float, seed: int, arguments: Arguments) -> TablePolicy:
    """PPO from the reference; Monte Carlo advantages, because a table's value does not see the score so far."""
    envs = gym.make_vec("textenv/Toy-v0", num_envs=arguments.num_envs, kl_coef=kl_coef)
    policy = TablePolicy(standard_toy().reference_logprobs)
    config = PPOConfig(learning_rate=0.05, lr_schedule="linear", gae_lambda=1.0, vf_coef=0.5)
    PPO(policy, envs, config, seed=seed).learn(arguments.episodes, run_dir=None, progress=False)
    return policy


def measure(kl_coef: float, arguments: Arguments) -> Row:
    language = standard_toy()
    reference = evaluate(language, language.reference_logprobs, kl_coef).objective
    optimum = solve(language, kl_coef).value
    runs = []
    start = time.perf_counter()
    for seed in range(arguments.seeds):
        policy = train(kl_coef, seed, arguments)
        logprobs = torch.log_softmax(policy.logits.detach().double(), -1).numpy()
        runs.append(evaluate(language, logprobs, kl_coef))
    closed = [(run.objective - reference) / (optimum - reference) for run in runs]
    return Row(
        kl_coef=kl_coef,
        reference=reference,
        optimum=optimum,
        ppo=statistics.median(run.objective for run in runs),
        gap_closed=statistics.median(closed),
        worst_gap_closed=min(closed),
        distance=statistics.median(run.distance for run in runs),
        seconds=(time.perf_counter() - start) / arguments.seeds,
    )


def main(arguments: Arguments) -> list[Row]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    rows = [measure(kl_coef, arguments) for kl_coef in track(arguments.kl_coefs, "Training ...", transient=True)]
    table = Table("kl_coef", "J(reference)", "J*", "J(PPO)", "gap closed", "worst seed", "distance, nats", "s a run")
    for row in rows:
        cells = (row.reference, row.optimum, row.ppo)
        table.add_row(
            f"{row.kl_coef:g}",
            *(f"{cell:.4f}" for cell in cells),
            f"{row.gap_closed:.2%}",
            f"{row.worst_gap_closed:.2%}",
            f"{row.distance:.4f}",
            f"{row.seconds:.1f}",
        )
    Console(width=100).print(table)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
