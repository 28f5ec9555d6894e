"""Checkpoints: a folder with everything that training needs to go on, written all or nothing.

state.json          configuration, counters, environment and wrapper states
policy.safetensors  the weights that train
policy.json         how a `LanguageModelPolicy` was made (absent for other policies)
optimizer.pt        optimiser and generators, read with `weights_only=True`
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from textenv.agents.policy import Policy
from textenv.replay import layers

if TYPE_CHECKING:
    from textenv.agents.agent import Agent
    from textenv.agents.offline import OfflineAgent

VERSION = 1
FILES = {"state.json", "policy.safetensors", "policy.json", "optimizer.pt"}


class Saved(NamedTuple):
    """A checkpoint as it was read."""

    folder: Path
    state: dict[str, Any]
    data: str = "envs"
    """What the agent's `load` takes beside the folder."""

    def call(self, *names: str) -> str:
        """How `load` is called with some arguments more, for messages."""
        return f"load({', '.join(['folder', self.data, *(f'{name}=...' for name in names if name != self.data)])})"

    def make_policy(self) -> Policy:
        """Remake the language model policy that was saved; its trained weights come with `restore`.

        Raises:
            ValueError: another kind of policy was saved.
        """
        settings = self.folder / "policy.json"
        if not settings.exists():
            raise ValueError(
                f"{self.folder} holds a {self.state['policy']}, which cannot be remade from its weights alone. Make "
                f"one as it was made for training and pass it: {self.call('policy')}."
            )
        from textenv.agents.language_model import LanguageModelPolicy

        return LanguageModelPolicy.from_pretrained(**json.loads(settings.read_text()))


def save(agent: Agent | OfflineAgent[Any, Any], folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint beside `folder` and move it into place: an interruption leaves the old one or the new one.

    Raises:
        FileExistsError: `folder` holds something else.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or not {path.name for path in folder.iterdir()} <= FILES):
        raise FileExistsError(
            f"{folder} exists and holds more than a checkpoint; it is not overwritten. Choose another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write(agent, scratch)
        _swap(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(agent: Agent | OfflineAgent[Any, Any], folder: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in agent.policy.state_dict().items()}
    save_file(tensors, folder / "policy.safetensors")
    if settings := getattr(agent.policy, "settings", None):  # empty where a policy was not made by name
        (folder / "policy.json").write_text(json.dumps(settings, indent=2) + "\n")
    generators = {name: generator.get_state() for name, generator in agent.generators.items()}
    torch.save({"optimizer": agent.optimizer.state_dict(), **generators}, folder / "optimizer.pt")
    state = {
        "version": VERSION,
        "agent": type(agent).__name__,
        "policy": type(agent.policy).__name__,
        "config": dataclasses.asdict(agent.config),
        "seed": agent.seed,
        "iteration": agent.iteration,
        "episodes": agent.episodes,
        "total_episodes": agent.total_episodes,
        "data": agent.data_fingerprints(),
        "envs": [(type(layer).__name__, layer.state_dict()) for layer in _stateful(agent.envs)],
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def _swap(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`. The old checkpoint is there until the new one is."""
    old = _old(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.chmod(0o755)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    """Where a checkpoint is while the next one takes its place."""
    return folder.with_name(f".{folder.name}-old")


def read(folder: str | os.PathLike[str], agent: str, data: str = "envs") -> Saved:
    """Read a checkpoint's state.

    Args:
        folder: a checkpoint, or the run folder that holds one.
        agent: name of the class that will go on with it.
        data: what its `load` takes beside the folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of another agent, or of a version that this one cannot read.
    """
    given = Path(folder).absolute()
    # A checkpoint or a run folder; each may have been interrupted between the two renames of `_swap`.
    places = [place for base in (given, given / "checkpoint") for place in (base, _old(base))]
    found = [place for place in places if (place / "state.json").exists()]
    if not found:
        raise FileNotFoundError(
            f"{folder} should be a folder that `save` wrote (or a run folder of `learn`), but it has no state.json."
        )
    folder = found[0]
    state = json.loads((folder / "state.json").read_text())
    if state["version"] != VERSION:
        raise ValueError(f"{folder} is a checkpoint of version {state['version']}, this textenv reads {VERSION}.")
    if state["agent"] != agent:
        raise ValueError(f"{folder} was saved by {state['agent']}, got {agent}: load it with {state['agent']}.load.")
    return Saved(folder, state, data)


def restore(agent: Agent | OfflineAgent[Any, Any], saved: Saved) -> None:
    """Bring an agent, its policy and its environments to the saved state.

    Raises:
        ValueError: the environments are not wrapped as they were, or the agent reads other data.
    """
    stateful = list(_stateful(agent.envs))
    then, now = [name for name, _ in saved.state["envs"]], [type(layer).__name__ for layer in stateful]
    if then != now:
        raise ValueError(f"The environments should be wrapped as for training, {then}, got {now}.")
    data, given = saved.state.get("data", {}), agent.data_fingerprints()
    others = sorted(name for name in data.keys() | given.keys() if data.get(name) != given.get(name))
    if others:
        raise ValueError(
            f"{', '.join(others)} should be as for training, got others: the run would not go on as if it had never "
            f"stopped. Pass the same: {saved.call(*others)}."
        )
    agent.policy.load_state_dict(load_file(saved.folder / "policy.safetensors"))
    tensors = torch.load(saved.folder / "optimizer.pt", weights_only=True)
    agent.optimizer.load_state_dict(tensors["optimizer"])
    for name, generator in agent.generators.items():
        if name in tensors:  # the one for `predict` is not in older checkpoints
            generator.set_state(tensors[name])
    for layer, (_, state) in zip(stateful, saved.state["envs"], strict=True):
        layer.load_state_dict(state)
    agent.iteration, agent.episodes = saved.state["iteration"], saved.state["episodes"]
    agent.total_episodes = saved.state["total_episodes"]
    agent.run_folder = saved.folder.resolve().parent


def _stateful(envs: Any) -> Any:
    """Layers of the environment stack that have something to remember; none where an agent has no environments."""
    return () if envs is None else (layer for layer in layers(envs) if hasattr(type(layer), "state_dict"))
