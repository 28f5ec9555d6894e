"""A PPO of one file on a text environment: everything an agent does is on this page, and the environment is Gymnasium.

It is written the way CleanRL writes agents, for a researcher who brings a file like it. The only lines that know about
text are the network's, and one that a KL toll needs: `attach_policy` tells the environment who acts.

Two things deserve attention in any such file:

- Autoreset. In Gymnasium's default mode, NEXT_STEP, the step after an episode's end ignores the action, gives reward 0
  and shows the next episode's first observation. No policy chose anything there: that step is masked out (`valid`).
- Truncation. A response that is cut at its budget is truncated. The budget belongs to the task, so its value beyond the
  end is 0, as after a termination: `dones` is the union, and nothing is bootstrapped there.

    python examples/cleanrl_ppo.py             # ten seconds on one core
    python examples/cleanrl_ppo.py --help
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from rich.progress import track
from torch import Tensor, nn
from toy_parts import measure, show

from textenv import attach_policy
from textenv.agents.policy import PolicyLogprobs


@dataclasses.dataclass(frozen=True)
class Args:
    """Settings, named as CleanRL names them."""

    env_id: str = "textenv/Toy-v0"
    """Any id of textenv. Only the toy's optimum is known."""
    kl_coef: float = 0.1
    """Price of a nat of KL from the reference, in units of the score."""
    total_timesteps: int = 400_000
    """Tokens, those of reset steps included."""
    num_envs: int = 256
    """Episodes side by side."""
    num_steps: int = 18
    """Steps per environment and iteration."""
    learning_rate: float = 5e-3
    """Of Adam; it falls to 0 linearly."""
    gamma: float = 1.0
    """Discount. The score comes once, at the end."""
    gae_lambda: float = 1.0
    """Of generalised advantage estimation; 1: whole returns."""
    num_minibatches: int = 4
    """Optimiser steps per epoch."""
    update_epochs: int = 4
    """Passes over a rollout."""
    clip_coef: float = 0.2
    """Of the probability ratio."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to it."""
    seed: int = 1
    """Of everything."""


class Agent(nn.Module):
    """Actor and critic over a prefix: an embedding of each column's token, one hidden layer, two heads."""

    def __init__(self, envs: Any, width: int = 16, hidden_size: int = 64) -> None:
        super().__init__()
        vocab_size = int(envs.single_action_space.n)
        length = envs.single_observation_space["input_ids"].shape[0]
        self.named_size = envs.unwrapped.task.named_size
        self.embedding = nn.Embedding(vocab_size, width)
        self.body = nn.Sequential(nn.Linear(length * width, hidden_size), nn.Tanh())
        self.actor = nn.Linear(hidden_size, vocab_size)
        self.critic = nn.Linear(hidden_size, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)  # starts close to the uniform distribution
        nn.init.zeros_(self.actor.bias)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        embedded = self.embedding(input_ids.long()) * attention_mask[..., None]
        hidden: Tensor = self.body(embedded.flatten(-2))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.actor(hidden)
        if self.named_size is not None:  # ids beyond have no token, and the reference never writes them
            logits = logits.index_fill(-1, torch.arange(self.named_size, logits.shape[-1]), -torch.inf)
        return logits

    def next_logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The name that textenv knows it by: see `PolicyLogprobs`."""
        return self.logits(self.hidden(input_ids, attention_mask))

    def logprobs_and_values(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(obs["input_ids"], obs["attention_mask"])
        return torch.log_softmax(self.logits(hidden), -1), self.critic(hidden).squeeze(-1)


@dataclasses.dataclass
class Rollout:
    """num_steps of num_envs, all (num_steps, num_envs, ...)."""

    obs: dict[str, Tensor]
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    dones: Tensor
    """The step ended an episode."""
    valid: Tensor
    """The policy chose the action; False where the step only reset."""
    next_value: Tensor
    """(num_envs,) of the states that the last steps led to."""
    next_obs: dict[str, Any]
    next_done: Any
    scores: list[float]
    """Of the episodes that ended."""
    kls: list[float]


@torch.no_grad()
def rollout(
    agent: Agent, envs: Any, next_obs: Any, next_done: Any, num_steps: int, generator: torch.Generator
) -> Rollout:
    """Step the environments from where they are."""
    steps: dict[str, list[Tensor]] = {k: [] for k in ("actions", "logprobs", "values", "rewards", "dones", "valid")}
    seen, scores, kls = [], [], []
    for _ in range(num_steps):
        obs = {key: torch.as_tensor(array) for key, array in next_obs.items()}
        valid = torch.as_tensor(~next_done)  # rows that ended one step ago are only reset now
        log_pi, value = agent.logprobs_and_values(obs)
        action = torch.multinomial(log_pi.exp(), 1, generator=generator)
        next_obs, reward, terminations, truncations, infos = envs.step(action.squeeze(-1).numpy())
        next_done = terminations | truncations
        if next_done.any():
            scores += infos["score"][infos["_score"]].tolist()
            kls += infos["kl"][infos["_kl"]].tolist()
        seen.append(obs)
        found = (action.squeeze(-1), log_pi.gather(-1, action).squeeze(-1), value, reward, next_done, valid)
        for name, array in zip(steps, found, strict=True):
            steps[name].append(torch.as_tensor(array))
    _, next_value = agent.logprobs_and_values({key: torch.as_tensor(array) for key, array in next_obs.items()})
    stacked = {name: torch.stack(arrays) for name, arrays in steps.items()}
    stacked["rewards"] = stacked["rewards"].float()
    obs = {key: torch.stack([step[key] for step in seen]) for key in seen[0]}
    return Rollout(
        obs, **stacked, next_value=next_value, next_obs=next_obs, next_done=next_done, scores=scores, kls=kls
    )


def advantages_of(data: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (num_steps, num_envs); what stands where `valid` is False means nothing."""
    advantages, lastgaelam = torch.zeros_like(data.rewards), torch.zeros_like(data.next_value)
    for t in reversed(range(len(data.rewards))):
        nextvalues = data.values[t + 1] if t + 1 < len(data.values) else data.next_value
        beyond = gamma * (nextvalues + gae_lambda * lastgaelam)
        beyond = torch.where(data.dones[t], 0.0, beyond)  # nothing reaches back over an end, reset steps included
        advantages[t] = lastgaelam = data.rewards[t] + beyond - data.values[t]
    return advantages


def update(agent: Agent, optimizer: Any, data: Rollout, args: Args, generator: torch.Generator) -> None:
    """The clipped objective on shuffled minibatches of the steps that the policy chose."""
    chosen = data.valid.flatten()
    advantages = advantages_of(data, args.gamma, args.gae_lambda).flatten()
    b_returns = (advantages + data.values.flatten())[chosen]
    b_obs = {key: array.flatten(0, 1)[chosen] for key, array in data.obs.items()}
    b_actions, b_logprobs = data.actions.flatten()[chosen], data.logprobs.flatten()[chosen]
    b_advantages = advantages[chosen]
    for _ in range(args.update_epochs):
        order = torch.randperm(len(b_actions), generator=generator)
        for mb_inds in order.chunk(args.num_minibatches):
            log_pi, newvalue = agent.logprobs_and_values({key: array[mb_inds] for key, array in b_obs.items()})
            newlogprob = log_pi.gather(-1, b_actions[mb_inds, None]).squeeze(-1)
            ratio = (newlogprob - b_logprobs[mb_inds]).exp()
            mb_advantages = b_advantages[mb_inds]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped).mean()
            v_loss = 0.5 * (newvalue - b_returns[mb_inds]).square().mean()
            optimizer.zero_grad()
            (pg_loss + args.vf_coef * v_loss).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def main(args: Args) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    envs: Any = gym.make_vec(args.env_id, num_envs=args.num_envs, kl_coef=args.kl_coef)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    agent = Agent(envs)
    attach_policy(envs, PolicyLogprobs(agent))  # the toll asks the policy for its log-probabilities
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    on_toy = args.env_id == "textenv/Toy-v0"
    rows: dict[str, Any] = {"before": measure(agent, args.kl_coef)} if on_toy else {}
    iterations = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
    next_obs, _ = envs.reset(seed=args.seed)
    next_done, data = np.zeros(args.num_envs, dtype=np.bool_), None
    for iteration in track(range(iterations), "Training ...", transient=True):
        optimizer.param_groups[0]["lr"] = (1 - iteration / iterations) * args.learning_rate
        data = rollout(agent, envs, next_obs, next_done, args.num_steps, generator)
        next_obs, next_done = data.next_obs, data.next_done
        update(agent, optimizer, data, args, generator)
    assert data is not None
    if on_toy:
        rows["after"] = measure(agent, args.kl_coef)
        show(rows, args.kl_coef)
    else:
        print(f"last rollout: score {np.mean(data.scores):.3f}, KL {np.mean(data.kls):.2f} nats")
    return {**rows, "scores": data.scores, "kls": data.kls}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
