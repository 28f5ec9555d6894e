"""Do settings have what they need: a reference, texts, differentiable entropies? Asked before any work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from textenv.agents.on_policy_config import OnPolicyConfig


def check_options(config: OnPolicyConfig, policy: Any, reference: Any, pretraining_texts: Sequence[Any] | None) -> None:
    """Refuse settings that lack what they need.

    Args:
        config: the settings.
        policy: whose `evaluate` must give differentiable entropies for an entropy bonus.
        reference: what the KL is measured against, or None.
        pretraining_texts: for `ptx_coef`, or None.

    Raises:
        TypeError: the policy cannot give differentiable entropies.
        ValueError: there is no reference, or there are texts or `ptx_coef` but not both.
    """
    if config.entropy_coef and "entropy_grad" not in inspect.signature(policy.evaluate).parameters:
        raise TypeError(
            f"With entropy_coef={config.entropy_coef} the policy's `evaluate` should take the argument `entropy_grad`, "
            f"got {type(policy).__name__}, whose does not: entropies without a gradient would leave the bonus without "
            "effect. Give it one (see `Policy.evaluate`), or set entropy_coef=0."
        )
    if config.kl_loss_coef and reference is None:
        raise ValueError(
            f"With kl_loss_coef={config.kl_loss_coef} there should be a reference to measure the KL against, got none: "
            "neither the policy nor a KLPenalty has one. Wrap the environments with KLPenalty(envs, ref_logprobs, "
            "kl_coef=0.0), or set kl_loss_coef=0."
        )
    if bool(config.ptx_coef) != (pretraining_texts is not None):
        raise ValueError(
            f"`ptx_coef` and `pretraining_texts` should come together, got ptx_coef={config.ptx_coef} and "
            f"{'no texts' if pretraining_texts is None else 'texts'}: nothing would be learned from them. Pass "
            "PPO(policy, envs, PPOConfig(ptx_coef=...), pretraining_texts=[...]), say, or neither."
        )


def check_unused(config: OnPolicyConfig, names: Sequence[str], why: str) -> None:
    """Refuse settings that an agent shares with others but has no use for, instead of ignoring them.

    Args:
        config: the settings.
        names: those without effect; they must have the values that they have in `OnPolicyConfig`.
        why: what the agent does instead, a sentence.

    Raises:
        ValueError: one of them was changed.
    """
    plain = OnPolicyConfig()
    for name in names:
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(
                f"`{name}` should be left as it is, {getattr(plain, name)!r}, got {getattr(config, name)!r}: "
                f"{type(config).__name__} has no use for it. {why}"
            )
