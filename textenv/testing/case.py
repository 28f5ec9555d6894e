"""One environment, single or vector, together with what the checks know of it and do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from textenv.layers import layers
from textenv.task import TextTask
from textenv.testing.episodes import Contract

PAY_AT_THE_END = {
    *("OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics", "TimeLimit"),
    *("ObservationWrapper", "VectorObservationWrapper", "ActionWrapper", "VectorActionWrapper", "ArrayConversion"),
    *("ScoreWrapper", "RecordResponses", "ArrayInfos"),
}
"""Wrappers (by class name, bases included) that pay nothing before the end; so do those with a `constraint`."""

NO_TEXTS = "ArrayConversion"
"""Gymnasium's base class of wrappers that turn every entry of an info into an array."""


@dataclass(frozen=True)
class Case:
    """What the checks of behaviour play with.

    Attributes:
        where: for messages.
        make: gives a fresh environment.
        task: its task.
        seed: of its episodes.
        tolerance: for floats.
        actions: lists of actions to step, a reset before each list; from a walk.
        vector: whether there are N rows.
        bare: whether no wrapper is around.
        fresh: whether `make` really makes; else it always gives the same environment.
        untouched: whether what `make` gives was never reset.
    """

    where: str
    make: Callable[[], Any]
    task: TextTask
    seed: int
    tolerance: float
    actions: list[Any]
    vector: bool = False
    bare: bool = True
    fresh: bool = True
    untouched: bool = True

    @property
    def first_actions(self) -> list[Any]:
        """An episode that stops early, or a few steps of all rows: enough where what follows is resets."""
        return list(self.actions[0][:8])


def wrapper_names(env: Any) -> list[set[str]]:
    """Class names of every wrapper, bases included, outermost first."""
    return [{kind.__name__ for kind in type(layer).__mro__} for layer in layers(env) if layer is not env.unwrapped]


def may_pay_per_token(env: Any) -> list[str]:
    """The wrappers of a stack that may pay before the end of an episode."""
    wrappers = [layer for layer in layers(env) if layer is not env.unwrapped]
    return [
        type(layer).__name__
        for layer, names in zip(wrappers, wrapper_names(env), strict=True)
        if not names & PAY_AT_THE_END and "constraint" not in vars(layer)
    ]


def contract_of(env: Any, task: TextTask, observation: Any) -> Contract:
    """What a stack's episodes are held to.

    Args:
        env: a stack, single or vector.
        task: its task.
        observation: one that it returned, of one row.
    """
    bare = env is env.unwrapped
    space = getattr(env, "single_observation_space", env.observation_space)
    own_arrays = isinstance(observation, dict) and all(isinstance(value, np.ndarray) for value in observation.values())
    return Contract(
        task,
        bare=bare,
        sparse=not may_pay_per_token(env),
        observations=bare or (space == task.observation_space() and own_arrays),
        texts=not (
            any(NO_TEXTS in names for names in wrapper_names(env))
            or any(getattr(type(layer), "hides_texts", False) for layer in layers(env))
        ),
    )
