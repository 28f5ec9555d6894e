"""`PreferenceSet`: comparisons as pairs of episodes of a task, encoded and checked once. Knows no models.

It is for policies that learn from comparisons (`textenv.agents.DPO`). Reward models read texts, see
`textenv.rewards.PreferenceData`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from textenv.constraints import Constraint
from textenv.demonstration_ids import fitted, response_ids
from textenv.demonstrations import UNFIT, DemonstrationSet, check_eos, task_of
from textenv.mdp import TokenMDP, TokenState
from textenv.packed_masks import PackedMasks
from textenv.prompts import Demonstration, EncodedPrompt, decoder, encode_prompt
from textenv.prompts.encoding import shortened
from textenv.prompts.prompt_set import splits
from textenv.task import TextTask

if TYPE_CHECKING:
    from textenv.rewards.preferences import Preference

SIDES = ("chosen", "rejected")
CHOICES = (
    'unfit="drop" leaves such pairs out, unfit="cut" ends their responses where an episode would (pairs that are equal '
    "then are left out)"
)


@dataclass(frozen=True, repr=False, eq=False)
class PreferenceSet:
    """N pairs of responses, of which the first was preferred.

    Attributes:
        episodes: the 2 N responses with their prompts, each pair's chosen one and behind it the rejected one.
        as_sampled: N times whether a pair holds the very tokens that a policy sampled; the others were encoded from
            their texts.
        dropped: pairs left out because no episode could hold them.
        cut: pairs of which a response was cut to what an episode can hold.
    """

    episodes: DemonstrationSet
    as_sampled: tuple[bool, ...]
    dropped: int = 0
    cut: int = 0

    @classmethod
    def encode(
        cls,
        preferences: Sequence[Preference],
        envs: Any,
        *,
        ended: bool = True,
        unfit: str = "error",
        eos_id: int | None = None,
    ) -> PreferenceSet:
        """Encode comparisons as the environments would see them, and refuse those that cannot be used.

        Where a comparison carries the tokens that a policy sampled (`Preference.ids`) and these read as its texts here,
        they are taken as they are: to decode and encode them may give others, and a response that the budget cut has
        no end. All else is encoded as `DemonstrationSet.encode` does it.

        Args:
            preferences: see `Preference`; ``sample_preferences(...).preferences``, or those of `load_preferences`.
            envs: text environments, single or vector, whose task it is (what their wrappers forbid is forbidden here
                too); or the `TextTask` itself.
            ended: whether responses that are encoded from texts ended by themselves; then they end in a stop id.
            unfit: what is done about pairs that no episode could hold. ``"error"`` refuses them; ``"drop"`` leaves them
                out; ``"cut"`` ends responses there where an episode would (over-long prompts are refused all the same).
                Both are counted.
            eos_id: see `DemonstrationSet.encode`.

        Raises:
            ValueError: none are left, or one has no prompt, special tokens spelt out in a response, more tokens than
                the budgets, text behind a stop id, or tokens that the wrappers forbid. It is named.
            TypeError: `envs` holds no text task, or something else than a `Preference`.
        """
        if unfit not in UNFIT:
            raise ValueError(f"`unfit` should be one of {UNFIT}, got {unfit!r}. Choose one of them.")
        task, constraint = task_of(envs)
        check_eos(eos_id, task.mdp)
        read = decoder(task.tokenizer)
        kept: list[tuple[EncodedPrompt, tuple[int, ...], str]] = []
        as_sampled: list[bool] = []
        dropped = cut = 0
        for row, preference in enumerate(_checked(preferences)):
            pair, own = _sampled(preference, task, read), True
            if pair is None:
                pair, own = _encoded(preference, task, f"preferences[{row}]", ended, eos_id), False
            prompt, ids, problem = _fitted(*pair, task.mdp)
            if problem is not None and (unfit == "error" or (unfit == "cut" and not all(ids))):
                raise ValueError(
                    f"preferences[{row}] {problem}: {shortened(prompt.text)!r} ... No episode of this task would hold "
                    f"it. Make the environments with larger budgets or other stop ids, or say what to do: {CHOICES}."
                )
            if problem is not None and (unfit == "drop" or ids[0] == ids[1]):
                dropped += 1
                continue
            cut += problem is not None
            as_sampled.append(own)
            kept += [(prompt, one, f"preferences[{row}], {side}") for one, side in zip(ids, SIDES, strict=True)]
        if not kept:
            raise ValueError(
                f"At least one pair should fit the task, got {len(preferences)}, of which {dropped} were dropped: "
                f"there would be nothing to learn. Raise the budgets, or take {CHOICES}."
            )
        prompts, responses, names = zip(*kept, strict=True)
        episodes = DemonstrationSet(task.mdp, prompts, responses, names, constraint)
        episodes.check_allowed()
        return cls(episodes, tuple(as_sampled), dropped, cut)

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.episodes) // 2

    def __repr__(self) -> str:
        counted = (
            f"{len(self)} pairs, {self.episodes.tokens} response tokens, {sum(self.as_sampled)} as they were sampled"
        )
        return f"PreferenceSet({counted}, {self.dropped} dropped and {self.cut} cut)"

    @property
    def mdp(self) -> TokenMDP:
        """Vocabulary, stop ids and budgets of the task."""
        return self.episodes.mdp

    @property
    def constraint(self) -> Constraint | None:
        """What the environments forbid; None: nothing."""
        return self.episodes.constraint

    @property
    def fingerprint(self) -> str:
        """A digest of ids and budgets in their order: two sets of one fingerprint train alike."""
        return self.episodes.fingerprint

    def state(self, rows: Sequence[int] | NDArray[np.int64] | None = None) -> TokenState:
        """The 2 n episodes of some pairs (None: all), each chosen one before its rejected one."""
        return self.episodes.state(None if rows is None else _both(rows))

    def action_masks(self, state: TokenState) -> PackedMasks | None:
        """What was allowed at each token of some states, index (B, T); None where nothing is forbidden."""
        return self.episodes.action_masks(state)

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[PreferenceSet, PreferenceSet]:
        """Pairs to train on, and held-out ones. No prompt's text is on both sides; see `PromptSet.split`.

        What was dropped and cut is counted for both together.

        Raises:
            ValueError: a fraction outside (0, 1), or a side that would have none.
        """
        held = np.array(splits([prompt.text for prompt in self.episodes.prompts[::2]], fraction, seed), np.bool_)
        return self._subset(np.flatnonzero(~held)), self._subset(np.flatnonzero(held))

    def _subset(self, pairs: NDArray[np.int64]) -> PreferenceSet:
        as_sampled = tuple(self.as_sampled[pair] for pair in pairs)
        return replace(self, episodes=self.episodes.subset(_both(pairs)), as_sampled=as_sampled)


def _both(pairs: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of the episodes of some pairs."""
    first = 2 * np.asarray(pairs, np.int64)
    return np.stack([first, first + 1], 1).reshape(-1)


def _checked(preferences: Any) -> Sequence[Preference]:
    from textenv.rewards.preferences import Preference

    if isinstance(preferences, str) or not hasattr(preferences, "__len__") or len(preferences) == 0:
        raise ValueError(
            f"`preferences` should be a list of at least one Preference, got {preferences!r:.80}. Files go through "
            "textenv.rewards.load_preferences(path); of sampled pairs take `.preferences`."
        )
    for row, preference in enumerate(preferences):
        if not isinstance(preference, Preference):
            raise TypeError(
                f"preferences[{row}] should be a Preference, got {preference!r:.80}. Rows of columns go through "
                "textenv.rewards.load_preferences(rows)."
            )
    found: Sequence[Preference] = preferences
    return found


def _sampled(preference: Preference, task: TextTask, read: Any) -> tuple[EncodedPrompt, list[Sequence[int]]] | None:
    """The ids that a comparison carries, where they read as its texts with this task's tokenizer."""
    ids = preference.ids
    if ids is None or max(*ids.prompt, *ids.chosen, *ids.rejected) >= task.mdp.vocab_size:
        return None
    if read([list(ids.chosen), list(ids.rejected)]) != [preference.chosen, preference.rejected]:
        return None  # another tokenizer's
    return EncodedPrompt(preference.prompt, ids.prompt), [ids.chosen, ids.rejected]


def _encoded(
    preference: Preference, task: TextTask, name: str, ended: bool, eos_id: int | None
) -> tuple[EncodedPrompt, list[Sequence[int]]]:
    prompt = encode_prompt(preference.prompt, task.tokenizer, task.mdp.vocab_size, f"The prompt of {name}")
    pair = [
        response_ids(
            Demonstration(preference.prompt, getattr(preference, side), ended), prompt, task, f"{name}, {side},", eos_id
        )
        for side in SIDES
    ]
    return prompt, [*pair]


def _fitted(
    prompt: EncodedPrompt, pair: Sequence[Sequence[int]], mdp: TokenMDP
) -> tuple[EncodedPrompt, list[tuple[int, ...]], str | None]:
    """Both responses as an episode can hold them, and what is wrong with the first that it cannot."""
    found = [fitted(prompt, ids, mdp) for ids in pair]
    return prompt, [ids for ids, _ in found], next((problem for _, problem in found if problem is not None), None)
