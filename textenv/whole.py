"""Responses known from end to end: their final states, and the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.mdp import TokenMDP, TokenState, initial_state


def whole_responses(
    mdp: TokenMDP, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int] | NDArray[Any]]
) -> TokenState:
    """The final states (B rows) of given responses.

    Raises:
        ValueError: a response that no episode could have produced (empty, over the budget, going on after a stop id, or
            ending without one below the budget), or ids outside the vocabulary.
    """
    if len(prompts) != len(responses) or len(prompts) == 0:
        raise ValueError(
            f"There should be one response per prompt and at least one of them, got {len(prompts)} prompts and "
            f"{len(responses)} responses. Pass a prompt for each response."
        )
    state = initial_state(mdp, prompts)
    for row, response in enumerate(responses):
        ids = np.asarray(response)
        _check_response(mdp, ids, row)
        columns = slice(mdp.max_prompt_tokens, mdp.max_prompt_tokens + len(ids))
        state.input_ids[row, columns] = ids
        state.attention_mask[row, columns] = 1
        state.response_lengths[row] = len(ids)
    return state


def _check_response(mdp: TokenMDP, ids: NDArray[Any], row: int) -> None:
    if ids.ndim != 1 or not 1 <= len(ids) <= mdp.max_response_tokens:
        raise ValueError(
            f"responses[{row}] should hold 1 to {mdp.max_response_tokens} token ids, got shape {ids.shape}. Pass a "
            "list of ids, without padding, cut at max_response_tokens."
        )
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= mdp.vocab_size:
        raise ValueError(
            f"responses[{row}] should hold token ids in [0, {mdp.vocab_size}), got {ids.tolist()}. Pass the ids that "
            "the engine sampled, as integers."
        )
    stops = mdp.is_stop[ids]
    if stops[:-1].any() or not (stops[-1] or len(ids) == mdp.max_response_tokens):
        raise ValueError(
            f"responses[{row}] should end at its first stop id {mdp.stop_ids} or at {mdp.max_response_tokens} tokens, "
            f"got {ids.tolist()}. Stepping it would end the episode elsewhere. Cut it behind its first stop id, or let "
            "the engine write on."
        )


def whole_logprobs(model: Any, state: TokenState, mdp: TokenMDP) -> Any:
    """Log-probabilities (B, T) from one call of the model, or (per-token callables) one per column that is in use."""
    if hasattr(model, "response_logprobs"):
        return model.response_logprobs(state.input_ids, state.attention_mask, mdp.max_response_tokens)
    rows, columns = np.arange(len(state.input_ids)), np.arange(mdp.length)
    whole = np.zeros((len(rows), mdp.max_response_tokens))
    for token in range(int(state.response_lengths.max())):
        # Rows that have ended repeat their last token: models see only states that exist.
        action_columns = mdp.max_prompt_tokens + np.minimum(token, state.response_lengths - 1)
        seen = columns < action_columns[:, None]
        prefix = {
            "input_ids": np.where(seen, state.input_ids, mdp.pad_id).astype(np.int32),
            "attention_mask": np.where(seen, state.attention_mask, 0).astype(np.int8),
        }
        values = np.asarray(model(prefix, state.input_ids[rows, action_columns]), dtype=np.float64)
        if values.shape != rows.shape:
            raise ValueError(
                f"A log-probability callable should return one number per row, shape {rows.shape}, got shape "
                f"{values.shape}. Return the log-probability of each action after its prefix."
            )
        whole[:, token] = values
    return whole


def check_logprobs(values: Any, name: str, state: TokenState, mdp: TokenMDP) -> NDArray[np.float64]:
    """Log-probabilities as (B, T) float64, 0 beyond the responses whatever stood there."""
    array = np.asarray(values, dtype=np.float64)
    shape = (len(state.input_ids), mdp.max_response_tokens)
    if array.shape != shape:
        raise ValueError(
            f"`{name}` should be (B, T) = {shape}, got shape {array.shape}. Tokens would be charged for one another; "
            "give one column per response token of the budget."
        )
    return np.where(state.attention_mask[:, mdp.max_prompt_tokens :] == 1, array, 0.0)
