"""The environment ids that textenv adds to Gymnasium's registry."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from textenv.sanity import SANITY_TASKS

ENTRY_POINTS = {
    "RLHF-v0": "textenv.rlhf",
    "textenv/Toy-v0": "textenv.toy_env",
}
"""Id to the module whose `make_env` and `make_vector_env` build it; the module is imported when the id is made. The ids
of the sanity environments are those of `textenv.sanity.SANITY_TASKS`."""


def register_envs() -> None:
    """Register every id, single and vector, once."""
    for env_id, module in ENTRY_POINTS.items():
        _register(env_id, module)
    for env_id, task in SANITY_TASKS.items():
        _register(env_id, "textenv.sanity_env", reward_threshold=task.solved_return, kwargs={"sanity_id": env_id})


def _register(env_id: str, module: str, **spec: Any) -> None:
    if env_id not in gym.registry:
        gym.register(env_id, f"{module}:make_env", vector_entry_point=f"{module}:make_vector_env", **spec)
