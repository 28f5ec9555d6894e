"""The exact optimum of a toy language: what RLHF converges to when nothing but the objective limits it.

The objective of a policy pi, with the KL over whole responses in nats (Ziegler et al. 2019, arXiv:1909.08593, eq. 2):

    J(pi) = E_pi[score] - kl_coef * KL(pi || reference)

Its optimum is the reference tilted by the score (Korbak et al. 2022, arXiv:2205.11275; Rafailov et al. 2023,
arXiv:2305.18290, eq. 4):

    pi*(y) = reference(y) exp(score(y) / kl_coef) / Z        J* = kl_coef log Z

and every other policy falls short by J* - J(pi) = kl_coef KL(pi || pi*), so a division gives its distance in nats.
At kl_coef = 0 the limit is meant: J* is the best score within the support of the reference, and pi* is the reference
restricted to the responses that reach it.

Two roads lead there. Additive scores take soft backward induction (Levine 2018, arXiv:1805.00909): the same tilt, one
position at a time. Any other score takes one tilt over the list of all responses.

Legend: M responses in the language, T horizon, V vocabulary. Response arrays are (M, T), -1 right of the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from textenv.toy import PAD, FloatArray, IntArray, ToyLanguage, sum_over_tokens

DEFAULT_LIMIT = 5_000_000
"""The most responses that are listed unasked; at T = 8 they take some hundred megabytes."""

TIE_TOLERANCE = 1e-9
"""Relative to max(1, |best|): scores this close are ties at kl_coef = 0, where rounding would otherwise choose."""

NORMALISATION_TOLERANCE = 1e-4
"""How far from 1 the probabilities of a policy may sum; float32 rounding over tens of tokens stays below."""

SequenceLogprobs = Callable[[IntArray, IntArray], npt.ArrayLike]


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
        return np.array([_logsumexp(logprobs[suffixes[:, 0] == token]) for token in range(language.vocab_size)])


@dataclass(frozen=True)
class Evaluation:
    """What a policy reaches, and what it misses."""

    score: float
    """E_pi[score]."""
    kl: float
    """KL(pi || reference) in nats per response; inf where pi writes what the reference never does."""
    objective: float
    """J(pi) = score - kl_coef * kl; -inf where `kl` is inf, also in the limit kl_coef = 0."""
    regret: float
    """J* - J(pi) >= 0 up to rounding, in units of the score."""
    distance: float
    """KL(pi || pi*) = regret / kl_coef in nats per response; nan at kl_coef = 0, where `regret` says it."""


class FrontierPoint(NamedTuple):
    """One point of the exact score-KL frontier: no policy with this KL has a higher score."""

    kl_coef: float
    kl: float
    """KL(pi* || reference) in nats per response."""
    score: float
    """E[score] under pi*."""


class _Listing(NamedTuple):
    """Every response of a language with what the optimum is made of."""

    responses: IntArray  # (M, T)
    lengths: IntArray  # (M,)
    scores: FloatArray  # (M,)
    ref_logprobs: FloatArray  # (M,)


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
    kl_coef = _check_kl_coef(kl_coef)
    if method not in ("auto", "induction", "enumeration"):
        raise ValueError(f"`method` should be 'auto', 'induction' or 'enumeration', got {method!r}. Use 'auto'.")
    if method == "enumeration" or (method == "auto" and not language.additive):
        return _solve_listing(language, _list(language, limit), kl_coef)
    policy_logprobs, value = _backward_induction(language, kl_coef)
    score, kl = _positional_expectations(language, policy_logprobs)
    return Optimum(language, kl_coef, value, _log_partition(value, kl_coef), score, kl, policy_logprobs=policy_logprobs)


def evaluate(
    language: ToyLanguage, logprobs: npt.ArrayLike, kl_coef: float, *, limit: int = DEFAULT_LIMIT
) -> Evaluation:
    """Evaluate a policy that depends on the position only, exactly.

    Args:
        language: The toy language.
        logprobs: (T, V) log-probabilities of the policy; rounding in their sums is divided out.
        kl_coef: Price of one nat in units of the score, >= 0.
        limit: The most responses that are listed if the score is not additive.

    Returns:
        Score, KL, objective, regret and distance.

    Raises:
        ValueError: A wrong shape, NaN, rows that do not sum to 1, or an error of `solve`.
    """
    table = np.array(logprobs, dtype=np.float64)
    if table.shape != language.reference_logits.shape:
        raise ValueError(
            f"`logprobs` should be (T, V) = {language.reference_logits.shape}, got shape {table.shape}. Tokens would "
            "be read at the wrong positions. Give one row of log-probabilities per position."
        )
    table -= np.array([_log_total(row, f"Row {t} of `logprobs`") for t, row in enumerate(table)])[:, None]
    if not language.additive:
        return evaluate_sequences(language, lambda y, _: sum_over_tokens(table, y), kl_coef, limit=limit)
    score, kl = _positional_expectations(language, table)
    return _compare(score, kl, solve(language, kl_coef))


def evaluate_sequences(
    language: ToyLanguage, sequence_logprobs: SequenceLogprobs, kl_coef: float, *, limit: int = DEFAULT_LIMIT
) -> Evaluation:
    """Evaluate any policy exactly, from its probability of every response.

    Args:
        language: The toy language.
        sequence_logprobs: Called once with `responses` (M, T), -1 right of the last token, and `lengths` (M,); returns
            (M,) log-probabilities of whole responses. Rounding in their sum is divided out.
        kl_coef: Price of one nat in units of the score, >= 0.
        limit: The most responses that may be listed.

    Returns:
        Score, KL, objective, regret and distance.

    Raises:
        ValueError: A wrong shape, NaN, probabilities that do not sum to 1, or an error of `solve`.
    """
    kl_coef = _check_kl_coef(kl_coef)
    listing = _list(language, limit)
    logprobs = np.array(sequence_logprobs(listing.responses, listing.lengths), dtype=np.float64)  # (M,)
    if logprobs.shape != listing.scores.shape:
        raise ValueError(
            f"`sequence_logprobs` should return one number per response, shape {listing.scores.shape}, got shape "
            f"{logprobs.shape}. Sum the log-probabilities of each response over its `lengths` tokens."
        )
    logprobs -= _log_total(logprobs, "`sequence_logprobs`")
    score, kl = _listed_expectations(listing, logprobs)
    return _compare(score, kl, _solve_listing(language, listing, kl_coef))


def frontier(language: ToyLanguage, kl_coefs: Iterable[float], *, limit: int = DEFAULT_LIMIT) -> list[FrontierPoint]:
    """Trace the exact score-KL frontier: (kl_coef, kl, score) of the optimum at each coefficient.

    Responses are listed once for all coefficients. See `solve` for arguments and errors.
    """
    listing = None if language.additive else _list(language, limit)
    points = []
    for kl_coef in map(_check_kl_coef, kl_coefs):
        optimum = solve(language, kl_coef) if listing is None else _solve_listing(language, listing, kl_coef)
        points.append(FrontierPoint(kl_coef, optimum.kl, optimum.score))
    return points


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
    log_mass = _logsumexp(weights)
    return _Tilted(weights - log_mass, best, log_mass)


def _backward_induction(language: ToyLanguage, kl_coef: float) -> tuple[FloatArray, float]:
    """Return log pi* (T, V) and J*: each position tilts the reference by what a token scores and leads to.

    What follows a token enters in two parts, its best score and its log mass. Their sum, the soft value, is enough for
    kl_coef > 0, but at 0 it forgets the mass, and a tie between stopping and going on would be shared wrongly.
    """
    token_scores = _token_scores(language)
    going_on = np.arange(language.vocab_size) != language.stop_id
    logprobs = np.empty_like(token_scores)
    ahead = _Tilted(np.empty(0), language.unfinished_score, 0.0)
    for position in reversed(range(language.horizon)):
        prior_logprobs = language.reference_logprobs[position] + going_on * ahead.log_mass
        ahead = _tilt(prior_logprobs, token_scores[position] + going_on * ahead.best, kl_coef)
        logprobs[position] = ahead.logprobs
    return logprobs, ahead.value(kl_coef)


def _positional_expectations(language: ToyLanguage, logprobs: FloatArray) -> tuple[float, float]:
    """E[score] and KL(pi || reference) of a positional policy, forward over the probability of still writing."""
    token_scores = _token_scores(language)
    going_on = np.arange(language.vocab_size) != language.stop_id
    score, kl, survival = 0.0, 0.0, 1.0
    for position in range(language.horizon):
        if survival == 0.0:
            break  # an infinite KL behind a certain stop counts nothing; 0 * inf would be NaN
        probs = np.exp(logprobs[position])
        score += survival * float(probs @ token_scores[position])
        kl += survival * _kl(logprobs[position], language.reference_logprobs[position])
        survival *= float(probs[going_on].sum())
    return score + survival * language.unfinished_score, kl


def _listed_expectations(listing: _Listing, logprobs: FloatArray) -> tuple[float, float]:
    """E[score] and KL(pi || reference) of any policy, as sums over all responses."""
    return float(np.exp(logprobs) @ listing.scores), _kl(logprobs, listing.ref_logprobs)


def _solve_listing(language: ToyLanguage, listing: _Listing, kl_coef: float) -> Optimum:
    tilted = _tilt(listing.ref_logprobs, listing.scores, kl_coef)
    value = tilted.value(kl_coef)
    score, kl = _listed_expectations(listing, tilted.logprobs)
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


def _list(language: ToyLanguage, limit: int) -> _Listing:
    responses, lengths = enumerate_responses(language, limit)
    ref_logprobs = sum_over_tokens(language.reference_logprobs, responses)
    return _Listing(responses, lengths, language.score_padded(responses), ref_logprobs)


def _compare(score: float, kl: float, optimum: Optimum) -> Evaluation:
    kl_coef = optimum.kl_coef
    objective = score - kl_coef * kl if np.isfinite(kl) else -np.inf
    regret = optimum.value - objective
    return Evaluation(score, kl, objective, regret, regret / kl_coef if kl_coef > 0.0 else np.nan)


def _log_partition(value: float, kl_coef: float) -> float:
    return value / kl_coef if kl_coef > 0.0 else np.nan


def _kl(logprobs: FloatArray, ref_logprobs: FloatArray) -> float:
    """KL in nats over K outcomes; 0 log 0 = 0, and inf where the reference has no mass but the policy does."""
    probs = np.exp(logprobs)
    log_ratios = np.subtract(logprobs, ref_logprobs, out=np.zeros_like(logprobs), where=probs > 0.0)
    return float((probs * log_ratios).sum())


def _logsumexp(values: FloatArray) -> float:
    top = float(values.max(initial=-np.inf))
    return top if top == -np.inf else top + float(np.log(np.exp(values - top).sum()))


def _log_total(logprobs: FloatArray, name: str) -> float:
    """Return the log of the sum of probabilities, which is almost 0, or raise a ValueError."""
    total = _logsumexp(logprobs) if not (np.isnan(logprobs) | np.isposinf(logprobs)).any() else np.nan
    if not abs(total) <= NORMALISATION_TOLERANCE:  # also true for NaN
        with np.errstate(over="ignore"):
            probability = float(np.exp(total))
        raise ValueError(
            f"{name} should be log-probabilities that sum to 1, got a sum of {probability:.6g}. Expectations would be "
            "wrong. Pass log-softmaxed numbers, count every token up to the stop token, and none to the right of it."
        )
    return total


def _token_scores(language: ToyLanguage) -> FloatArray:
    if language.token_scores is None:
        raise ValueError(
            "`method` 'induction' should get an additive score, got a language with `score_fn`. The value of a prefix "
            "would depend on all of it. Use method='auto' or 'enumeration'."
        )
    return language.token_scores


def _check_kl_coef(kl_coef: float) -> float:
    if not 0.0 <= kl_coef < np.inf:  # also true for NaN
        raise ValueError(
            f"`kl_coef` should be a finite number >= 0, got {kl_coef}. A negative price pays for leaving the reference "
            "and has no optimum. Use 0 for the greedy limit; for an infinite price the optimum is the reference."
        )
    return float(kl_coef)
