"""Scorers learned from people: ratings, the Bradley-Terry loss, reward models.

Names are imported when first used, so that ratings and prompts can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.rewards.bradley_terry import bradley_terry_loss, preference_accuracy
    from textenv.rewards.early_stopping import EarlyStopping
    from textenv.rewards.genuine import review_answers
    from textenv.rewards.overoptimisation import (
        best_of_n_curve,
        best_of_n_kl,
        best_of_n_scores,
        best_of_n_weights,
    )
    from textenv.rewards.overoptimisation_curve import GoldFit, OverOptimisation, Peak, fit_gold
    from textenv.rewards.preferences import Preference
    from textenv.rewards.probe_report import ProbeReport, VariantResult
    from textenv.rewards.probes import probe
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
    from textenv.rewards.variants import VARIANTS

__all__ = [
    "VARIANTS",
    "Comparisons",
    "EarlyStopping",
    "GoldFit",
    "OverOptimisation",
    "Peak",
    "Preference",
    "ProbeReport",
    "RatedSentence",
    "RewardModel",
    "SequenceClassificationReward",
    "VariantResult",
    "best_of_n_curve",
    "best_of_n_kl",
    "best_of_n_scores",
    "best_of_n_weights",
    "bradley_terry_loss",
    "draw_comparisons",
    "fit_gold",
    "load_openings",
    "load_ratings",
    "preference_accuracy",
    "probe",
    "review_answers",
    "score_and_logprobs",
    "shares_trunk",
    "split_ratings",
]

_HOMES = {
    "preferences": ("Preference",),
    "bradley_terry": ("bradley_terry_loss", "preference_accuracy"),
    "early_stopping": ("EarlyStopping",),
    "genuine": ("review_answers",),
    "overoptimisation": ("best_of_n_curve", "best_of_n_kl", "best_of_n_scores", "best_of_n_weights"),
    "overoptimisation_curve": ("GoldFit", "OverOptimisation", "Peak", "fit_gold"),
    "probe_report": ("ProbeReport", "VariantResult"),
    "probes": ("probe",),
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
    "variants": ("VARIANTS",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
