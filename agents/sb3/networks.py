"""From what `policy_kwargs` say to the policy that acts; what of it goes into a saved file; the toll."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from textenv.agents import training
from textenv.agents.language_model import LanguageModelPolicy
from textenv.agents.sb3.vec_env import vector_envs
from textenv.replay import text_envs

Model = str | os.PathLike[str] | nn.Module | Callable[..., Any]


class GivenPolicy:
    """A policy that was made beforehand. Pickles hold how it was made, or itself where it does not know.

    Stable-Baselines3 pickles `policy_kwargs` whenever it saves. The weights that train are saved beside them, so a
    language model's name and settings are enough there.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __reduce__(self) -> tuple[Any, ...]:
        """The settings of `LanguageModelPolicy.from_pretrained` where there are some, else the policy as it is."""
        settings = getattr(self.policy, "settings", None)
        return (_made_again, (settings,)) if settings else (GivenPolicy, (self.policy,))


def _made_again(settings: dict[str, Any]) -> GivenPolicy:
    if isinstance(settings.get("reward_model"), dict):
        raise ValueError(
            f"The saved policy's values started from a {settings['reward_model'].get('object')} that was given as an "
            "object, which no file can name. Make the policy as it was made then, and load with "
            "custom_objects={'policy_kwargs': policy_kwargs(policy, envs)}."
        )
    return GivenPolicy(LanguageModelPolicy.from_pretrained(**settings))


def policy_kwargs(model: Model, envs: Any, **settings: Any) -> dict[str, Any]:
    """The `policy_kwargs` with which a Stable-Baselines3 algorithm trains a model of ours in environments of ours.

    Args:
        model: what `LanguageModelActorCriticPolicy` takes; a policy object goes into saved files by its settings.
        envs: a `SB3VecEnv`, or the vector text environments in it.
        **settings: further arguments of `LanguageModelActorCriticPolicy`.
    """
    task = text_envs(vector_envs(envs)).task
    given = GivenPolicy(model) if isinstance(model, nn.Module) else model
    return {"model": given, "response_tokens": task.mdp.max_response_tokens, **settings}


def attach(model: Any, envs: Any = None) -> Any:
    """Make a Stable-Baselines3 model's policy the one that acts in environments: their toll asks it from then on.

    `KLPenalty` then charges what this policy says of its tokens, measured against its own reference, and both are read
    from what was computed for acting; see `textenv.agents.attach`. Do it once the model is made or loaded, and for
    environments of evaluation too. Without it nobody pays a toll, and a warning says so.

    Args:
        model: an algorithm whose policy is a `LanguageModelActorCriticPolicy`.
        envs: a `SB3VecEnv`, wrapped or not; None: those of the model.

    Returns:
        The model.

    Raises:
        TypeError: the policy is none of ours, or the environments are none of ours.
        ValueError: the model has no environments.
    """
    network = getattr(model.policy, "network", None)
    if network is None:
        raise TypeError(
            "`model` should have a LanguageModelActorCriticPolicy (or its maskable sibling), got a "
            f"{type(model.policy).__name__}. The toll needs log-probabilities of the text so far, which a plain "
            "policy's observations carry as numbers only. Pass the policy class to the algorithm."
        )
    envs = model.get_env() if envs is None else envs
    if envs is None:
        raise ValueError("`model` should have environments, got one without: load it with env=..., or pass `envs`.")
    training.attach(network, vector_envs(envs))
    return model


def build_network(model: Any, settings: dict[str, Any]) -> Any:
    """The policy of textenv that `policy_kwargs` ask for.

    Args:
        model: see `LanguageModelActorCriticPolicy`.
        settings: what is left of its keyword arguments.

    Raises:
        TypeError: an unknown setting, settings for a policy that is there already, or no policy.
    """
    if isinstance(model, GivenPolicy):
        model = model.policy
    if isinstance(model, str | os.PathLike):
        _check_settings(settings)
        return LanguageModelPolicy.from_pretrained(model, **settings)
    if not isinstance(model, nn.Module) and callable(model):
        model, settings = model(**settings), {}
    if settings:
        raise TypeError(
            f"A policy that is made already takes no settings, got {sorted(settings)}: they would change nothing. Give "
            "them where the policy is made, or pass the model's name instead of the object."
        )
    if not isinstance(model, nn.Module) or not all(hasattr(model, name) for name in ("evaluate", "next_logits")):
        raise TypeError(
            "`model` should be a model's name or folder, a torch module with the methods of textenv.agents.Policy, or "
            f"a function that makes one, got {type(model).__name__}. Stable-Baselines3 moves, saves and optimises "
            "modules."
        )
    return model


def _check_settings(settings: dict[str, Any]) -> None:
    known = set(inspect.signature(LanguageModelPolicy.from_pretrained).parameters) - {"model", "device"}
    if "device" in settings:
        raise TypeError(
            "`device` should be given to the algorithm, PPO(..., device='cuda'), got it in policy_kwargs: "
            "Stable-Baselines3 moves the policy there, and leaves a device out of what it saves."
        )
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(
            f"policy_kwargs should be settings of LanguageModelPolicy.from_pretrained, got {unknown[0]!r}, which it "
            f"does not have: there is no network of Stable-Baselines3's here to be shaped. Known are {sorted(known)}."
        )
