"""Reward-shaping wrappers for vector text environments: names and formulas of `textenv.wrappers`, N rows at a time."""

from textenv.wrappers.vector.action_masks import ActionMask, MinLength
from textenv.wrappers.vector.array_infos import ArrayInfos
from textenv.wrappers.vector.kl_penalty import KLPenalty
from textenv.wrappers.vector.record_responses import RecordResponses
from textenv.wrappers.vector.response_wrappers import LengthPenalty, RepetitionPenalty
from textenv.wrappers.vector.score_every import ScoreEvery
from textenv.wrappers.vector.score_wrappers import ClipScore, MissingEOSPenalty, NormalizeScore

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
]
