"""Who is measured on the toys: each trains a table of logits within a budget of tokens and shows it as it goes.

A contender is a function of a toy, a seed, a budget and settings. It yields (tokens sampled so far, (T, V)
log-probabilities) after every update; the runner stops asking when the budget is spent, and times what lies between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import textenv  # noqa: F401 - registers textenv/Toy-v0
from support.yard_toys import FloatArray, Toy, mean_length
from textenv.agents import (
    DPO,
    GRPO,
    PPO,
    REINFORCE,
    RLOO,
    DPOConfig,
    ExpertIteration,
    OnlineDPO,
    TablePolicy,
    sample_preferences,
)
from textenv.preference_set import PreferenceSet

Steps = Iterator[tuple[int, FloatArray]]
Train = Callable[[Toy, int, int, dict[str, Any]], Steps]

ROWS = 256
"""Responses of an iteration."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """An agent in the race."""

    train: Train
    settings: dict[str, Any]
    """What `search` found; see `grid`."""
    grid: tuple[dict[str, Any], ...]
    """What the search tries, the same number for all."""
    on_policy: bool = True
    """Whether it is held to the target."""
    note: str = ""
    """Why it is not expected to reach the optimum, where it is not."""

    @property
    def tried(self) -> list[dict[str, Any]]:
        """Settings of the search: the grid's points on top of what is fixed."""
        return [{**self.settings, **point} for point in self.grid]


def table_of(policy: TablePolicy) -> FloatArray:
    """(T, V) log-probabilities, in double precision."""
    found: FloatArray = torch.log_softmax(policy.logits.detach().double(), -1).numpy()
    return found


def ours(agent_class: Any) -> Train:
    """One of our agents that samples for itself; its learning rate falls to 0 as the budget of tokens is spent."""

    def train(toy: Toy, seed: int, budget: int, settings: dict[str, Any]) -> Steps:
        envs = gym.make_vec("textenv/Toy-v0", num_envs=ROWS, kl_coef=toy.kl_coef, language=toy.language)
        policy = TablePolicy(toy.language.reference_logprobs)
        agent = agent_class(policy, envs, agent_class.config_class(lr_schedule="linear", **settings), seed=seed)
        tokens = 0
        for stats in agent.iterate():
            tokens += stats.tokens
            yield tokens, table_of(policy)
            agent.total_episodes = max(1, round(agent.episodes * budget / tokens))  # what the budget comes to

    return train


def dpo(toy: Toy, seed: int, budget: int, settings: dict[str, Any]) -> Steps:
    """The whole budget goes into pairs of the reference's samples, labelled as Bradley and Terry's judge would."""
    envs = gym.make_vec("textenv/Toy-v0", num_envs=ROWS, kl_coef=toy.kl_coef, language=toy.language)
    policy = TablePolicy(toy.language.reference_logprobs)
    pairs = max(1, int(budget / (2 * mean_length(toy.language))))
    found = sample_preferences(policy, None, envs, None, pairs, seed, noise=1.0)
    data = PreferenceSet.encode(found.preferences, envs)
    config = DPOConfig(beta=toy.kl_coef, warmup_fraction=0.0, **settings)
    agent = DPO(policy, data, config, reference=toy.language.reference, seed=seed)
    for stats in agent.iterate():  # no pair depends on training: those of later steps may as well be drawn later
        yield min(budget, round(budget * stats.episodes / len(data))), table_of(policy)


def sb3_ppo(toy: Toy, seed: int, budget: int, settings: dict[str, Any]) -> Steps:
    """Stable-Baselines3's PPO, stepping the environments token by token; its learning rate falls as ours does."""
    from stable_baselines3 import PPO as SB3PPO

    from textenv.agents.sb3 import LanguageModelActorCriticPolicy, SB3VecEnv, attach, policy_kwargs

    num_envs = SB3_ENVS
    envs = SB3VecEnv(gym.make_vec("textenv/Toy-v0", num_envs=num_envs, kl_coef=toy.kl_coef, language=toy.language))
    policy = TablePolicy(toy.language.reference_logprobs)
    given = dict(settings)
    rate, spent = given.pop("learning_rate"), [0]
    model = SB3PPO(
        LanguageModelActorCriticPolicy,
        envs,
        learning_rate=lambda _remaining: rate * max(0.0, 1 - spent[0] / budget),
        gamma=1.0,
        seed=seed,
        device="cpu",
        policy_kwargs=policy_kwargs(policy, envs),
        **given,
    )
    attach(model)
    while True:
        model.learn(model.n_steps * num_envs, reset_num_timesteps=False)
        yield model.num_timesteps, table_of(policy)
        spent[0] = model.num_timesteps


def crossed(**axes: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Every combination of some settings' values."""
    names = list(axes)
    points = np.stack(np.meshgrid(*(np.arange(len(axes[n])) for n in names), indexing="ij"), -1).reshape(-1, len(names))
    return tuple({name: axes[name][i] for name, i in zip(names, point, strict=True)} for point in points.tolist())


RATES = (0.05, 0.1, 0.2, 0.4)
MONTE_CARLO = {"gae_lambda": 1.0, "vf_coef": 0.5}
"""A table's value does not see the score so far, so that returns are better targets than its own values."""
GROUPED = {"samples_per_prompt": 4}
UNBIASED = {"scale_by": "none", "loss_mode": "seq-mean-token-sum"}
SB3 = {"gae_lambda": 1.0, "vf_coef": 0.5, "max_grad_norm": 1.0, "n_steps": 128, "batch_size": 2048}
SB3_ENVS = 16
"""Few and long rather than many and short: where a rollout ends within a response, Stable-Baselines3 goes on with the
value there, and a table's value does not see what the response has earned so far. With 128 environments and 16 steps
none of eight settings came nearer than 0.45 nats."""

CONTENDERS = {
    "PPO": Contender(
        ours(PPO), {**MONTE_CARLO, "learning_rate": 0.2, "epochs": 4}, crossed(learning_rate=RATES, epochs=(1, 4))
    ),
    "GRPO": Contender(
        ours(GRPO),
        {**GROUPED, "learning_rate": 0.4, "epochs": 4},
        crossed(learning_rate=RATES, epochs=(1, 4)),
        note="divided by the group's standard deviation, and each response's tokens share one weight",
    ),
    "GRPO, unbiased": Contender(
        ours(GRPO),
        {**GROUPED, **UNBIASED, "learning_rate": 0.4, "epochs": 4},
        crossed(learning_rate=RATES, epochs=(1, 4)),
    ),
    "RLOO": Contender(
        ours(RLOO),
        {**GROUPED, "learning_rate": 0.4, "epochs": 4},
        crossed(learning_rate=RATES, epochs=(1, 4)),
    ),
    "REINFORCE": Contender(
        ours(REINFORCE), {"learning_rate": 0.2, "epochs": 4}, crossed(learning_rate=RATES, epochs=(1, 4))
    ),
    "OnlineDPO": Contender(
        ours(OnlineDPO), {"learning_rate": 0.2, "epochs": 4}, crossed(learning_rate=RATES, epochs=(1, 4))
    ),
    "ExpertIteration": Contender(
        ours(ExpertIteration),
        {**GROUPED, "learning_rate": 0.2, "epochs": 4},
        crossed(learning_rate=RATES, epochs=(1, 4)),
        note="imitates its best samples: where returns differ, narrowing pays whatever it costs the others",
    ),
    "DPO": Contender(
        dpo,
        {"learning_rate": 0.4, "epochs": 4, "batch_size": 1024},
        crossed(learning_rate=RATES, epochs=(1, 4)),
        on_policy=False,
        note="all of its comparisons are of the reference's samples",
    ),
    "PPO of Stable-Baselines3": Contender(
        sb3_ppo,
        {**SB3, "learning_rate": 0.2, "n_epochs": 4},
        crossed(learning_rate=RATES, n_epochs=(1, 4)),
        note="its rollouts end within responses, and a table's value there does not see what they have earned",
    ),
}
