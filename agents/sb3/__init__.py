"""Stable-Baselines3 on text environments. The only room that knows it; nothing else of textenv does.

- `SB3VecEnv`: our vector environments as Stable-Baselines3 steps them.
- `LanguageModelActorCriticPolicy`: a language model as the policy of PPO, A2C and TRPO.
- `MaskableLanguageModelActorCriticPolicy`, `PackedMaskBuffer`: the same for sb3-contrib's MaskablePPO.
- `policy_kwargs`: what the policy is told, in a form that keeps frozen weights out of saved files.
- `attach`: the KL toll asks the policy that acts.
- `ResponseLog`: scores, KL and lengths of responses, per rollout, in Stable-Baselines3's logger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textenv.optional import require

require("stable_baselines3", "sb3", "textenv.agents.sb3")

from textenv.agents.sb3.networks import attach, policy_kwargs  # noqa: E402
from textenv.agents.sb3.policy import LanguageModelActorCriticPolicy  # noqa: E402
from textenv.agents.sb3.response_log import ResponseLog  # noqa: E402
from textenv.agents.sb3.vec_env import SB3VecEnv  # noqa: E402

if TYPE_CHECKING:
    from textenv.agents.sb3.maskable import MaskableLanguageModelActorCriticPolicy, PackedMaskBuffer

__all__ = [
    "LanguageModelActorCriticPolicy",
    "MaskableLanguageModelActorCriticPolicy",
    "PackedMaskBuffer",
    "ResponseLog",
    "SB3VecEnv",
    "attach",
    "policy_kwargs",
]


def __getattr__(name: str) -> Any:
    """Load what needs sb3-contrib when it is first asked for.

    Raises:
        ImportError: sb3-contrib is not installed.
    """
    if name in ("MaskableLanguageModelActorCriticPolicy", "PackedMaskBuffer"):
        require("sb3_contrib", "sb3", name)
        from textenv.agents.sb3 import maskable

        return getattr(maskable, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
