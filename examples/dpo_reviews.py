"""Direct preference optimisation on film reviews: no reward model is asked while the policy learns.

SmolLM2-135M writes two continuations of each opening of a film review, the environment's scorer says which is the
better one, and DPO learns from those comparisons. Score and KL to the reference are measured before and after, on
responses to other openings.

    python examples/dpo_reviews.py                 # some minutes on two cores
    python examples/dpo_reviews.py --loss ipo
    python examples/dpo_reviews.py --help

Writes runs/<name>/: pairs.jsonl, metrics.jsonl, tensorboard/, training.png, report.json and checkpoint/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import tyro
from rich.console import Console
from rich.table import Table

from textenv import PreferenceSet, evaluate
from textenv.agents import DPO, DPOConfig, LanguageModelPolicy, attach, sample_preferences
from textenv.lm.precision import fast_dtype
from textenv.rewards import save_preferences


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    name: str = ""
    """Files go to runs/<name>/; empty: dpo-reviews-<date>-<time>."""
    seed: int = 0
    """Of adapters, samples, labels and the order of pairs."""
    pairs: int = 512
    """Openings that are answered twice; equal answers are left out."""
    held_out: float = 0.1
    """Share of the openings whose pairs are only measured."""
    noise: float = 1.0
    """Temperature of the judge, in units of the score: 1 is the one that Bradley and Terry's model expects, 0 never
    errs."""
    beta: float = 0.1
    """Price of a nat of KL in units of the score (kl_coef)."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO or IPO."""
    label_smoothing: float = 0.0
    """Above 0: conservative DPO."""
    epochs: int = 2
    """Passes over the pairs."""
    batch_size: int = 32
    """Pairs per step."""
    learning_rate: float = 2e-4
    """Of AdamW, on the adapters."""
    lora_rank: int = 16
    """Of the adapters."""
    max_response_tokens: int = 24
    """Budget of a response."""
    episodes: int = 128
    """Responses that are measured before and after."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the network; auto: bfloat16 where the processor multiplies it natively."""


def make_envs(arguments: Arguments, dtype: str, split: str) -> Any:
    """Film reviews; one side of the openings is for training, the other for measuring."""
    return gym.make_vec(
        "RLHF-v0",
        num_envs=32,
        max_response_tokens=arguments.max_response_tokens,
        split=split,
        dtype=dtype,
        kl_coef=arguments.beta,
    )


def main(arguments: Arguments) -> dict[str, Any]:
    console = Console()
    dtype = fast_dtype() if arguments.dtype == "auto" else arguments.dtype
    policy = LanguageModelPolicy.from_pretrained(
        "smollm2-135m", lora_rank=arguments.lora_rank, dtype=dtype, seed=arguments.seed
    )
    envs, eval_envs = (make_envs(arguments, dtype, split) for split in ("train", "eval"))
    measure: dict[str, Any] = {"episodes": arguments.episodes, "seed": arguments.seed, "progress": True}
    policy.eval()
    attach(policy, eval_envs)
    before = evaluate(policy, eval_envs, **measure)
    found = sample_preferences(
        policy, None, envs, None, arguments.pairs, arguments.seed, noise=arguments.noise, progress=True
    )
    sampled = PreferenceSet.encode(found.preferences, envs)
    train, held_out = sampled.split(arguments.held_out, arguments.seed)
    console.print(f"Learn from {train}\nmeasure    {held_out}", highlight=False)
    config = DPOConfig(
        beta=arguments.beta,
        loss=arguments.loss,
        label_smoothing=arguments.label_smoothing,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
    )
    folder = Path("runs") / (arguments.name or f"dpo-reviews-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    agent = DPO(policy, train, config, held_out=held_out, seed=arguments.seed)
    start = time.perf_counter()
    agent.learn(folder)
    seconds = time.perf_counter() - start
    save_preferences(found.preferences, folder / "pairs.jsonl")
    after = evaluate(policy, eval_envs, **measure)
    report = {
        "before": {"score": before.score.value, "kl": before.kl.value},
        "after": {"score": after.score.value, "kl": after.kl.value},
        "held_out": agent.evaluate().metrics(),
        "agreement": found.agreement,
        "pairs": len(train),
        "training_seconds": seconds,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    table = Table("on openings not trained on", "before", "after")
    table.add_row("score", str(before.score), str(after.score))
    table.add_row("KL to the reference, nats", str(before.kl), str(after.kl))
    console.print(table)
    console.print(f"Learned from {len(train)} pairs in {seconds:.0f} s. Wrote {folder}.")
    return report


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
