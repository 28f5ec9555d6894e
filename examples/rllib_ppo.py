"""RLlib's PPO on a text environment: what to pass, and the distance to the exact optimum that it reaches.

RLlib pins a Gymnasium of its own and is large, so it wants an environment of its own as well:

    pip install "textenv[train]" "ray[rllib]" tyro
    python examples/rllib_ppo.py             # some two minutes on one core
    python examples/rllib_ppo.py --help

Three things to watch for:

- Observations. RLlib's default networks take one array: `one_hot` makes one of the dictionary, as a Gymnasium wrapper.
- The KL toll. RLlib makes the environments; once they are there, `attach_policy` tells each who acts in it. That takes
  environments in this process, ``num_env_runners=0``.
- Truncation. RLlib bootstraps a value where an episode was truncated. Here the budget belongs to the task: with
  ``length_limit="terminate"`` the environment reports it as an end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env
from rich.progress import track
from torch import Tensor
from toy_parts import measure, show

from textenv import attach_policy
from textenv.agents.policy import PolicyLogprobs


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    kl_coef: float = 0.1
    """Price of a nat of KL from the reference, in units of the score."""
    iterations: int = 50
    """Rollouts, each followed by an update."""
    num_envs: int = 32
    """Episodes side by side."""
    steps_per_update: int = 2048
    """Tokens between two updates."""
    batch_size: int = 512
    """Tokens per optimiser step."""
    epochs: int = 4
    """Passes over the tokens of an update."""
    learning_rate: float = 5e-3
    """Of Adam."""
    seed: int = 0
    """Of environments, networks and sampling."""


def one_hot(observation: Mapping[str, Any], vocab_size: int) -> np.ndarray[Any, Any]:
    """(..., L) ids and mask as one float32 array (..., L * V)."""
    ids, mask = np.asarray(observation["input_ids"]), np.asarray(observation["attention_mask"])
    found = (ids[..., None] == np.arange(vocab_size)) & (mask[..., None] == 1)
    return found.reshape(*ids.shape[:-1], -1).astype(np.float32)


def make_env(settings: Mapping[str, Any]) -> Any:
    """One episode at a time, its observation as one array."""
    env: Any = gym.make("textenv/Toy-v0", length_limit="terminate", **settings)
    vocab_size, length = int(env.action_space.n), env.observation_space["input_ids"].shape[0]
    space = gym.spaces.Box(0, 1, (length * vocab_size,), np.float32)
    return gym.wrappers.TransformObservation(env, lambda observation: one_hot(observation, vocab_size), space)


class ActingPolicy:
    """The module that RLlib acts with, as textenv asks for it."""

    def __init__(self, module: Any, vocab_size: int) -> None:
        self.module, self.vocab_size = module, vocab_size

    def parameters(self) -> Any:
        return self.module.parameters()

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        observation = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        obs = torch.as_tensor(one_hot(observation, self.vocab_size))
        logits: Tensor = self.module.forward_exploration({"obs": obs})["action_dist_inputs"]
        return logits


def build(arguments: Arguments) -> Any:
    """RLlib's algorithm, with environments and learner in this process."""
    register_env("toy", make_env)
    config = (
        PPOConfig()
        .environment("toy", env_config={"kl_coef": arguments.kl_coef})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=arguments.num_envs,
            rollout_fragment_length=arguments.steps_per_update // arguments.num_envs,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64], fcnet_activation="tanh"))
        .training(
            gamma=1.0,
            lambda_=1.0,  # the score comes once, at the end
            lr=arguments.learning_rate,
            train_batch_size_per_learner=arguments.steps_per_update,
            minibatch_size=arguments.batch_size,
            num_epochs=arguments.epochs,
            clip_param=0.2,
            vf_clip_param=float("inf"),
            use_kl_loss=False,  # a penalty for leaving the last policy, not the reference
            grad_clip=0.5,
        )
        .debugging(seed=arguments.seed, log_level="ERROR")
    )
    return config.build_algo()


def main(arguments: Arguments) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    algorithm = build(arguments)
    envs = algorithm.env_runner.env.unwrapped.envs
    policy = ActingPolicy(algorithm.env_runner.module, int(envs[0].action_space.n))
    for env in envs:
        attach_policy(env, PolicyLogprobs(policy))
    rows = {"before": measure(policy, arguments.kl_coef)}
    for _ in track(range(arguments.iterations), "Training ...", transient=True):
        algorithm.train()
    rows["after"] = measure(policy, arguments.kl_coef)
    show(rows, arguments.kl_coef)
    algorithm.stop()
    return rows


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
