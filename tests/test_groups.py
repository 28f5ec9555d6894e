"""Several responses to one prompt, from `reset` on: rows that share a prompt, and batches made of them."""

from __future__ import annotations

import numpy as np
import pytest
from agent_helpers import TOY, lm_envs, toy_envs

from textenv.agents import (
    GRPO,
    PPO,
    RLOO,
    GRPOConfig,
    LanguageModelPolicy,
    PPOConfig,
    RLOOConfig,
    TablePolicy,
)
from textenv.agents.rollouts import HFEngine, StepwiseEngine
from textenv.agents.rollouts.collect import collect
from textenv.evaluation import draw_prompts

ASKED = [f"prompt {number}" for number in range(40)]


@pytest.fixture
def text_envs(tiny_model):
    return lambda **options: lm_envs(tiny_model, **({"prompts": ASKED} | options))


def test_rows_next_to_each_other_share_a_prompt(text_envs):
    envs = text_envs()
    observations, infos = envs.reset(seed=3, options={"samples_per_prompt": 4})
    assert len({*infos["prompt"][:4]}) == len({*infos["prompt"][4:]}) == 1
    assert infos["prompt"][0] != infos["prompt"][4]
    for ids in (observations["input_ids"][:4], observations["input_ids"][4:]):
        assert (ids == ids[0]).all()


def test_a_group_starts_where_its_first_row_would(text_envs):
    alone, grouped = text_envs(), text_envs()
    _, first = alone.reset(seed=3)
    _, second = grouped.reset(seed=3, options={"samples_per_prompt": 4})
    assert second["prompt"][0] == first["prompt"][0]
    assert second["prompt"][4] == first["prompt"][4]


def test_groups_of_one_are_plain_resets(text_envs):
    plain, grouped = text_envs(), text_envs()
    for seed in (3, None):
        _, one = plain.reset(seed=seed)
        _, other = grouped.reset(seed=seed, options={"samples_per_prompt": 1})
        assert list(one["prompt"]) == list(other["prompt"])


def test_no_prompt_is_passed_over_in_order(text_envs):
    """Eight rows in groups of four take two prompts a reset: the third reset holds prompts 4 and 5."""
    envs = text_envs(order="sequential")
    drawn = draw_prompts(envs, 24, 0, samples_per_prompt=4)
    assert [prompt.text for prompt in drawn] == [ASKED[i // 4] for i in range(24)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_prompt": 3}, r"`num_envs` should be a multiple of samples_per_prompt=3, got 8.*Use 6"),
        ({"samples_per_prompt": 0}, "an integer of at least 1, got 0"),
        ({"samples_per_prompt": True}, "an integer of at least 1, got True"),
        ({"samples_per_prompt": 4, "prompt": "x"}, r"got \['prompt'\] beside it"),
        ({"samples_per_prompt": 4, "reset_mask": np.ones(8, bool)}, r"got \['reset_mask'\] beside it"),
    ],
)
def test_groups_that_cannot_be_are_refused(text_envs, options, message):
    envs = text_envs()
    with pytest.raises(ValueError, match=message):
        envs.reset(options=options)


@pytest.mark.parametrize("agent", [GRPO, RLOO])
def test_agents_refuse_environments_that_do_not_divide(agent):
    with pytest.raises(ValueError, match=r"`num_envs` should be a multiple of samples_per_prompt=4, got 30"):
        agent(TablePolicy(TOY.reference_logits), toy_envs(30), agent.config_class(episodes_per_iteration=32))
    with pytest.raises(ValueError, match=r"`episodes_per_iteration` should be a multiple"):
        agent(TablePolicy(TOY.reference_logits), toy_envs(32), agent.config_class(episodes_per_iteration=30))


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_a_group_of_one_is_refused(config):
    with pytest.raises(ValueError, match=r"should be at least 2, got 1.*every advantage would be 0"):
        config(samples_per_prompt=1)


def test_a_batch_holds_groups_and_their_members_differ():
    agent = PPO(TablePolicy(TOY.reference_logits), toy_envs(), PPOConfig(samples_per_prompt=8))
    rollout = agent.rollout()
    assert len(rollout.prompts) == 32
    assert len({tuple(row) for row in rollout.input_ids[:8].tolist()}) > 1


@pytest.mark.parametrize("engine", [StepwiseEngine, HFEngine])
def test_engines_answer_each_prompt_of_a_batch_as_often_as_asked(tiny_model, text_envs, engine):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    episodes = collect(policy, text_envs(), engine(policy), episodes=8, seed=0, env_seed=1, samples_per_prompt=4)
    assert len({*episodes.prompts[:4]}) == len({*episodes.prompts[4:]}) == 1
    assert episodes.prompts[0] != episodes.prompts[4]
    assert len({*episodes.responses[:4]}) > 1
