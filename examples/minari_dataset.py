"""Offline: episodes as a Minari dataset, and two agents that learn from it without an environment.

The toy's reference plays (uniform random tokens), and its episodes are kept in Minari's format. Then

- SFT imitates the best tenth of them;
- DPO learns from pairs, the better one of which is preferred by a judge who errs as Bradley and Terry say. With noise 1
  and a `beta` equal to `kl_coef` its optimum is that of the environment with the toll.

Both are measured against the exact optimum. The dataset is recorded once and read again by the next run; it is like any
other of Minari's, for libraries that read these.

    python examples/minari_dataset.py             # about half a minute on one core
    python examples/minari_dataset.py --help

Writes runs/<name>/datasets/.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import torch
import tyro
from rich.console import Console
from toy_parts import measure, show

from textenv import DemonstrationSet, PreferenceSet, demonstrations_from_minari, preferences_from_minari, record_minari
from textenv.agents import DPO, SFT, DPOConfig, SFTConfig, TablePolicy
from textenv.toy import standard_toy


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    name: str = "minari"
    """The dataset goes to runs/<name>/datasets/."""
    episodes: int = 4000
    """To record."""
    best: float = 0.1
    """Share of the episodes that SFT imitates."""
    kl_coef: float = 0.1
    """DPO's `beta`, and what a nat of KL costs where policies are measured."""
    epochs: int = 20
    """Passes over the data, of both agents."""
    learning_rate: float = 0.05
    """Of AdamW, of both agents."""
    seed: int = 0
    """Of the episodes, the judge and the agents."""


def reference() -> TablePolicy:
    """The policy that wrote the data, and that both agents start from."""
    return TablePolicy(standard_toy().reference_logits)


def recorded(envs: Any, arguments: Arguments) -> Any:
    """The dataset, recorded unless it is there already."""
    dataset_id = f"toy/reference-{arguments.episodes}-{arguments.seed}-v0"
    os.environ["MINARI_DATASETS_PATH"] = str(Path("runs", arguments.name, "datasets").absolute())
    if dataset_id in minari.list_local_datasets():
        return minari.load_dataset(dataset_id)
    return record_minari(
        reference(),
        envs,
        arguments.episodes,
        dataset_id,
        seed=arguments.seed,
        algorithm_name="the reference",
        description="Uniform random responses of textenv/Toy-v0.",
    )


def imitate(dataset: Any, envs: Any, arguments: Arguments) -> TablePolicy:
    """SFT on the episodes with the highest scores."""
    scores = [episode.infos["score"][-1] for episode in dataset.iterate_episodes()]
    threshold = np.quantile(scores, 1 - arguments.best)
    best = dataset.filter_episodes(lambda episode: episode.infos["score"][-1] >= threshold)
    demonstrations = DemonstrationSet.encode(demonstrations_from_minari(best), envs)
    policy, config = reference(), SFTConfig(epochs=arguments.epochs, learning_rate=arguments.learning_rate)
    SFT(policy, demonstrations, config, seed=arguments.seed).learn(run_dir=None, progress=False)
    return policy


def prefer(dataset: Any, envs: Any, arguments: Arguments) -> TablePolicy:
    """DPO on pairs of episodes."""
    labelled = preferences_from_minari(dataset, envs, noise=1.0, seed=arguments.seed)
    pairs = PreferenceSet.encode(labelled.preferences, envs)
    policy = reference()
    config = DPOConfig(beta=arguments.kl_coef, epochs=arguments.epochs, learning_rate=arguments.learning_rate)
    agent = DPO(policy, pairs, config, reference=standard_toy().reference, seed=arguments.seed)
    agent.learn(run_dir=None, progress=False)
    return policy


def main(arguments: Arguments) -> dict[str, Any]:
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    envs: Any = gym.make_vec("textenv/Toy-v0", num_envs=256)
    with Console().status("Recording ..."):
        dataset = recorded(envs, arguments)
    rows = {"reference": measure(reference(), arguments.kl_coef)}
    for name, learn in {"SFT on the best": imitate, "DPO on pairs": prefer}.items():
        with Console().status(f"{name} ..."):
            rows[name] = measure(learn(dataset, envs, arguments), arguments.kl_coef)
    show(rows, arguments.kl_coef)
    return {**rows, "dataset": dataset}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
