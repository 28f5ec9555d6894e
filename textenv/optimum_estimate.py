"""The optimum where no oracle lists the responses: an estimate from samples of the reference, or that there is none.

The best that any policy can reach on a prompt x, at the price beta (`kl_coef`) per nat, is a mean over the reference
(Korbak et al. 2022, arXiv:2205.11275; Rafailov et al. 2023, arXiv:2305.18290, eq. 4):

    J*(x) = beta log Z(x)        Z(x) = E_ref[w]        w = exp(score / beta)

and a policy falls short of it by beta times its distance to the optimal policy, KL(policy || optimum) in nats.

**How much n samples say.** Weights are skewed: where beta is small, a few samples carry the sum, and the responses
that make up the optimum were never drawn. The effective sample size (sum w)^2 / sum w^2 (Kong 1992) says how many
samples took part. Its inverse is, but for 1 / n, the squared relative error of Z, so that log Z has a standard error of
about 1 / sqrt(ess) nats, and the plug-in log mean w falls short of log Z by about 1 / (2 ess) on average (Jensen); that
much is added. Below `MIN_EFFECTIVE_SAMPLES` on any prompt both series mean nothing, and `known` is False.

**What holds at any n.** The product of the prompts' mean weights has the product of the Z as its mean, so that it is
1 / delta times larger with probability at most delta (Markov). This makes `OptimumEstimate.at_least`, which needs no
rule: the optimum is no lower, at the confidence asked for. It may be far higher: needed are about exp(KL(optimum ||
reference)) samples (Chatterjee & Diaconis 2018, arXiv:1511.01437), and no sample tells of what it has never seen. A
score that is high once in a million responses leaves no trace in a thousand, in the effective sample size either.

Legend: K prompts, n samples of the reference for each, m responses of a policy for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from textenv.estimates import UNDEFINED, Estimate, quantile_of

FloatArray = npt.NDArray[np.float64]
Grouped = npt.ArrayLike | Sequence[npt.ArrayLike]
"""(n,) numbers of one prompt, (K, n) of several, or K sequences of any lengths."""

MIN_EFFECTIVE_SAMPLES = 50.0
"""Where an optimum can be told: there log Z has a standard error of 0.14 nats a prompt, and the terms that the
interval leaves out, of the order of 1 / ess, are a hundredth of a nat."""


@dataclass(frozen=True)
class OptimumEstimate:
    """J*, the mean over prompts of beta log Z, as far as samples tell."""

    kl_coef: float
    """beta."""
    optimum: Estimate
    """J* of these prompts, in units of the score; nan where `known` is False."""
    plug_in: float
    """Mean over prompts of beta log mean w, without correction; too low on average, at any n."""
    at_least: float
    """J* is no lower than this, at the interval's confidence (one-sided), whatever the effective sample size."""
    effective_samples: FloatArray
    """(K,) of each prompt, between 1 and its n."""
    samples: int
    """Of all prompts together."""
    confidence: float
    """Of the interval."""

    @property
    def known(self) -> bool:
        """Whether the effective sample size of every prompt is at least `MIN_EFFECTIVE_SAMPLES`."""
        return bool(self.effective_samples.min() >= MIN_EFFECTIVE_SAMPLES)

    def __str__(self) -> str:
        """The estimate, or that there is none at this n."""
        least = self.effective_samples.min()
        if self.known:
            return f"{self.optimum}, effective sample size {least:.0f}"
        return (
            f"cannot be said at this n: of {self.samples} samples, {least:.1f} took part where it was fewest, "
            f"{MIN_EFFECTIVE_SAMPLES:g} are needed; at least {self.at_least:.3g}"
        )


def estimate_optimum(scores: Grouped, kl_coef: float, *, confidence: float = 0.95) -> OptimumEstimate:
    """Estimate the best value of score - kl_coef * KL that any policy reaches, from samples of the reference.

    The interval is the delta method's, of log Z: z standard errors sqrt(1 / ess - 1 / n) on either side of the
    corrected value, prompts adding up as strata. It needs no random numbers; a bootstrap resamples the same few large
    weights and covers no better where they decide. Prompts count as given: the interval tells how far off the mean over
    these prompts may be, not that over others.

    Args:
        scores: of independent samples of the reference at the task's temperature: (n,), (K, n) or ragged. As the
            objective has them: with penalties, without the toll.
        kl_coef: beta, above 0.
        confidence: of the interval and of `at_least`.

    Returns:
        The estimate, or that it cannot be said at this n.

    Raises:
        ValueError: no samples, scores that are not finite, a `kl_coef` of 0 or less.

    Example:
        One half of the reference's responses score 1, the other 0; at beta = 1, J* = log((1 + e) / 2) = 0.62:

        >>> estimate_optimum([0.0, 1.0] * 500, 1.0).optimum
        Estimate(value=0.620..., low=0.591..., high=0.648...)
        >>> print(estimate_optimum([0.0, 1.0, 3.0] * 5, 0.1))
        cannot be said at this n: of 15 samples, 5.0 took part where it was fewest, 50 are needed; at least 2.59
    """
    z = quantile_of(confidence)
    if not (math.isfinite(kl_coef) and kl_coef > 0):
        raise ValueError(
            f"`kl_coef` should be above 0, got {kl_coef!r}: without a price the optimum is the highest score that the "
            "reference can write, which samples do not tell."
        )
    groups = grouped(scores, "scores")
    logs, effective, variances = np.array([log_mean_weight(group / kl_coef) for group in groups]).T
    count = len(groups)
    plug_in = kl_coef * float(logs.mean())
    corrected = plug_in + kl_coef * float(variances.mean()) / 2
    error = kl_coef * math.sqrt(float(variances.sum())) / count
    optimum = Estimate(corrected, corrected - z * error, corrected + z * error)
    return OptimumEstimate(
        kl_coef=float(kl_coef),
        optimum=optimum if effective.min() >= MIN_EFFECTIVE_SAMPLES else UNDEFINED,
        plug_in=plug_in,
        at_least=plug_in + kl_coef * math.log1p(-confidence) / count,
        effective_samples=effective,
        samples=sum(map(len, groups)),
        confidence=confidence,
    )


def distance(optimum: OptimumEstimate, objectives: Grouped) -> Estimate:
    """How far a policy is from the optimum: (J* - J) / kl_coef, KL(policy || optimum) in nats per response.

    Args:
        optimum: of the same prompts, from samples independent of the policy's.
        objectives: score - kl_coef * log(policy / reference) of m responses of the policy to each prompt, (m,), (K, m)
            or ragged: their mean is J.

    Returns:
        The distance and its interval, at the confidence of `optimum`. Where the optimum cannot be said, value and high
        are nan and inf, and low is what is certain: at least so far.

    Raises:
        ValueError: other prompts, by their number; a prompt with fewer than two responses, whose spread would be
            unknown; objectives that are not finite.
    """
    groups = grouped(objectives, "objectives")
    if len(groups) != len(optimum.effective_samples) or min(map(len, groups)) < 2:
        raise ValueError(
            f"`objectives` should hold two or more responses to each of {len(optimum.effective_samples)} prompts, got "
            f"{[len(group) for group in groups]}. J and J* would be those of different prompts, or J of unknown error."
        )
    beta, z = optimum.kl_coef, quantile_of(optimum.confidence)
    mean = float(np.mean([group.mean() for group in groups]))
    error = math.sqrt(sum(float(group.var(ddof=1)) / len(group) for group in groups)) / len(groups)
    if not optimum.known:
        # Two statements at half the risk each hold together at the confidence asked for (Bonferroni).
        risk = (1 - optimum.confidence) / 2
        least = optimum.plug_in + beta * math.log(risk) / len(groups)
        low = (least - mean - quantile_of(1 - 2 * risk) * error) / beta
        return Estimate(math.nan, max(0.0, low), math.inf)
    value = (optimum.optimum.value - mean) / beta
    half = math.hypot((optimum.optimum.high - optimum.optimum.value) / beta, z * error / beta)
    return Estimate(value, value - half, value + half)


def log_mean_weight(log_weights: FloatArray) -> tuple[float, float, float]:
    """Give log mean w, the effective sample size, and the variance of log mean w by the delta method.

    The variance is s^2 / (n mean(w)^2), s^2 with n - 1 in its denominator, inf for one sample.

    Args:
        log_weights: (n,) finite; only their differences may be far from 0.
    """
    n, highest = len(log_weights), float(log_weights.max())
    weights = np.exp(log_weights - highest)  # the largest is 1: nothing overflows
    mean = float(weights.mean())
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    variance = float(weights.var(ddof=1)) / (n * mean**2) if n > 1 else math.inf
    return highest + math.log(mean), effective, variance


def grouped(x: Grouped, name: str) -> list[FloatArray]:
    """K arrays, one per prompt.

    Raises:
        ValueError: nothing for some prompt, or numbers that are not finite.
    """
    rows: list[Any] = list(x) if np.iterable(x) else [x]
    if not rows or np.ndim(rows[0]) == 0:
        rows = [rows]  # one prompt
    groups = [np.asarray(row, dtype=np.float64) for row in rows]
    if any(group.ndim != 1 or len(group) == 0 for group in groups):
        raise ValueError(
            f"`{name}` should be at least one number for each prompt, in one dimension or two, got shapes "
            f"{[group.shape for group in groups][:4]}. Leave prompts without samples out."
        )
    if not all(np.isfinite(group).all() for group in groups):
        raise ValueError(
            f"`{name}` should be finite, got {[float(v) for g in groups for v in g if not np.isfinite(v)][:4]}: one "
            "such number decides every mean. Leave dropped samples out."
        )
    return groups
