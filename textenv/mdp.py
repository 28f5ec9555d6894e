"""The token Markov decision process as pure functions on arrays. Knows nothing of text, scores or Gymnasium.

Legend: N rows, P prompt columns, T response tokens at most, L = P + T, V vocabulary.

    state       prompt x and the tokens so far y_<t
    action      the next token y_t, an id in [0, V)
    transition  append it
    end         a stop id: terminated; the budget of T tokens without one: truncated

A prompt is padded on the left to P columns and the response grows to the right from column P, so response token t is
always in column P + t.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenState(NamedTuple):
    """N rows of the process. Functions return new states and never edit the one they were given."""

    input_ids: NDArray[np.int32]
    """(N, L) token ids; columns where the mask is 0 hold the pad id and mean nothing."""
    attention_mask: NDArray[np.int8]
    """(N, L) 1 on real tokens."""
    response_lengths: NDArray[np.int64]
    """(N,) response tokens so far."""


@dataclass(frozen=True, kw_only=True)
class TokenMDP:
    """The constants of the process.

    Attributes:
        vocab_size: V, the number of actions.
        stop_ids: actions that end a response; they are part of it, because stopping was a choice.
        max_prompt_tokens: P.
        max_response_tokens: T.
        pad_id: what fills unused columns. It may equal a stop id: masks come from lengths, never from ids.

    Raises:
        ValueError: a budget below 1, or ids outside the vocabulary.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    max_prompt_tokens: int
    max_response_tokens: int
    pad_id: int = 0

    def __post_init__(self) -> None:
        """Refuse constants that could never give an episode."""
        for name in ("max_prompt_tokens", "max_response_tokens", "vocab_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(
                    f"`{name}` should be an integer of at least 1, got {value!r}. With it no token could be placed and "
                    "every episode would be over before its first action. Give it room for at least one token."
                )
        for name, ids in (("stop_ids", self.stop_ids), ("pad_id", (self.pad_id,))):
            outside = [i for i in ids if not 0 <= i < self.vocab_size]
            if outside:
                raise ValueError(
                    f"`{name}` should hold ids in [0, {self.vocab_size}), got {outside}. No action could ever match; "
                    "check that tokenizer and model belong together."
                )

    @property
    def length(self) -> int:
        """L = P + T, the columns of an observation."""
        return self.max_prompt_tokens + self.max_response_tokens

    @functools.cached_property
    def is_stop(self) -> NDArray[np.bool_]:
        """(V,) True on stop ids."""
        table = np.zeros(self.vocab_size, dtype=np.bool_)
        table[list(self.stop_ids)] = True
        return table


def initial_state(mdp: TokenMDP, prompts: Sequence[Sequence[int]]) -> TokenState:
    """Rows that hold a prompt each and no response yet."""
    shape = (len(prompts), mdp.length)
    input_ids = np.full(shape, mdp.pad_id, dtype=np.int32)
    attention_mask = np.zeros(shape, dtype=np.int8)
    for row, prompt in enumerate(prompts):
        start = mdp.max_prompt_tokens - len(prompt)
        input_ids[row, start : mdp.max_prompt_tokens] = prompt
        attention_mask[row, start : mdp.max_prompt_tokens] = 1
    return TokenState(input_ids, attention_mask, np.zeros(len(prompts), dtype=np.int64))


def transition(
    mdp: TokenMDP, state: TokenState, actions: NDArray[np.int64], rows: NDArray[np.int64] | None = None
) -> TokenState:
    """Append one token to each row (or to `rows` only).

    Args:
        mdp: the constants.
        state: N rows, those concerned with fewer than T response tokens.
        actions: (N,) ids.
        rows: indices of the rows that move; the others stay as they are. None: all.

    Returns:
        The next state, in arrays of its own.
    """
    if rows is None:
        rows = np.arange(len(actions))
    input_ids, attention_mask = state.input_ids.copy(), state.attention_mask.copy()
    response_lengths = state.response_lengths.copy()
    columns = mdp.max_prompt_tokens + response_lengths[rows]
    input_ids[rows, columns] = actions[rows]
    attention_mask[rows, columns] = 1
    response_lengths[rows] += 1
    return TokenState(input_ids, attention_mask, response_lengths)


def replace_rows(state: TokenState, rows: NDArray[np.int64], new: TokenState) -> TokenState:
    """The state with `rows` taken from `new` (whose rows are those alone), in arrays of its own."""
    merged = TokenState(state.input_ids.copy(), state.attention_mask.copy(), state.response_lengths.copy())
    merged.input_ids[rows] = new.input_ids
    merged.attention_mask[rows] = new.attention_mask
    merged.response_lengths[rows] = new.response_lengths
    return merged


def is_terminated(mdp: TokenMDP, actions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N,) True where the action chosen was a stop id. The only place that decides termination."""
    stopped: NDArray[np.bool_] = mdp.is_stop[actions]
    return stopped


def is_truncated(mdp: TokenMDP, state: TokenState, terminated: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(N,) True where the budget is used up without a stop id. The only place that decides truncation."""
    return (state.response_lengths >= mdp.max_response_tokens) & ~terminated


def responses(mdp: TokenMDP, state: TokenState, rows: Sequence[int] | NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Response ids of some rows, the stop id included where it was chosen."""
    start = mdp.max_prompt_tokens
    return [state.input_ids[row, start : start + state.response_lengths[row]].copy() for row in rows]
