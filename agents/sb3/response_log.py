"""`ResponseLog`: what Stable-Baselines3 does not know of text, rollout by rollout."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

MEANS = {"score": "score", "kl": "kl", "response_length": "response_length", "shaped_return": "episode"}
"""Figures of a rollout, and where in the infos of an ended response they are."""


class ResponseLog(BaseCallback):
    """Means over the responses that ended in each rollout: ``rollout/score``, ``rollout/kl`` and others in the logger.

    `records` has a dict for each rollout: ``iteration``, ``tokens`` (steps since training began), ``episodes``
    (responses ended), ``seconds`` since training began at the rollout's end, ``update_seconds`` that the update took
    which followed, ``score`` (the scorer's numbers), ``kl`` in nats per response, ``response_length``,
    ``shaped_return`` (the sum of rewards, tolls included) and ``eos_rate``. A figure that no response had is nan.

    Example:
        ``model.learn(100_000, callback=ResponseLog())``
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, float]] = []
        self._ends: list[dict[str, Any]] = []
        self._episodes = 0
        self._began = self._rolled_out = 0.0

    def _on_training_start(self) -> None:
        self._began = time.perf_counter() - (self.records[-1]["seconds"] if self.records else 0.0)

    def _on_rollout_start(self) -> None:
        self._update_ended()
        self._ends = []

    def _on_step(self) -> bool:
        self._ends += [info for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True) if done]
        return True

    def _on_rollout_end(self) -> None:
        self._rolled_out = time.perf_counter()
        self._episodes += len(self._ends)
        means = {name: mean(figure(info, key) for info in self._ends) for name, key in MEANS.items()}
        means["eos_rate"] = mean(info.get("finish_reason") == "stop" for info in self._ends)
        for name, value in means.items():
            if np.isfinite(value):
                self.logger.record(f"rollout/{name}", value)
        counts = {
            "iteration": len(self.records) + 1,
            "tokens": self.num_timesteps,
            "episodes": self._episodes,
            "seconds": self._rolled_out - self._began,
            "update_seconds": float("nan"),
        }
        self.records.append(counts | means)

    def _on_training_end(self) -> None:
        self._update_ended()

    def _update_ended(self) -> None:
        """Note how long the update took that has just ended, if there was one."""
        if self.records and not np.isfinite(self.records[-1]["update_seconds"]):
            self.records[-1]["update_seconds"] = time.perf_counter() - self._rolled_out


def figure(info: dict[str, Any], key: str) -> float:
    """A number in the info of an ended response, nan where it is not there; of an episode the return."""
    value = info.get(key, float("nan"))
    return float(value["r"] if isinstance(value, dict) else value)


def mean(values: Any) -> float:
    """Of the numbers that are defined; nan where there are none."""
    numbers = np.array([value for value in values if np.isfinite(value)], dtype=np.float64)
    return float(numbers.mean()) if len(numbers) else float("nan")
