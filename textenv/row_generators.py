"""One random generator per row, each what a single environment of the same seed would have, and its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray


class RowGenerators:
    """Generators of N rows, freshly seeded until `seed` says otherwise.

    Attributes:
        rows: N generators.
        seeds: N seeds that they started from.
        drawn: N counts of the prompts that each row has drawn since it was seeded.
    """

    def __init__(self, num_rows: int) -> None:
        fresh = [seeding.np_random() for _ in range(num_rows)]
        self.rows = [generator for generator, _ in fresh]
        self.seeds = [seed for _, seed in fresh]
        self.drawn = [0] * num_rows

    def seed(self, seed: int | Sequence[int | None] | None, rows: NDArray[np.int64]) -> None:
        """Start the generators of some rows anew: row i from ``seed + i``, or from the i-th seed; None leaves them.

        Raises:
            ValueError: another number of seeds than rows.
        """
        if seed is None:
            return
        count = len(self.rows)
        seeds = [seed + i for i in range(count)] if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != count:
            raise ValueError(
                f"`seed` should be an int or {count} of them, got {len(seeds)}. An int gives row i seed + i."
            )
        for row in rows:
            wanted = seeds[row]
            if wanted is not None:
                self.rows[row], self.seeds[row] = seeding.np_random(int(wanted))
                self.drawn[row] = 0

    def state_dict(self) -> dict[str, Any]:
        """The generators' states and the rows' places, as JSON can hold them."""
        return {"generators": [generator.bit_generator.state for generator in self.rows], "drawn": list(self.drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: it was taken from another number of rows.
        """
        states = state["generators"]
        if len(states) != len(self.rows):
            raise ValueError(
                f"The state should be of {len(self.rows)} environments, got {len(states)}. Make num_envs equal."
            )
        for generator, saved in zip(self.rows, states, strict=True):
            generator.bit_generator.state = saved
        self.drawn = [int(count) for count in state.get("drawn", self.drawn)]  # older states have none
