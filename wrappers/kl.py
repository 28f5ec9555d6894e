"""The KL toll: what leaving the reference costs, per token; and the adaptive controller. Pure functions.

Log-probabilities are those of the sampling distribution, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Logprobs = Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], NDArray[Any]]
"""``(observations, actions) -> (N,)`` log-probability of each action after its prefix."""


def kl_toll(logprobs: NDArray[Any], ref_logprobs: NDArray[Any], kl_coef: float) -> NDArray[Any]:
    """kl_coef * (log pi - log pi_ref), the k1 estimate per token, to be subtracted from the reward.

    Ziegler et al. 2019 (arXiv:1909.08593), eq. 2. Summed over a response sampled from pi its mean is kl_coef times
    KL(pi || pi_ref). k1 may be negative on a single token; it is the estimator whose use as a (constant) reward gives
    the exact policy gradient of score - kl_coef * KL.

    Args:
        logprobs: any shape.
        ref_logprobs: the same shape.
        kl_coef: at least 0.

    Returns:
        Tolls of that shape.
    """
    if kl_coef == 0:
        return np.zeros_like(logprobs - ref_logprobs)  # also where the reference forbids a token: 0 * inf is NaN
    return kl_coef * (logprobs - ref_logprobs)


def adapt_kl_coef(kl_coef: float, kl: float, target_kl: float, gain: float = 0.1) -> float:
    """kl_coef * (1 + gain * clip(kl / target_kl - 1, -0.2, 0.2)): at most 2% a step at the published gain.

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.

    Args:
        kl_coef: the coefficient now.
        kl: measured, nats per response.
        target_kl: wanted, nats per response, above 0.
        gain: K.
    """
    error = min(max(kl / target_kl - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + gain * error)


def check_kl_settings(kl_coef: float, target_kl: float | None, episodes_per_update: int | None = None) -> None:
    """Refuse settings that would reward leaving the reference, poison every reward, or never steer.

    Raises:
        ValueError: kl_coef negative or not finite, target_kl not positive and finite, or episodes_per_update below 1.
    """
    if not (isinstance(kl_coef, int | float | np.number) and math.isfinite(kl_coef) and kl_coef >= 0):
        raise ValueError(
            f"`kl_coef` should be a finite number of at least 0, got {kl_coef!r}. A negative one pays the policy for "
            "leaving the reference, NaN turns every reward into NaN; 0 measures the KL without charging for it."
        )
    if target_kl is not None and not (isinstance(target_kl, int | float | np.number) and 0 < target_kl < math.inf):
        raise ValueError(
            f"`target_kl` should be a positive number of nats per response, got {target_kl!r}. The controller divides "
            "by it; None keeps the coefficient as it is."
        )
    if target_kl is not None and kl_coef == 0:
        raise ValueError(
            f"`target_kl`={target_kl} should have a kl_coef above 0 to start from, got kl_coef=0. The controller "
            "multiplies it, so it would stay 0. Start from 0.05, say."
        )
    if episodes_per_update is not None and not (isinstance(episodes_per_update, int) and episodes_per_update >= 1):
        raise ValueError(
            f"`episodes_per_update` should be an integer of at least 1, got {episodes_per_update!r}. The controller "
            "needs a mean to move on; None takes one episode per row."
        )


def task_reference(env: Any) -> Any:
    """The reference of the text task at the bottom of a stack, single or vector, or None."""
    return getattr(getattr(env.unwrapped, "task", None), "reference", None)


def own_copy(observations: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Observations in arrays of their own: whoever acts may overwrite the ones it was given."""
    return {key: np.array(value) for key, value in observations.items()}
