"""What a constraint allows while responses are written, step by step, and what it allowed, for the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.constraints import Constraint
from textenv.mdp import TokenState, initial_state
from textenv.packed_masks import PackedMasks, concatenated


class StepMasks:
    """Masks of B responses that grow side by side, a token a step.

    What was allowed is written down rather than worked out again later: the tokens that a reference finds most likely
    may differ by rounding between one pass and another, and a sampled token must stay an allowed one.

    Args:
        constraint: of the task.
        prompts: B lists of ids.
    """

    def __init__(self, constraint: Constraint, prompts: Sequence[Sequence[int]]) -> None:
        self.constraint = constraint
        self._state: TokenState = initial_state(constraint.mdp, prompts)
        self._steps: list[PackedMasks] = []

    def next_masks(self) -> PackedMasks:
        """What may follow in each of the B rows; those that have ended are shown as they are."""
        observations: dict[str, NDArray[Any]] = {
            "input_ids": self._state.input_ids,
            "attention_mask": self._state.attention_mask,
        }
        self._steps.append(self.constraint.next_masks(observations))
        return self._steps[-1]

    def append(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Add the tokens that some rows chose."""
        columns = self.constraint.mdp.max_prompt_tokens + self._state.response_lengths[rows]
        self._state.input_ids[rows, columns] = tokens
        self._state.attention_mask[rows, columns] = 1
        self._state.response_lengths[rows] += 1

    def response_masks(self) -> PackedMasks:
        """What was allowed where each token was chosen, index (B, T); any mask beyond a response's end."""
        steps = concatenated(self._steps)
        written = steps.index.reshape(len(self._steps), -1).T  # (B, steps)
        missing = self.constraint.mdp.max_response_tokens - len(self._steps)
        index = np.pad(written, ((0, 0), (0, missing)), mode="edge")
        used, compact = np.unique(index, return_inverse=True)
        return PackedMasks(steps.table[used], compact.reshape(index.shape).astype(np.int64), steps.vocab_size)
