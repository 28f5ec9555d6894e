"""``RLHF-v0``: a language model's vocabulary as actions, a reward model's score as the reward."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from textenv import stacks
from textenv.optional import require
from textenv.prompts import Curriculum, Prompt, PromptSet, is_source, load_prompts
from textenv.task import TextTask

SENTENCE_ENDS = (".", "!", "?")
"""Where a film-review sentence ends."""

SELECTION = ("weights", "curriculum", "order", "split", "eval_fraction", "overlong")
"""Options that `TextTask.build` takes as they are."""

COLUMNS = {
    "prompt_column": "prompt",
    "context_columns": "context",
    "weight_column": "weight",
    "dataset_split": "split",
    "dataset_config": "config",
}
"""Options that `load_prompts` takes under other names."""


@dataclass(frozen=True, kw_only=True)
class RLHFOptions:
    """The task of ``RLHF-v0``.

    Attributes:
        model: whose tokenizer and vocabulary make the actions, and who is the reference: ``"smollm2-135m"`` (embedded),
            a folder, or a hub id.
        prompts: texts, token ids, chat messages or records; or what `load_prompts` reads: a file's path, a saved
            dataset's folder, the id of a dataset on the hub, a `datasets.Dataset`, a list of dicts. None for openings
            of film reviews.
        prompt_column: the column that holds the prompts, of a file or dataset with columns.
        context_columns: columns that go along to the scorer, see `load_prompts`.
        weight_column: a column of weights, see `load_prompts`.
        dataset_split: which split of a dataset that has several.
        dataset_config: which configuration of a dataset on the hub that has several.
        weights: one per prompt; see `PromptSet.encode`.
        curriculum: weights over time; see `textenv.prompts.schedule.Schedule`.
        order: ``"random"``, or ``"sequential"`` for evaluation; see `textenv.prompts.schedule.Schedule`.
        split: ``"train"`` or ``"eval"``: one side of the prompts, by their texts; None: all. See `PromptSet.split`.
        eval_fraction: share of the evaluation side.
        overlong: ``"error"``, ``"drop"``, ``"cut-left"`` or ``"cut-right"``: what is done about prompts that are too
            long; see `TextTask.build`.
        scorer: ``scorer(prompts, responses, **context) -> scores``; None for the embedded reward model, which learned
            from human ratings how positive a film-review sentence is.
        max_prompt_tokens: P; None for the longest prompt.
        max_response_tokens: T.
        stop: texts of single tokens that end a response, beside the model's own end-of-sequence ids. None: the ends
            of a sentence for the embedded film reviews, nothing more for prompts of your own.
        temperature: of the reference's distribution, while no agent brings its own.
        device: where the reference and the embedded reward model run.
        dtype: their arithmetic, ``"float32"`` or ``"bfloat16"``.
        length_limit: see `TextTask`.
        scorer_errors: see `TextTask`.
    """

    model: str | os.PathLike[str] = "smollm2-135m"
    prompts: Any = None
    prompt_column: str = "prompt"
    context_columns: Sequence[str] = ()
    weight_column: str | None = None
    dataset_split: str | None = None
    dataset_config: str | None = None
    weights: Sequence[float] | None = None
    curriculum: Curriculum | None = None
    order: str = "random"
    split: str | None = None
    eval_fraction: float = 0.1
    overlong: str = "error"
    scorer: Callable[..., Any] | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int = 24
    stop: Sequence[str] | None = None
    temperature: float = 1.0
    device: str = "cpu"
    dtype: str = "float32"
    length_limit: str = "truncate"
    scorer_errors: str = "raise"


def make_env(*, render_mode: str | None = "ansi", **options: Any) -> Any:
    """``gym.make("RLHF-v0", ...)``; the options are those of `RLHFOptions` and `stacks.Shaping`."""
    task, shaping = _parts(options)
    return stacks.single(task, shaping, render_mode)


def make_vector_env(
    *,
    num_envs: int,
    render_mode: str | None = "ansi",
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> Any:
    """``gym.make_vec("RLHF-v0", num_envs, ...)``; the options are those of `RLHFOptions` and `stacks.Shaping`."""
    task, shaping = _parts(options)
    return stacks.vector(task, shaping, num_envs, render_mode, autoreset_mode)


def _parts(options: dict[str, Any]) -> tuple[TextTask, stacks.Shaping]:
    given, shaping = stacks.split_options("RLHF-v0", {"kl_coef": 0.05, **options}, RLHFOptions, stacks.Shaping)
    return build_task(given), shaping


def build_task(options: RLHFOptions) -> TextTask:
    """Load the tokenizer, encode the prompts, and name the models, whose weights are loaded when they are first needed.

    Raises:
        ValueError: unknown model, prompts that cannot be used, budgets beyond the model's context, stops that are no
            tokens.
        ImportError: torch or transformers is missing.
    """
    require("torch", "train", "RLHF-v0")
    require("transformers", "train", "RLHF-v0")
    from textenv.lm import LazyLanguageModel, load_tokenizer
    from textenv.rewards import RewardModel

    tokenizer = load_tokenizer(options.model)
    stop = options.stop if options.stop is not None else SENTENCE_ENDS if options.prompts is None else ()
    if isinstance(stop, str):
        raise ValueError(f"`stop` should be a list of texts, got the single text {stop!r}. Write stop=[{stop!r}].")
    return TextTask.build(
        prompts=read_prompts(options),
        scorer=options.scorer or RewardModel.default(device=options.device, dtype=options.dtype),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        stop_ids=sorted({*tokenizer.stop_ids, *tokenizer.ids_of(stop)}),
        max_response_tokens=options.max_response_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        pad_id=tokenizer.pad_id,
        reference=LazyLanguageModel(
            options.model,
            options.device,
            options.dtype,
            named_size=tokenizer.named_size,
            temperature=options.temperature,
        ),
        length_limit=options.length_limit,
        scorer_errors=options.scorer_errors,
        **{name: getattr(options, name) for name in SELECTION},
    )


def read_prompts(options: RLHFOptions) -> Sequence[Prompt] | PromptSet:
    """Prompts as they were given, or read from where they are; None: openings of film reviews.

    Raises:
        ValueError: see `load_prompts`; or columns are named for prompts that have none.
    """
    told = {name: getattr(options, name) for name in COLUMNS}
    if is_source(options.prompts):
        return load_prompts(options.prompts, **{COLUMNS[name]: value for name, value in told.items()})
    for name, value in told.items():
        if value not in (getattr(RLHFOptions, name), []):
            raise ValueError(
                f"`{name}` should be given with a file, a dataset or a list of dicts, got {value!r} beside prompts "
                "without columns, where it would be ignored. Leave it out, or pass prompts=[{...}, ...]."
            )
    if options.prompts is None:
        from textenv.rewards.ratings import load_openings

        return load_openings()
    prompts: Sequence[Prompt] | PromptSet = options.prompts
    return prompts
