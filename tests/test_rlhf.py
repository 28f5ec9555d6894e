"""`RLHF-v0` as it comes: the real model and reward, against Gymnasium's checker and against itself on both roads."""

from __future__ import annotations

import copy
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

import textenv
from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, attach
from textenv.agents.rollouts.collect import collect
from textenv.agents.start_check import StartError, check_reference
from textenv.layers import text_envs

SHORT = {"max_response_tokens": 5, "prompts": ["The film is", "I have never seen a duller", "A"]}


def write(env, tokens):
    """Play fixed tokens; the observations, rewards and last info."""
    observation, _ = env.reset(seed=3)
    steps = []
    for token in tokens:
        observation, reward, terminated, truncated, info = env.step(token)
        steps.append((observation["input_ids"].tolist(), reward, terminated, truncated))
        if terminated or truncated:
            break
    return steps, info


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:KLPenalty has no policy attached")
class TestDefault:
    def test_gymnasium_accepts_it(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(gym.make("RLHF-v0", max_response_tokens=3).unwrapped)

    def test_its_id_works_without_an_import_and_its_text_grows(self):
        env = gym.make("textenv:RLHF-v0", max_response_tokens=4)
        _, info = env.reset(seed=0)
        assert env.render() == info["prompt"]
        env.step(1109)  # " great" in this vocabulary, whatever it says it is appended
        assert env.render().startswith(info["prompt"]) and len(env.render()) > len(info["prompt"])

    def test_it_ends_with_its_sentence(self):
        env = gym.make("RLHF-v0")
        tokenizer = env.unwrapped.task.tokenizer
        steps, info = write(env, [*tokenizer.encode(" a moving, beautifully acted triumph."), 17])
        assert steps[-1][2] and not steps[-1][3] and info["finish_reason"] == "stop"
        assert info["response"] == " a moving, beautifully acted triumph."
        worse = write(env, tokenizer.encode(" a boring mess."))[1]
        assert info["score"] > worse["score"] + 1  # log-odds that a person prefers it

    def test_copies_and_the_spec_remake_it(self):
        env = gym.make("RLHF-v0", kl_coef=0.2, **SHORT)
        tokens = [504, 4771, 314, 1109, 30]
        expected = write(env, tokens)
        remade = gym.make(EnvSpec.from_json(env.spec.to_json()))
        for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env)), remade):
            steps, info = write(other, tokens)
            assert steps[-1][0] == expected[0][-1][0]
            assert info["score"] == pytest.approx(expected[1]["score"], abs=1e-5)

    @pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
    def test_stepping_and_replay_give_the_same_rewards(self, mode):
        """A policy that has left its reference: its tolls and the scores, per token and in one pass."""
        options = {"kl_coef": 0.1, "missing_eos_penalty": 0.5, "autoreset_mode": mode, "max_response_tokens": 6}
        envs = gym.make_vec("RLHF-v0", num_envs=3, **options)
        policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        attach(policy, envs)
        episodes = collect(policy, envs, policy.engine(), episodes=3, seed=1, env_seed=5)
        replayed = episodes.replayed
        assert np.abs(replayed.infos["kl"]).max() > 0.05  # it has left
        envs.reset(options={"prompts": list(episodes.prompts)})
        live = np.ones(3, dtype=bool)
        for token in range(6):
            _, rewards, terminated, truncated, _ = envs.step(replayed.input_ids[:, -6 + token])
            np.testing.assert_allclose(rewards[live], replayed.rewards[live, token], atol=2e-4)
            live &= ~(terminated | truncated)
            if not live.any():
                break
        assert not live.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_start_check_tells_a_wrong_temperature_from_rounding(dtype):
    envs = gym.make_vec("RLHF-v0", num_envs=16, dtype=dtype, max_response_tokens=12)
    agent = PPO(LanguageModelPolicy.from_pretrained(dtype=dtype, lora_rank=2), envs, PPOConfig(micro_batch_tokens=64))
    rollout = agent.rollout()
    check_reference(agent.policy, agent.policy.reference, rollout)
    agent.policy.reference.temperature = 0.9
    with pytest.raises(StartError, match=r"Likely cause: temperature: policy 1\.0, reference 0\.9"):
        check_reference(agent.policy, agent.policy.reference, agent.rollout())


@pytest.mark.slow
class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"prompts": []}, ValueError, "at least one prompt, got none"),
            ({"prompts": ["The film is"], "max_prompt_tokens": 2}, ValueError, r"prompts\[0\] should have at most"),
            ({"max_response_token": 5}, TypeError, "Did you mean 'max_response_tokens'"),
            ({"max_episode_steps": 5}, TypeError, "max_response_tokens"),
            ({"model": "./no/such/folder"}, ValueError, "No language model could be loaded"),
            ({"max_response_tokens": 0}, ValueError, "at least 1, got 0"),
            ({"max_response_tokens": 9000}, ValueError, "should fit the context"),
            ({"kl_coef": -0.1}, ValueError, "at least 0, got -0.1"),
            ({"kl_coef": float("nan")}, ValueError, "at least 0, got nan"),
            ({"stop": "."}, ValueError, r"Write stop=\['\.'\]"),
            ({"stop": ["no single token says this"]}, ValueError, "which no token"),
            ({"scorer": "positive"}, TypeError, "`scorer` should be a function"),
            ({"dtype": "float16"}, ValueError, "`dtype` should be one of .*got 'float16'"),
            ({"device": "gpu"}, ValueError, "`device` should be a torch device"),
            ({"temperature": 0}, ValueError, "`temperature` should be a positive number, got 0"),
        ],
    )
    def test_is_refused_when_the_environment_is_made(self, options, error, message):
        with pytest.raises(error, match=message):
            gym.make_vec("RLHF-v0", num_envs=2, **options)


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(textenv.optional.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"needs torch.*pip install 'textenv\[train\]'"):
        gym.make("RLHF-v0")


@pytest.mark.slow
def test_evaluating_the_untrained_policy_shows_the_reference():
    envs = gym.make_vec("RLHF-v0", num_envs=8, max_response_tokens=8, min_length=2)
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=4)
    record = textenv.evaluate(policy, envs, 48, seed=0, opponent=policy, texts=["The film was long and dull."])
    assert abs(record.kl.value) < 1e-3
    assert record.tax.tax.value == pytest.approx(0.0, abs=1e-4)
    assert 0 < record.tax.reference.value < 8  # far below log V = 10.8: it has read English
    assert record.win_rate.low < 0.5 < record.win_rate.high
    assert record.length.value > 2 and record.ref_perplexity.value > 1
    # The scorer, asked about the texts themselves, says the same.
    prompts, responses, scores = zip(*record.samples, strict=True)
    np.testing.assert_allclose(text_envs(envs).task.scorer(list(prompts), list(responses)), scores, atol=1e-3)
