"""The state of a `KLPenalty`: where log-probabilities come from, each episode's KL so far, the coefficient.

Legend: N rows, T response tokens, V vocabulary. Log-probabilities are those of the sampling distribution, in nats.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from textenv.constraints import Constraint, joint
from textenv.distributions import check_gives_distributions, chosen, kl_divergence, next_distributions, stepper_of
from textenv.packed_masks import PackedMasks
from textenv.whole import check_constrainable
from textenv.wrappers.kl import Logprobs, adapt_kl_coef, check_kl_settings
from textenv.wrappers.kl_estimators import check_estimator, estimate


class Reading(NamedTuple):
    """What both models say of some tokens, all of one shape."""

    logprobs: NDArray[np.float64]
    """Under the policy; nan where there is none."""
    ref_logprobs: NDArray[np.float64]
    exact: NDArray[np.float64] | None
    """KL of the states' whole distributions, where the estimator asks for it."""


class KLLeash:
    """The KL toll of N rows.

    Args:
        num_rows: N.
        ref_logprobs: log-probabilities under the reference.
        default_reference: the reference where `ref_logprobs` is None; a policy may bring another.
        policy_logprobs: under the policy that acts; None: taken to be the reference, toll 0, and one warning says so.
        kl_coef: the coefficient, or its start.
        target_kl: nats per response that the controller steers to; None keeps the coefficient.
        episodes_per_update: the controller moves after this many finished episodes, on their mean KL.
        estimator: see `kl_estimators`.
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
        estimator: str = "k1",
    ) -> None:
        check_kl_settings(kl_coef, target_kl, episodes_per_update)
        check_estimator(estimator)
        self.kl_coef = float(kl_coef)
        self.target_kl = target_kl
        self.episodes_per_update = episodes_per_update or num_rows
        self.estimator = estimator
        self.constraint: Constraint | None = None
        self._own_reference = ref_logprobs is not None
        self.ref_logprobs = ref_logprobs if ref_logprobs is not None else default_reference
        self.policy_logprobs = policy_logprobs
        self._check_models(policy_logprobs, ref_logprobs)
        self.kl = np.zeros(num_rows)
        self.charged = np.zeros(num_rows)
        self._tokens = np.zeros(num_rows, dtype=np.int64)
        self._finished: list[float] = []
        self._planned: Reading | None = None
        self._steppers: dict[str, tuple[Any, Any]] = {}
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Memory of what is kept between steps (keys and values of the prefixes)."""
        return sum(int(getattr(stepper, "nbytes", 0)) for _, stepper in self._steppers.values())

    def restart(self, rows: Any = slice(None)) -> None:
        """Begin new episodes on some rows."""
        self.kl[rows] = 0.0
        self.charged[rows] = 0.0
        self._tokens[rows] = 0

    def tolls(
        self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any], live: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """The tolls (N,) of one step, 0 on rows that are not live, and count their KL."""
        # Rows that are not live have an action that nobody chose: whatever the models say of it, infinities included.
        logprobs, ref_logprobs, exact = (
            None if values is None else np.where(live, values, 0.0) for values in self._read(observations, actions)
        )
        assert logprobs is not None and ref_logprobs is not None
        self.kl += logprobs - ref_logprobs
        self._tokens += live
        tolls = np.zeros(len(self.kl))
        if self.kl_coef != 0:  # at 0 also where the reference forbids a token: 0 * inf is NaN
            tolls = self.kl_coef * estimate(self.estimator, logprobs, ref_logprobs, exact)
        self.charged += tolls
        return tolls

    def finish(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """What the infos say of the episodes that end on `rows`; the controller counts them, and the rows restart."""
        ends = {
            "kl": self.kl[rows].copy(),
            "kl_toll": self.charged[rows].copy(),
            "kl_coef": np.full(len(rows), self.kl_coef),
        }
        if self.target_kl is not None:
            self._finished.extend(ends["kl"].tolist())
            while len(self._finished) >= self.episodes_per_update:
                batch = self._finished[: self.episodes_per_update]
                del self._finished[: self.episodes_per_update]
                self.kl_coef = adapt_kl_coef(self.kl_coef, sum(batch) / len(batch), self.target_kl)
        self.restart(rows)
        return ends

    def plan(
        self,
        logprobs: NDArray[Any] | None,
        ref_logprobs: NDArray[Any] | None,
        exact: NDArray[Any] | None = None,
    ) -> None:
        """Enter replay with (N, T) figures of the coming responses, or leave it with None.

        Args:
            logprobs: under the policy; None: there is none.
            ref_logprobs: under the reference; None: leave.
            exact: KL of whole distributions, for that estimator.
        """
        if ref_logprobs is None:
            self._planned = None
        else:
            unknown = np.full_like(ref_logprobs, np.nan)
            self._planned = Reading(unknown if logprobs is None else logprobs, ref_logprobs, exact)

    def attach(self, policy_logprobs: Logprobs, reference: Logprobs | None) -> None:
        """Take the acting policy's log-probabilities, and its own reference where none was chosen for this leash."""
        taken = None if self._own_reference else reference
        self._check_models(policy_logprobs, taken)
        self.policy_logprobs = policy_logprobs
        if taken is not None:
            self.ref_logprobs = taken

    def constrain(self, constraint: Constraint) -> None:
        """Renormalise both models over what a constraint allows, beside those there are.

        Raises:
            TypeError: a reference chosen for this leash knows chosen tokens only.
        """
        self.constraint = joint([constraint] if self.constraint is None else [self.constraint, constraint])
        self._check_models(None, self.ref_logprobs if self._own_reference else None)

    def _check_models(self, policy: Any, reference: Any) -> None:
        """Refuse models that cannot do what will be asked of them, before any work."""
        if self.constraint is not None and reference is not None:
            check_constrainable(reference)
        if self.estimator == "exact":
            for model in (policy, reference):
                if model is not None:
                    check_gives_distributions(
                        model,
                        "A model behind estimator='exact'",
                        "The exact KL sums over all tokens of the vocabulary.",
                    )

    def _read(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> Reading:
        if self._planned is not None:
            at = np.arange(len(self.kl)), np.minimum(self._tokens, self._planned.ref_logprobs.shape[1] - 1)
            return Reading(*(None if whole is None else whole[at] for whole in self._planned))  # type: ignore[arg-type]
        if self.policy_logprobs is None:
            if self.estimator != "cross_entropy":
                self._warn_once()
                return Reading(np.zeros_like(self.kl), np.zeros_like(self.kl), np.zeros_like(self.kl))
            if self.target_kl is not None:
                raise ValueError(
                    "A controller should have a KL to steer by, but no policy is attached, and estimator="
                    "'cross_entropy' without one measures none. Pass policy_logprobs, or leave target_kl out."
                )
        if self.ref_logprobs is None:
            raise ValueError(
                "KLPenalty charges a policy for leaving a reference, but has no reference to measure it against. Pass "
                "ref_logprobs, or wrap an environment whose task has a reference."
            )
        action_masks = None if self.constraint is None else self.constraint.next_masks(observations)
        logprobs, log_pi = np.full_like(self.kl, np.nan), None
        if self.policy_logprobs is not None:
            logprobs, log_pi = self._ask("policy_logprobs", observations, actions, action_masks)
        ref_logprobs, log_ref = self._ask("ref_logprobs", observations, actions, action_masks)
        exact = None
        if self.estimator == "exact":
            assert log_pi is not None and log_ref is not None
            exact = kl_divergence(log_pi, log_ref)
        return Reading(logprobs, ref_logprobs, exact)

    def _ask(
        self,
        name: str,
        observations: Mapping[str, NDArray[Any]],
        actions: NDArray[Any],
        action_masks: PackedMasks | None,
    ) -> tuple[NDArray[np.float64], NDArray[Any] | None]:
        """One model's log-probabilities (N,), and its distributions (N, V) where they are needed."""
        model = self._stepper(name)
        if action_masks is not None and name == "policy_logprobs" and not hasattr(model, "next_logprobs"):
            action_masks = None  # a bare function: those of the policy that acts, which chooses among the allowed
        if action_masks is None and self.estimator != "exact":
            return self._checked(model(observations, actions), name), None
        if action_masks is not None:
            check_constrainable(model)
        log_pi = next_distributions(model, observations, action_masks)
        return self._checked(chosen(log_pi, actions), name), log_pi

    def _stepper(self, name: str) -> Any:
        """What stands in for a model while tokens are stepped one by one, with a cache of this leash's own."""
        model = getattr(self, name)
        if name not in self._steppers or self._steppers[name][0] is not model:
            self._steppers[name] = (model, stepper_of(model))
        return self._steppers[name][1]

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

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the steppers: copies start with caches of their own."""
        return {**self.__dict__, "_steppers": {}}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on: the coefficient and the episodes that wait for the next update."""
        return {"kl_coef": self.kl_coef, "finished": list(self._finished)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.kl_coef, self._finished = float(state["kl_coef"]), list(state["finished"])
