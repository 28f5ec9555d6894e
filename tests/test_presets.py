"""Published settings: every value has its source beside it, and what belongs together can be used together."""

from __future__ import annotations

import ast
import dataclasses
import re

import gymnasium as gym
import pytest
from agent_helpers import CUT, toy_envs

from textenv.agents import PPO, PPOConfig, Preset, TablePolicy
from textenv.agents.presets import PRESETS
from textenv.layers import layers
from textenv.rlhf import RLHFOptions
from textenv.stacks import Shaping
from textenv.toy import standard_toy

NAMES = ("instructgpt", "summarize", "n_plus", "ziegler")
PAPERS = {"instructgpt": "2203.02155", "summarize": "2009.01325", "n_plus": "2403.17031", "ziegler": "1909.08593"}


def documented(name):
    """The table of a preset's docstring: {setting: (value, source)}."""
    rows = re.findall(r"^ *\| (\w+) = (.+?) +\| (.+?) +\|$", Preset(name).documentation, re.MULTILINE)
    table = {key: (ast.literal_eval(value), source) for key, value, source in rows}
    assert len(table) == len(rows), "a value is listed twice"
    return table


def test_the_four_are_there():
    assert tuple(PRESETS) == NAMES
    assert repr(Preset("ziegler")) == "Preset('ziegler')"


@pytest.mark.parametrize("name", NAMES)
def test_every_value_stands_in_the_docstring_with_its_source(name):
    preset = Preset(name)
    settings = {**preset.settings, **preset.environment, **preset.policy}
    assert {key: value for key, (value, _) in documented(name).items()} == settings
    assert all(
        re.match(r"(section|appendix|table|code|detail|PPO details|ours)", s) for _, s in documented(name).values()
    )
    assert f"arXiv:{PAPERS[name]}" in preset.documentation


def test_the_published_numbers():
    """Spot checks against the papers, kept apart from the code on purpose."""
    instructgpt, summarize, n_plus, ziegler = (PPOConfig.preset(name) for name in NAMES)
    assert (instructgpt.ptx_coef, instructgpt.epochs, instructgpt.num_minibatches) == (27.8, 1, 8)
    assert instructgpt.ptx_batch_size == 8 * instructgpt.episodes_per_iteration // instructgpt.num_minibatches
    assert [config.epochs for config in (summarize, n_plus, ziegler)] == [4, 4, 4]
    assert [config.learning_rate for config in (summarize, n_plus, ziegler)] == [1.5e-5, 3e-6, 1.41e-5]
    assert {config.clip_range for config in (instructgpt, summarize, n_plus, ziegler)} == {0.2}
    assert {(config.gamma, config.gae_lambda) for config in (instructgpt, summarize, n_plus, ziegler)} == {(1.0, 0.95)}
    assert [Preset(name).environment["kl_coef"] for name in NAMES] == [0.02, 0.05, 0.05, 0.15]
    assert Preset("ziegler").environment["target_kl"] == 6.0
    assert Preset("n_plus").environment["missing_eos_mode"] == "replace"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_are_real_options(name):
    preset = Preset(name)
    options = {field.name for kind in (RLHFOptions, Shaping) for field in dataclasses.fields(kind)}
    assert set(preset.environment) <= options
    assert preset.config() == PPOConfig.preset(name) == PPOConfig(**preset.settings)
    assert preset.policy["temperature"] == preset.environment["temperature"]


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_takes_them(name):
    envs = gym.make_vec("RLHF-v0", num_envs=2, **Preset(name).environment)  # lazy: no weights are loaded
    stack = {type(layer).__name__: layer for layer in layers(envs)}
    asked = Preset(name).environment
    assert stack["KLPenalty"].leash.kl_coef == asked["kl_coef"]
    assert stack["KLPenalty"].leash.target_kl == asked.get("target_kl")
    if "target_kl" in asked:
        assert stack["KLPenalty"].leash.episodes_per_update == 1024
    assert ("MissingEOSPenalty" in stack) == ("missing_eos_penalty" in asked)
    assert ("NormalizeScore" in stack) == bool(asked.get("normalize_score"))
    envs.close()


def test_overrides_win_and_are_checked():
    config = PPOConfig.preset("instructgpt", ptx_coef=0.0, learning_rate=5e-4)
    assert (config.ptx_coef, config.learning_rate, config.clip_range) == (0.0, 5e-4, 0.2)
    assert Preset("instructgpt").config(ptx_coef=0.0, learning_rate=5e-4) == config
    with pytest.raises(ValueError, match="`epochs` should be an integer of at least 1, got 0"):
        PPOConfig.preset("summarize", epochs=0)
    with pytest.raises(TypeError, match="learningrate"):
        PPOConfig.preset("summarize", learningrate=1)


@pytest.mark.parametrize("make", [Preset, PPOConfig.preset])
def test_unknown_names_are_refused(make):
    with pytest.raises(ValueError, match="one of 'instructgpt', 'summarize', 'n_plus', 'ziegler', got 'chatgpt'"):
        make("chatgpt")


def test_what_is_given_is_a_copy():
    Preset("ziegler").environment["kl_coef"] = 9.0
    Preset("ziegler").settings["epochs"] = 9
    assert Preset("ziegler").environment["kl_coef"] == 0.15
    assert Preset("ziegler").config().epochs == 4


@pytest.mark.parametrize("name", ["summarize", "n_plus", "ziegler"])
def test_it_trains(name):
    """On the toy language, with the learning rate that its table of logits wants: the score rises."""
    preset = Preset(name)
    shaping = {key: value for key, value in preset.environment.items() if hasattr(Shaping, key)}
    policy = TablePolicy(standard_toy().reference_logits)
    config = preset.config(learning_rate=0.05, episodes_per_iteration=256)
    agent = PPO(policy, toy_envs(64, **shaping), config, seed=0)
    scores = [agent.step().score for _ in range(8)]
    assert scores[-1] > scores[0] + 0.3


@pytest.mark.filterwarnings(CUT)
def test_the_controller_moves_once_per_batch():
    """Two batches of 1,024 at a KL of 0, far below 6 nats: 0.15 * (1 - 0.1 * 0.2) ** 2."""
    shaping = {key: value for key, value in Preset("ziegler").environment.items() if hasattr(Shaping, key)}
    policy = TablePolicy(standard_toy().reference_logits)
    agent = PPO(policy, toy_envs(64, **shaping), PPOConfig.preset("ziegler", learning_rate=1e-9), seed=0)
    assert agent.step().kl_coef == pytest.approx(0.15 * 0.98)
    assert agent.step().kl_coef == pytest.approx(0.15 * 0.98**2)


def test_shaping_says_what_its_new_options_need():
    with pytest.raises(ValueError, match="`kl_episodes_per_update`=8 needs a `target_kl`"):
        Shaping(kl_coef=0.1, kl_episodes_per_update=8)
    with pytest.raises(ValueError, match="`missing_eos_mode`='replace' needs a `missing_eos_penalty`"):
        Shaping(missing_eos_mode="replace")
