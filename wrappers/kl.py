"""The KL toll: what leaving the reference costs, per token. Pure functions, the adaptive controller, and their state.

Legend: N rows, T response tokens. Log-probabilities are those of the sampling distribution, in nats.
"""

from __future__ import annotations

import math
import warnings
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


class KLLeash:
    """The KL toll of N rows: where log-probabilities come from, the KL so far of each episode, the coefficient.

    Args:
        num_rows: N.
        ref_logprobs: log-probabilities under the reference.
        policy_logprobs: under the policy that acts; None: taken to be the reference, toll 0, and one warning says so.
        kl_coef: the coefficient, or its start.
        target_kl: nats per response that the controller steers to; None keeps the coefficient.
        episodes_per_update: the controller moves after this many finished episodes, on their mean KL.
    """

    def __init__(
        self,
        num_rows: int,
        ref_logprobs: Logprobs | None,
        default_reference: Logprobs | None,
        policy_logprobs: Logprobs | None,
        kl_coef: float,
        target_kl: float | None,
        episodes_per_update: int | None,
    ) -> None:
        check_kl_settings(kl_coef, target_kl, episodes_per_update)
        self.kl_coef = float(kl_coef)
        self.target_kl = target_kl
        self.episodes_per_update = episodes_per_update or num_rows
        self._own_reference = ref_logprobs is not None
        self.ref_logprobs = ref_logprobs if ref_logprobs is not None else default_reference
        self.policy_logprobs = policy_logprobs
        self.kl = np.zeros(num_rows)
        self._tokens = np.zeros(num_rows, dtype=np.int64)
        self._finished: list[float] = []
        self._planned: tuple[NDArray[Any], NDArray[Any]] | None = None
        self._warned = False

    def restart(self, rows: Any = slice(None)) -> None:
        """Begin new episodes on some rows."""
        self.kl[rows] = 0.0
        self._tokens[rows] = 0

    def tolls(
        self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any], live: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """The tolls (N,) of one step, 0 on rows that are not live, and count their KL."""
        logprobs, ref_logprobs = self._both(observations, actions)
        # Rows that are not live have an action that nobody chose: whatever the models say of it, infinities included.
        logprobs, ref_logprobs = np.where(live, logprobs, 0.0), np.where(live, ref_logprobs, 0.0)
        self.kl += logprobs - ref_logprobs
        self._tokens += live
        tolls: NDArray[np.float64] = kl_toll(logprobs, ref_logprobs, self.kl_coef)
        return tolls

    def finish(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """KL of the episodes that end on `rows`, nats; the controller counts them, and the rows restart."""
        kl = self.kl[rows].copy()
        if self.target_kl is not None:
            self._finished.extend(kl.tolist())
            while len(self._finished) >= self.episodes_per_update:
                batch = self._finished[: self.episodes_per_update]
                del self._finished[: self.episodes_per_update]
                self.kl_coef = adapt_kl_coef(self.kl_coef, sum(batch) / len(batch), self.target_kl)
        self.restart(rows)
        return kl

    def plan(self, logprobs: NDArray[Any] | None, ref_logprobs: NDArray[Any] | None) -> None:
        """Enter replay with the (N, T) log-probabilities of the coming responses, or leave it with None."""
        self._planned = None if logprobs is None or ref_logprobs is None else (logprobs, ref_logprobs)

    def attach(self, policy_logprobs: Logprobs, reference: Logprobs | None) -> None:
        """Take the acting policy's log-probabilities, and its own reference where none was chosen for this leash."""
        self.policy_logprobs = policy_logprobs
        if reference is not None and not self._own_reference:
            self.ref_logprobs = reference

    def _both(
        self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if self._planned is not None:
            rows, columns = np.arange(len(self.kl)), np.minimum(self._tokens, self._planned[0].shape[1] - 1)
            return self._planned[0][rows, columns], self._planned[1][rows, columns]
        if self.policy_logprobs is None:
            self._warn_once()
            return np.zeros_like(self.kl), np.zeros_like(self.kl)
        if self.ref_logprobs is None:
            raise ValueError(
                "KLPenalty has a policy but no reference to measure it against. Pass ref_logprobs, or wrap an "
                "environment whose task has a reference."
            )
        policy = self._checked(self.policy_logprobs(observations, actions), "policy_logprobs")
        return policy, self._checked(self.ref_logprobs(observations, actions), "ref_logprobs")

    def _checked(self, values: Any, name: str) -> NDArray[np.float64]:
        array = np.asarray(values, dtype=np.float64)
        if array.shape != self.kl.shape:
            raise ValueError(
                f"`{name}` should return one number per row, shape {self.kl.shape}, got shape {array.shape}. Return "
                "the log-probability of each action after its prefix."
            )
        return array

    def _warn_once(self) -> None:
        if not self._warned:
            warnings.warn(
                "KLPenalty has no policy attached: actions are taken to come from the reference, so the toll is 0. "
                "Agents of textenv attach theirs; others call env.get_wrapper_attr('attach_policy')(policy_logprobs).",
                UserWarning,
                stacklevel=5,
            )
            self._warned = True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on: the coefficient and the episodes that wait for the next update."""
        return {"kl_coef": self.kl_coef, "finished": list(self._finished)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.kl_coef, self._finished = float(state["kl_coef"]), list(state["finished"])
