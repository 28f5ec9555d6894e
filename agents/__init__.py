"""Agents that plug into text environments. They load torch; `textenv` itself does not."""

from textenv.optional import require

for _module in ("torch", "transformers", "peft", "jaxtyping", "safetensors"):
    require(_module, "train", "textenv.agents")

from textenv.agents.alarm import Alarm, AlarmLimits, Notice, RewardHackingWarning  # noqa: E402
from textenv.agents.best_of_n import BestOfN  # noqa: E402
from textenv.agents.config import PPOConfig  # noqa: E402
from textenv.agents.dpo import DPO  # noqa: E402
from textenv.agents.dpo_config import DPOConfig  # noqa: E402
from textenv.agents.expert_iteration import ExpertIteration, ExpertIterationConfig  # noqa: E402
from textenv.agents.grpo import GRPO, GRPOConfig  # noqa: E402
from textenv.agents.language_model import LanguageModelPolicy  # noqa: E402
from textenv.agents.nll import Likelihood, likelihood  # noqa: E402
from textenv.agents.on_policy import OnPolicy  # noqa: E402
from textenv.agents.on_policy_config import OnPolicyConfig  # noqa: E402
from textenv.agents.online_dpo import OnlineDPO, OnlineDPOConfig  # noqa: E402
from textenv.agents.policy import Policy  # noqa: E402
from textenv.agents.ppo import PPO  # noqa: E402
from textenv.agents.preferences import sample_preferences  # noqa: E402
from textenv.agents.presets import Preset  # noqa: E402
from textenv.agents.reinforce import REINFORCE, REINFORCEConfig  # noqa: E402
from textenv.agents.rloo import RLOO, RLOOConfig  # noqa: E402
from textenv.agents.sft import SFT  # noqa: E402
from textenv.agents.sft_config import SFTConfig  # noqa: E402
from textenv.agents.table import TablePolicy  # noqa: E402
from textenv.agents.tiny import tiny_transformer  # noqa: E402
from textenv.agents.training import attach  # noqa: E402

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "REINFORCE",
    "RLOO",
    "SFT",
    "Alarm",
    "AlarmLimits",
    "BestOfN",
    "DPOConfig",
    "ExpertIteration",
    "ExpertIterationConfig",
    "GRPOConfig",
    "LanguageModelPolicy",
    "Likelihood",
    "Notice",
    "OnPolicy",
    "OnPolicyConfig",
    "OnlineDPO",
    "OnlineDPOConfig",
    "PPOConfig",
    "Policy",
    "Preset",
    "REINFORCEConfig",
    "RLOOConfig",
    "RewardHackingWarning",
    "SFTConfig",
    "TablePolicy",
    "attach",
    "likelihood",
    "sample_preferences",
    "tiny_transformer",
]
