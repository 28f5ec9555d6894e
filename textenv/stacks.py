"""The wrappers that an id applies by itself: keyword arguments in, a stack of single or vector wrappers out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from textenv.task import TextTask


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Reward shaping of an id. None leaves a wrapper out.

    Attributes:
        kl_coef: coefficient of `KLPenalty`.
        target_kl: nats per response that its controller steers to.
        missing_eos_penalty: what `MissingEOSPenalty` subtracts from the score of a response cut by the budget.
        normalize_score: apply `NormalizeScore`, below the penalty.
    """

    kl_coef: float | None = None
    target_kl: float | None = None
    missing_eos_penalty: float | None = None
    normalize_score: bool = False

    def __post_init__(self) -> None:
        """Refuse a controller that has nothing to steer."""
        if self.target_kl is not None and self.kl_coef is None:
            raise ValueError(f"`target_kl`={self.target_kl} needs a `kl_coef` to start from, got None.")

    def wrap(self, env: Any, wrappers: Any) -> Any:
        """Stack the wrappers of a namespace (`textenv.wrappers` or `textenv.wrappers.vector`) on an environment."""
        if self.normalize_score:
            env = wrappers.NormalizeScore(env)
        if self.missing_eos_penalty is not None:
            env = wrappers.MissingEOSPenalty(env, self.missing_eos_penalty)
        if self.kl_coef is not None:
            env = wrappers.KLPenalty(env, kl_coef=self.kl_coef, target_kl=self.target_kl)
        return env


def single(task: TextTask, shaping: Shaping, render_mode: str | None) -> Any:
    """A single environment with its wrappers."""
    from textenv import wrappers
    from textenv.env import TextGenerationEnv

    return shaping.wrap(TextGenerationEnv(task, render_mode=render_mode), wrappers)


def vector(task: TextTask, shaping: Shaping, num_envs: int, render_mode: str | None, autoreset_mode: Any) -> Any:
    """A vector environment with its wrappers."""
    from textenv.vector_env import TextGenerationVectorEnv
    from textenv.wrappers import vector as wrappers

    envs = TextGenerationVectorEnv(num_envs, task, render_mode=render_mode, autoreset_mode=autoreset_mode)
    return shaping.wrap(envs, wrappers)


def split_options(env_id: str, options: Mapping[str, Any], *kinds: type) -> list[Any]:
    """Sort keyword arguments into dataclasses by field name.

    Raises:
        TypeError: an option that none of them has; the nearest known one is named.
    """
    fields = [[field.name for field in dataclasses.fields(kind)] for kind in kinds]
    known = sorted(name for names in fields for name in names)
    for name in options:
        if name == "max_episode_steps":
            raise TypeError(
                f"{env_id} takes its episode length from max_response_tokens, got max_episode_steps={options[name]!r}. "
                "The budget is part of the task: wrappers and agents need to know it."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{env_id} has no option {name!r}.{hint} Known are {', '.join(known)}.")
    return [kind(**{k: v for k, v in options.items() if k in names}) for kind, names in zip(kinds, fields, strict=True)]
