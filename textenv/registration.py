"""The environment ids that textenv adds to Gymnasium's registry."""

from __future__ import annotations

import gymnasium as gym

ENTRY_POINTS = {
    "RLHF-v0": "textenv.rlhf",
    "textenv/Toy-v0": "textenv.toy_env",
}
"""Id to the module whose `make_env` and `make_vector_env` build it; the module is imported when the id is made."""


def register_envs() -> None:
    """Register every id, single and vector, once."""
    for env_id, module in ENTRY_POINTS.items():
        if env_id not in gym.registry:
            gym.register(env_id, entry_point=f"{module}:make_env", vector_entry_point=f"{module}:make_vector_env")
