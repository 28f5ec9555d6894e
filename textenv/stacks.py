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
        kl_estimator: its `estimator`.
        target_kl: nats per response that its controller steers to.
        kl_episodes_per_update: its `episodes_per_update`: the controller moves once per so many finished episodes.
        min_length: of `MinLength`: how many tokens come before the first stop id.
        missing_eos_penalty: what `MissingEOSPenalty` subtracts from the score of a response cut by the budget.
        missing_eos_mode: its `mode`: ``"subtract"``, or ``"replace"`` such a score by the negative penalty.
        normalize_score: apply `NormalizeScore`, below the penalties.
        clip_score: bound of `ClipScore` on both sides, above `NormalizeScore` and below the penalties.
        length_penalty: what `LengthPenalty` subtracts from the score for each token.
    """

    kl_coef: float | None = None
    kl_estimator: str = "k1"
    target_kl: float | None = None
    kl_episodes_per_update: int | None = None
    min_length: int | None = None
    missing_eos_penalty: float | None = None
    missing_eos_mode: str = "subtract"
    normalize_score: bool = False
    clip_score: float | None = None
    length_penalty: float | None = None

    def __post_init__(self) -> None:
        """Refuse a controller that has nothing to steer, and bounds that no score would survive."""
        if self.target_kl is not None and self.kl_coef is None:
            raise ValueError(f"`target_kl`={self.target_kl} needs a `kl_coef` to start from, got None.")
        if self.kl_episodes_per_update is not None and self.target_kl is None:
            raise ValueError(
                f"`kl_episodes_per_update`={self.kl_episodes_per_update} needs a `target_kl` to steer to, got None."
            )
        if self.missing_eos_mode != "subtract" and self.missing_eos_penalty is None:
            raise ValueError(f"`missing_eos_mode`={self.missing_eos_mode!r} needs a `missing_eos_penalty`, got None.")
        if self.kl_estimator != "k1" and self.kl_coef is None:
            raise ValueError(f"`kl_estimator`={self.kl_estimator!r} needs a `kl_coef` to charge, got None.")
        if self.clip_score is not None and not self.clip_score > 0:
            raise ValueError(
                f"`clip_score` should be above 0, got {self.clip_score!r}. Scores are clipped to -clip_score and "
                "clip_score: every one would become the same. None leaves them as they are."
            )

    def wrap(self, env: Any, wrappers: Any) -> Any:
        """Stack the wrappers of a namespace (`textenv.wrappers` or `textenv.wrappers.vector`) on an environment."""
        if self.min_length is not None:
            env = wrappers.MinLength(env, self.min_length)
        if self.normalize_score:
            env = wrappers.NormalizeScore(env)
        if self.clip_score is not None:
            env = wrappers.ClipScore(env, -self.clip_score, self.clip_score)
        if self.missing_eos_penalty is not None:
            env = wrappers.MissingEOSPenalty(env, self.missing_eos_penalty, self.missing_eos_mode)
        if self.length_penalty is not None:
            env = wrappers.LengthPenalty(env, self.length_penalty)
        if self.kl_coef is not None:
            env = wrappers.KLPenalty(
                env,
                kl_coef=self.kl_coef,
                target_kl=self.target_kl,
                episodes_per_update=self.kl_episodes_per_update,
                estimator=self.kl_estimator,
            )
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
            raise TypeError(  # in Python's own words, for which libraries look when they try an option out
                f"{env_id} got an unexpected keyword argument {name!r}: it has no such option.{hint} Known are "
                f"{', '.join(known)}."
            )
    return [kind(**{k: v for k, v in options.items() if k in names}) for kind, names in zip(kinds, fields, strict=True)]
