"""Reward-shaping wrappers for single text environments; `textenv.wrappers.vector` has the same names for many.

- `KLPenalty`: a toll per token for leaving the reference.
- `MissingEOSPenalty`: responses that the budget cuts score less.
- `NormalizeScore`: scores of mean 0 and standard deviation 1.

They compose with each other and with Gymnasium's own. Those that shape the score keep the scorer's number in
``info["score"]`` and the number that the reward holds in ``info["shaped_score"]``.
"""

from textenv.wrappers import vector
from textenv.wrappers.kl_penalty import KLPenalty
from textenv.wrappers.score_wrappers import MissingEOSPenalty, NormalizeScore

__all__ = ["KLPenalty", "MissingEOSPenalty", "NormalizeScore", "vector"]
