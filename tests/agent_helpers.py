"""Small agents: PPO on the toy language, and on a tiny random language model with a simple score."""

from __future__ import annotations

import string

import gymnasium as gym
import torch
from lm_helpers import PROMPTS

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, TablePolicy
from textenv.toy import standard_toy

TOY = standard_toy()
CUT = "ignore:Every response of a batch was cut"


def toy_envs(num_envs=32, kl_coef=0.1, **options):
    return gym.make_vec("textenv/Toy-v0", num_envs=num_envs, kl_coef=kl_coef, **options)


def toy_agent(policy=None, envs=None, seed=0, engine=None, **config):
    policy = TablePolicy(TOY.reference_logits) if policy is None else policy
    return PPO(policy, envs or toy_envs(), PPOConfig(**config), seed=seed, engine=engine)


def letters(_prompts, responses):
    """The number of lower-case letters: something that a random model does now and then."""
    return [sum(char.islower() for char in response) for response in responses]


def lm_envs(folder, num_envs=8, scorer=letters, **options):
    defaults = {"kl_coef": 0.05, "prompts": PROMPTS, "max_response_tokens": 6, "stop": list(string.punctuation)}
    return gym.make_vec("RLHF-v0", num_envs=num_envs, model=folder, scorer=scorer, **(defaults | options))


def lm_agent(folder, envs=None, lora_rank=4, temperature=1.0, seed=0, **config):
    policy = LanguageModelPolicy.from_pretrained(folder, lora_rank=lora_rank, temperature=temperature)
    return PPO(policy, envs or lm_envs(folder), PPOConfig(**config), seed=seed)


def parameters(agent):
    return [parameter.detach().clone() for parameter in agent.policy.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Counting:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)
