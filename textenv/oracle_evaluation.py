"""What a policy of a toy language reaches and what it misses, exactly; see `textenv.oracle` for the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from textenv.oracle_listing import (
    DEFAULT_LIMIT,
    list_responses,
    listed_expectations,
    logsumexp,
    positional_expectations,
)
from textenv.oracle_optimum import Optimum, check_kl_coef, solve, solve_listing
from textenv.toy import ToyLanguage, sum_over_tokens
from textenv.toy_checks import FloatArray, IntArray

NORMALISATION_TOLERANCE = 1e-4
"""How far from 1 the probabilities of a policy may sum; float32 rounding over tens of tokens stays below."""

SequenceLogprobs = Callable[[IntArray, IntArray], npt.ArrayLike]


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
    score, kl = positional_expectations(language, table)
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
    kl_coef = check_kl_coef(kl_coef)
    listing = list_responses(language, limit)
    logprobs = np.array(sequence_logprobs(listing.responses, listing.lengths), dtype=np.float64)  # (M,)
    if logprobs.shape != listing.scores.shape:
        raise ValueError(
            f"`sequence_logprobs` should return one number per response, shape {listing.scores.shape}, got shape "
            f"{logprobs.shape}. Sum the log-probabilities of each response over its `lengths` tokens."
        )
    logprobs -= _log_total(logprobs, "`sequence_logprobs`")
    score, kl = listed_expectations(listing, logprobs)
    return _compare(score, kl, solve_listing(language, listing, kl_coef))


def _compare(score: float, kl: float, optimum: Optimum) -> Evaluation:
    kl_coef = optimum.kl_coef
    objective = score - kl_coef * kl if np.isfinite(kl) else -np.inf
    regret = optimum.value - objective
    return Evaluation(score, kl, objective, regret, regret / kl_coef if kl_coef > 0.0 else np.nan)


def _log_total(logprobs: FloatArray, name: str) -> float:
    """Return the log of the sum of probabilities, which is almost 0, or raise a ValueError."""
    total = logsumexp(logprobs) if not (np.isnan(logprobs) | np.isposinf(logprobs)).any() else np.nan
    if not abs(total) <= NORMALISATION_TOLERANCE:  # also true for NaN
        with np.errstate(over="ignore"):
            probability = float(np.exp(total))
        raise ValueError(
            f"{name} should be log-probabilities that sum to 1, got a sum of {probability:.6g}. Expectations would be "
            "wrong. Pass log-softmaxed numbers, count every token up to the stop token, and none to the right of it."
        )
    return total
