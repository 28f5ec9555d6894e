"""Make a language model write more positive film reviews, with PPO on a KL leash.

SmolLM2-135M continues the openings of film reviews. A reward model that learned from human ratings scores the
sentences. PPO raises the score, and pays for every nat that it moves away from the model it started from.

    python examples/align_reviews.py                 # about five minutes on two cores
    python examples/align_reviews.py --help

Writes runs/<name>/: metrics.jsonl, tensorboard/, training.png, samples.txt, report.json and checkpoint/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import textenv  # noqa: F401 - registers RLHF-v0
from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, attach
from textenv.agents.rollouts import VLLMEngine
from textenv.agents.rollouts.collect import Episodes, collect
from textenv.lm.precision import fast_dtype
from textenv.metrics import distinct_n

SAMPLES = 6
"""Texts that a report keeps."""
SHOWN = 2
"""Texts of them that are printed."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    name: str = ""
    """Files go to runs/<name>/; empty: align-reviews-<date>-<time>."""
    seed: int = 0
    """Of prompts, sampling, adapters and minibatches."""
    episodes: int = 1584
    """Responses to train on."""
    num_envs: int = 48
    """Responses per iteration."""
    max_response_tokens: int = 24
    """Budget of a response; it also ends at the end of its sentence."""
    kl_coef: float = 0.13
    """Price of a nat."""
    missing_eos_penalty: float = 1.0
    """Taken from the score of a sentence that the budget cut."""
    learning_rate: float = 6e-4
    """Of AdamW, on the adapters and the value head; it falls to 0 over the run."""
    epochs: int = 2
    """Passes over each batch."""
    num_minibatches: int = 3
    """Optimiser steps per pass."""
    gae_lambda: float = 0.95
    """Between one-step advantages and Monte Carlo returns."""
    engine: Literal["hf", "vllm"] = "hf"
    """Who writes: transformers, or vLLM (`make vllm` installs it)."""
    layout: Literal["shared", "separate"] = "shared"
    """shared: adapters, on one trunk for policy, reference, values and reward. separate: all weights of a policy and of
    a value network beside a frozen reference, as in the papers; learning_rate must then be some 30 times smaller."""
    lora_rank: int = 16
    """Of the adapters."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the network; auto: bfloat16 where the processor multiplies it natively."""
    eval_episodes: int = 144
    """Responses before and after, to the same prompts."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures of one set of responses."""

    score: float
    score_std: float
    kl: float
    eos_rate: float
    length: float
    distinct_2: float
    distinct_2_all: float
    samples: tuple[str, ...]

    @classmethod
    def of(cls, episodes: Episodes, batch: int) -> Report:
        """Measure them. Distinct-2 falls with the amount of text: it is taken per `batch` responses, as in training."""
        replayed = episodes.replayed
        blocks = [episodes.responses[start : start + batch] for start in range(0, len(episodes.responses), batch)]
        return cls(
            score=float(replayed.scores.mean()),
            score_std=float(replayed.scores.std()),
            kl=float(replayed.infos["kl"].mean()),
            eos_rate=float(np.mean(replayed.infos["finish_reason"] == "stop")),
            length=float(replayed.infos["response_length"].mean()),
            distinct_2=float(np.mean([distinct_n(block, 2) for block in blocks])),
            distinct_2_all=distinct_n(episodes.responses, 2),
            samples=tuple(
                f"{p} |{r}" for p, r in list(zip(episodes.prompts, episodes.responses, strict=True))[:SAMPLES]
            ),
        )


def make_envs(arguments: Arguments, num_envs: int) -> Any:
    """The review task."""
    return gym.make_vec(
        "RLHF-v0",
        num_envs=num_envs,
        max_response_tokens=arguments.max_response_tokens,
        kl_coef=arguments.kl_coef,
        missing_eos_penalty=arguments.missing_eos_penalty,
        dtype=dtype_of(arguments),
    )


def dtype_of(arguments: Arguments) -> str:
    """The network's arithmetic."""
    return fast_dtype() if arguments.dtype == "auto" else arguments.dtype


def make_agent(arguments: Arguments) -> PPO:
    """PPO on the review task, before it has learned anything."""
    shared = arguments.layout == "shared"
    policy = LanguageModelPolicy.from_pretrained(
        "smollm2-135m",
        lora_rank=arguments.lora_rank if shared else None,
        value="trunk" if shared else "separate",
        dtype=dtype_of(arguments),
        seed=arguments.seed,
    )
    config = PPOConfig(
        learning_rate=arguments.learning_rate,
        lr_schedule="linear",
        epochs=arguments.epochs,
        gamma=1.0,
        gae_lambda=arguments.gae_lambda,
        clip_range=0.2,
        num_minibatches=arguments.num_minibatches,
    )
    engine = VLLMEngine(policy) if arguments.engine == "vllm" else None
    return PPO(policy, make_envs(arguments, arguments.num_envs), config, seed=arguments.seed, engine=engine)


def main(arguments: Arguments) -> dict[str, Any]:
    console = Console()
    eval_envs = make_envs(arguments, arguments.eval_episodes)
    agent = make_agent(arguments)
    attach(agent.policy, eval_envs)

    def measure() -> Report:
        count = arguments.eval_episodes
        episodes = collect(agent.policy, eval_envs, agent.engine, episodes=count, seed=12345, env_seed=12345)
        return Report.of(episodes, arguments.num_envs)

    folder = Path("runs") / (arguments.name or f"align-reviews-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    with console.status("Measuring the reference ..."):
        before = measure()
    start = time.perf_counter()
    agent.learn(arguments.episodes, run_dir=folder)
    seconds = time.perf_counter() - start
    with console.status("Measuring the trained policy ..."):
        after = measure()
    report = compare(before, after, seconds)
    agent.engine.close()
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show(console, before, after, report)
    return report


def compare(before: Report, after: Report, seconds: float) -> dict[str, Any]:
    """Before and after; the gain in the reference's standard deviations, and how much of sqrt(2 KL) that is."""
    gain = (after.score - before.score) / before.score_std
    best = math.sqrt(2 * after.kl) if after.kl > 0 else math.nan  # the best gain at this KL for Gaussian scores
    return {
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "gain_in_std": gain,
        "efficiency": gain / best,
        "training_seconds": seconds,
    }


def show(console: Console, before: Report, after: Report, report: dict[str, Any]) -> None:
    """Print the comparison and two texts of each."""
    table = Table("", "before", "after")
    for label, key, style in (
        ("score", "score", "{:+.2f}"),
        ("score, standard deviation", "score_std", "{:.2f}"),
        ("KL to the reference, nats per response", "kl", "{:.2f}"),
        ("ended by a stop token", "eos_rate", "{:.0%}"),
        ("length, tokens", "length", "{:.1f}"),
        ("distinct-2, per batch of training size", "distinct_2", "{:.2f}"),
        ("distinct-2, all responses together", "distinct_2_all", "{:.2f}"),
    ):
        table.add_row(label, style.format(getattr(before, key)), style.format(getattr(after, key)))
    console.print(table)
    console.print(
        f"The score rose by {report['gain_in_std']:.2f} standard deviations of the reference's scores, "
        f"{report['efficiency']:.0%} of the sqrt(2 KL) that is possible at this KL for Gaussian scores, "
        f"in {report['training_seconds']:.0f} s of training."
    )
    for label, side in (("before", before), ("after", after)):
        for sample in side.samples[:SHOWN]:
            console.print(f"{label:>6}: {sample!r}", highlight=False, markup=False)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
