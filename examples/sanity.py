"""The first hour of a new agent: six environments, each of which it can fail for one reason only.

Trains PPO from a random tiny transformer over bytes on one or all of them, with one setting, and measures the policy on
fresh episodes. docs/sanity.md says what each failure means. Put your own agent in the place of PPO, in `train`.

    python examples/sanity.py                          # all six, one seed: about a minute on one core
    python examples/sanity.py --envs Password-v0       # one of them
    python examples/sanity.py --seeds 5                # the table of docs/sanity.md
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import textenv  # noqa: F401 - registers the ids
from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.tiny import tiny_transformer
from textenv.evaluation import evaluate
from textenv.sanity import SANITY_TASKS

CONFIG = PPOConfig(
    learning_rate=2e-3,
    lr_schedule="linear",  # ends with small steps: a policy that is nearly certain is easily thrown off
    num_minibatches=2,
    gae_lambda=1.0,  # the score comes once, at the end: until values are learned, only whole returns carry it back
    vf_coef=0.5,
)
EPISODES = 25_600
LONG_EPISODES = 10_240
"""LongWait's episodes have 32 tokens each, and it needs fewer of them."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to train on."""

    envs: tuple[str, ...] = tuple(env_id.removeprefix("textenv/") for env_id in SANITY_TASKS)
    """Names of the environments."""
    seeds: int = 1
    """Runs per environment, with seeds 0, 1, ..."""
    episodes: int | None = None
    """Responses to train on; None: 25,600, and 10,240 for LongWait-v0."""
    num_envs: int = 256
    """Responses per iteration."""
    eval_episodes: int = 256
    """Responses that are measured in the end."""
    output: Path | None = None
    """Where to write the rows as JSON."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment: what its runs reached."""

    env_id: str
    returns: list[float]
    best: float
    random: float
    solved: int
    seconds: float


def train(env_id: str, seed: int, arguments: Arguments) -> LanguageModelPolicy:
    """One PPO run from random weights."""
    envs: Any = gym.make_vec(env_id, num_envs=arguments.num_envs)
    policy = tiny_transformer(envs.single_action_space.n, seed=seed)
    episodes = arguments.episodes or (LONG_EPISODES if env_id == "textenv/LongWait-v0" else EPISODES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every response of a batch was cut")  # the budget is where these tasks end
        warnings.filterwarnings("ignore", "Every advantage of a batch is 0")  # uniform play may find nothing at first
        PPO(policy, envs, CONFIG, seed=seed).learn(episodes, run_dir=None, progress=False)
    return policy


def measure(env_id: str, arguments: Arguments) -> Row:
    """Train and evaluate every seed of one environment."""
    task, returns, seconds = SANITY_TASKS[env_id], [], []
    for seed in range(arguments.seeds):
        start = time.process_time()  # of one core; other programs do not count
        policy = train(env_id, seed, arguments)
        seconds.append(time.process_time() - start)
        envs: Any = gym.make_vec(env_id, num_envs=arguments.num_envs)
        returns.append(evaluate(policy, envs, arguments.eval_episodes, seed=1_000 + seed).shaped_return.value)
    solved = sum(value >= task.solved_return for value in returns)
    return Row(env_id, returns, task.best_return, task.random_return, solved, statistics.mean(seconds))


def main(arguments: Arguments) -> list[Row]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    ids = [f"textenv/{name.removeprefix('textenv/')}" for name in arguments.envs]
    unknown = [env_id for env_id in ids if env_id not in SANITY_TASKS]
    if unknown:
        raise SystemExit(f"--envs should be among {', '.join(SANITY_TASKS)}, got {', '.join(unknown)}.")
    rows = [measure(env_id, arguments) for env_id in track(ids, "Training ...", transient=True)]
    table = Table("environment", "return", "worst seed", "best", "random", "solved", "CPU s a run")
    for row in rows:
        figures = (statistics.mean(row.returns), min(row.returns), row.best, row.random)
        solved = f"{row.solved} of {arguments.seeds}"
        table.add_row(row.env_id, *(f"{figure:.4f}" for figure in figures), solved, f"{row.seconds:.1f}")
    Console(width=100).print(table)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
