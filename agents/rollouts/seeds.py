"""Every row's randomness of its own: what a row draws depends on the seed, its prompt's place and its sample's number.

Neither the other rows, nor their order in memory, nor who has finished can change it. B rows are prompts times samples,
the samples of one prompt next to each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def row_seeds(seed: int, prompts: int, samples: int = 1) -> NDArray[np.uint64]:
    """A seed for each row, a hash of (seed, prompt's place, sample's number): neighbouring seeds share nothing.

    Args:
        seed: of the call, not negative.
        prompts: how many.
        samples: responses to each prompt.

    Returns:
        (prompts * samples,), below 2**63, so that engines that want signed integers take them.
    """
    keys = ((prompt, sample) for prompt in range(prompts) for sample in range(samples))
    # As spawn keys they cannot run into the seed's own words, as a sequence (seed, prompt, sample) could.
    states = [np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] for key in keys]
    return np.array(states, dtype=np.uint64) >> np.uint64(1)


def uniforms(seeds: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """The first `count` numbers in [0, 1) of each row's stream, (B, count). A longer call begins with a shorter one's.

    Args:
        seeds: (B,) from `row_seeds`.
        count: numbers per row, one per token.
    """
    drawn = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds.tolist()):
        drawn[row] = np.random.Generator(np.random.PCG64(seed)).random(count)
    return drawn
