"""A reward trainer's checkpoint: one safetensors file with trained weights, AdamW's state and the place in the data.

It is written beside its name and moved into place: an interruption leaves the old one or the new one. There is no
generator to save, because what a step holds is a function of its number.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from textenv.rewards.training import RewardTrainer

VERSION = 1
UNCHANGED = ("network", "config", "data")
"""What a run that goes on must have in common with the one that stopped."""


def write_checkpoint(trainer: RewardTrainer, path: Path) -> None:
    """Write a trainer's state."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.network.trained_state().items():
        tensors[f"weight/{name}"] = parameter.detach()
        for part, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{part}/{name}"] = value
    state = {
        "version": VERSION,
        **_identity(trainer),
        "steps_done": trainer.steps_done,
        "offset": trainer.network.offset,
        "history": [dataclasses.asdict(stats) for stats in trainer.history],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        held = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(held, scratch, metadata={"state": json.dumps(state)})
        Path(scratch).chmod(0o644)  # temporary files are their owner's alone
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def read_checkpoint(trainer: RewardTrainer, path: Path) -> None:
    """Bring a trainer and its network to a saved state.

    Raises:
        ValueError: the file is no such checkpoint, or one of another network, other data or other settings.
    """
    from textenv.rewards.training import StepStats

    state, tensors = _read(path)
    identity = _identity(trainer)
    for name in UNCHANGED:
        if state[name] != identity[name]:
            others = _differences(state[name], identity[name])
            raise ValueError(
                f"{path} should be a checkpoint of a run with the same {name}, got {others}: "
                "the run would not go on as if it had never stopped. Train as before, or to another file."
            )
    trained = trainer.network.trained_state()
    states = {}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(trained.items()):
            parameter.copy_(tensors[f"weight/{name}"])
            parts = {
                part: tensors[f"{part}/{name}"]
                for part in ("step", "exp_avg", "exp_avg_sq")
                if f"{part}/{name}" in tensors
            }
            if parts:
                states[number] = parts
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": states, "param_groups": groups})
    trainer.network.offset, trainer.steps_done = state["offset"], state["steps_done"]
    trainer.history = [StepStats(**stats) for stats in state["history"]]


def _identity(trainer: RewardTrainer) -> dict[str, Any]:
    """What `UNCHANGED` names, as JSON gives it back. How often a run saves, and where it runs, are no part of it."""
    network = {
        name: value for name, value in trainer.network.settings.items() if name not in ("device", "checkpointing")
    }
    config = {name: value for name, value in dataclasses.asdict(trainer.config).items() if name != "save_every"}
    return json.loads(json.dumps({"network": network, "config": config, "data": trainer.data.fingerprint}))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} should be a checkpoint that a RewardTrainer wrote, got another file: {error}"
        ) from error
    if state.get("version") != VERSION:
        raise ValueError(f"{path} is a checkpoint of version {state.get('version')}, this textenv reads {VERSION}.")
    return state, tensors


def _differences(then: Any, now: Any) -> str:
    if not isinstance(then, dict):
        return f"{then!r} then and {now!r} now"
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return ", ".join(f"{name}={then.get(name)!r} then and {now.get(name)!r} now" for name in names)
