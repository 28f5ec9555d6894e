"""What every road to the optimum needs: the list of all responses, and expectations over it or along positions.

Legend: M responses in the language, T horizon, V vocabulary. Response arrays are (M, T), -1 right of the last token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from textenv.toy import PAD, ToyLanguage, sum_over_tokens
from textenv.toy_checks import FloatArray, IntArray

DEFAULT_LIMIT = 5_000_000
"""The most responses that are listed unasked; at T = 8 they take some hundred megabytes."""


class Listing(NamedTuple):
    """Every response of a language with what the optimum is made of."""

    responses: IntArray  # (M, T)
    lengths: IntArray  # (M,)
    scores: FloatArray  # (M,)
    ref_logprobs: FloatArray  # (M,)


def enumerate_responses(language: ToyLanguage, limit: int = DEFAULT_LIMIT) -> tuple[IntArray, IntArray]:
    """List every response: those that stop, by length, then the unfinished ones; lexicographic within.

    Responses that the reference forbids are listed too, because a policy may still write them.

    Args:
        language: The toy language.
        limit: The most responses to list.

    Returns:
        `responses` (M, T) ids, -1 right of the last token, and `lengths` (M,).

    Raises:
        ValueError: M = 1 + (V-1) + ... + (V-1)^(T-1) + (V-1)^T is larger than `limit`.
    """
    horizon, stop_id = language.horizon, language.stop_id
    going_on = np.delete(np.arange(language.vocab_size, dtype=np.int32), stop_id)
    total, prefixes = 0, 1
    for _ in range(horizon):
        total, prefixes = total + prefixes, prefixes * going_on.size
        if total + prefixes > limit:
            raise ValueError(
                f"`limit` allows {limit} responses, got a language with {language.vocab_size} tokens and horizon "
                f"{horizon}, which has more. The list would fill the memory. Use a smaller language, an additive score "
                "with method='induction', or a higher `limit`."
            )
    responses = np.full((total + prefixes, horizon), PAD, dtype=np.int32)  # (M, T)
    alive, start = np.empty((1, 0), dtype=np.int32), 0  # (K, t) prefixes without the stop token
    for length in range(1, horizon + 1):
        block = responses[start : start + len(alive)]
        block[:, : length - 1], block[:, length - 1] = alive, stop_id
        start += len(alive)
        alive = np.column_stack([np.repeat(alive, going_on.size, axis=0), np.tile(going_on, len(alive))])
    responses[start:] = alive
    return responses, (responses != PAD).sum(axis=1)


def list_responses(language: ToyLanguage, limit: int) -> Listing:
    """Every response with its score and its log-probability under the reference; see `enumerate_responses`."""
    responses, lengths = enumerate_responses(language, limit)
    ref_logprobs = sum_over_tokens(language.reference_logprobs, responses)
    return Listing(responses, lengths, language.score_padded(responses), ref_logprobs)


def listed_expectations(listing: Listing, logprobs: FloatArray) -> tuple[float, float]:
    """E[score] and KL(pi || reference) of any policy, as sums over all responses."""
    return float(np.exp(logprobs) @ listing.scores), kl_divergence(logprobs, listing.ref_logprobs)


def positional_expectations(language: ToyLanguage, logprobs: FloatArray) -> tuple[float, float]:
    """E[score] and KL(pi || reference) of a positional policy, forward over the probability of still writing."""
    token_scores = additive_scores(language)
    going_on = np.arange(language.vocab_size) != language.stop_id
    score, kl, survival = 0.0, 0.0, 1.0
    for position in range(language.horizon):
        if survival == 0.0:
            break  # an infinite KL behind a certain stop counts nothing; 0 * inf would be NaN
        probs = np.exp(logprobs[position])
        score += survival * float(probs @ token_scores[position])
        kl += survival * kl_divergence(logprobs[position], language.reference_logprobs[position])
        survival *= float(probs[going_on].sum())
    return score + survival * language.unfinished_score, kl


def additive_scores(language: ToyLanguage) -> FloatArray:
    """(T, V) scores per token, or a ValueError where the score is no sum over tokens."""
    if language.token_scores is None:
        raise ValueError(
            "`method` 'induction' should get an additive score, got a language with `score_fn`. The value of a prefix "
            "would depend on all of it. Use method='auto' or 'enumeration'."
        )
    return language.token_scores


def kl_divergence(logprobs: FloatArray, ref_logprobs: FloatArray) -> float:
    """KL in nats over K outcomes; 0 log 0 = 0, and inf where the reference has no mass but the policy does."""
    probs = np.exp(logprobs)
    log_ratios = np.subtract(logprobs, ref_logprobs, out=np.zeros_like(logprobs), where=probs > 0.0)
    return float((probs * log_ratios).sum())


def logsumexp(values: FloatArray) -> float:
    """Log sum exp(values), -inf for nothing, without overflow."""
    top = float(values.max(initial=-np.inf))
    return top if top == -np.inf else top + float(np.log(np.exp(values - top).sum()))
