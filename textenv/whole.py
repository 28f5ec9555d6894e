"""Responses known from end to end: their final states, and the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.distributions import (
    check_gives_distributions,
    chosen,
    kl_divergence,
    renormalised,
    takes_action_masks,
    whole_distributions,
)
from textenv.mdp import TokenMDP, TokenState, initial_state
from textenv.packed_masks import PackedMasks


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
    for row, response in enumerate(responses):
        _check_response(mdp, np.asarray(response), row)
    return filled(mdp, prompts, responses)


def filled(
    mdp: TokenMDP, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int] | NDArray[Any]]
) -> TokenState:
    """States (B rows) that hold a prompt each and a response, finished or not, of at most T tokens."""
    state = initial_state(mdp, prompts)
    for row, response in enumerate(responses):
        columns = slice(mdp.max_prompt_tokens, mdp.max_prompt_tokens + len(response))
        state.input_ids[row, columns] = response
        state.attention_mask[row, columns] = 1
        state.response_lengths[row] = len(response)
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


def whole_logprobs(model: Any, state: TokenState, mdp: TokenMDP, action_masks: PackedMasks | None = None) -> Any:
    """Log-probabilities (B, T) from one call of the model, or (per-token callables) one per column that is in use.

    Args:
        model: a log-probability model, see `textenv.task.LogprobModel`.
        state: finished responses.
        mdp: of their task.
        action_masks: what was allowed where each token was chosen, index (B, T); the model is renormalised over it.

    Raises:
        TypeError: there are masks, and the model tells the log-probabilities of chosen tokens only.
    """
    if action_masks is not None:
        return _masked_logprobs(model, state, mdp, action_masks)
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


def _masked_logprobs(model: Any, state: TokenState, mdp: TokenMDP, action_masks: PackedMasks) -> NDArray[np.float64]:
    """Of the model renormalised over the allowed tokens: by itself where it can, else from its distributions."""
    budget = mdp.max_response_tokens
    whole = getattr(model, "response_logprobs", None)
    if whole is not None and takes_action_masks(whole):
        masked: NDArray[np.float64] = whole(state.input_ids, state.attention_mask, budget, action_masks=action_masks)
        return masked
    check_constrainable(model)
    logprobs = np.zeros((len(state.input_ids), budget))
    real = state.attention_mask[:, mdp.max_prompt_tokens :] == 1
    tokens = state.input_ids[:, mdp.max_prompt_tokens :]
    for rows, log_pi in whole_distributions(model, state.input_ids, state.attention_mask, budget, mdp.vocab_size):
        used = real[rows]
        logprobs[rows][used] = chosen(renormalised(log_pi[used], action_masks[rows][used]), tokens[rows][used])
    return logprobs


def can_be_constrained(model: Any) -> bool:
    """Whether a model's distribution over whole responses can be renormalised over the allowed tokens."""
    return hasattr(model, "next_logprobs") or takes_action_masks(getattr(model, "response_logprobs", None))


def check_constrainable(model: Any) -> None:
    """Refuse a model that cannot be renormalised.

    Raises:
        TypeError: see `check_gives_distributions`.
    """
    check_gives_distributions(
        model,
        "A model in an environment with MinLength or ActionMask",
        "Not renormalised over the allowed tokens it would be another distribution, and the KL wrong, negative even.",
    )


def whole_kl(
    policy: Any, reference: Any, state: TokenState, mdp: TokenMDP, action_masks: PackedMasks | None = None
) -> NDArray[np.float64]:
    """KL(policy || reference) (B, T) of each state's whole distribution, nats, 0 beyond the responses.

    Distributions (b, T, V) are compared a bounded block of rows at a time, see `whole_distributions`.

    Raises:
        TypeError: a model tells the log-probabilities of chosen tokens only.
    """
    for model in (policy, reference):
        check_gives_distributions(model, "A model behind the exact KL", "The exact KL sums over all tokens.")
    kl = np.zeros((len(state.input_ids), mdp.max_response_tokens))
    real = state.attention_mask[:, mdp.max_prompt_tokens :] == 1
    arguments = state.input_ids, state.attention_mask, mdp.max_response_tokens, mdp.vocab_size
    pairs = zip(whole_distributions(policy, *arguments), whole_distributions(reference, *arguments), strict=True)
    for (rows, log_pi), (_, log_ref) in pairs:
        used = real[rows]
        distributions = log_pi[used], log_ref[used]  # (M, V)
        if action_masks is not None:
            distributions = tuple(renormalised(x, action_masks[rows][used]) for x in distributions)  # type: ignore[assignment]
        kl[rows][used] = kl_divergence(*distributions)
    return kl


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
