"""``textenv/Toy-v0``: an enumerable language as an environment, to measure an agent against the optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from textenv import stacks
from textenv.task import TextTask
from textenv.toy import ToyLanguage, ToyTokenizer, standard_toy


@dataclass(frozen=True, kw_only=True)
class ToyOptions:
    """The task of ``textenv/Toy-v0``.

    Attributes:
        language: None for the standard toy: 6 tokens, token 0 stops, at most 8 tokens, +0.5 for each token 3, -0.5 for
            each token 5, -1 for never stopping. Best return 3.5 (seven 3s and a stop); a uniform policy gets about
            -0.23.
        length_limit: see `TextTask`.
    """

    language: ToyLanguage | None = None
    length_limit: str = "truncate"


def build_task(options: ToyOptions) -> TextTask:
    """The language as a text task: its prompt is one stop token, its text the token ids in decimal."""
    language = options.language or standard_toy()
    return TextTask.build(
        prompts=[[language.stop_id]],
        scorer=language.scorer,
        tokenizer=ToyTokenizer(),
        vocab_size=language.vocab_size,
        stop_ids=language.stop_ids,
        max_response_tokens=language.horizon,
        reference=language.reference,
        length_limit=options.length_limit,
    )


def make_env(*, render_mode: str | None = "ansi", **options: Any) -> Any:
    """``gym.make("textenv/Toy-v0", ...)``; the options are those of `ToyOptions` and `stacks.Shaping`."""
    toy, shaping = stacks.split_options("textenv/Toy-v0", options, ToyOptions, stacks.Shaping)
    return stacks.single(build_task(toy), shaping, render_mode)


def make_vector_env(
    *,
    num_envs: int,
    render_mode: str | None = "ansi",
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> Any:
    """``gym.make_vec("textenv/Toy-v0", num_envs, ...)``; the options are those of `make_env`."""
    toy, shaping = stacks.split_options("textenv/Toy-v0", options, ToyOptions, stacks.Shaping)
    return stacks.vector(build_task(toy), shaping, num_envs, render_mode, autoreset_mode)
