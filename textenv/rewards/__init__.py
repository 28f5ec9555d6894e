"""Scorers learned from people: ratings, the Bradley-Terry loss, reward models.

Names are imported when first used, so that ratings and prompts can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.rewards.bradley_terry import bradley_terry_loss, preference_accuracy
    from textenv.rewards.preference_chat import ChatTemplate, parse_transcript, transcript_text
    from textenv.rewards.preference_files import load_preferences, save_preferences, split_preferences
    from textenv.rewards.preference_report import BadPreferencesError, BadRow, PreferenceReport
    from textenv.rewards.preference_sources import LabelledPairs, label_pairs, preferences_from_ratings
    from textenv.rewards.preferences import Preference
    from textenv.rewards.ratings import (
        Comparisons,
        RatedSentence,
        draw_comparisons,
        load_openings,
        load_ratings,
        split_ratings,
    )
    from textenv.rewards.reward_model import RewardModel
    from textenv.rewards.sequence_classification import SequenceClassificationReward
    from textenv.rewards.shared import score_and_logprobs, shares_trunk

__all__ = [
    "BadPreferencesError",
    "BadRow",
    "ChatTemplate",
    "Comparisons",
    "LabelledPairs",
    "Preference",
    "PreferenceReport",
    "RatedSentence",
    "RewardModel",
    "SequenceClassificationReward",
    "bradley_terry_loss",
    "draw_comparisons",
    "label_pairs",
    "load_openings",
    "load_preferences",
    "load_ratings",
    "parse_transcript",
    "preference_accuracy",
    "preferences_from_ratings",
    "save_preferences",
    "score_and_logprobs",
    "shares_trunk",
    "split_preferences",
    "split_ratings",
    "transcript_text",
]

_HOMES = {
    "preference_chat": (
        "ChatTemplate",
        "parse_transcript",
        "transcript_text",
    ),
    "preference_files": (
        "load_preferences",
        "save_preferences",
        "split_preferences",
    ),
    "preference_report": (
        "BadPreferencesError",
        "BadRow",
        "PreferenceReport",
    ),
    "preference_sources": (
        "LabelledPairs",
        "label_pairs",
        "preferences_from_ratings",
    ),
    "preferences": ("Preference",),
    "bradley_terry": ("bradley_terry_loss", "preference_accuracy"),
    "ratings": (
        "Comparisons",
        "RatedSentence",
        "draw_comparisons",
        "load_openings",
        "load_ratings",
        "split_ratings",
    ),
    "reward_model": ("RewardModel",),
    "sequence_classification": ("SequenceClassificationReward",),
    "shared": ("score_and_logprobs", "shares_trunk"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
