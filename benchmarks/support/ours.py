"""Our PPO on the work: the layout and the arithmetic that a job names."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import textenv  # noqa: F401 - registers RLHF-v0
from support.process import run
from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.rollouts import Engine
from textenv.lm import LazyLanguageModel, load_tokenizer, resolve
from textenv.replay import text_envs
from textenv.rewards import RewardModel, SequenceClassificationReward, film_review_head


def config(job: dict[str, Any]) -> PPOConfig:
    """Every setting that decides how much is computed; the rest are defaults."""
    return PPOConfig(
        epochs=job["epochs"],
        num_minibatches=job["num_minibatches"],
        learning_rate=1e-6 if job["layout"] == "separate" else 1e-4,
        micro_batch_tokens=1024,  # the whole batch at once
    )


def scorer(job: dict[str, Any]) -> Any:
    """A network of its own, or a head on the trunk that all share: the embedded one where that is SmolLM2."""
    if job["layout"] == "separate":
        return SequenceClassificationReward(job["classifier"], dtype=job["dtype"])
    if job["model"] == resolve("smollm2-135m"):
        return film_review_head(dtype=job["dtype"])
    tokenizer = load_tokenizer(job["model"])
    trunk = LazyLanguageModel(job["model"], dtype=job["dtype"], named_size=tokenizer.named_size)
    width = job["config"]["hidden_size"]
    return RewardModel(trunk, tokenizer, np.random.default_rng(0).standard_normal(width) / width)


def environments(job: dict[str, Any]) -> Any:
    """As many environments as a batch has prompts, in which nothing ends a response but its budget."""
    envs = gym.make_vec(
        "RLHF-v0",
        num_envs=job["batch_size"],
        model=job["model"],
        prompts=job["prompts"],
        scorer=scorer(job),
        max_response_tokens=job["response_tokens"],
        kl_coef=job["kl_coef"],
        dtype=job["dtype"],
        render_mode=None,
    )
    base: Any = text_envs(envs)
    base.task = dataclasses.replace(base.task, mdp=dataclasses.replace(base.task.mdp, stop_ids=()))
    return envs


def make_policy(job: dict[str, Any]) -> LanguageModelPolicy:
    """Four networks whose weights train or are frozen as in TRL, or adapters and heads on one trunk."""
    if job["layout"] == "separate":
        return LanguageModelPolicy.from_pretrained(job["model"], lora_rank=None, value="separate", dtype=job["dtype"])
    return LanguageModelPolicy.from_pretrained(job["model"], lora_rank=job["lora_rank"], dtype=job["dtype"])


def make_engine(job: dict[str, Any], policy: LanguageModelPolicy) -> Engine | None:
    """None for the policy's own."""
    if job["engine"] == "hf":
        return None
    from textenv.agents.rollouts import VLLMEngine

    length = job["prompt_tokens"] + job["response_tokens"]
    return VLLMEngine(policy, max_model_len=length, max_rows=job["batch_size"], kv_cache_gib=0.25)


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each iteration after the first, by phase."""
    torch.set_num_threads(job["threads"])
    policy = make_policy(job)
    engine = make_engine(job, policy)
    agent = PPO(policy, environments(job), config(job), seed=job["seed"], engine=engine)
    iterations, records = [], []
    for _ in range(1 + job["iterations"]):
        start = time.perf_counter()
        stats = agent.step()
        iterations.append(phases(stats.seconds, time.perf_counter() - start))
        records.append(stats)
    if engine is not None:
        engine.close()
    wanted = job["batch_size"] * job["response_tokens"]
    if any(stats.tokens != wanted for stats in records):
        raise RuntimeError(f"Each batch should have {wanted} response tokens, got {[s.tokens for s in records]}.")
    return {
        "iterations": iterations[1:],
        "tokens": wanted,
        "kl": [stats.kl for stats in records],
        "score": [stats.score for stats in records],
    }


def phases(seconds: dict[str, float], total: float) -> dict[str, float]:
    """TRL's phases: writing (engines take the weights over first), what comes before the first epoch, the epochs."""
    return {
        "generate": seconds["generate"],
        "forward": total - seconds["generate"] - seconds["update"],
        "update": seconds["update"],
    }


if __name__ == "__main__":
    run(main)
