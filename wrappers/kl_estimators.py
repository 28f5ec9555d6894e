"""Estimators of KL(pi || pi_ref) from a sampled token, and what each does to the gradient as a reward.

With logr = log pi(a) - log pi_ref(a) at the token that was sampled (Schulman 2020, "Approximating KL divergence",
joschu.net/blog/kl-approx.html):

| name | per token | mean over pi |
|---|---|---|
| ``"k1"`` | logr | KL |
| ``"k2"`` | logr^2 / 2 | about KL near the reference |
| ``"k3"`` | exp(-logr) - 1 + logr | KL, always at least 0 |
| ``"exact"`` | sum over a of pi(a) (log pi(a) - log pi_ref(a)) | KL, no variance from the token |
| ``"cross_entropy"`` | -log pi_ref(a) | KL + entropy of pi |

A toll is part of the reward, a number that no gradient flows through: the policy gradient of a response is
sum_t grad log pi(a_t) * (reward from t on). What makes a good *estimate* need not make a good *reward*: each docstring
says what is left of the gradient of -KL. Tests compare every such statement with the exact gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ESTIMATORS = ("k1", "k2", "k3", "exact", "cross_entropy")


def k1(logprobs: NDArray[Any], ref_logprobs: NDArray[Any]) -> NDArray[np.float64]:
    """Give logr, unbiased, negative on some tokens.

    As a reward: the exact gradient of -KL, at every horizon, because E[grad logr] = E[grad log pi] = 0.

    Example:
        >>> round(float(k1(np.log(0.9), np.log(0.5))), 4)
        0.5878
    """
    return np.asarray(logprobs, dtype=np.float64) - ref_logprobs


def k2(logprobs: NDArray[Any], ref_logprobs: NDArray[Any]) -> NDArray[np.float64]:
    """Give logr^2 / 2, never negative, biased unless pi is near the reference.

    As a reward: minus the gradient of E[logr^2 / 2], *plus* that of KL (one token): the sign of logr is lost, so tokens
    that became rarer are punished like those that became likelier, and the policy may be pushed away from the
    reference. It is a loss to differentiate, not a reward.

    Example:
        >>> round(float(k2(np.log(0.9), np.log(0.5))), 4)
        0.1727
    """
    return k1(logprobs, ref_logprobs) ** 2 / 2


def k3(logprobs: NDArray[Any], ref_logprobs: NDArray[Any]) -> NDArray[np.float64]:
    """Give exp(-logr) - 1 + logr, unbiased and never negative.

    As a reward: minus the gradient of KL(pi || pi_ref), *plus* that of KL(pi_ref || pi) (one token). The two cancel to
    first order near the reference, and beyond it the second may win and push the policy away. Good to look at, not to
    train with.

    Example:
        >>> round(float(k3(np.log(0.9), np.log(0.5))), 4)
        0.1433
    """
    logr = k1(logprobs, ref_logprobs)
    with np.errstate(over="ignore"):  # a token that the policy all but forbids: infinite, and meant so
        return np.expm1(-logr) + logr


def cross_entropy(ref_logprobs: NDArray[Any]) -> NDArray[np.float64]:
    """Give -log pi_ref(a), which needs no policy.

    As a reward: the gradient of E[log pi_ref], the reference's half of -KL. For maximum-entropy agents, whose own
    entropy bonus at temperature `kl_coef` is the other half: r + kl_coef log pi_ref + kl_coef H(pi) is score -
    kl_coef KL. An agent without that bonus would collapse onto the reference's likeliest tokens.
    """
    return -np.asarray(ref_logprobs, dtype=np.float64)


def estimate(
    estimator: str, logprobs: NDArray[Any], ref_logprobs: NDArray[Any], exact: NDArray[Any] | None
) -> NDArray[np.float64]:
    """The estimator's value per token.

    Args:
        estimator: one of `ESTIMATORS`.
        logprobs: any shape.
        ref_logprobs: the same shape.
        exact: for ``"exact"``: the KL of the states' whole distributions, see
            `textenv.distributions.kl_divergence`. As a reward it has no gradient on the token chosen in the same
            state, whatever that was: only what the token does to *later* states' KL is felt. It lacks the direct
            derivative, E[sum_t grad KL(s_t)]; with one token nothing at all holds the policy. Add that term to the
            loss, or use it as a figure.
    """
    if estimator == "exact":
        assert exact is not None
        return exact
    if estimator == "cross_entropy":
        return cross_entropy(ref_logprobs)
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, ref_logprobs)


def check_estimator(estimator: str) -> None:
    """Refuse an unknown name.

    Raises:
        ValueError: it is none of `ESTIMATORS`.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"`estimator` should be one of {ESTIMATORS}, got {estimator!r}. Take 'k1' to train: as a reward it alone "
            "has the exact gradient of score - kl_coef * KL."
        )
