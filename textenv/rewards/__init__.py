"""Scorers learned from people: ratings, comparisons, training on them, reward models, how good they are.

Names are imported when first used, so that ratings and prompts can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.rewards.bradley_terry import bradley_terry_loss, centering_loss, preference_accuracy
    from textenv.rewards.comparison_data import PreferenceData
    from textenv.rewards.early_stopping import EarlyStopping
    from textenv.rewards.ensemble import RewardEnsemble, pessimistic
    from textenv.rewards.genuine import review_answers
    from textenv.rewards.learning_curves import learning_curve
    from textenv.rewards.network import RewardNetwork
    from textenv.rewards.network_files import load_adapters, save_adapters, save_classifier
    from textenv.rewards.noise_ceiling import half_against_half, one_against_rest, pair_accuracy
    from textenv.rewards.overoptimisation import best_of_n_curve, best_of_n_kl, best_of_n_scores, best_of_n_weights
    from textenv.rewards.overoptimisation_curve import GoldFit, OverOptimisation, Peak, fit_gold
    from textenv.rewards.plots import plot_calibration, plot_learning_curve, plot_scores
    from textenv.rewards.preference_chat import ChatTemplate, parse_transcript, transcript_text
    from textenv.rewards.preference_evaluation import (
        accuracy_estimate,
        calibration_curve,
        evaluate_preferences,
        score_distribution,
    )
    from textenv.rewards.preference_files import load_preferences, save_preferences, split_preferences
    from textenv.rewards.preference_report import BadPreferencesError, BadRow, PreferenceReport
    from textenv.rewards.preference_sources import LabelledPairs, label_pairs, preferences_from_ratings
    from textenv.rewards.preferences import Preference
    from textenv.rewards.probe_report import ProbeReport, VariantResult
    from textenv.rewards.probes import probe
    from textenv.rewards.rated_data import RatedData
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
    from textenv.rewards.training import RewardTrainer, RewardTrainingConfig
    from textenv.rewards.variants import VARIANTS

__all__ = [
    "VARIANTS",
    "BadPreferencesError",
    "BadRow",
    "ChatTemplate",
    "Comparisons",
    "EarlyStopping",
    "GoldFit",
    "LabelledPairs",
    "OverOptimisation",
    "Peak",
    "Preference",
    "PreferenceData",
    "PreferenceReport",
    "ProbeReport",
    "RatedData",
    "RatedSentence",
    "RewardEnsemble",
    "RewardModel",
    "RewardNetwork",
    "RewardTrainer",
    "RewardTrainingConfig",
    "SequenceClassificationReward",
    "VariantResult",
    "accuracy_estimate",
    "best_of_n_curve",
    "best_of_n_kl",
    "best_of_n_scores",
    "best_of_n_weights",
    "bradley_terry_loss",
    "calibration_curve",
    "centering_loss",
    "draw_comparisons",
    "evaluate_preferences",
    "fit_gold",
    "half_against_half",
    "label_pairs",
    "learning_curve",
    "load_adapters",
    "load_openings",
    "load_preferences",
    "load_ratings",
    "one_against_rest",
    "pair_accuracy",
    "parse_transcript",
    "pessimistic",
    "plot_calibration",
    "plot_learning_curve",
    "plot_scores",
    "preference_accuracy",
    "preferences_from_ratings",
    "probe",
    "review_answers",
    "save_adapters",
    "save_classifier",
    "save_preferences",
    "score_and_logprobs",
    "score_distribution",
    "shares_trunk",
    "split_preferences",
    "split_ratings",
    "transcript_text",
]

_HOMES = {
    "bradley_terry": (
        "bradley_terry_loss",
        "centering_loss",
        "preference_accuracy",
    ),
    "comparison_data": ("PreferenceData",),
    "early_stopping": ("EarlyStopping",),
    "ensemble": (
        "RewardEnsemble",
        "pessimistic",
    ),
    "genuine": ("review_answers",),
    "learning_curves": ("learning_curve",),
    "network": ("RewardNetwork",),
    "network_files": (
        "load_adapters",
        "save_adapters",
        "save_classifier",
    ),
    "noise_ceiling": (
        "half_against_half",
        "one_against_rest",
        "pair_accuracy",
    ),
    "overoptimisation": (
        "best_of_n_curve",
        "best_of_n_kl",
        "best_of_n_scores",
        "best_of_n_weights",
    ),
    "overoptimisation_curve": (
        "GoldFit",
        "OverOptimisation",
        "Peak",
        "fit_gold",
    ),
    "plots": (
        "plot_calibration",
        "plot_learning_curve",
        "plot_scores",
    ),
    "preference_chat": (
        "ChatTemplate",
        "parse_transcript",
        "transcript_text",
    ),
    "preference_evaluation": (
        "accuracy_estimate",
        "calibration_curve",
        "evaluate_preferences",
        "score_distribution",
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
    "probe_report": (
        "ProbeReport",
        "VariantResult",
    ),
    "probes": ("probe",),
    "rated_data": ("RatedData",),
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
    "shared": (
        "score_and_logprobs",
        "shares_trunk",
    ),
    "training": (
        "RewardTrainer",
        "RewardTrainingConfig",
    ),
    "variants": ("VARIANTS",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
