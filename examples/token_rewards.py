"""Token-level credit, drawn: what each token of one response costs, earns, and is thought to be worth.

The score comes once, at the last token; the KL toll comes at every token. Their difference is the reward; the return is
the sum of the rewards from a token on; the value is what the policy expected of it; the advantage says which tokens the
next update makes more likely (green) or less likely (red).

    python examples/token_rewards.py                                    # trains for a few iterations first
    python examples/token_rewards.py --run runs/align-reviews-<date>    # of a policy that is trained already
    python examples/token_rewards.py --help

Writes runs/<name>/token_rewards.html and token_rewards.json.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import align_reviews
import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from textenv.agents import PPO
from textenv.agents.advantages import gae
from textenv.agents.rollouts.collect import Episodes, collect
from textenv.layers import text_envs


@dataclass(frozen=True)
class Arguments:
    """Settings of the drawing."""

    name: str = "token-rewards"
    """Files go to runs/<name>/."""
    run: Path | None = None
    """Folder of a run of examples/align_reviews.py with its default task; None: train on the spot."""
    episodes: int = 384
    """Responses to train on where no run is given."""
    num_envs: int = 48
    """Responses per iteration, and responses to choose from."""
    choose: int | None = None
    """Which response of the batch is drawn, from 0; None: the one whose toll is nearest to the batch's mean."""
    seed: int = 0
    """Of training and of the response."""


@dataclass(frozen=True)
class Credit:
    """One response of T tokens; every list has T numbers."""

    prompt: str
    tokens: list[str]
    logprobs: list[float]
    """Under the policy that wrote it, nats."""
    ref_logprobs: list[float]
    """Under the reference."""
    toll: list[float]
    """kl_coef * (logprob - ref_logprob)."""
    score: list[float]
    """The shaped score at the last token, 0 before."""
    reward: list[float]
    """As the wrapped environments gave it: score - toll."""
    returns: list[float]
    """Undiscounted sum of the rewards from here on."""
    value: list[float]
    """What the value head expected before the token was chosen."""
    advantage: list[float]
    """By GAE, before whitening."""
    kl: float
    """Sum of logprob - ref_logprob, nats: the KL estimate of this response."""
    kl_coef: float


def credit(episodes: Episodes, row: int, tokens: Sequence[str], gae_lambda: float) -> Credit:
    """Take one response of a batch apart.

    Args:
        episodes: a batch from environments with a KL toll.
        row: which response.
        tokens: its texts, one per token.
        gae_lambda: of the advantages.
    """
    replayed, length = episodes.replayed, len(tokens)
    assert episodes.ref_logprobs is not None
    rewards = torch.as_tensor(replayed.rewards[row, :length])
    values = episodes.output.values[row, :length].double()
    real = torch.ones(1, length, dtype=torch.bool)
    advantages, _ = gae(rewards[None], values[None], real, gamma=1.0, gae_lambda=gae_lambda)
    gaps = (episodes.logprobs - episodes.ref_logprobs)[row, :length].double()
    shaped = replayed.infos.get("shaped_score", replayed.infos["score"])[row]
    kl_coef = float(replayed.infos["kl_coef"][row])
    return Credit(
        prompt=episodes.prompts[row],
        tokens=list(tokens),
        logprobs=episodes.logprobs[row, :length].tolist(),
        ref_logprobs=episodes.ref_logprobs[row, :length].tolist(),
        toll=(kl_coef * gaps).tolist(),
        score=[0.0] * (length - 1) + [float(shaped)],
        reward=rewards.tolist(),
        returns=rewards.flip(0).cumsum(0).flip(0).tolist(),
        value=values.tolist(),
        advantage=advantages[0].tolist(),
        kl=float(gaps.sum()),
        kl_coef=kl_coef,
    )


COLUMNS = ("logprobs", "ref_logprobs", "toll", "score", "reward", "returns", "value", "advantage")
SUMMED = ("toll", "score", "reward")


def table_of(one: Credit) -> Table:
    """A row per token, and the sums that must agree."""
    table = Table("", "token", *(name.replace("_", " ") for name in COLUMNS), title="What each token costs and earns")
    for column in table.columns[2:]:
        column.justify = "right"
    for t, token in enumerate(one.tokens):
        table.add_row(f"{t}", Text(repr(token)), *(f"{getattr(one, name)[t]:+.3f}" for name in COLUMNS))
    table.add_section()
    sums = (f"{sum(getattr(one, name)):+.3f}" if name in SUMMED else "" for name in COLUMNS)
    table.add_row("", "sum", *sums)
    return table


def coloured(one: Credit, numbers: Sequence[float], sign: int = 1) -> Text:
    """The response, each token on green where its number (times `sign`) is positive, on red where it is negative."""
    largest = max(max(map(abs, numbers)), 1e-9)
    text = Text(f"{one.prompt} |")
    for token, number in zip(one.tokens, numbers, strict=True):
        fade = 255 - round(175 * abs(number) / largest)
        background = (fade, 255, fade) if sign * number >= 0 else (255, fade, fade)
        text.append(token, style=f"black on rgb({','.join(map(str, background))})")
    return text


def draw(console: Console, one: Credit) -> None:
    """Print the table, the coloured texts, and how the numbers add up."""
    console.print(table_of(one))
    for label, numbers, sign in (
        ("toll (red: paid)", one.toll, -1),
        ("advantage (green: to be more likely)", one.advantage, 1),
    ):
        console.print(f"{label}:")
        console.print(coloured(one, numbers, sign))
    console.print(
        f"The tolls add up to kl_coef * KL = {one.kl_coef:g} * {one.kl:.3f} = {one.kl_coef * one.kl:.3f}. Taken from "
        f"the score of {one.score[-1]:+.3f} they leave {one.returns[0]:+.3f}, the return of the first token.",
        highlight=False,
    )


def trained(arguments: Arguments) -> PPO:
    """A policy that has left its reference: of a run that was made before, or of a few iterations."""
    settings = align_reviews.Arguments(seed=arguments.seed, episodes=arguments.episodes, num_envs=arguments.num_envs)
    if arguments.run is not None:
        return PPO.load(arguments.run, align_reviews.make_envs(settings, arguments.num_envs))
    return align_reviews.make_agent(settings).learn(arguments.episodes, run_dir=None)


def main(arguments: Arguments) -> Credit:
    agent = trained(arguments)
    envs: Any = agent.envs
    count = arguments.num_envs
    episodes = collect(agent.policy, envs, agent.engine, episodes=count, seed=arguments.seed + 1)
    row = arguments.choose
    if row is None:
        kls = episodes.replayed.infos["kl"]
        row = int(abs(kls - kls.mean()).argmin())
    elif not 0 <= row < count:
        raise SystemExit(f"--choose should be between 0 and {count - 1}, got {row}: there are {count} responses.")
    task = text_envs(envs).task
    length = int(episodes.replayed.response_mask[row].sum())
    ids = episodes.replayed.input_ids[row, task.mdp.max_prompt_tokens :][:length]
    tokens = task.tokenizer.tokenizer.batch_decode([[int(i)] for i in ids])
    one = credit(episodes, row, tokens, agent.config.gae_lambda)
    folder = Path("runs") / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token_rewards.json").write_text(json.dumps(dataclasses.asdict(one), indent=2) + "\n")
    console = Console()
    draw(console, one)
    page = Console(record=True, width=140, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    draw(page, one)
    page.save_html(str(folder / "token_rewards.html"))
    console.print(f"The page is {folder}/token_rewards.html", soft_wrap=True)
    return one


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
