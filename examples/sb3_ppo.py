"""Stable-Baselines3's PPO trains SmolLM2 on film-review openings: the model, adapters, reward and toll of our own PPO.

The environment is an ordinary one, so that an agent which knows nothing of text can learn in it. What Stable-Baselines3
does not know it pays for: minibatches are random states of random responses. `LanguageModelActorCriticPolicy` reads
states of one response in one pass where a minibatch has several; ``--no-share-prefixes`` reads every state on its own,
so that each token costs its whole prefix in every epoch.

    python examples/sb3_ppo.py                 # about two minutes on two cores
    python examples/sb3_ppo.py --help

Writes runs/<name>/: records.json, sb3_ppo.png, model.zip (`PPO.load` goes on from it) and tensorboard/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import tyro
from rich.console import Console
from rich.table import Table
from stable_baselines3 import PPO

import textenv  # noqa: F401 - registers RLHF-v0
from textenv.agents.policy import arithmetic
from textenv.agents.sb3 import LanguageModelActorCriticPolicy, ResponseLog, SB3VecEnv, attach
from textenv.lm.precision import fast_dtype
from textenv.plotting import new_figure, save_figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, and how."""

    name: str | None = None
    """Files go to runs/<name>/; None: named by date and time."""
    iterations: int = 10
    """Rollouts, each with an update."""
    num_envs: int = 16
    """Responses that are written side by side."""
    n_steps: int = 24
    """Tokens of each environment in a rollout."""
    batch_size: int = 384
    """States in a minibatch; num_envs * n_steps is the whole rollout."""
    epochs: int = 4
    """Passes over a rollout."""
    learning_rate: float = 5e-4
    """Of Adam, constant."""
    gae_lambda: float = 0.95
    """Of the advantages; the discount is 1."""
    clip_range: float = 0.2
    """Of the ratio."""
    vf_coef: float = 0.1
    """Of the value loss."""
    max_grad_norm: float = 1.0
    """Of all gradients together."""
    kl_coef: float = 0.05
    """Toll per nat."""
    missing_eos_penalty: float | None = 1.0
    """Subtracted from the score of a response that the budget cuts; None: nothing."""
    max_response_tokens: int = 24
    """T."""
    model: str = "smollm2-135m"
    """Whose adapters are trained: a name or a folder."""
    lora_rank: int = 16
    """Of the adapters."""
    dtype: str = "auto"
    """Arithmetic: float32, bfloat16, or auto for what the processor multiplies natively."""
    share_prefixes: bool = True
    """Read states of one response in one pass where a minibatch has several."""
    seed: int = 0
    """Of everything."""


def build(settings: Settings, tensorboard: str | None = None) -> tuple[PPO, SB3VecEnv]:
    """PPO on the review task, before it has learned anything; the toll asks its policy already."""
    dtype = fast_dtype() if settings.dtype == "auto" else settings.dtype
    envs = SB3VecEnv(
        gym.make_vec(
            "RLHF-v0",
            num_envs=settings.num_envs,
            model=settings.model,
            max_response_tokens=settings.max_response_tokens,
            kl_coef=settings.kl_coef,
            missing_eos_penalty=settings.missing_eos_penalty,
            dtype=dtype,
        )
    )
    model = PPO(
        LanguageModelActorCriticPolicy,
        envs,
        learning_rate=settings.learning_rate,
        n_steps=settings.n_steps,
        batch_size=settings.batch_size,
        n_epochs=settings.epochs,
        gamma=1.0,
        gae_lambda=settings.gae_lambda,
        clip_range=settings.clip_range,
        vf_coef=settings.vf_coef,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        device="cpu",
        tensorboard_log=tensorboard,
        policy_kwargs={
            "model": settings.model,
            "lora_rank": settings.lora_rank,
            "dtype": dtype,
            "seed": settings.seed,
            "share_prefixes": settings.share_prefixes,
        },
    )
    return attach(model), envs


def train(model: PPO, iterations: int, progress: bool = False) -> list[dict[str, float]]:
    """Train for some rollouts and give `ResponseLog.records`: tokens, seconds, score and KL per response of each."""
    log = ResponseLog()
    assert model.env is not None
    with arithmetic(model.policy.network):  # the backward passes too
        model.learn(iterations * model.n_steps * model.env.num_envs, callback=log, progress_bar=progress)
    return log.records


def main(settings: Settings) -> list[dict[str, float]]:
    console = Console()
    folder = Path("runs") / (settings.name or f"sb3-ppo-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    model, envs = build(settings, str(folder / "tensorboard"))
    records = train(model, settings.iterations, progress=console.is_terminal)
    model.save(folder / "model.zip")
    envs.close()
    (folder / "records.json").write_text(json.dumps(records, indent=2) + "\n")
    draw(records, folder / "sb3_ppo.png")
    show(console, records)
    console.print(f"The plot is {folder}/sb3_ppo.png", soft_wrap=True)
    return records


def show(console: Console, records: Sequence[dict[str, float]]) -> None:
    """Print a line for each rollout."""
    columns = (
        ("iteration", "{:d}"),
        ("tokens", "{:d}"),
        ("seconds", "{:.1f}"),
        ("score", "{:+.2f}"),
        ("kl", "{:.2f}"),
        ("response_length", "{:.1f}"),
        ("eos_rate", "{:.0%}"),
    )
    table = Table(*(name for name, _ in columns))
    for record in records:
        table.add_row(*(style.format(record[name]) for name, style in columns))
    console.print(table)
    last = records[-1]
    console.print(
        f"From {records[0]['score']:+.2f}, the reference's, to {last['score']:+.2f} at {last['kl']:.2f} nats per "
        f"response, from {last['tokens']:d} tokens in {last['seconds']:.0f} s."
    )


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Score and KL against tokens."""
    figure = new_figure(7, 5)
    tokens = [record["tokens"] for record in records]
    for axis, (key, label) in zip(
        figure.subplots(2, sharex=True), (("score", "score"), ("kl", "KL (nats per response)")), strict=True
    ):
        axis.plot(tokens, [record[key] for record in records], marker=".")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axis.set_xlabel("response tokens")
    save_figure(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
