"""What any policy of a toy language reaches, exactly, from its next-token distributions alone.

It is for policies that look at the whole prefix, such as networks, whatever library trained them: each prefix is shown
to the policy once, as the environment shows it.

Legend: M responses in the language, T horizon, V vocabulary, K prefixes of one length, L = 1 + T columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from textenv.oracle_evaluation import Evaluation, evaluate_sequences
from textenv.oracle_listing import DEFAULT_LIMIT
from textenv.toy import ToyLanguage
from textenv.toy_checks import FloatArray, IntArray

BLOCK = 2**16
"""Prefixes that a policy sees at once."""

NextLogprobs = Callable[[Mapping[str, npt.NDArray[Any]]], npt.ArrayLike]


def evaluate_policy(
    language: ToyLanguage, next_logprobs: NextLogprobs, kl_coef: float, *, limit: int = DEFAULT_LIMIT
) -> Evaluation:
    """Evaluate any policy exactly, from what it says of the next token after each prefix.

    The standard toy has 97,656 prefixes, which a small network reads in a fraction of a second. A policy that depends
    on the position only needs none of them, see `evaluate`.

    Args:
        language: The toy language.
        next_logprobs: Called with observations of ``textenv/Toy-v0`` (``input_ids`` and ``attention_mask``, (N, L)
            each, prefixes of one length, all of them unfinished); returns (N, V) log-probabilities of the next token.
        kl_coef: Price of one nat in units of the score, >= 0.
        limit: The most responses that may be listed.

    Returns:
        Score, KL, objective, regret and distance.

    Raises:
        ValueError: A wrong shape, log-probabilities that do not sum to 1 over the responses, or an error of `solve`.
    """
    going_on = np.delete(np.arange(language.vocab_size, dtype=np.int32), language.stop_id)

    def sequence_logprobs(responses: IntArray, lengths: IntArray) -> FloatArray:
        totals = np.zeros(len(responses))  # (M,)
        places = np.zeros(len(responses), dtype=np.int64)  # (M,) of each response's prefix among those of its length
        prefixes = np.empty((1, 0), dtype=np.int32)  # (K, t) in lexicographic order
        for position in range(language.horizon):
            rows = np.flatnonzero(lengths > position)
            tokens, before = responses[rows, position], places[rows]
            totals[rows] += _distributions(language, next_logprobs, prefixes)[before, tokens]
            places[rows] = before * going_on.size + tokens - (tokens > language.stop_id)
            repeated = np.repeat(prefixes, going_on.size, axis=0)
            prefixes = np.column_stack([repeated, np.tile(going_on, len(prefixes))])
        return totals

    return evaluate_sequences(language, sequence_logprobs, kl_coef, limit=limit)


def _distributions(language: ToyLanguage, next_logprobs: NextLogprobs, prefixes: IntArray) -> FloatArray:
    """What a policy says (K, V) after each of (K, t) prefixes."""
    count, position = prefixes.shape
    input_ids = np.zeros((count, 1 + language.horizon), dtype=np.int32)
    input_ids[:, 0], input_ids[:, 1 : 1 + position] = language.stop_id, prefixes  # the prompt is one stop token
    attention_mask = np.zeros(input_ids.shape, dtype=np.int8)
    attention_mask[:, : 1 + position] = 1
    found = []
    for start in range(0, count, BLOCK):
        block = slice(start, start + BLOCK)
        observations: dict[str, npt.NDArray[Any]] = {
            "input_ids": input_ids[block],
            "attention_mask": attention_mask[block],
        }
        logprobs = np.asarray(next_logprobs(observations), dtype=np.float64)
        shape = (len(input_ids[block]), language.vocab_size)
        if logprobs.shape != shape:
            raise ValueError(
                f"`next_logprobs` should return (N, V) = {shape} log-probabilities, got shape {logprobs.shape}. Tokens "
                "would get each other's probabilities. Give one row per prefix, one column per token."
            )
        found.append(logprobs)
    return np.concatenate(found)
