"""Finding one's way in a stack of vector wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymnasium.vector import VectorEnv

from textenv.vector_env import TextGenerationVectorEnv


def layers(envs: VectorEnv[Any, Any, Any]) -> Iterator[Any]:
    """The wrapped environment and everything inside it, outermost first."""
    while envs is not envs.unwrapped:
        yield envs
        envs = envs.env  # type: ignore[attr-defined]
    yield envs


def text_envs(envs: VectorEnv[Any, Any, Any]) -> TextGenerationVectorEnv:
    """The text environments at the bottom of a stack of vector wrappers.

    Raises:
        TypeError: there are none.
    """
    base = getattr(envs, "unwrapped", envs)
    if not isinstance(base, TextGenerationVectorEnv):
        raise TypeError(
            "`envs` should be vector text environments (a TextGenerationVectorEnv, wrapped or not), got "
            f"{type(base).__name__}. Make them with gym.make_vec('RLHF-v0', num_envs=...); for one episode at a time "
            "use num_envs=1."
        )
    return base


def attach_policy(envs: VectorEnv[Any, Any, Any], policy_logprobs: Any, reference: Any = None) -> None:
    """Hand a policy's log-probabilities, and its own reference where it carries one, to every layer that wants them."""
    for layer in layers(envs):
        if hasattr(type(layer), "attach_policy"):
            layer.attach_policy(policy_logprobs, reference)


def reference_of(policy: Any, envs: VectorEnv[Any, Any, Any]) -> Any:
    """What the toll measures against; without a toll the policy's own reference, for the record; else None."""
    for layer in layers(envs):
        if "leash" in vars(layer) and layer.leash.ref_logprobs is not None:
            return layer.leash.ref_logprobs
    return getattr(policy, "reference", None)
