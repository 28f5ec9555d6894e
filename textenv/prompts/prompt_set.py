"""`PromptSet`: prompts encoded and checked once, ready to be drawn."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from textenv.prompts.encoding import EncodedPrompt, Prompt, PromptRecord, Tokenizer, encode_prompt, name_of
from textenv.prompts.overlong import fit
from textenv.prompts.schedule import Curriculum, Schedule

RESERVED = ("prompts", "responses")
"""What a scorer's first two arguments are called: no columns of context."""


@dataclass(frozen=True, repr=False, eq=False)
class PromptSet:
    """Encoded prompts, ready to be drawn.

    Attributes:
        prompts: text, ids and context of each.
        names: what each is called in messages, with its file and line where it came from one.
        schedule: which of them comes next.
        columns: names of the context columns, which every prompt has.
        dropped: how many over-long prompts were left out when the set was made.
        cut: how many were cut.
    """

    prompts: tuple[EncodedPrompt, ...]
    names: tuple[str, ...]
    schedule: Schedule
    columns: tuple[str, ...] = ()
    dropped: int = 0
    cut: int = 0

    @classmethod
    def encode(
        cls,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        vocab_size: int,
        max_prompt_tokens: int | None = None,
        *,
        weights: ArrayLike | None = None,
        curriculum: Curriculum | None = None,
        order: str = "random",
        overlong: str = "error",
    ) -> PromptSet:
        """Encode prompts and refuse those that cannot be used, before any work is done.

        Args:
            prompts: texts, token ids, chat messages or records, mixed as one likes.
            tokenizer: encodes the texts; texts of id prompts come from its `decode`.
            vocab_size: V.
            max_prompt_tokens: P, or None for the longest of the prompts.
            weights: one per prompt, at least 0; prompts are drawn in proportion to them. None: those of the records, or
                all alike.
            curriculum: weights over time, see `Schedule`.
            order: ``"random"``, or ``"sequential"`` for evaluation, see `Schedule`.
            overlong: ``"error"``, ``"drop"``, ``"cut-left"`` or ``"cut-right"``: what is done about prompts over
                `max_prompt_tokens`, see `textenv.prompts.overlong.fit`.

        Raises:
            ValueError: no prompts, one that is empty or over the budget, ids outside the vocabulary, context that some
                prompts lack, or weights that cannot be used; the row is named.
        """
        _check_sequence(prompts)
        names = [name_of(prompt, f"prompts[{row}]") for row, prompt in enumerate(prompts)]
        encoded = [encode_prompt(p, tokenizer, vocab_size, f"prompts[{row}]") for row, p in enumerate(prompts)]
        columns = _shared_columns(encoded, names)
        if (recorded := _recorded_weights(prompts, names)) is not None:
            if weights is not None:
                raise ValueError(
                    "`weights` and the weights of the prompt records both say how often prompts are drawn. Leave one "
                    "of them out."
                )
            weights = recorded
        fitted = fit(encoded, names, tokenizer, max_prompt_tokens, overlong)
        schedule = Schedule(tuple(fitted.rows), len(encoded), weights, curriculum, order)
        kept = tuple(names[row] for row in fitted.rows)
        dropped = len(encoded) - len(fitted.prompts)
        return cls(tuple(fitted.prompts), kept, schedule, columns, dropped, fitted.cut)

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self.prompts)

    def __repr__(self) -> str:
        counted = f"{len(self)} prompts of at most {self.longest} tokens, {self.schedule.order} order"
        context = f", context {', '.join(self.columns)}" if self.columns else ""
        return f"PromptSet({counted}{context}, {self.dropped} dropped and {self.cut} cut for their length)"

    @property
    def texts(self) -> tuple[str, ...]:
        """What the scorer and the infos show of each."""
        return tuple(prompt.text for prompt in self.prompts)

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of each, 1 to P of them."""
        return tuple(prompt.ids for prompt in self.prompts)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def name_of_longest(self) -> str:
        """What the longest prompt is called in messages."""
        return max(zip(self.prompts, self.names, strict=True), key=lambda pair: len(pair[0].ids))[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of texts and ids in their order: two sets of one fingerprint are drawn from alike."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.text, prompt.ids]).encode())
        return digest.hexdigest()[:16]

    def draw(self, rng: np.random.Generator, drawn: int = 0, row: int = 0, num_rows: int = 1) -> EncodedPrompt:
        """The prompt that comes next.

        Args:
            rng: the row's generator.
            drawn: prompts that the row has drawn since it was seeded.
            row: which row it is, of
            num_rows: N.
        """
        return self.prompts[self.schedule.choose(rng, drawn, row, num_rows)]

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[PromptSet, PromptSet]:
        """Prompts to train on, and prompts to evaluate on. No text is on both sides.

        A prompt's side follows from its text and the seed alone, so it stays there when others come or go.

        Args:
            fraction: expected share of the evaluation side.
            seed: another one splits otherwise.

        Raises:
            ValueError: a fraction outside (0, 1), or a side that would have no prompts.
        """
        held = splits([prompt.text for prompt in self.prompts], fraction, seed)
        return self._subset([not h for h in held]), self._subset(held)

    def _subset(self, keep: Sequence[bool]) -> PromptSet:
        places = [place for place, kept in enumerate(keep) if kept]
        return dataclasses.replace(
            self,
            prompts=tuple(self.prompts[place] for place in places),
            names=tuple(self.names[place] for place in places),
            schedule=self.schedule.of(places),
        )


def check_context(prompt: EncodedPrompt, columns: Iterable[str], name: str) -> None:
    """Refuse a prompt whose context is not what the scorer will be given.

    Raises:
        ValueError: a column is missing, or is one that the others do not have. `name` says which prompt it is.
    """
    columns = set(columns)
    missing, more = sorted(columns - set(prompt.context)), sorted(set(prompt.context) - columns)
    if missing or more:
        raise ValueError(
            f"{name} should have the context columns {sorted(columns)} as the other prompts do, got "
            f"{sorted(prompt.context)}. A scorer is given {'a value' if missing else 'columns'} for every prompt "
            "or for none. Pass PromptRecord(prompt, {"
            + ", ".join(f"{column!r}: ..." for column in sorted(columns))
            + "}), or leave the column out for all."
        )


def _check_sequence(prompts: Sequence[Prompt]) -> None:
    if isinstance(prompts, str):
        raise ValueError(
            f"`prompts` should be a list of texts, got the single text {prompts!r}, which would become one prompt "
            f"per character. Write prompts=[{prompts!r}], or load_prompts({prompts!r}) where it names a file."
        )
    if isinstance(prompts, Mapping) or (len(prompts) and all(isinstance(p, Mapping) for p in prompts)):
        raise ValueError(
            f"`prompts` should be a list of prompts, got {'a dict' if isinstance(prompts, Mapping) else 'dicts'}. One "
            "chat is one prompt: write prompts=[messages]. Rows of columns go through load_prompts(rows, "
            "prompt='the column')."
        )
    if len(prompts) == 0:
        raise ValueError(
            "`prompts` should hold at least one prompt, got none. An episode starts from a prompt; check the file "
            "or filter that they came from."
        )


def _shared_columns(encoded: Sequence[EncodedPrompt], names: Sequence[str]) -> tuple[str, ...]:
    """The columns of context that all prompts have."""
    every = {column: None for prompt in encoded for column in prompt.context}  # in the order of their appearance
    for prompt, name in zip(encoded, names, strict=True):
        if len(prompt.context) != len(every):
            check_context(prompt, every, name)
    wrong = [column for column in every if column in RESERVED or not isinstance(column, str)]
    if wrong:
        raise ValueError(
            f"Context columns should have other names than {RESERVED}, which are a scorer's own arguments, got "
            f"{wrong[0]!r}. Rename the column."
        )
    return tuple(every)


def _recorded_weights(prompts: Sequence[Prompt], names: Sequence[str]) -> list[float] | None:
    """The weights that records carry, None where none does."""
    weights = [prompt.weight if isinstance(prompt, PromptRecord) else None for prompt in prompts]
    if all(weight is None for weight in weights):
        return None
    found: list[float] = []
    for weight, name in zip(weights, names, strict=True):
        if weight is None:
            raise ValueError(f"{name} should have a weight as other prompts do, got none. Use 1 for an ordinary one.")
        found.append(weight)
    return found


def splits(texts: Sequence[str], fraction: float, seed: int) -> list[bool]:
    """Which of some prompts are held out, by their texts; see `PromptSet.split`.

    Raises:
        ValueError: a fraction outside (0, 1), or a side that would have no prompts.
    """
    if not 0 < fraction < 1:
        raise ValueError(
            f"The fraction of prompts for evaluation should be between 0 and 1, got {fraction!r}. One side would "
            "be empty."
        )
    held = [_uniform(text, seed) < fraction for text in texts]
    if all(held) or not any(held):
        empty = "training" if all(held) else "evaluation"
        raise ValueError(
            f"Both sides of a split should have prompts, got none for {empty}: of {len(texts)} prompts a share of "
            f"{fraction} is expected for evaluation, and chance (by seed {seed}) left that side empty. Choose "
            "another fraction or seed, or bring more prompts."
        )
    return held


def _uniform(text: str, seed: int) -> float:
    """A number in [0, 1) that follows from a text and a seed."""
    digest = hashlib.sha256(f"{seed}\n{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
