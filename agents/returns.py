"""What environments pay for responses apart from the KL toll, for agents that have a price of KL of their own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from textenv.replay import Replay


def returns_without_toll(replayed: Replay) -> NDArray[np.float64]:
    """Undiscounted returns (B,) with the outermost `KLPenalty`'s toll added back; NaN where a sample was dropped.

    That is the score as the wrappers shape it (clipped, with penalties), so that an agent which compares responses
    compares what the environment pays.

    Args:
        replayed: finished episodes.
    """
    returns = replayed.rewards.sum(1)
    tolls = replayed.infos.get("kl_toll")
    whole = returns if tolls is None else returns + tolls.astype(np.float64)
    kept: NDArray[np.float64] = np.where(np.isnan(replayed.scores), np.nan, whole)
    return kept
