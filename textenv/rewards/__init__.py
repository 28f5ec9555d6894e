"""Where scores come from: reward models learned from people, checks, judges, other machines, and sums of them.

Names are imported when first used, so that ratings and prompts can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.rewards.answers import Normalize, as_number, numbers_in
    from textenv.rewards.bradley_terry import bradley_terry_loss, preference_accuracy
    from textenv.rewards.comparisons import Comparison, Labels
    from textenv.rewards.judge import Judge, Reply
    from textenv.rewards.judge_comparisons import ComparingJudge
    from textenv.rewards.judge_scores import ScoringJudge
    from textenv.rewards.preferences import Preference
    from textenv.rewards.python_check import PythonCheck
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
    from textenv.rewards.reward_model import RewardModel
    from textenv.rewards.sequence_classification import SequenceClassificationReward
    from textenv.rewards.shared import score_and_logprobs, shares_trunk
    from textenv.rewards.verifiable import ExactMatch, NumericMatch, RegexMatch
    from textenv.rewards.weighted import WeightedReward

__all__ = [
    "ComparingJudge",
    "Comparison",
    "Comparisons",
    "ExactMatch",
    "Judge",
    "Labels",
    "Normalize",
    "NumericMatch",
    "Preference",
    "PythonCheck",
    "RatedSentence",
    "ReasoningTasks",
    "RegexMatch",
    "RemoteScorer",
    "Reply",
    "RewardModel",
    "ScorerServer",
    "ScoringJudge",
    "SequenceClassificationReward",
    "WeightedReward",
    "as_number",
    "bradley_terry_loss",
    "draw_comparisons",
    "load_openings",
    "load_ratings",
    "numbers_in",
    "preference_accuracy",
    "score_and_logprobs",
    "serve_scorer",
    "shares_trunk",
    "split_ratings",
]

_HOMES = {
    "answers": ("Normalize", "as_number", "numbers_in"),
    "comparisons": ("Comparison", "Labels"),
    "judge": ("Judge", "Reply"),
    "judge_comparisons": ("ComparingJudge",),
    "judge_scores": ("ScoringJudge",),
    "python_check": ("PythonCheck",),
    "reasoning": ("ReasoningTasks",),
    "remote": ("RemoteScorer",),
    "remote_server": ("ScorerServer", "serve_scorer"),
    "verifiable": ("ExactMatch", "NumericMatch", "RegexMatch"),
    "weighted": ("WeightedReward",),
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
