"""What a toy language is made of: its arrays and ids, checked once and then trusted."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.integer[Any]]
Response = tuple[int, ...]


def read_only(values: npt.ArrayLike) -> FloatArray:
    """A float64 copy that cannot be written to."""
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


def as_logits(values: npt.ArrayLike) -> FloatArray:
    """Reference logits as a read-only (T, V) array.

    Raises:
        ValueError: a wrong shape, NaN or +inf, or a position where every token is forbidden.
    """
    logits = read_only(values)
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(
            f"`reference_logits` should be (T, V) with T >= 1 positions and V >= 1 tokens, got shape {logits.shape}. "
            "Horizon and vocabulary are read from it. For the same logits at every position: np.tile(logits, (T, 1))."
        )
    if np.isnan(logits).any() or np.isposinf(logits).any():
        position, token = np.argwhere(np.isnan(logits) | np.isposinf(logits))[0].tolist()
        raise ValueError(
            f"`reference_logits` should be finite, or -inf to forbid a token, got {logits[position, token]} at "
            f"position {position}, token {token}. Every log-probability there would be NaN. Use a finite number."
        )
    if np.isneginf(logits).all(axis=1).any():
        position = int(np.flatnonzero(np.isneginf(logits).all(axis=1))[0])
        raise ValueError(
            f"`reference_logits` should leave a token possible at every position, got only -inf at {position}. "
            "The reference could not go on. Allow a token there, for example the stop token."
        )
    return logits


def as_token_scores(values: npt.ArrayLike, horizon: int, vocab_size: int) -> FloatArray:
    """Scores per token, (V,) or (T, V), as a read-only (T, V) array.

    Raises:
        ValueError: another shape, or scores that are not finite.
    """
    array = read_only(values)
    if array.shape not in ((vocab_size,), (horizon, vocab_size)):
        raise ValueError(
            f"`token_scores` should be ({vocab_size},) or ({horizon}, {vocab_size}), like `reference_logits`, got "
            f"{array.shape}. Scores would belong to other tokens. Give one number per token, or per position and token."
        )
    if not np.isfinite(array).all():
        raise ValueError(
            f"`token_scores` should be finite, got {array[~np.isfinite(array)][0]}. Every expected score would be "
            "infinite or NaN. Forbid tokens with -inf in `reference_logits` instead."
        )
    return read_only(np.broadcast_to(array, (horizon, vocab_size)))


def as_unfinished_score(value: float, beside_score_fn: bool) -> float:
    """What never stopping adds to an additive score, as a finite float.

    Raises:
        ValueError: it is not finite, or not 0 where a `score_fn` would ignore it.
    """
    unfinished_score = float(value)
    if not np.isfinite(unfinished_score):
        raise ValueError(
            f"`unfinished_score` should be a finite number, got {unfinished_score}. Every expected score would be "
            "infinite or NaN. Give a large negative number, or -inf logits to forbid tokens."
        )
    if beside_score_fn and unfinished_score != 0.0:
        raise ValueError(
            f"`unfinished_score` should stay 0.0 beside `score_fn`, got {unfinished_score}. It would be ignored. "
            "Add it inside `score_fn`, to responses without the stop token."
        )
    return unfinished_score


def as_id(value: object, vocab_size: int | None, name: str) -> int:
    """A plain int in 0 to `vocab_size` - 1 (no upper bound for None), or a ValueError."""
    expected = "a non-negative integer" if vocab_size is None else f"an integer in 0 to {vocab_size - 1}"
    try:
        token = operator.index(value)  # type: ignore[arg-type]  # whatever it is, the except branch names it
    except TypeError:
        token = -1
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        raise ValueError(f"{name} should be {expected}, got {value!r}. It names no token. Use ids of this vocabulary.")
    return token


def as_tokens(values: npt.ArrayLike, vocab_size: int, name: str) -> IntArray:
    """An int64 array whose entries are in 0 to `vocab_size` - 1, or a ValueError."""
    array = np.asarray(values)
    wrong = (array < 0) | (array >= vocab_size)
    if array.size and (not np.issubdtype(array.dtype, np.integer) or wrong.any()):
        got = array[wrong][0] if wrong.any() else f"dtype {array.dtype}"
        raise ValueError(
            f"{name} should be integers in 0 to {vocab_size - 1}, got {got}. They would name no token, or another one. "
            "Use ids of this vocabulary."
        )
    return array.astype(np.int64)


def as_response(response: Sequence[int], *, horizon: int, vocab_size: int, stop_id: int) -> Response:
    """A finished response as a tuple of plain ints, or a ValueError that says what is wrong with it."""
    ids = tuple(as_id(token, vocab_size, f"Every id of the response {response!r}") for token in response)
    if not 1 <= len(ids) <= horizon:
        raise ValueError(
            f"A response should have 1 to {horizon} tokens, got {len(ids)}: {ids}. The language has no such response, "
            "so its optimum says nothing about it. Set the token budget to `horizon`."
        )
    if stop_id in ids[:-1]:
        raise ValueError(
            f"A response should end at the first stop token ({stop_id}), got {ids}. Tokens after the end would be "
            "scored. Cut the response behind its first stop token."
        )
    if ids[-1] != stop_id and len(ids) < horizon:
        raise ValueError(
            f"A response should end with the stop token ({stop_id}) or have {horizon} tokens, got {ids}. It is "
            "unfinished and has no score. Score at the end of the episode, with a token budget of `horizon`."
        )
    return ids
