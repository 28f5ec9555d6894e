"""A value head, dissected: the policy stays as it is, a value head learns from its rollouts and is asked about others.

The value of a prefix is the return that is to be expected from it. Here the policy is the reference, so that no token
costs a toll, and the return after every token is the score of the finished sentence: what a head can know of it grows
with the prefix. Rollouts to learn from and rollouts to be asked about have different prompts.

    python examples/value_head.py                 # some six minutes on two cores
    python examples/value_head.py --help

Writes runs/<name>/value_head.png and value_head.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import textenv  # noqa: F401 - registers RLHF-v0
from textenv.agents import LanguageModelPolicy, attach
from textenv.agents.advantages import gae
from textenv.agents.losses import clipped_value_loss
from textenv.agents.rollouts.collect import collect
from textenv.lm.precision import fast_dtype
from textenv.plotting import new_figure, save_figure
from textenv.rewards.ratings import load_ratings


@dataclass(frozen=True)
class Arguments:
    """Settings of the experiment."""

    name: str = "value-head"
    """Files go to runs/<name>/."""
    seed: int = 0
    """Of prompts, sampling and minibatches."""
    episodes: int = 2048
    """Rollouts to learn from."""
    held_out_episodes: int = 512
    """Rollouts to be asked about, on prompts that the others never had."""
    num_envs: int = 256
    """Rollouts written together."""
    prompt_words: int = 12
    """A prompt is so many first words of a review sentence. The longer it is, the more of the return is known."""
    max_response_tokens: int = 24
    """Budget of a response; it also ends at the end of its sentence."""
    learning_rate: float = 3e-3
    """Of AdamW; it falls to 0."""
    weight_decay: float = 0.1
    """Of AdamW."""
    epochs: int = 30
    """Passes over the tokens of the rollouts."""
    minibatch_tokens: int = 1024
    """Tokens per optimiser step."""


@dataclass(frozen=True)
class Tokens:
    """The M tokens of some rollouts, one behind the other."""

    features: Tensor
    """(M, H) hidden states that the head reads: those of the state in which the token was chosen."""
    returns: Tensor
    """(M,) undiscounted sum of the rewards from the token on."""
    position: Tensor
    """(M,) 0 for a response's first token."""
    last: Tensor
    """(M,) True on a response's last token."""


def make_prompts(words: int) -> list[str]:
    """The first words of the rated sentences that go on for at least four more."""
    split = (sentence.text.split() for sentence in load_ratings())
    return list(dict.fromkeys(" ".join(parts[:words]) for parts in split if len(parts) >= words + 4))


def gather(policy: LanguageModelPolicy, envs: Any, episodes: int, seed: int, title: str) -> Tokens:
    """Let the policy write, and keep what a value head reads and what it should have said."""
    engine, parts = policy.engine(), []
    for start in track(range(0, episodes, envs.num_envs), title, transient=True):
        count = min(envs.num_envs, episodes - start)
        env_seed = seed if start == 0 else None
        done = collect(policy, envs, engine, episodes=count, seed=seed + start, env_seed=env_seed).replayed
        mask = torch.as_tensor(done.response_mask)
        rewards = torch.as_tensor(done.rewards, dtype=torch.float32)
        _, returns = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, gae_lambda=1.0)
        ids, attention = torch.as_tensor(done.input_ids), torch.as_tensor(done.attention_mask)
        with torch.no_grad(), policy.arithmetic():
            blocks = zip(ids.split(32), attention.split(32), strict=True)
            hidden = torch.cat(
                [policy.lm.hidden_states(*block)[:, -mask.shape[1] - 1 : -1].float() for block in blocks]
            )
        position = torch.arange(mask.shape[1]).expand_as(mask)
        last = position == mask.sum(-1, keepdim=True) - 1
        parts.append([tensor[mask] for tensor in (hidden, returns, position, last)])
    engine.close()
    return Tokens(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def train(policy: LanguageModelPolicy, tokens: Tokens, arguments: Arguments) -> None:
    """Fit the policy's value head with the value loss of PPO; nothing else has a gradient."""
    head, generator = policy.value_head, torch.Generator().manual_seed(arguments.seed)
    optimizer = torch.optim.AdamW(head.parameters(), arguments.learning_rate, weight_decay=arguments.weight_decay)
    steps = arguments.epochs * -(-len(tokens.returns) // arguments.minibatch_tokens)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in track(range(arguments.epochs), "Training the value head ...", transient=True):
        for index in torch.randperm(len(tokens.returns), generator=generator).split(arguments.minibatch_tokens):
            values, returns = head(tokens.features[index])[None], tokens.returns[index][None]
            real = torch.ones_like(returns, dtype=torch.bool)
            loss = clipped_value_loss(values, values.detach(), returns, real, None).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def predict(policy: LanguageModelPolicy, tokens: Tokens) -> Tensor:
    """The head's values (M,)."""
    values: Tensor = policy.value_head(tokens.features)
    return values


def measure(values: Tensor, tokens: Tokens) -> dict[str, float]:
    """Root mean squared errors in units of the score, and the correlation with the return.

    Returns:
        error: over all tokens.
        constant: the error of the best single number: the returns' standard deviation.
        first: the error at first tokens, where only the prompt is known.
        last: at last tokens.
        correlation: of values and returns over all tokens; nan where all values are equal.
        correlation_first, correlation_last: the same at first and at last tokens.
    """
    first = tokens.position == 0
    wrong = values - tokens.returns
    return {
        "error": rms(wrong),
        "constant": float(tokens.returns.std(correction=0)),
        "first": rms(wrong[first]),
        "last": rms(wrong[tokens.last]),
        "correlation": correlation(values, tokens.returns),
        "correlation_first": correlation(values[first], tokens.returns[first]),
        "correlation_last": correlation(values[tokens.last], tokens.returns[tokens.last]),
    }


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's; nan where one of them is constant."""
    if float(x.std(correction=0)) == 0 or float(y.std(correction=0)) == 0:
        return float("nan")
    return float(np.corrcoef(x.numpy(), y.numpy())[0, 1])


def main(arguments: Arguments) -> dict[str, dict[str, float]]:
    console, dtype = Console(), fast_dtype()
    prompts = make_prompts(arguments.prompt_words)
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", value="detached", dtype=dtype, seed=arguments.seed)
    sides: dict[str, Tokens] = {}
    for split, episodes in (("train", arguments.episodes), ("eval", arguments.held_out_episodes)):
        envs = gym.make_vec(
            "RLHF-v0",
            num_envs=min(arguments.num_envs, episodes),
            prompts=prompts,
            split=split,
            stop=[".", "!", "?"],
            max_response_tokens=arguments.max_response_tokens,
            dtype=dtype,
        )
        attach(policy, envs)
        sides[split] = gather(policy, envs, episodes, arguments.seed, f"Writing rollouts ({split}) ...")
    before = {split: predict(policy, tokens) for split, tokens in sides.items()}
    train(policy, sides["train"], arguments)
    after = {split: predict(policy, tokens) for split, tokens in sides.items()}
    results = {
        f"{split}, {when}": measure(values[split], tokens)
        for split, tokens in sides.items()
        for when, values in (("before", before), ("after", after))
    }
    folder = Path("runs") / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "value_head.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(sides["eval"], before["eval"], after["eval"], folder / "value_head.png")
    show(console, results)
    console.print(f"The plot is {folder}/value_head.png", soft_wrap=True)
    return results


def show(console: Console, results: dict[str, dict[str, float]]) -> None:
    """Print root mean squared errors and correlations with the return, on rollouts learned from and held out."""
    table = Table("rollouts", *results)
    table.columns[0].no_wrap = True
    for label, key in (
        ("error", "error"),
        ("error of best constant", "constant"),
        ("error, first tokens", "first"),
        ("error, last tokens", "last"),
        ("correlation", "correlation"),
        ("correlation, first", "correlation_first"),
        ("correlation, last", "correlation_last"),
    ):
        table.add_row(label, *(f"{figures[key]:.3f}" for figures in results.values()))
    console.print(table)


def draw(tokens: Tokens, before: Tensor, after: Tensor, path: Path) -> None:
    """Values against returns, first and last tokens apart; and the error by how many tokens have been written."""
    figure = new_figure(11, 5)
    scatter, by_position = figure.subplots(1, 2)
    for label, chosen in (("first token", tokens.position == 0), ("last token", tokens.last)):
        scatter.plot(tokens.returns[chosen], after[chosen], ".", alpha=0.6, label=label)
    bounds = [float(tokens.returns.min()), float(tokens.returns.max())]
    scatter.plot(bounds, bounds, color="grey", linestyle=":")
    scatter.set_xlabel("return")
    scatter.set_ylabel("value")
    scatter.set_title("Held-out rollouts, after training")
    positions = [t for t in range(int(tokens.position.max()) + 1) if (tokens.position == t).sum() >= 10]
    for label, values in (("before", before), ("after", after)):
        by_position.plot(positions, errors(values, tokens, positions), marker=".", label=label)
    mean = tokens.returns.mean().expand_as(after)
    by_position.plot(positions, errors(mean, tokens, positions), color="grey", linestyle=":", label="best constant")
    by_position.set_xlabel("response tokens written")
    by_position.set_ylabel("root mean squared error")
    for axis in (scatter, by_position):
        axis.legend()
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def errors(values: Tensor, tokens: Tokens, positions: Sequence[int]) -> list[float]:
    """Root mean squared error at each position."""
    return [rms((values - tokens.returns)[tokens.position == t]) for t in positions]


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
