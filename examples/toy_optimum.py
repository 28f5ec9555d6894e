"""PPO against the exact optimum: sweep the KL coefficient on the toy language and draw the score-KL frontier.

On a language small enough to enumerate, the best trade of score against KL is known exactly. Each PPO run is a point;
no point can lie above the frontier, and a good agent's points lie on it. The coefficient 0 is the leash let go: the
best score, whatever it costs in KL.

    python examples/toy_optimum.py             # about half a minute on one core
    python examples/toy_optimum.py --help

Writes runs/<name>/frontier.png and frontier.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import textenv  # noqa: F401 - registers textenv/Toy-v0
from textenv.agents import PPO, PPOConfig, TablePolicy
from textenv.oracle import evaluate, frontier, solve
from textenv.plotting import new_figure, save_figure
from textenv.toy import standard_toy


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the sweep."""

    name: str = "toy-optimum"
    """Files go to runs/<name>/."""
    kl_coefs: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
    """Coefficients to train at; 0 means no toll."""
    episodes: int = 60_000
    """Responses per run."""
    num_envs: int = 512
    """Responses per iteration."""
    seed: int = 0
    """Of the runs."""


def train(kl_coef: float, arguments: Arguments) -> Any:
    """One PPO run from the reference, measured exactly."""
    language = standard_toy()
    envs = gym.make_vec("textenv/Toy-v0", num_envs=arguments.num_envs, kl_coef=kl_coef)
    policy = TablePolicy(language.reference_logprobs)
    config = PPOConfig(learning_rate=0.05, lr_schedule="linear", gae_lambda=1.0, vf_coef=0.5)
    PPO(policy, envs, config, seed=arguments.seed).learn(arguments.episodes, run_dir=None, progress=False)
    return evaluate(language, torch.log_softmax(policy.logits.detach().double(), -1).numpy(), kl_coef)


def main(arguments: Arguments) -> list[dict[str, float]]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    language, rows = standard_toy(), []
    table = Table("kl_coef", "PPO score", "PPO KL", "best score", "best KL", "regret J* - J")
    for kl_coef in track(arguments.kl_coefs, "Training ...", transient=True):
        run, best = train(kl_coef, arguments), solve(language, kl_coef)
        rows.append({"kl_coef": kl_coef, "score": run.score, "kl": run.kl, "regret": run.regret})
        cells = (run.score, run.kl, best.score, best.kl, run.regret)
        table.add_row(f"{kl_coef:g}", *(f"{cell:.3f}" for cell in cells))
    Console().print(table)
    folder = Path("runs") / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "frontier.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(rows, folder / "frontier.png")
    Console().print(f"The plot is in {folder}/frontier.png", soft_wrap=True)
    return rows


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """The exact frontier as a line, PPO's runs as points."""
    exact = frontier(standard_toy(), [0.0, *np.geomspace(0.02, 50, 80)])
    figure = new_figure(7, 5)
    axis = figure.subplots()
    axis.plot([point.kl for point in exact], [point.score for point in exact], label="exact optimum")
    axis.plot([row["kl"] for row in rows], [row["score"] for row in rows], "o", label="PPO")
    for row in rows:
        axis.annotate(f"{row['kl_coef']:g}", (row["kl"], row["score"]), xytext=(6, -12), textcoords="offset points")
    axis.set_xlabel("KL(policy || reference), nats per response")
    axis.set_ylabel("expected score")
    axis.set_title("Toy language: score against KL, labelled by kl_coef")
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    save_figure(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
