"""RLHF as a Gymnasium environment: the state is a text prefix, an action is a token, a scorer judges what was written.

Importing textenv registers ``RLHF-v0``, ``textenv/Toy-v0`` and the sanity environments of `textenv.sanity`. It needs
numpy and Gymnasium only; models, agents and scorers live in `textenv.lm`, `textenv.agents` and `textenv.rewards`, and
load torch when they are imported.
"""

from textenv.demonstrations import DemonstrationSet
from textenv.env import TextGenerationEnv
from textenv.evaluation import evaluate
from textenv.evaluation_record import Evaluation
from textenv.mdp import TokenMDP
from textenv.minari_data import demonstrations_from_minari, preferences_from_minari
from textenv.minari_recording import record_minari
from textenv.preference_set import PreferenceSet
from textenv.prompts import Demonstration, PromptRecord, PromptSet, load_demonstrations, load_prompts
from textenv.registration import register_envs
from textenv.replay import Replay, attach_policy, replay
from textenv.scoring import ScorerError
from textenv.task import TextTask
from textenv.vector_env import TextGenerationVectorEnv

__version__ = "0.1.0"

__all__ = [
    "Demonstration",
    "DemonstrationSet",
    "Evaluation",
    "PreferenceSet",
    "PromptRecord",
    "PromptSet",
    "Replay",
    "ScorerError",
    "TextGenerationEnv",
    "TextGenerationVectorEnv",
    "TextTask",
    "TokenMDP",
    "attach_policy",
    "demonstrations_from_minari",
    "evaluate",
    "load_demonstrations",
    "load_prompts",
    "preferences_from_minari",
    "record_minari",
    "replay",
]

register_envs()
