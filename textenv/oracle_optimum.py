"""The optimal policy of a toy language: backward induction where the score is additive, else one tilt of the list.

Both tilt the reference by exp(score / kl_coef); see `textenv.oracle` for the formulas and the legend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from textenv.oracle_listing import (
    DEFAULT_LIMIT,
    Listing,
    additive_scores,
    list_responses,
    listed_expectations,
    logsumexp,
    positional_expectations,
)
from textenv.toy import ToyLanguage, sum_over_tokens
from textenv.toy_checks import FloatArray, IntArray

TIE_TOLERANCE = 1e-9
"""Relative to max(1, |best|): scores this close are ties at kl_coef = 0, where rounding would otherwise choose."""


@dataclass(frozen=True, eq=False)
class Optimum:
    """The optimal policy of a toy language and its figures. Made by `solve`."""

    language: ToyLanguage
    kl_coef: float
    """Price of one nat, in units of the score."""
    value: float
    """J*, in units of the score."""
    log_partition: float
    """log Z = J* / kl_coef; nan at kl_coef = 0, where it diverges while J* does not."""
    score: float
    """E[score] under pi*."""
    kl: float
    """KL(pi* || reference) in nats per response."""
    policy_logprobs: FloatArray | None = None
    """(T, V) log pi*(token | position), whatever came before; None on the enumeration road."""
    responses: IntArray | None = None
    """(M, T) every response, on the enumeration road; else None."""
    scores: FloatArray | None = None
    """(M,) score of each of `responses`."""
    sequence_logprobs: FloatArray | None = None
    """(M,) log pi* of each of `responses`."""

    def next_logprobs(self, prefix: Sequence[int]) -> FloatArray:
        """Log-probabilities of the next token under pi*.

        A prefix that pi* never writes is no error: the answer is the best policy from there on.

        Args:
            prefix: The response so far: 0 to T - 1 ids, none of them the stop token.

        Returns:
            (V,) log-probabilities in nats.

        Raises:
            ValueError: The prefix is finished, too long, or has ids outside the vocabulary.
        """
        language, start = self.language, len(prefix)
        going_on = all(0 <= token < language.vocab_size and token != language.stop_id for token in prefix)
        if start >= language.horizon or not going_on:
            raise ValueError(
                f"`prefix` should be 0 to {language.horizon - 1} ids in 0 to {language.vocab_size - 1} without the "
                f"stop token {language.stop_id}, got {tuple(prefix)}. No token follows it. Ask before the episode ends."
            )
        if self.policy_logprobs is not None:
            return np.array(self.policy_logprobs[start])
        assert self.responses is not None and self.scores is not None  # the other road
        rows = np.all(self.responses[:, :start] == np.asarray(prefix, dtype=np.int64), axis=1)
        suffixes = self.responses[rows, start:]
        # The tilt of the subtree, not a slice of pi*: it stays defined where pi* underflows or is zero.
        suffix_logprobs = sum_over_tokens(language.reference_logprobs[start:], suffixes)
        logprobs = _tilt(suffix_logprobs, self.scores[rows], self.kl_coef).logprobs
        return np.array([logsumexp(logprobs[suffixes[:, 0] == token]) for token in range(language.vocab_size)])


class FrontierPoint(NamedTuple):
    """One point of the exact score-KL frontier: no policy with this KL has a higher score."""

    kl_coef: float
    kl: float
    """KL(pi* || reference) in nats per response."""
    score: float
    """E[score] under pi*."""


def solve(language: ToyLanguage, kl_coef: float, method: str = "auto", *, limit: int = DEFAULT_LIMIT) -> Optimum:
    """Compute the optimal policy and its value.

    Args:
        language: The toy language.
        kl_coef: Price of one nat in units of the score, >= 0; 0 is the greedy limit.
        method: "induction" (additive scores only), "enumeration", or "auto": induction where it applies.
        limit: The most responses that enumeration may list.

    Returns:
        The optimum; `policy_logprobs` is set by induction, `responses` and their arrays by enumeration.

    Raises:
        ValueError: A negative, infinite or NaN `kl_coef`, an unknown `method`, induction for a score that is not
            additive, or more than `limit` responses.
    """
    kl_coef = check_kl_coef(kl_coef)
    if method not in ("auto", "induction", "enumeration"):
        raise ValueError(f"`method` should be 'auto', 'induction' or 'enumeration', got {method!r}. Use 'auto'.")
    if method == "enumeration" or (method == "auto" and not language.additive):
        return solve_listing(language, list_responses(language, limit), kl_coef)
    policy_logprobs, value = _backward_induction(language, kl_coef)
    score, kl = positional_expectations(language, policy_logprobs)
    return Optimum(language, kl_coef, value, _log_partition(value, kl_coef), score, kl, policy_logprobs=policy_logprobs)


def frontier(language: ToyLanguage, kl_coefs: Iterable[float], *, limit: int = DEFAULT_LIMIT) -> list[FrontierPoint]:
    """Trace the exact score-KL frontier: (kl_coef, kl, score) of the optimum at each coefficient.

    Responses are listed once for all coefficients. See `solve` for arguments and errors.
    """
    listing = None if language.additive else list_responses(language, limit)
    points = []
    for kl_coef in map(check_kl_coef, kl_coefs):
        optimum = solve(language, kl_coef) if listing is None else solve_listing(language, listing, kl_coef)
        points.append(FrontierPoint(kl_coef, optimum.kl, optimum.score))
    return points


def solve_listing(language: ToyLanguage, listing: Listing, kl_coef: float) -> Optimum:
    """The optimum on the enumeration road."""
    tilted = _tilt(listing.ref_logprobs, listing.scores, kl_coef)
    value = tilted.value(kl_coef)
    score, kl = listed_expectations(listing, tilted.logprobs)
    return Optimum(
        language,
        kl_coef,
        value,
        _log_partition(value, kl_coef),
        score,
        kl,
        responses=listing.responses,
        scores=listing.scores,
        sequence_logprobs=tilted.logprobs,
    )


class _Tilted(NamedTuple):
    """A tilted distribution on K outcomes, and its soft maximum `best + kl_coef * log_mass` in two parts."""

    logprobs: FloatArray  # (K,)
    best: float  # the highest score with any prior mass
    log_mass: float  # log of the prior mass, each outcome discounted by exp((score - best) / kl_coef)

    def value(self, kl_coef: float) -> float:
        return self.best + kl_coef * self.log_mass


def _tilt(prior_logprobs: FloatArray, scores: FloatArray, kl_coef: float) -> _Tilted:
    """Return prior * exp(score / kl_coef) / Z on K outcomes; the prior may sum to less than 1.

    Scores enter relative to the best one that the prior reaches: no exponential overflows for small kl_coef, and at 0
    the discount is 1 for the best outcomes, 0 for the others.
    """
    support = prior_logprobs > -np.inf
    best = float(scores[support].max())
    gaps = np.where(support, scores - best, 0.0)  # (K,) <= 0
    if kl_coef == 0.0:
        discounts = np.where(gaps >= -TIE_TOLERANCE * max(1.0, abs(best)), 0.0, -np.inf)
    else:
        with np.errstate(over="ignore"):  # -inf is the right answer for a gap that overflows
            discounts = gaps / kl_coef
    weights = prior_logprobs + discounts
    log_mass = logsumexp(weights)
    return _Tilted(weights - log_mass, best, log_mass)


def _backward_induction(language: ToyLanguage, kl_coef: float) -> tuple[FloatArray, float]:
    """Return log pi* (T, V) and J*: each position tilts the reference by what a token scores and leads to.

    What follows a token enters in two parts, its best score and its log mass. Their sum, the soft value, is enough for
    kl_coef > 0, but at 0 it forgets the mass, and a tie between stopping and going on would be shared wrongly.
    """
    token_scores = additive_scores(language)
    going_on = np.arange(language.vocab_size) != language.stop_id
    logprobs = np.empty_like(token_scores)
    ahead = _Tilted(np.empty(0), language.unfinished_score, 0.0)
    for position in reversed(range(language.horizon)):
        prior_logprobs = language.reference_logprobs[position] + going_on * ahead.log_mass
        ahead = _tilt(prior_logprobs, token_scores[position] + going_on * ahead.best, kl_coef)
        logprobs[position] = ahead.logprobs
    return logprobs, ahead.value(kl_coef)


def _log_partition(value: float, kl_coef: float) -> float:
    return value / kl_coef if kl_coef > 0.0 else np.nan


def check_kl_coef(kl_coef: float) -> float:
    """The coefficient as a float, or a ValueError where there is no optimum."""
    if not 0.0 <= kl_coef < np.inf:  # also true for NaN
        raise ValueError(
            f"`kl_coef` should be a finite number >= 0, got {kl_coef}. A negative price pays for leaving the reference "
            "and has no optimum. Use 0 for the greedy limit; for an infinite price the optimum is the reference."
        )
    return float(kl_coef)
