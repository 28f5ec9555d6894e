"""Small agents of Stable-Baselines3 on the toy language and on a tiny random language model."""

from __future__ import annotations

import gymnasium as gym
import torch
from agent_helpers import lm_envs

from textenv.agents import LanguageModelPolicy, TablePolicy
from textenv.agents.sb3 import LanguageModelActorCriticPolicy, SB3VecEnv, attach, policy_kwargs
from textenv.toy import standard_toy

TOY = standard_toy()


def toy_vec_env(num_envs=8, kl_coef=0.1, **options):
    return SB3VecEnv(gym.make_vec("textenv/Toy-v0", num_envs=num_envs, kl_coef=kl_coef, **options))


def toy_model(algorithm, policy=None, envs=None, policy_class=LanguageModelActorCriticPolicy, **settings):
    envs = envs or toy_vec_env()
    kwargs = policy_kwargs(TablePolicy(TOY.reference_logits) if policy is None else policy, envs)
    model = algorithm(policy_class, envs, policy_kwargs=kwargs, **{"seed": 0, "device": "cpu", "gamma": 1.0} | settings)
    return attach(model)


def moved_policy(folder, **settings):
    """A language model that has left its reference, with values that differ from state to state."""
    policy = LanguageModelPolicy.from_pretrained(folder, **{"lora_rank": 4} | settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name or "value_head" in name:
                parameter.normal_(0, 0.3, generator=generator)
    return policy


def lm_model(algorithm, folder, policy_class=LanguageModelActorCriticPolicy, envs=None, **settings):
    envs = envs or SB3VecEnv(lm_envs(folder))
    common = {"policy_kwargs": {"model": folder, "lora_rank": 4}, "seed": 0, "device": "cpu", "gamma": 1.0}
    return attach(algorithm(policy_class, envs, **common | settings))


class Passes:
    """The number of passes and tokens that go through a language model's trunk in a block."""

    def __init__(self, network):
        self.shapes = []
        trunk = network.lm.model.base_model
        self._hook = trunk.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module, _args, kwargs):
        self.shapes.append(tuple(kwargs["input_ids"].shape))

    @property
    def tokens(self):
        return sum(rows * columns for rows, columns in self.shapes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()
