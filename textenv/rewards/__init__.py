"""Where scores come from: reward models learned from people, checks, judges, other machines, and sums of them.

Names are imported when first used, so that ratings and prompts can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.rewards.answers import Normalize, as_number, numbers_in
    from textenv.rewards.bradley_terry import bradley_terry_loss, centering_loss, preference_accuracy
    from textenv.rewards.comparison_data import PreferenceData
    from textenv.rewards.comparisons import Comparison, Labels
    from textenv.rewards.early_stopping import EarlyStopping
    from textenv.rewards.ensemble import RewardEnsemble, pessimistic
    from textenv.rewards.film_reviews import adapted_reward, film_review_head, film_review_reward
    from textenv.rewards.genuine import review_answers
    from textenv.rewards.judge import Judge, Reply
    from textenv.rewards.judge_comparisons import ComparingJudge
    from textenv.rewards.judge_scores import ScoringJudge
    from textenv.rewards.learning_curves import learning_curve
    from textenv.rewards.linear_head import fit_head_to
    from textenv.rewards.network import RewardNetwork
    from textenv.rewards.network_files import film_review_network, load_adapters, save_adapters, save_classifier
    from textenv.rewards.noise_ceiling import half_against_half, one_against_rest, pair_accuracy
    from textenv.rewards.overoptimisation import (
        best_of_n_curve,
        best_of_n_kl,
        best_of_n_logprobs,
        best_of_n_scores,
        best_of_n_weights,
    )
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
    from textenv.rewards.preferences import Preference, SampledIds
    from textenv.rewards.probe_report import ProbeReport, VariantResult
    from textenv.rewards.probes import probe
    from textenv.rewards.python_check import PythonCheck
    from textenv.rewards.rated_data import RatedData
    from textenv.rewards.ratings import (
        Comparisons,
        RatedSentence,
        draw_comparisons,
        load_openings,
        load_ratings,
        split_ratings,
    )
    from textenv.rewards.reasoning import ReasoningTasks
    from textenv.rewards.remote import RemoteScorer
    from textenv.rewards.remote_server import ScorerServer, serve_scorer
    from textenv.rewards.reviews import load_review_demonstrations, review_demonstrations
    from textenv.rewards.reward_model import RewardModel
    from textenv.rewards.sequence_classification import SequenceClassificationReward
    from textenv.rewards.shared import score_and_logprobs, shares_trunk
    from textenv.rewards.training import RewardTrainer, RewardTrainingConfig
    from textenv.rewards.variants import VARIANTS
    from textenv.rewards.verifiable import ExactMatch, NumericMatch, RegexMatch
    from textenv.rewards.weighted import WeightedReward

__all__ = [
    "VARIANTS",
    "BadPreferencesError",
    "BadRow",
    "ChatTemplate",
    "ComparingJudge",
    "Comparison",
    "Comparisons",
    "EarlyStopping",
    "ExactMatch",
    "GoldFit",
    "Judge",
    "LabelledPairs",
    "Labels",
    "Normalize",
    "NumericMatch",
    "OverOptimisation",
    "Peak",
    "Preference",
    "PreferenceData",
    "PreferenceReport",
    "ProbeReport",
    "PythonCheck",
    "RatedData",
    "RatedSentence",
    "ReasoningTasks",
    "RegexMatch",
    "RemoteScorer",
    "Reply",
    "RewardEnsemble",
    "RewardModel",
    "RewardNetwork",
    "RewardTrainer",
    "RewardTrainingConfig",
    "SampledIds",
    "ScorerServer",
    "ScoringJudge",
    "SequenceClassificationReward",
    "VariantResult",
    "WeightedReward",
    "accuracy_estimate",
    "adapted_reward",
    "as_number",
    "best_of_n_curve",
    "best_of_n_kl",
    "best_of_n_logprobs",
    "best_of_n_scores",
    "best_of_n_weights",
    "bradley_terry_loss",
    "calibration_curve",
    "centering_loss",
    "draw_comparisons",
    "evaluate_preferences",
    "film_review_head",
    "film_review_network",
    "film_review_reward",
    "fit_gold",
    "fit_head_to",
    "half_against_half",
    "label_pairs",
    "learning_curve",
    "load_adapters",
    "load_openings",
    "load_preferences",
    "load_ratings",
    "load_review_demonstrations",
    "numbers_in",
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
    "review_demonstrations",
    "save_adapters",
    "save_classifier",
    "save_preferences",
    "score_and_logprobs",
    "score_distribution",
    "serve_scorer",
    "shares_trunk",
    "split_preferences",
    "split_ratings",
    "transcript_text",
]

_HOMES = {
    "answers": ("Normalize", "as_number", "numbers_in"),
    "bradley_terry": ("bradley_terry_loss", "centering_loss", "preference_accuracy"),
    "comparison_data": ("PreferenceData",),
    "comparisons": ("Comparison", "Labels"),
    "early_stopping": ("EarlyStopping",),
    "ensemble": ("RewardEnsemble", "pessimistic"),
    "film_reviews": ("adapted_reward", "film_review_head", "film_review_reward"),
    "genuine": ("review_answers",),
    "judge": ("Judge", "Reply"),
    "judge_comparisons": ("ComparingJudge",),
    "judge_scores": ("ScoringJudge",),
    "learning_curves": ("learning_curve",),
    "linear_head": ("fit_head_to",),
    "network": ("RewardNetwork",),
    "network_files": ("film_review_network", "load_adapters", "save_adapters", "save_classifier"),
    "noise_ceiling": ("half_against_half", "one_against_rest", "pair_accuracy"),
    "overoptimisation": (
        "best_of_n_curve",
        "best_of_n_kl",
        "best_of_n_logprobs",
        "best_of_n_scores",
        "best_of_n_weights",
    ),
    "overoptimisation_curve": ("GoldFit", "OverOptimisation", "Peak", "fit_gold"),
    "plots": ("plot_calibration", "plot_learning_curve", "plot_scores"),
    "preference_chat": ("ChatTemplate", "parse_transcript", "transcript_text"),
    "preference_evaluation": ("accuracy_estimate", "calibration_curve", "evaluate_preferences", "score_distribution"),
    "preference_files": ("load_preferences", "save_preferences", "split_preferences"),
    "preference_report": ("BadPreferencesError", "BadRow", "PreferenceReport"),
    "preference_sources": ("LabelledPairs", "label_pairs", "preferences_from_ratings"),
    "preferences": ("Preference", "SampledIds"),
    "probe_report": ("ProbeReport", "VariantResult"),
    "probes": ("probe",),
    "python_check": ("PythonCheck",),
    "rated_data": ("RatedData",),
    "ratings": ("Comparisons", "RatedSentence", "draw_comparisons", "load_openings", "load_ratings", "split_ratings"),
    "reasoning": ("ReasoningTasks",),
    "remote": ("RemoteScorer",),
    "remote_server": ("ScorerServer", "serve_scorer"),
    "reviews": ("load_review_demonstrations", "review_demonstrations"),
    "reward_model": ("RewardModel",),
    "sequence_classification": ("SequenceClassificationReward",),
    "shared": ("score_and_logprobs", "shares_trunk"),
    "training": ("RewardTrainer", "RewardTrainingConfig"),
    "variants": ("VARIANTS",),
    "verifiable": ("ExactMatch", "NumericMatch", "RegexMatch"),
    "weighted": ("WeightedReward",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
