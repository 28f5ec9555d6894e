"""PPO with vLLM writing: it learns what it learns with its own engine, and SmolLM2's numbers are the trainer's."""

from __future__ import annotations

import dataclasses
import importlib.util

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_helpers import CUT
from test_vllm_engine import gaps, move

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, tiny_transformer
from textenv.agents.rollouts import VLLMEngine
from textenv.agents.types import Sampling
from textenv.sanity import BANDIT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings(CUT),
    pytest.mark.filterwarnings("ignore:Every advantage of a batch is 0"),  # uniform play may find nothing at first
]


def learning_curve(iterations, engine_class=None, seed=0):
    """Mean scores, iteration by iteration."""
    envs = gym.make_vec(BANDIT.env_id, num_envs=128)
    policy = tiny_transformer(envs.single_action_space.n, seed=seed, hidden_size=64)
    engine = None if engine_class is None else engine_class(policy, kv_cache_gib=0.1)
    agent = PPO(policy, envs, PPOConfig(learning_rate=2e-3, num_minibatches=2, vf_coef=0.5), seed=seed, engine=engine)
    try:
        return [agent.step().score for _ in range(iterations)]
    finally:
        agent.engine.close()


def test_training_with_vllm_raises_the_score():
    iterations = 20
    scores = learning_curve(iterations, VLLMEngine)
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.3
    assert np.mean(scores[-3:]) == pytest.approx(np.mean(learning_curve(iterations)[-3:]), abs=0.2)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_smollm2_writes_with_the_trainers_logprobs_after_every_sync(temperature):
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", temperature=temperature)
    engine = VLLMEngine(policy, max_model_len=128)
    prompts = [policy.tokenizer.encode(text) for text in ("The film", "A long and winding road of", "I")] * 4
    sampling = Sampling(max_tokens=16, stop_ids=policy.tokenizer.stop_ids, temperature=temperature)
    try:
        for seed in range(3):
            generation = engine.generate(prompts, dataclasses.replace(sampling, seed=seed))
            found = gaps(policy, prompts, generation)
            assert np.quantile(found, [0.5, 0.99, 1.0]) == pytest.approx(0, abs=1e-3), np.quantile(found, [0.5, 0.99])
            move(policy, 2e-3, seed)
            with torch.no_grad():  # the head is tied to the embeddings, and must follow
                policy.lm.model.get_input_embeddings().weight.mul_(1.02)
            engine.sync(policy)
    finally:
        engine.close()
