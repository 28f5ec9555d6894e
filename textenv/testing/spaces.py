"""Are the spaces those of a text environment? Knows no episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from textenv.task import TextTask


def single_spaces(env: Any, task: TextTask) -> Iterator[str]:
    """What is wrong with the spaces of an environment that no wrapper is around."""
    yield from _observation_space("observation_space", env.observation_space, task)
    yield from _action_space("action_space", env.action_space, task)


def vector_spaces(envs: Any, task: TextTask, mode: Any) -> Iterator[str]:
    """What is wrong with the spaces and the metadata of N rows that no wrapper is around."""
    yield from _observation_space("single_observation_space", envs.single_observation_space, task)
    yield from _action_space("single_action_space", envs.single_action_space, task)
    for kind in ("observation", "action"):
        whole = getattr(envs, f"{kind}_space")
        expected = batch_space(getattr(envs, f"single_{kind}_space"), envs.num_envs)
        if whole != expected:
            yield f"{kind}_space should be {envs.num_envs} times single_{kind}_space, {expected}, got {whole}"
    found = envs.metadata.get("autoreset_mode")
    if found is not mode:
        yield (
            f"metadata['autoreset_mode'] should be {mode}, got {found!r}; agents and wrappers read from it which step "
            "resets a row"
        )


def _observation_space(name: str, space: Any, task: TextTask) -> Iterator[str]:
    expected = task.observation_space()
    if not isinstance(space, spaces.Dict):
        yield f"{name} should be a Dict with the keys {list(expected)}, got {space}"
        return
    for key, box in expected.items():
        if key not in space.keys() or space[key] != box:
            yield f"{name}[{key!r}] should be {box} (L = P + T = {task.mdp.length}), got {space.get(key)}"


def _action_space(name: str, space: Any, task: TextTask) -> Iterator[str]:
    if space != task.action_space():
        yield f"{name} should be {task.action_space()}, one action per row of the vocabulary, got {space}"
