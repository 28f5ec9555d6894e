"""TorchRL's PPO on a text environment: what to pass, and the distance to the exact optimum that it reaches.

`GymWrapper` takes our vector environment as it is. Three things to watch for:

- Autoreset. TorchRL resets rows itself and wants ``autoreset_mode="Disabled"``; it passes the rows on as
  ``options={"reset_mask": ...}``.
- Actions. ``categorical_action_encoding=True``: token ids, not one-hot vectors as wide as the vocabulary.
- Truncation. TorchRL's GAE bootstraps a value where an episode was truncated. Here the budget belongs to the task: with
  ``length_limit="terminate"`` the environment reports it as an end.

    python examples/torchrl_ppo.py             # about a minute on one core
    python examples/torchrl_ppo.py --help
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import torch
import tyro
from rich.progress import track
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import ExplorationType, GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from toy_parts import PrefixNetwork, measure, show

from textenv import attach_policy
from textenv.agents.policy import PolicyLogprobs

OBSERVATION = ["input_ids", "attention_mask"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    kl_coef: float = 0.1
    """Price of a nat of KL from the reference, in units of the score."""
    iterations: int = 80
    """Rollouts, each followed by an update."""
    num_envs: int = 256
    """Episodes side by side."""
    steps: int = 16
    """Tokens per environment and rollout."""
    minibatches: int = 4
    """Optimiser steps per pass over a rollout."""
    epochs: int = 4
    """Passes over a rollout."""
    learning_rate: float = 5e-3
    """Of Adam; it falls to 0 linearly."""
    seed: int = 0
    """Of environments, networks and sampling."""


def make_envs(num_envs: int, kl_coef: float, seed: int) -> Any:
    """Our vector environment as a TorchRL environment of batch size (num_envs,)."""
    envs: Any = gym.make_vec(
        "textenv/Toy-v0",
        num_envs=num_envs,
        kl_coef=kl_coef,
        length_limit="terminate",
        autoreset_mode="Disabled",
    )
    wrapped = GymWrapper(envs, categorical_action_encoding=True)
    wrapped.set_seed(seed)
    return wrapped


def make_loss(network: PrefixNetwork, critic: PrefixNetwork) -> tuple[Any, Any, Any]:
    """TorchRL's actor, advantage and loss around two plain networks."""
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=OBSERVATION, out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,  # else it acts greedily outside of TorchRL's collectors
    )
    value = ValueOperator(critic, in_keys=OBSERVATION)
    advantage = GAE(gamma=1.0, lmbda=1.0, value_network=value)  # the score comes once, at the end
    loss = ClipPPOLoss(actor, value, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=0.5, normalize_advantage=True)
    return actor, advantage, loss


def update(loss: Any, optimizer: Any, batch: Any, arguments: Arguments) -> None:
    """The clipped objective on shuffled minibatches of (rows, steps) as one list of tokens."""
    flat = batch.reshape(-1)
    for _ in range(arguments.epochs):
        for places in torch.randperm(len(flat)).chunk(arguments.minibatches):
            losses = loss(flat[places])
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()


def main(arguments: Arguments) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    torch.manual_seed(arguments.seed)  # TorchRL samples from torch's global generator
    envs = make_envs(arguments.num_envs, arguments.kl_coef, arguments.seed)
    vocab_size, length = int(envs.action_spec.space.n), envs.observation_spec["input_ids"].shape[-1]
    network, critic = PrefixNetwork(vocab_size, length, vocab_size), PrefixNetwork(vocab_size, length, 1)
    attach_policy(envs._env, PolicyLogprobs(network))  # the toll asks the network for log-probabilities
    actor, advantage, loss = make_loss(network, critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=arguments.learning_rate)
    rows = {"before": measure(network, arguments.kl_coef)}
    state = envs.reset()
    for iteration in track(range(arguments.iterations), "Training ...", transient=True):
        optimizer.param_groups[0]["lr"] = (1 - iteration / arguments.iterations) * arguments.learning_rate
        with torch.no_grad():
            batch = envs.rollout(arguments.steps, actor, tensordict=state, auto_reset=False, break_when_any_done=False)
            state = envs.maybe_reset(envs.step_mdp(batch[:, -1]))
            advantage(batch)
        update(loss, optimizer, batch, arguments)
    rows["after"] = measure(network, arguments.kl_coef)
    show(rows, arguments.kl_coef)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
