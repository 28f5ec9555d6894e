"""Scorers learned from people: ratings, the Bradley-Terry loss, reward models.

Names are imported when first used, so that ratings and prompts can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.rewards.bradley_terry import bradley_terry_loss, preference_accuracy
    from textenv.rewards.preferences import Preference
    from textenv.rewards.ratings import (
        Comparisons,
        RatedSentence,
        draw_comparisons,
        load_openings,
        load_ratings,
        split_ratings,
    )
    from textenv.rewards.reviews import load_review_demonstrations, review_demonstrations
    from textenv.rewards.reward_model import RewardModel
    from textenv.rewards.sequence_classification import SequenceClassificationReward
    from textenv.rewards.shared import score_and_logprobs, shares_trunk

__all__ = [
    "Comparisons",
    "Preference",
    "RatedSentence",
    "RewardModel",
    "SequenceClassificationReward",
    "bradley_terry_loss",
    "draw_comparisons",
    "load_openings",
    "load_ratings",
    "load_review_demonstrations",
    "preference_accuracy",
    "review_demonstrations",
    "score_and_logprobs",
    "shares_trunk",
    "split_ratings",
]

_HOMES = {
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
    "reviews": ("load_review_demonstrations", "review_demonstrations"),
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
