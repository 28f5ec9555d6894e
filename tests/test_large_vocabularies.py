"""Fifty and a hundred and fifty thousand actions: both checkers, Stable-Baselines3, masking agents, bounded memory."""

import tracemalloc
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import PieceTokenizer
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from stable_baselines3.common import env_checker
from stable_baselines3.common.vec_env import DummyVecEnv

from textenv import TextGenerationEnv, TextGenerationVectorEnv, TextTask, replay
from textenv.testing import check_text_env
from textenv.wrappers import ActionMask
from textenv.wrappers import vector as wrappers

SIZES = (50_000, 152_000)
STOP = 7


class Numbers(PieceTokenizer):
    """Every id reads as a number."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return "".join(f" {i}" for i in ids if i != STOP)


def count(prompts, responses):
    return np.array([len(response.split()) for response in responses], dtype=np.float64)


def task(vocab_size, **options):
    defaults = {"max_response_tokens": 4, "scorer": count, "stop_ids": [STOP]}
    return TextTask.build(
        prompts=[" 1 2 3", f" {vocab_size - 1}"], tokenizer=Numbers(), vocab_size=vocab_size, **(defaults | options)
    )


@pytest.mark.parametrize("vocab_size", SIZES)
class TestEnvironment:
    def test_gymnasium_accepts_it(self, vocab_size):
        env = TextGenerationEnv(task(vocab_size))
        env.spec = gym.spec("textenv/Toy-v0")  # the checker wants one to remake the environment from
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*render.*")
            check_env(env, skip_render_check=True)

    def test_stable_baselines3_accepts_it(self, vocab_size):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env_checker.check_env(TextGenerationEnv(task(vocab_size), render_mode=None))

    def test_it_keeps_the_rules(self, vocab_size):
        check_text_env(lambda: TextGenerationEnv(task(vocab_size)))

    def test_the_last_id_is_an_action_like_any_other(self, vocab_size):
        envs = TextGenerationVectorEnv(2, task(vocab_size))
        envs.reset(seed=0)
        observations, *_ = envs.step(np.full(2, vocab_size - 1))
        assert observations["input_ids"].max() == vocab_size - 1
        with pytest.raises(ValueError, match=f"got {vocab_size}"):
            envs.step(np.full(2, vocab_size))

    def test_memory_does_not_grow_with_the_vocabulary(self, vocab_size):
        envs = TextGenerationVectorEnv(64, task(vocab_size), render_mode=None)
        tracemalloc.start()
        envs.reset(seed=0)
        for _ in range(9):
            envs.step(np.full(64, 5))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * vocab_size / 8  # not even one bit for each action of each row


@pytest.mark.parametrize("vocab_size", SIZES)
class TestStableBaselines3:
    def test_ppo_trains(self, vocab_size):
        envs = DummyVecEnv([lambda: TextGenerationEnv(task(vocab_size, length_limit="terminate"), render_mode=None)])
        model = PPO("MultiInputPolicy", envs, n_steps=16, batch_size=16, n_epochs=2, seed=0, device="cpu")
        model.learn(32)
        assert all(torch.isfinite(parameter).all() for parameter in model.policy.parameters())

    @pytest.mark.parametrize("kind", ["few", "almost all"])
    def test_masking_ppo_keeps_to_the_allowed(self, vocab_size, kind):
        allowed = [STOP, 11, vocab_size - 1] if kind == "few" else range(1, vocab_size)

        def make():
            env = TextGenerationEnv(task(vocab_size, length_limit="terminate"), render_mode=None)
            return ActionMask(env, allowed_ids=allowed)

        model = MaskablePPO("MultiInputPolicy", DummyVecEnv([make]), n_steps=16, batch_size=16, n_epochs=2, seed=0)
        model.learn(32)  # a forbidden token would be refused
        assert set(np.unique(model.rollout_buffer.actions)) <= set(allowed)


def returns_of_stable_baselines3(length_limit):
    """What its rollout buffer holds for responses that the budget cuts, each with a score of 4."""

    def make():
        return TextGenerationEnv(task(50, stop_ids=[], length_limit=length_limit), render_mode=None)

    model = PPO("MultiInputPolicy", DummyVecEnv([make]), n_steps=16, batch_size=16, gamma=1.0, gae_lambda=1.0, seed=0)
    model.learn(16)
    return model.rollout_buffer.returns.ravel()


def test_a_cut_response_returns_its_score_and_no_value_on_top():
    np.testing.assert_allclose(returns_of_stable_baselines3("terminate"), 4.0, atol=1e-5)
    # Reported as truncation, the library adds the value of a state that no token will ever follow.
    assert np.abs(returns_of_stable_baselines3("truncate") - 4.0).max() > 1e-3


def test_our_replay_gives_that_return():
    envs = wrappers.MissingEOSPenalty(TextGenerationVectorEnv(3, task(50, stop_ids=[], length_limit="terminate")), 0.0)
    replayed = replay(envs, [" 1 2 3"] * 3, [[1, 2, 3, 4]] * 3)
    np.testing.assert_array_equal(replayed.rewards.sum(1), 4.0)
