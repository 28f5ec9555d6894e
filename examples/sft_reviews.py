"""Teach a language model to write film reviews as people do whose reviews are rated highly: stage one of three.

SmolLM2-135M reads the openings of film-review sentences that people rated highly, and learns to go on as their writers
did. Held-out sentences tell how much more likely it holds them to be. What was learned then becomes the policy and the
reference of PPO, in two ways: merged into the weights, or as an adapter that both keep.

    python examples/sft_reviews.py                 # a quarter of an hour on two cores
    python examples/sft_reviews.py --help

Writes runs/<name>/: metrics.jsonl, tensorboard/, training.png, report.json, checkpoint/, adapter/ (PEFT) and merged/, a
plain transformers folder, which vLLM reads as well.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from textenv import DemonstrationSet
from textenv.agents import SFT, LanguageModelPolicy, Likelihood, SFTConfig, attach, likelihood
from textenv.agents.rollouts.collect import collect
from textenv.lm.precision import fast_dtype
from textenv.rewards import load_review_demonstrations


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    name: str = ""
    """Files go to runs/<name>/; empty: sft-reviews-<date>-<time>."""
    seed: int = 0
    """Of adapters, the order of demonstrations, and samples."""
    min_rating: float = 1.0
    """The least mean rating, of -4 to 4, of a sentence to imitate."""
    demonstrations: int | None = None
    """Sentences to train on, at most; None: all that there are."""
    held_out: int | None = None
    """Sentences to measure, at most; None: all that there are."""
    epochs: int = 2
    """Passes over the demonstrations."""
    batch_size: int = 32
    """Demonstrations per step."""
    learning_rate: float = 4e-4
    """Of AdamW, on the adapters."""
    lora_rank: int = 16
    """Of the adapters."""
    max_response_tokens: int = 40
    """Budget of a response. Sentences that are longer are left out and counted."""
    samples: int = 96
    """Reviews that are written and scored before and after; 0: none."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the network; auto: bfloat16 where the processor multiplies it natively."""


def main(arguments: Arguments) -> dict[str, Any]:
    console = Console()
    dtype = fast_dtype() if arguments.dtype == "auto" else arguments.dtype
    options: dict[str, Any] = {"lora_rank": arguments.lora_rank, "dtype": dtype, "seed": arguments.seed}
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", **options)
    envs = gym.make_vec(
        "RLHF-v0",
        num_envs=max(arguments.samples, 1),
        max_prompt_tokens=16,
        max_response_tokens=arguments.max_response_tokens,
        dtype=dtype,
    )
    sides, most = load_review_demonstrations(arguments.min_rating), (arguments.demonstrations, arguments.held_out)
    train, held_out = (
        DemonstrationSet.encode(side[:count], envs, unfit="drop") for side, count in zip(sides, most, strict=True)
    )
    console.print(f"Train on {train}\nmeasure  {held_out}", highlight=False)
    config = SFTConfig(epochs=arguments.epochs, batch_size=arguments.batch_size, learning_rate=arguments.learning_rate)
    agent = SFT(policy, train, config, held_out=held_out, seed=arguments.seed)

    folder = Path("runs") / (arguments.name or f"sft-reviews-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    before, wrote_before = agent.evaluate(progress=True), write(policy, envs, arguments)
    start = time.perf_counter()
    agent.learn(folder)
    seconds = time.perf_counter() - start
    after, wrote_after = agent.evaluate(progress=True), write(policy, envs, arguments)
    policy.save_pretrained(folder / "adapter")
    starts = {
        "merged": policy.merged(folder / "merged"),
        "kept": LanguageModelPolicy.from_pretrained("smollm2-135m", adapter=folder / "adapter", **options),
    }
    report = {
        "before": before.metrics() | wrote_before,
        "after": after.metrics() | wrote_after,
        "gain": after.gain_over(before)._asdict(),
        "next_stage": {name: next_stage(start, held_out) for name, start in starts.items()},
        "training_seconds": seconds,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show(console, before, after, report)
    return report


def write(policy: LanguageModelPolicy, envs: Any, arguments: Arguments) -> dict[str, Any]:
    """Let the policy continue openings of reviews that it has not seen: mean score, KL, and two of them to read."""
    if not arguments.samples:
        return {}
    attach(policy, envs)
    engine, seed = policy.engine(), arguments.seed + 12345
    episodes = collect(policy, envs, engine, episodes=arguments.samples, seed=seed, env_seed=seed)
    engine.close()
    replayed = episodes.replayed
    return {
        "score": float(replayed.scores.mean()),
        "kl": float(replayed.infos["kl"].mean()),
        "eos_rate": float(np.mean(replayed.infos["finish_reason"] == "stop")),
        "samples": [f"{p} |{r}" for p, r in list(zip(episodes.prompts, episodes.responses, strict=True))[:2]],
    }


def next_stage(policy: LanguageModelPolicy, held_out: DemonstrationSet) -> dict[str, float]:
    """What PPO would start from: how likely it holds the demonstrations to be, and its distance to its reference."""
    some = dataclasses.replace(
        held_out, prompts=held_out.prompts[:64], responses=held_out.responses[:64], names=held_out.names[:64]
    )
    state, width = some.state(), some.mdp.max_response_tokens
    ours, reference = (
        model.response_logprobs(state.input_ids, state.attention_mask, width) for model in (policy, policy.reference)
    )
    return {"nll": likelihood(policy, some).nll, "kl_at_step_0": float(np.abs(ours - reference).sum(1).mean())}


def show(console: Console, before: Likelihood, after: Likelihood, report: dict[str, Any]) -> None:
    """Print the comparison, two texts of each, and what the next stage starts from."""
    table = Table("held-out demonstrations", "before", "after")
    table.add_row("NLL, nats per token", str(before.estimate()), str(after.estimate()))
    table.add_row("perplexity", f"{before.perplexity:.2f}", f"{after.perplexity:.2f}")
    for label, key in (("score of what it writes", "score"), ("KL to the base model, nats", "kl")):
        if key in report["before"]:
            table.add_row(label, f"{report['before'][key]:+.2f}", f"{report['after'][key]:+.2f}")
    console.print(table)
    console.print(
        f"The held-out NLL fell by {after.gain_over(before)} nats per token (95% interval, paired) in "
        f"{report['training_seconds']:.0f} s of training."
    )
    for name, start in report["next_stage"].items():
        console.print(
            f"PPO from the {name} model starts at a KL of {start['kl_at_step_0']:.2g} nats to its reference, with an "
            f"NLL of {start['nll']:.3f} on 64 demonstrations."
        )
    for label in ("before", "after"):
        for sample in report[label].get("samples", ()):
            console.print(f"{label:>6}: {sample!r}", highlight=False, markup=False)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
