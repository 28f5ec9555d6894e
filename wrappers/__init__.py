"""Reward-shaping wrappers for single text environments; `textenv.wrappers.vector` has the same names for many.

- `KLPenalty`: a toll per token for leaving the reference.
- `MinLength`: no stop id among the first tokens, for policy, reference and engine alike.
- `ActionMask`: only some tokens, for everybody too.
- `MissingEOSPenalty`: responses that the budget cuts score less.
- `LengthPenalty`: long responses score less, by each token or near the budget only.
- `RepetitionPenalty`: responses that repeat themselves score less.
- `NormalizeScore`: scores of mean 0 and standard deviation 1.
- `ClipScore`: scores within bounds.
- `ScoreEvery`: the score paid as it comes, without changing which response is best.
- `RecordResponses`: finished episodes as lines of JSON.
- `ArrayInfos`: infos without texts, for Gymnasium's `NumpyToTorch` and its like.

They compose with each other and with Gymnasium's own. Those that shape the score keep the scorer's number in
``info["score"]`` and the number that the reward holds in ``info["shaped_score"]``.
"""

from textenv.wrappers import vector
from textenv.wrappers.action_masks import ActionMask, MinLength
from textenv.wrappers.array_infos import ArrayInfos
from textenv.wrappers.kl_penalty import KLPenalty
from textenv.wrappers.record_responses import RecordResponses
from textenv.wrappers.response_wrappers import LengthPenalty, RepetitionPenalty
from textenv.wrappers.score_every import ScoreEvery
from textenv.wrappers.score_wrappers import ClipScore, MissingEOSPenalty, NormalizeScore

__all__ = [
    "ActionMask",
    "ArrayInfos",
    "ClipScore",
    "KLPenalty",
    "LengthPenalty",
    "MinLength",
    "MissingEOSPenalty",
    "NormalizeScore",
    "RecordResponses",
    "RepetitionPenalty",
    "ScoreEvery",
    "vector",
]
