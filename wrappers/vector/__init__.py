"""Reward-shaping wrappers for vector text environments: names and formulas of `textenv.wrappers`, N rows at a time."""

from textenv.wrappers.vector.kl_penalty import KLPenalty
from textenv.wrappers.vector.score_wrappers import MissingEOSPenalty, NormalizeScore

__all__ = ["KLPenalty", "MissingEOSPenalty", "NormalizeScore"]
