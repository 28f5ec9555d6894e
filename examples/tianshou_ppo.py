"""Tianshou's PPO on a text environment: what to pass, and the distance to the exact optimum that it reaches.

Tianshou steps single environments side by side (`DummyVectorEnv`), resets them itself, and hands a dictionary
observation to the networks as a `Batch`. Two things to watch for:

- It bootstraps a value where an episode was truncated. Here the budget belongs to the task: with
  ``length_limit="terminate"`` the environment reports it as an end.
- It keeps infos in its buffer and refuses gaps in them. Texts come at an episode's end only: `ArrayInfos` leaves them
  out, and numbers stay.

    python examples/tianshou_ppo.py             # about a minute on one core
    python examples/tianshou_ppo.py --help
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import torch
import tyro
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import ActionReprNet
from torch import Tensor, nn
from toy_parts import PrefixNetwork, measure, show

from textenv import attach_policy
from textenv.agents.policy import PolicyLogprobs
from textenv.wrappers import ArrayInfos


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    kl_coef: float = 0.1
    """Price of a nat of KL from the reference, in units of the score."""
    steps: int = 80_000
    """Tokens to train on."""
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
    progress: bool = True
    """Show Tianshou's bars."""


class Actor(ActionReprNet[Any]):
    """The network as Tianshou calls it: a `Batch` of observations in, logits and a recurrent state out."""

    def __init__(self, network: PrefixNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return self.network(*_tensors(obs)), state


class Critic(nn.Module):
    """Values (B, 1)."""

    def __init__(self, network: PrefixNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: Any) -> Tensor:
        values: Tensor = self.network(*_tensors(obs))
        return values


def _tensors(obs: Any) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(obs.input_ids), torch.as_tensor(obs.attention_mask)


def make_env(network: PrefixNetwork, kl_coef: float) -> Any:
    """One episode at a time; its toll asks the network for log-probabilities."""
    env: Any = gym.make("textenv/Toy-v0", kl_coef=kl_coef, length_limit="terminate")
    attach_policy(env, PolicyLogprobs(network))
    return ArrayInfos(env)


def build(arguments: Arguments) -> tuple[Any, Collector[Any], PrefixNetwork]:
    """Tianshou's algorithm, what collects episodes for it, and the network that acts."""
    torch.manual_seed(arguments.seed)  # Tianshou samples from torch's global generator
    spaces: Any = gym.make("textenv/Toy-v0")
    vocab_size, length = int(spaces.action_space.n), spaces.observation_space["input_ids"].shape[0]
    network = PrefixNetwork(vocab_size, length, vocab_size)
    envs = DummyVectorEnv([lambda: make_env(network, arguments.kl_coef)] * arguments.num_envs)
    envs.seed(arguments.seed)
    algorithm: Any = PPO(
        policy=DiscreteActorPolicy(
            actor=Actor(network), action_space=spaces.action_space, observation_space=spaces.observation_space
        ),
        critic=Critic(PrefixNetwork(vocab_size, length, 1)),
        optim=AdamOptimizerFactory(lr=arguments.learning_rate),
        gamma=1.0,
        gae_lambda=1.0,  # the score comes once, at the end
        ent_coef=0.0,
        max_grad_norm=0.5,
    )
    buffer = VectorReplayBuffer(2 * arguments.steps_per_update, arguments.num_envs)
    return algorithm, Collector(algorithm, envs, buffer), network


def main(arguments: Arguments) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    algorithm, collector, network = build(arguments)
    rows = {"before": measure(network, arguments.kl_coef)}
    algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=arguments.steps,
            collection_step_num_env_steps=arguments.steps_per_update,
            update_step_num_repetitions=arguments.epochs,
            batch_size=arguments.batch_size,
            verbose=False,
            show_progress=arguments.progress,
        )
    )
    rows["after"] = measure(network, arguments.kl_coef)
    show(rows, arguments.kl_coef)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
