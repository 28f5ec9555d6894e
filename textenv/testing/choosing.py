"""Which tokens the checks write: random ones among those allowed, stopping where a plan says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.constraints import constraint_of
from textenv.layers import layers
from textenv.task import TextTask


@dataclass
class Chooser:
    """Draws actions for episodes that end as planned, as far as constraints and vocabulary let them.

    Attributes:
        task: vocabulary and stop ids.
        rng: what draws.
    """

    task: TextTask
    rng: np.random.Generator

    def plans(self) -> list[int | None]:
        """Where to stop, as the place of the stop id: at once, never, third, second, with the last token."""
        last = self.task.mdp.max_response_tokens - 1
        return list(dict.fromkeys([min(1, last), None, 0, min(2, last), last]))

    def token(self, placed: int, stop_at: int | None, allowed: NDArray[np.bool_] | None) -> int:
        """One token after `placed` others: a stop id once `stop_at` is reached, one of the others before.

        Args:
            placed: response tokens so far.
            stop_at: a plan.
            allowed: (V,) True on tokens that may be chosen; None: all.
        """
        mdp = self.task.mdp
        named = np.arange(mdp.vocab_size) < getattr(self.task.tokenizer, "named_size", mdp.vocab_size)
        free = named if allowed is None or not (allowed & named).any() else allowed & named
        wanted = mdp.is_stop if stop_at is not None and placed >= stop_at else ~mdp.is_stop
        candidates = np.flatnonzero(free & wanted if (free & wanted).any() else free)
        return int(self.rng.choice(candidates))


class Allowed:
    """The actions that the constraints in a stack leave; without constraints all.

    Args:
        env: a stack, single or vector.
    """

    def __init__(self, env: Any) -> None:
        self.constraint = constraint_of(env)
        masking = [layer for layer in layers(env) if hasattr(type(layer), "action_masks")]
        self.action_masks = masking[0].action_masks if masking else None
        self.vocab_size = env.unwrapped.task.mdp.vocab_size

    def __call__(self, observations: Sequence[Any]) -> Sequence[NDArray[np.bool_] | None]:
        """(V,) True on allowed ids after each of N observations, or None."""
        if self.constraint is not None:
            batch = {key: np.stack([seen[key] for seen in observations]) for key in ("input_ids", "attention_mask")}
            return list(self.constraint.next_masks(batch).unpacked())
        if self.action_masks is not None:  # somebody else's wrapper, in the convention of masking agents
            return list(np.asarray(self.action_masks(), dtype=np.bool_).reshape(len(observations), self.vocab_size))
        return [None] * len(observations)
