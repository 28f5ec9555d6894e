"""Is training about to start from where it should? Checked once, before the first update.

Two things must hold: the policy is the reference (mean KL 0), and the policy that trains is the policy that wrote
(every ratio 1). When one does not, the check says which of the usual suspects it found.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from textenv.agents.policy import temperature_of
from textenv.agents.types import Rollout

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats per token: of every token in float32, on average in bfloat16. There single tokens wander by 0.3 between batches
of other shapes, but the average of SmolLM2 stays at 0.004; a reference at temperature 0.9 instead of 1 shows 0.2."""

ENGINE_TOLERANCE = 0.05
"""Nats per token on average, whatever the engine's precision: bfloat16 alone explains 0.02."""


class StartError(RuntimeError):
    """The policy does not start at the reference, or its ratios do not start at 1."""


def check_reference(policy: Any, reference: Any, rollout: Rollout, config: str = "PPOConfig") -> None:
    """Before any update the mean KL to the reference must be 0.

    Args:
        policy: that acts.
        reference: that it should be.
        rollout: its first.
        config: the class of the agent's settings, for the message.

    Raises:
        StartError: it is not; the message names the likely cause.
    """
    if rollout.ref_logprobs is None:
        return
    gaps = (rollout.logprobs - rollout.ref_logprobs)[rollout.response_mask]
    gap = float(gaps.abs().mean()) if len(gaps) else 0.0
    if not gap <= tolerance(policy):  # NaN too
        raise StartError(
            f"Before the first update the policy should be the reference, but their log-probabilities differ by "
            f"{gap:.3g} nats per token on average. {suspects(policy, reference)} A toll against another model pulls "
            f"training there. For a policy that is meant to start elsewhere pass {config}(check_start=False)."
        )


def check_ratios(policy: Any, logratio: Tensor, response_mask: Tensor) -> None:
    """In the first minibatch of the first update every ratio must be 1.

    Raises:
        StartError: they are not; the message names the likely cause.
    """
    gaps = logratio.detach()[response_mask].abs()
    # In bfloat16 single tokens wander, so the mean is held to the tolerance; in float32 every one is.
    gap = 0.0 if len(gaps) == 0 else float(gaps.max() if dtype_of(policy) == "float32" else gaps.mean())
    if not gap <= tolerance(policy):
        raise StartError(
            f"In the first minibatch every ratio should be 1, but log-ratios reach {gap:.3g}. The log-probabilities of "
            f"the rollout and of the update are not those of one distribution. {suspects(policy, None)} Clipping would "
            "then remove true gradients and keep false ones."
        )


def check_engine(policy: Any, logprobs: Tensor, engine_logprobs: Tensor | None, response_mask: Tensor) -> None:
    """An engine must have written from the policy's own distribution.

    Raises:
        StartError: it reports other log-probabilities by more than precision explains.
    """
    if engine_logprobs is None or not response_mask.any():
        return
    gap = float((logprobs - engine_logprobs)[response_mask].abs().mean())
    if not gap <= ENGINE_TOLERANCE:
        raise StartError(
            f"The engine should write from the policy's distribution, but its log-probabilities differ from the "
            f"trainer's by {gap:.3g} nats per token on average. Likely causes: weights that were not synced, another "
            f"temperature than the policy's {temperature_of(policy)}, sampling settings that the engine fills in by "
            "itself, or a model that the engine computes differently. Training would learn from somebody else's text."
        )


def dtype_of(policy: Any) -> str:
    """The arithmetic of the policy's passes."""
    return str(getattr(getattr(policy, "lm", None), "dtype", "float32"))


def tolerance(policy: Any) -> float:
    """Nats per token that arithmetic alone explains."""
    return TOLERANCE[dtype_of(policy)]


def suspects(policy: Any, reference: Any) -> str:
    """Which of dropout, temperature, precision and weights differs, in words."""
    found = []
    if isinstance(policy, nn.Module):
        active = [
            name
            for name, module in policy.named_modules()
            if isinstance(module, nn.Dropout) and module.training and module.p > 0
        ]
        if active:
            found.append(f"dropout is on ({active[0]}): call policy.eval()")
        modes = [name for name, module in policy.named_modules() if module.training]
        if modes and not active:
            found.append(
                f"{modes[0] or 'the policy'} is in training mode, where functional dropout acts: call policy.eval()"
            )
    ref_temperature = getattr(reference, "temperature", None)
    if ref_temperature is not None and ref_temperature != temperature_of(policy):
        found.append(f"temperature: policy {temperature_of(policy)}, reference {ref_temperature}; make them equal")
    if dtype_of(policy) != dtype_of_model(reference, dtype_of(policy)):
        found.append(f"precision: policy {dtype_of(policy)}, reference {dtype_of_model(reference, '')}")
    source, ours = getattr(reference, "source", None), getattr(getattr(policy, "lm", None), "source", None)
    if source and ours and source != ours:
        found.append(f"other weights: policy {ours}, reference {source}")
    if not found:
        return (
            "Dropout, temperature and precision agree; look for weights that were changed, a prompt template or BOS "
            "that only one side adds, or an `evaluate` that is not deterministic."
        )
    return f"Likely cause: {'; '.join(found)}."


def dtype_of_model(model: Any, default: str) -> str:
    """A model's arithmetic where it says so."""
    return str(getattr(model, "dtype", default))
