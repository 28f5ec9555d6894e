"""What comes in through `reset` and `step`, checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOREIGN_OPTIONS = ("minari_autoseed",)
"""Reset options of collectors around an environment, which pass all options on: they concern nobody here."""


def check_actions(actions: Any, shape: tuple[int, ...], vocab_size: int) -> NDArray[np.int64]:
    """Actions as int64 of that shape: (N,) for N environments, () for one.

    Raises:
        ValueError: wrong shape, wrong type, or an id outside the vocabulary.
    """
    array = np.asarray(actions)
    if array.shape != shape or array.dtype.kind not in "iu":
        expected = f"{shape[0]} token ids, an integer array of shape {shape}" if shape else "one token id, an integer"
        raise ValueError(
            f"Actions should be {expected}, got {array.dtype} of shape {array.shape}. Pass what "
            "`action_space.sample()` would give."
        )
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        row = int(outside[0])
        raise ValueError(
            f"An action should be a token id in [0, {vocab_size}), got {array.flat[row]} (row {row}). Such a token has "
            "no embedding: a model would fail on it or read another row. Choose among the vocab_size ids of the task."
        )
    return array.astype(np.int64, copy=False)


def check_options(options: Mapping[str, Any] | None, known: Sequence[str]) -> dict[str, Any]:
    """Reset options as a dict of their own, without those that are for somebody else.

    Raises:
        ValueError: an unknown option.
    """
    options = {key: value for key, value in (options or {}).items() if key not in FOREIGN_OPTIONS}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"Reset options should be among {', '.join(map(repr, known))}, got {unknown[0]!r}. It would be ignored: "
            "mend its name, or leave it out."
        )
    return options


def rows_to_reset(options: Mapping[str, Any], num_envs: int) -> NDArray[np.int64]:
    """Indices of the rows in ``options["reset_mask"]``, or of all.

    Raises:
        ValueError: the mask is no (N,) bool array, or names no row.
    """
    mask = options.get("reset_mask")
    if mask is None:
        return np.arange(num_envs)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(
            f"`reset_mask` should be a bool array of shape ({num_envs},) with at least one True, got {mask!r}. Pass "
            "the rows that ended: terminations | truncations."
        )
    return np.flatnonzero(mask)


def prompts_asked_for(options: Mapping[str, Any], num_envs: int) -> Sequence[Any]:
    """One prompt per row, None where it is to be drawn.

    Raises:
        ValueError: another number of prompts, or ``prompt`` beside ``prompts``.
    """
    if "prompts" not in options:
        return [options.get("prompt")] * num_envs
    prompts = options["prompts"]
    if "prompt" in options or isinstance(prompts, str) or len(prompts) != num_envs:
        raise ValueError(
            f"`prompts` should hold one prompt per row ({num_envs}; those outside `reset_mask` are ignored), and no "
            f"`prompt` beside it, got {prompts!r}. Use `prompt` to start all rows from the same one."
        )
    return list(prompts)


def group_asked_for(options: Mapping[str, Any], num_envs: int) -> int:
    """How many rows next to each other start from one prompt.

    Raises:
        ValueError: no number that divides the rows, or prompts or a mask beside it.
    """
    if "samples_per_prompt" not in options:
        return 1
    if len(options) > 1:
        others = sorted(set(options) - {"samples_per_prompt"})
        raise ValueError(
            f"`samples_per_prompt` draws one prompt for each group of rows, got {others} beside it, which choose rows "
            "or prompts themselves. Repeat each prompt in `prompts`, or leave one of them out."
        )
    size = options["samples_per_prompt"]
    check_groups(num_envs, size, "num_envs")
    return int(size)


def check_groups(count: int, samples_per_prompt: Any, name: str) -> None:
    """Refuse a number of episodes or rows that does not divide into groups of one prompt each.

    Raises:
        ValueError: `samples_per_prompt` is no integer of at least 1, or does not divide `count`.
    """
    size = samples_per_prompt
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
        raise ValueError(f"`samples_per_prompt` should be an integer of at least 1, got {size!r}: 1 means no groups.")
    if count % size:
        raise ValueError(
            f"`{name}` should be a multiple of samples_per_prompt={size}, got {count}: some group would lack responses "
            f"to compare with. Use {max(1, count // size) * size}, or another samples_per_prompt."
        )


def check_prompts_saved(state: Mapping[str, Any], fingerprint: str) -> None:
    """Refuse a saved place in other prompts.

    Raises:
        ValueError: the state names another set of prompts.
    """
    if state.get("prompts", fingerprint) != fingerprint:  # older states do not say
        raise ValueError(
            f"The state should be of environments with the same prompts in the same order ({fingerprint}), got one of "
            f"others ({state['prompts']}): its place would mean other prompts, and the run would not go on as if it "
            "had never stopped. Make the environments with the prompts of training."
        )
