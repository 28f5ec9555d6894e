"""Stable-Baselines3 as it comes: its checker accepts the toy, and its PPO trains on it through DummyVecEnv."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import textenv  # noqa: F401 - registers the ids


def make_toy():
    # SB3 bootstraps a value where an episode was truncated; the budget is part of this task, so it counts as its end.
    return Monitor(gym.make("textenv/Toy-v0", length_limit="terminate"))


@pytest.mark.parametrize("env_id", ["textenv/Toy-v0", pytest.param("RLHF-v0", marks=pytest.mark.slow)])
def test_checker_accepts(env_id):
    check_env(gym.make(env_id).unwrapped)


def test_ppo_learns_the_toy():
    envs = DummyVecEnv([make_toy] * 16)
    settings = {"n_steps": 64, "batch_size": 256, "learning_rate": 3e-3, "gamma": 1.0}
    model = PPO("MultiInputPolicy", envs, **settings, seed=0, device="cpu")
    before, _ = evaluate_policy(model, DummyVecEnv([make_toy]), n_eval_episodes=100, deterministic=False)
    model.learn(15_000)
    after, _ = evaluate_policy(model, DummyVecEnv([make_toy]), n_eval_episodes=100, deterministic=False)
    # Uniform play scores -0.23 on average, the best response 3.5.
    assert before < 0.6
    assert after > before + 1.0
    assert np.isfinite(after)
