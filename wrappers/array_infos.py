"""`ArrayInfos` for one environment: infos without texts, for libraries of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

NUMBERS = (bool, int, float, np.number, np.bool_)


class ArrayInfos(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Leaves in the infos only what arrays can hold: numbers and arrays of them, no text.

    Put it below Gymnasium's `NumpyToTorch`, `JaxToTorch` and their like, which convert every entry of an info: they
    turn a text into the name of a Python object, and the vector ones refuse it. Wrappers that read texts (all that
    shape or record the score) belong below this one, and refuse the other order.

    Example:
        >>> numeric({"prompt": "a", "score": 1.5, "episode": {"r": 1.5, "note": "x"}})
        {'score': 1.5, 'episode': {'r': 1.5}}

    Args:
        env: a text environment.
    """

    hides_texts = True

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, numeric(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, numeric(info)


def numeric(info: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers or arrays of them, at any depth; a key's ``_key`` goes with it."""
    kept: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, Mapping):
            kept[key] = numeric(value)
        elif isinstance(value, NUMBERS) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
            kept[key] = value
    return {key: value for key, value in kept.items() if not (key.startswith("_") and key[1:] not in kept)}
