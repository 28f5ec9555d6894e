"""What best-of-n does to a proxy and to the gold score behind it, without training anything. Pure numpy.

Best-of-n writes n responses and keeps the one that the proxy likes best. It is the cheapest optimiser there is, so it
shows how far a proxy can be trusted before a policy is trained against it.

Legend: P prompts, N samples per prompt, K values of n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from textenv.rewards.overoptimisation_curve import OverOptimisation


def best_of_n_kl(n: ArrayLike) -> NDArray[np.float64]:
    """KL(best-of-n || policy) = log n - (n - 1) / n nats: how far best-of-n is from the policy that it draws from.

    Stiennon et al. (2020, arXiv:2009.01325) and Hilton & Gao (2022, "Measuring Goodhart's law"). It is exact
    where no two responses have the same score, and an upper bound otherwise (Beirami et al. 2024, arXiv:2401.01879). It
    knows nothing of the scores themselves.

    Args:
        n: responses that the best is chosen from, at least 1; any shape.

    Returns:
        The same shape; 0 at n = 1.

    Raises:
        ValueError: an n below 1.

    >>> best_of_n_kl([1, 2, 4]).round(4).tolist()
    [0.0, 0.1931, 0.6363]
    """
    n = np.asarray(n, np.float64)
    if not (n >= 1).all():
        raise ValueError(f"`n` should be at least 1, got {n.min()}: the best of no response does not exist.")
    kl: NDArray[np.float64] = np.log(n) - (n - 1) / n
    return kl


def best_of_n_weights(samples: int, n: int) -> NDArray[np.float64]:
    """C(i - 1, n - 1) / C(N, n) for ranks i = 1 .. N: how likely the i-th worst of N is the best of n drawn from them.

    The draws are without replacement, so that the weighted mean is unbiased for n fresh samples (Nakano et al. 2021,
    arXiv:2112.09332; used by Gao et al. 2022, arXiv:2210.10760). Computed by a running product, which neither overflows
    nor cancels.

    Args:
        samples: N.
        n: between 1 and N.

    Returns:
        (N,), ascending ranks; sums to 1.

    Raises:
        ValueError: n outside 1 .. N.

    >>> best_of_n_weights(4, 2).round(4).tolist()
    [0.0, 0.1667, 0.3333, 0.5]
    """
    for name, value in (("samples", samples), ("n", n)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"`{name}` should be an integer, got {value!r}.")
    if not 1 <= n <= samples:
        raise ValueError(
            f"`n` should be between 1 and the number of samples per prompt, {samples}, got {n}. The best of more than "
            "there are cannot be estimated: draw more samples, or ask for a smaller n."
        )
    ranks = np.arange(samples, 1, -1)  # N, N - 1, .., 2
    steps = np.maximum(ranks - n, 0) / (ranks - 1)  # weight of rank i - 1 over weight of rank i
    falling = n / samples * np.cumprod(np.concatenate([[1.0], steps]))
    weights: NDArray[np.float64] = falling[::-1].copy()
    return weights


def best_of_n_scores(proxy: ArrayLike, gold: ArrayLike, ns: Sequence[int]) -> NDArray[np.float64]:
    """The expected gold score (P, K) of the sample that the proxy likes best among n, for each n, from N >= n samples.

    Unbiased: the mean over all subsets of n of the N samples, by `best_of_n_weights` instead of enumeration. Where the
    proxy ties, one of the tied is taken at random. With the proxy as `gold` it is the proxy's own expected best.

    Args:
        proxy: (P, N), or (N,) for one prompt: what chooses.
        gold: the same shape: what the choice is worth.
        ns: K values of n.

    Raises:
        ValueError: shapes that differ, scores that are not finite, an n outside 1 .. N.

    >>> best_of_n_scores([0.0, 1.0, 2.0], [5.0, 9.0, 1.0], [1, 2, 3]).tolist()
    [[5.0, 3.6666666666666665, 1.0]]
    """
    proxy, gold = check_scores(proxy, gold)
    order = np.argsort(proxy, axis=1, kind="stable")
    ranked = np.take_along_axis(gold, order, 1)  # (P, N)
    ranked = np.stack([_mean_of_ties(p[o], g) for p, o, g in zip(proxy, order, ranked, strict=True)])
    weights = np.stack([best_of_n_weights(proxy.shape[1], n) for n in ns])  # (K, N)
    expected: NDArray[np.float64] = ranked @ weights.T
    return expected


def best_of_n_logprobs(logprobs: ArrayLike, scores: ArrayLike, n: int) -> NDArray[np.float64]:
    """What best-of-n writes, exactly: the log-probability (M,) of each of M outcomes to be the best of n draws.

    With F(s) the probability of a draw that scores at most s, the best of n scores at most s with probability F(s)^n;
    among equal scores an outcome is as likely as it was. Where outcomes can be listed (`textenv.oracle`) this gives the
    KL and the score of best-of-n without sampling.

    Args:
        logprobs: (M,) of one draw, summing to 1; -inf for what is never drawn.
        scores: (M,).
        n: at least 1.

    Raises:
        ValueError: shapes that differ, or an n below 1.

    >>> np.exp(best_of_n_logprobs(np.log([0.5, 0.25, 0.25]), [0.0, 1.0, 1.0], 2)).round(4).tolist()
    [0.25, 0.375, 0.375]
    """
    logprobs, scores = np.asarray(logprobs, np.float64), np.asarray(scores, np.float64)
    if logprobs.shape != scores.shape or logprobs.ndim != 1:
        raise ValueError(f"`logprobs` and `scores` should both be (M,), got {logprobs.shape} and {scores.shape}.")
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"`n` should be an integer of at least 1, got {n!r}: the best of no response does not exist.")
    _, level = np.unique(scores, return_inverse=True)  # (M,), ascending scores
    mass = np.full(level.max() + 1, -np.inf)
    np.logaddexp.at(mass, level, logprobs)
    up_to = np.minimum(np.logaddexp.accumulate(mass), 0.0)  # log F(s)
    below = np.concatenate([[-np.inf], up_to[:-1]])  # log of the probability to score less
    with np.errstate(invalid="ignore", divide="ignore"):  # where nothing is drawn up to some score
        share = n * up_to + np.log1p(-np.exp(n * np.where(up_to > -np.inf, below - up_to, -np.inf)))
        best = logprobs + np.where(mass > -np.inf, share - mass, 0.0)[level]
    exact: NDArray[np.float64] = best
    return exact


def best_of_n_curve(
    proxy: ArrayLike,
    gold: ArrayLike,
    ns: Sequence[int] | None = None,
    *,
    standardise: bool = True,
    confidence: float = 0.95,
) -> OverOptimisation:
    """Proxy and gold score of best-of-n against its KL.

    Args:
        proxy: (P, N) scores of N samples of each of P prompts.
        gold: (P, N) of the same samples.
        ns: values of n; None: 1, 2, 4, .. up to N.
        standardise: measure each score from its mean over all samples, in its standard deviations over them, so that
            both curves begin at 0 and can be compared. False leaves scores as they are.
        confidence: of the intervals.

    Raises:
        ValueError: see `best_of_n_scores`; a score that is the same for every sample, or ns that do not rise.
    """
    proxy, gold = check_scores(proxy, gold)
    if ns is None:
        ns = [2**power for power in range(proxy.shape[1].bit_length())]
    if standardise:
        proxy, gold = _standard("proxy", proxy), _standard("gold", gold)
    return OverOptimisation(
        kl=best_of_n_kl(ns),
        proxy=best_of_n_scores(proxy, proxy, ns),
        gold=best_of_n_scores(proxy, gold, ns),
        labels=tuple(f"best of {n}" for n in ns),
        confidence=confidence,
    )


def check_scores(proxy: ArrayLike, gold: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both as finite (P, N) float64.

    Raises:
        ValueError: shapes that differ or are not (P, N), or scores that are not finite.
    """
    proxy, gold = (np.atleast_2d(np.asarray(scores, np.float64)) for scores in (proxy, gold))
    if proxy.shape != gold.shape or proxy.ndim != 2 or proxy.size == 0:
        raise ValueError(
            "`proxy` and `gold` should both have shape (P, N), N samples for each of P prompts, got "
            f"{proxy.shape} and {gold.shape}. They should be two scores of the same samples."
        )
    for name, scores in (("proxy", proxy), ("gold", gold)):
        if not np.isfinite(scores).all():
            row, column = np.argwhere(~np.isfinite(scores))[0].tolist()
            raise ValueError(
                f"`{name}` should be finite, got {scores[row, column]} for prompt {row}, sample {column}. It could not "
                "be ranked. Leave that sample out of both scores, or its prompt where samples per prompt must be equal."
            )
    return proxy, gold


def _mean_of_ties(proxy: NDArray[np.float64], gold: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gold (N,) in which samples that the proxy cannot tell apart have the mean of their gold scores; proxy sorted."""
    _, group = np.unique(proxy, return_inverse=True)
    means: NDArray[np.float64] = np.bincount(group, gold) / np.bincount(group)
    tied: NDArray[np.float64] = means[group]
    return tied


def _standard(name: str, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    deviation = scores.std()
    if deviation == 0:
        raise ValueError(
            f"`{name}` should differ between samples, got {scores.flat[0]} for all {scores.size}: there are no "
            "standard deviations to measure it in, and no best of n. Pass standardise=False to look at it all the same."
        )
    standard: NDArray[np.float64] = (scores - scores.mean()) / deviation
    return standard
