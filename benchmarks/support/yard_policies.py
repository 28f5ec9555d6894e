"""Language model policies in training on the film-review task, each agent's way from the reference as records.

A record has the figures of one batch, written by the policy before the update that follows: ``tokens`` and ``seconds``
spent until that batch was scored, ``score``, ``kl`` (nats per response), ``shaped_return``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

import textenv  # noqa: F401 - registers RLHF-v0
from textenv.agents import (
    DPO,
    GRPO,
    PPO,
    REINFORCE,
    RLOO,
    DPOConfig,
    ExpertIteration,
    LanguageModelPolicy,
    OnlineDPO,
    attach,
    sample_preferences,
)
from textenv.agents.policy import arithmetic
from textenv.agents.rollouts import engine_for
from textenv.agents.rollouts.collect import collect
from textenv.preference_set import PreferenceSet

Records = list[dict[str, float]]


class Returns(NamedTuple):
    """What responses to some prompts were paid."""

    returns: np.ndarray[Any, Any]
    """(K, n)"""
    prompts: tuple[str, ...]
    """K of them."""


SB3_NAME = "PPO of Stable-Baselines3"
UNBIASED = {"scale_by": "none", "loss_mode": "seq-mean-token-sum"}
OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO": (PPO, {"epochs": 4, "gae_lambda": 0.95}),
    "GRPO": (GRPO, {"samples_per_prompt": 4}),
    "GRPO, unbiased": (GRPO, {"samples_per_prompt": 4, **UNBIASED}),
    "RLOO": (RLOO, {"samples_per_prompt": 4}),
    "REINFORCE": (REINFORCE, {}),
    "OnlineDPO": (OnlineDPO, {"epochs": 2}),
    "ExpertIteration": (ExpertIteration, {"samples_per_prompt": 4}),
}
AGENTS = (*OURS, "DPO", SB3_NAME)


def make_envs(options: Any, num_envs: int) -> Any:
    """The review task."""
    return gym.make_vec(
        "RLHF-v0",
        num_envs=num_envs,
        model=options.model,
        prompts=options.prompts,
        scorer=options.scorer,
        max_response_tokens=options.max_response_tokens,
        kl_coef=options.kl_coef,
        missing_eos_penalty=options.missing_eos_penalty,
        dtype=options.arithmetic,
    )


def make_policy(options: Any, seed: int) -> LanguageModelPolicy:
    """Adapters on the model; without training the reference itself."""
    return LanguageModelPolicy.from_pretrained(
        options.model, lora_rank=options.lora_rank, dtype=options.arithmetic, seed=seed
    )


def train(name: str, options: Any, seed: int, learning_rate: float, tokens: int) -> tuple[Any, Records]:
    """Train one agent until its tokens or seconds are spent; the policy, and its records."""
    if name == SB3_NAME:
        return train_sb3(options, seed, learning_rate, tokens)
    if name == "DPO":
        return train_dpo(options, seed, learning_rate, tokens)
    policy = make_policy(options, seed)
    agent_class, settings = OURS[name]
    config = agent_class.config_class(learning_rate=learning_rate, lr_schedule="linear", **settings)
    agent = agent_class(policy, make_envs(options, options.num_envs), config, seed=seed)
    return policy, list(on_policy_records(agent, tokens, options.seconds))


def on_policy_records(agent: Any, tokens: int, seconds: float) -> Iterator[dict[str, float]]:
    """Iterations until the tokens are spent, the learning rate falling to 0 by then, or the seconds."""
    spent, start = 0, time.perf_counter()
    while spent < tokens and time.perf_counter() - start < seconds:
        stats = agent.step()
        spent += stats.tokens
        agent.total_episodes = max(1, round(agent.episodes * tokens / spent))
        taken = time.perf_counter() - start
        yield {
            "tokens": spent,
            "seconds": taken - stats.seconds["update"],
            "score": stats.score,
            "kl": stats.kl,
            "shaped_return": stats.shaped_return,
        }


def train_dpo(options: Any, seed: int, learning_rate: float, tokens: int) -> tuple[Any, Records]:
    """All tokens go into pairs of the reference's samples; there are no records on the way, nothing is written."""
    policy, envs = make_policy(options, seed), make_envs(options, options.num_envs)
    pairs = max(2, tokens // (2 * options.max_response_tokens))
    found = sample_preferences(policy, None, envs, None, pairs, seed, noise=1.0)
    data = PreferenceSet.encode(found.preferences, envs)
    config = DPOConfig(learning_rate=learning_rate, beta=options.kl_coef, epochs=2, batch_size=16)
    DPO(policy, data, config, seed=seed).learn(None, progress=False)
    return policy, []


def train_sb3(options: Any, seed: int, learning_rate: float, tokens: int) -> tuple[Any, Records]:
    """Stable-Baselines3's PPO on the same adapters; its rollout has as many tokens as an iteration of ours at most."""
    from stable_baselines3 import PPO as SB3PPO
    from stable_baselines3.common.callbacks import BaseCallback, CallbackList

    from textenv.agents.sb3 import LanguageModelActorCriticPolicy, ResponseLog, SB3VecEnv
    from textenv.agents.sb3 import attach as attach_sb3

    class Deadline(BaseCallback):
        """Stops at the first step behind the deadline."""

        def _on_training_start(self) -> None:
            self.end = time.perf_counter() + options.seconds

        def _on_step(self) -> bool:
            return time.perf_counter() < self.end

    envs = SB3VecEnv(make_envs(options, options.num_envs))
    steps = options.max_response_tokens
    model = SB3PPO(
        LanguageModelActorCriticPolicy,
        envs,
        learning_rate=lambda remaining: learning_rate * remaining,
        n_steps=steps,
        batch_size=options.num_envs * steps,
        n_epochs=4,
        gamma=1.0,
        gae_lambda=0.95,
        vf_coef=0.1,
        max_grad_norm=1.0,
        seed=seed,
        device="cpu",
        policy_kwargs={
            "model": options.model,
            "lora_rank": options.lora_rank,
            "dtype": options.arithmetic,
            "seed": seed,
            "share_prefixes": options.share_prefixes,
        },
    )
    log, policy = ResponseLog(), attach_sb3(model).policy.network
    with arithmetic(policy):
        model.learn(tokens, callback=CallbackList([Deadline(), log]))
    keys = ("tokens", "seconds", "score", "kl", "shaped_return")
    return policy, [{key: float(record[key]) for key in keys} for record in log.records]


def objectives(policy: Any, options: Any, prompts: int, samples: int, seed: int) -> Returns:
    """Sums of shaped rewards, tolls included: their mean is J, and the reference's have no toll.

    Equal seeds give the same K prompts to every policy.
    """
    envs = make_envs(options, samples)
    attach(policy, envs)
    engine = engine_for(policy)
    with torch.no_grad():
        found = collect(
            policy,
            envs,
            engine,
            episodes=prompts * samples,
            samples_per_prompt=samples,
            seed=seed,
            env_seed=seed,
            micro_batch_tokens=1024,
        )
    returns = np.asarray(found.replayed.rewards.sum(1)).reshape(prompts, samples)
    return Returns(returns, found.prompts[::samples])
