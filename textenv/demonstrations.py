"""`DemonstrationSet`: demonstrations as episodes of a task, encoded and checked once. Knows no models, learns nothing.

A demonstration becomes what stepping an environment through it would show: the prompt padded on the left to P columns,
the response from column P on, its stop token included. Every token of a response is an action; none of a prompt is.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.constraints import Constraint, check_allowed, constraint_of
from textenv.demonstration_ids import fitted, response_ids
from textenv.mdp import TokenMDP, TokenState
from textenv.packed_masks import PackedMasks
from textenv.prompts import Demonstration, EncodedPrompt, encode_prompt
from textenv.prompts.encoding import shortened
from textenv.prompts.prompt_set import splits
from textenv.task import TextTask
from textenv.whole import filled

UNFIT = ("error", "drop", "cut")
CHOICES = 'unfit="drop" leaves such demonstrations out, unfit="cut" ends their responses where an episode would'
CHECKED_ROWS = 64
"""Rows whose tokens are held against the constraints at once."""


@dataclass(frozen=True, repr=False, eq=False)
class DemonstrationSet:
    """Encoded demonstrations of one task.

    Attributes:
        mdp: vocabulary, stop ids and budgets of the task.
        prompts: text and ids of each prompt.
        responses: ids of each response, the stop id included where it ended by itself.
        names: what each is called in messages, with its file and line where it came from one.
        constraint: what the environments forbid; None: nothing.
        dropped: how many were left out because no episode could hold them.
        cut: how many responses were cut to what an episode can hold.
    """

    mdp: TokenMDP
    prompts: tuple[EncodedPrompt, ...]
    responses: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    constraint: Constraint | None = None
    dropped: int = 0
    cut: int = 0

    @classmethod
    def encode(
        cls,
        demonstrations: Sequence[Demonstration],
        envs: Any,
        *,
        unfit: str = "error",
        eos_id: int | None = None,
    ) -> DemonstrationSet:
        """Encode demonstrations as the environments would see them, and refuse those that cannot be used.

        Args:
            demonstrations: see `Demonstration`; pairs ``(prompt, response)`` will do.
            envs: text environments, single or vector, whose task it is (what their wrappers forbid is forbidden here
                too); or the `TextTask` itself.
            unfit: what is done about demonstrations that no episode could hold. ``"error"`` refuses them; ``"drop"``
                leaves them out and counts them; ``"cut"`` cuts responses that go on behind a stop id or over the budget
                there, as an episode would, and counts them (over-long prompts are refused all the same).
            eos_id: the stop id that ends a response which ended by itself and holds none. None: what the chat template
                writes, the tokenizer's end-of-sequence id, or the only stop id.

        Raises:
            ValueError: none are left, or one has no prompt, ids without a token, special tokens spelt out in its text,
                more tokens than the budgets, text behind a stop id, or tokens that the wrappers forbid. It is named.
            TypeError: `envs` holds no text task.
        """
        if unfit not in UNFIT:
            raise ValueError(f"`unfit` should be one of {UNFIT}, got {unfit!r}. Choose one of them.")
        task, constraint = task_of(envs)
        check_eos(eos_id, task.mdp)
        kept: list[tuple[EncodedPrompt, tuple[int, ...], str]] = []
        dropped = cut = 0
        for row, given in enumerate(_checked(demonstrations)):
            name = f"demonstrations[{row}]" + (f" ({given.place})" if given.place else "")
            prompt = encode_prompt(given.prompt, task.tokenizer, task.mdp.vocab_size, name)
            ids, problem = fitted(prompt, response_ids(given, prompt, task, name, eos_id), task.mdp)
            if problem is not None and (unfit == "error" or (unfit == "cut" and not ids)):
                raise ValueError(
                    f"{name} {problem}: {shortened(prompt.text)!r} ... No episode of this task would hold it. Make the "
                    f"environments with larger budgets or other stop ids, or say what to do: {CHOICES}."
                )
            if problem is not None and unfit == "drop":
                dropped += 1
            else:
                cut += problem is not None
                kept.append((prompt, ids, name))
        if not kept:
            raise ValueError(
                f"At least one demonstration should fit the task, got {len(demonstrations)}, of which {dropped} were "
                f"dropped: there would be nothing to imitate. Raise the budgets, or take {CHOICES}."
            )
        prompts, responses, names = zip(*kept, strict=True)
        found = cls(task.mdp, prompts, responses, names, constraint, dropped, cut)
        found.check_allowed()
        return found

    def __len__(self) -> int:
        """How many there are."""
        return len(self.prompts)

    def __repr__(self) -> str:
        counted = f"{len(self)} demonstrations, {self.tokens} response tokens"
        return f"DemonstrationSet({counted}, {self.dropped} dropped and {self.cut} cut)"

    @property
    def tokens(self) -> int:
        """Response tokens of all of them, what is learned from."""
        return sum(map(len, self.responses))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of ids and budgets in their order: two sets of one fingerprint train alike."""
        digest = hashlib.sha256(json.dumps([self.mdp.max_prompt_tokens, self.mdp.max_response_tokens]).encode())
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            digest.update(json.dumps([prompt.ids, response]).encode())
        return digest.hexdigest()[:16]

    def state(self, rows: Sequence[int] | NDArray[np.int64] | None = None) -> TokenState:
        """Some demonstrations (None: all) as the states in which their episodes end, or stand where they were cut."""
        chosen = range(len(self)) if rows is None else rows
        return filled(self.mdp, [self.prompts[i].ids for i in chosen], [self.responses[i] for i in chosen])

    def action_masks(self, state: TokenState) -> PackedMasks | None:
        """What was allowed at each token of some states, index (B, T); None where nothing is forbidden."""
        if self.constraint is None:
            return None
        return self.constraint.response_masks(state.input_ids, state.attention_mask, self.mdp.max_response_tokens)

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[DemonstrationSet, DemonstrationSet]:
        """Demonstrations to train on, and held-out ones. No prompt's text is on both sides; see `PromptSet.split`.

        Raises:
            ValueError: a fraction outside (0, 1), or a side that would have none.
        """
        held = splits([prompt.text for prompt in self.prompts], fraction, seed)
        return self.subset([i for i, h in enumerate(held) if not h]), self.subset([i for i, h in enumerate(held) if h])

    def subset(self, places: Sequence[int] | NDArray[np.int64]) -> DemonstrationSet:
        """Those at some places, in that order."""
        chosen: dict[str, Any] = {
            key: tuple(getattr(self, key)[i] for i in places) for key in ("prompts", "responses", "names")
        }
        return replace(self, **chosen)

    def check_allowed(self) -> None:
        """Refuse tokens that the constraint forbids.

        Raises:
            ValueError: a response holds one; its rows are named.
        """
        if self.constraint is None:
            return
        first = self.mdp.max_prompt_tokens
        for start in range(0, len(self), CHECKED_ROWS):
            rows = range(start, min(start + CHECKED_ROWS, len(self)))
            state = self.state(list(rows))
            masks = self.action_masks(state)
            assert masks is not None
            try:
                check_allowed(self.constraint, masks, state.input_ids[:, first:], state.attention_mask[:, first:] == 1)
            except ValueError as error:
                raise ValueError(
                    f"{self.names[start]} to {self.names[rows[-1]]}, counted as rows from 0: {error} The policy could "
                    "never act like that: its loss would be infinite. Leave the demonstration out."
                ) from error


def task_of(envs: Any) -> tuple[TextTask, Constraint | None]:
    """The task of environments, and what they forbid.

    Raises:
        TypeError: there is no text task.
    """
    if isinstance(envs, TextTask):
        return envs, None
    task = getattr(getattr(envs, "unwrapped", None), "task", None)
    if not isinstance(task, TextTask):
        raise TypeError(
            f"`envs` should be text environments (gym.make_vec('RLHF-v0', ...)) or a TextTask, got "
            f"{type(envs).__name__}: budgets, stop ids and the tokenizer come from there."
        )
    return task, constraint_of(envs)


def check_eos(eos_id: int | None, mdp: TokenMDP) -> None:
    """Refuse an end of responses that ends no episode.

    Raises:
        ValueError: it is no stop id.
    """
    if eos_id is not None and eos_id not in mdp.stop_ids:
        raise ValueError(
            f"`eos_id` should be one of the task's stop ids {mdp.stop_ids}, got {eos_id!r}: an episode would go on "
            "behind it."
        )


def _checked(demonstrations: Sequence[Any]) -> list[Demonstration]:
    """Demonstrations, pairs made into them."""
    if isinstance(demonstrations, str) or not hasattr(demonstrations, "__len__") or len(demonstrations) == 0:
        raise ValueError(
            f"`demonstrations` should be a list of at least one Demonstration, got {demonstrations!r}. Files go "
            "through textenv.load_demonstrations(path)."
        )
    return [d if isinstance(d, Demonstration) else _of_pair(d, row) for row, d in enumerate(demonstrations)]


def _of_pair(pair: Any, row: int) -> Demonstration:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            f"demonstrations[{row}] should be a Demonstration or a pair (prompt, response), got {pair!r}. Rows of "
            "columns go through textenv.load_demonstrations(rows, prompt=..., response=...)."
        )
    return Demonstration(*pair)
