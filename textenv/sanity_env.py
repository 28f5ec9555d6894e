"""``textenv/Bandit-v0`` and its siblings: the tasks of `textenv.sanity` as environments. No model, nothing to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from textenv import stacks
from textenv.bytes import ByteTokenizer
from textenv.sanity import SANITY_TASKS
from textenv.task import TextTask


@dataclass(frozen=True, kw_only=True)
class SanityOptions:
    """The options of a sanity environment; the task itself is fixed by the id.

    Attributes:
        length_limit: see `TextTask`.
    """

    length_limit: str = "truncate"


def build_task(env_id: str, options: SanityOptions) -> TextTask:
    """A sanity task over byte ids. Its scorer is the `SanityTask`, where best and random return can be read."""
    sanity = SANITY_TASKS[env_id]
    return TextTask.build(
        prompts=sanity.prompts,
        scorer=sanity,
        tokenizer=ByteTokenizer(),
        vocab_size=sanity.vocab_size,
        stop_ids=sanity.stop_ids,
        max_response_tokens=sanity.max_response_tokens,
        length_limit=options.length_limit,
    )


def make_env(*, sanity_id: str, render_mode: str | None = "ansi", **options: Any) -> Any:
    """``gym.make("textenv/Bandit-v0", ...)``; the options are those of `SanityOptions` and `stacks.Shaping`.

    Args:
        sanity_id: the id itself, filled in by the registration.
        render_mode: see `TextGenerationEnv`.
        **options: see above.
    """
    sanity, shaping = stacks.split_options(sanity_id, options, SanityOptions, stacks.Shaping)
    return stacks.single(build_task(sanity_id, sanity), shaping, render_mode)


def make_vector_env(
    *,
    num_envs: int,
    sanity_id: str,
    render_mode: str | None = "ansi",
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> Any:
    """``gym.make_vec("textenv/Bandit-v0", num_envs, ...)``; the options are those of `make_env`."""
    sanity, shaping = stacks.split_options(sanity_id, options, SanityOptions, stacks.Shaping)
    return stacks.vector(build_task(sanity_id, sanity), shaping, num_envs, render_mode, autoreset_mode)
