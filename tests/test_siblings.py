"""The siblings of PPO: they learn, they resume, and what must not matter to their gradients does not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from agent_helpers import TOY, lm_envs, parameters, same, toy_envs

from textenv.agents import (
    GRPO,
    PPO,
    REINFORCE,
    RLOO,
    GRPOConfig,
    LanguageModelPolicy,
    PPOConfig,
    REINFORCEConfig,
    RLOOConfig,
    TablePolicy,
)
from textenv.agents.losses import clipped_policy_loss
from textenv.oracle import evaluate, solve

AGENTS = [PPO, GRPO, RLOO, REINFORCE]
VARIANTS = {
    "published": {"kl_loss_coef": 0.04, "kl_loss_estimator": "k3"},
    "dr_grpo": {"scale_by": "none", "loss_mode": "seq-mean-token-sum"},
    "batch": {"scale_by": "batch"},
    "dapo": {"clip_range_high": 0.28, "loss_mode": "token-mean", "epochs": 2},
    "gspo": {"ratio_level": "sequence", "clip_range": 3e-2, "clip_range_high": 4e-2, "epochs": 2},
}


def table_agent(agent, seed=0, envs=None, **config):
    config = agent.config_class(**config)
    return agent(TablePolicy(TOY.reference_logits), envs or toy_envs(64), config, seed=seed)


def toy_objective(policy, kl_coef=0.1):
    return evaluate(TOY, torch.log_softmax(policy.logits.detach().double(), -1).numpy(), kl_coef)


@pytest.mark.parametrize("agent", AGENTS)
def test_one_line_swaps_the_agent(agent):
    """The same environments, policy, seed and budget; each closes most of the gap to the optimum."""
    learner = table_agent(agent, envs=toy_envs(256), learning_rate=0.1, lr_schedule="linear")
    before = toy_objective(learner.policy).regret
    learner.learn(20_000, run_dir=None, progress=False)
    assert toy_objective(learner.policy).regret < 0.2 * before
    assert toy_objective(learner.policy).objective <= solve(TOY, 0.1).value


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_grpo_learn(name):
    envs = toy_envs(256, kl_coef=0.0 if name == "published" else 0.1)
    learner = table_agent(GRPO, envs=envs, learning_rate=0.1, **VARIANTS[name])
    before = toy_objective(learner.policy).score
    learner.learn(256 * 20, run_dir=None, progress=False)
    assert toy_objective(learner.policy).score > before + 1.0


@pytest.mark.parametrize("agent", AGENTS)
def test_micro_batches_add_up_to_the_batch(agent):
    """Responses of unequal lengths, one by one or all at once: the same gradient."""
    whole, pieces = (table_agent(agent, micro_batch_tokens=size, epochs=1) for size in (None, 9))
    for learner in (whole, pieces):
        learner.step()
    for one, other in zip(whole.parameters, pieces.parameters, strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)
    assert whole.policy.logits.grad.abs().max() > 1e-3


@pytest.mark.parametrize("agent", AGENTS)
def test_a_resumed_run_is_the_uninterrupted_one(agent, tmp_path):
    through = table_agent(agent).learn(64 * 4, run_dir=None, progress=False)
    table_agent(agent).learn(64 * 2, run_dir=tmp_path / "run", progress=False)
    resumed = agent.load(tmp_path / "run", toy_envs(64), TablePolicy(TOY.reference_logits))
    resumed.learn(64 * 4, run_dir=None, progress=False)
    assert same(parameters(through), parameters(resumed))


def test_checkpoints_are_of_one_agent(tmp_path):
    table_agent(GRPO).save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="was saved by GRPO, got RLOO"):
        RLOO.load(tmp_path / "checkpoint", toy_envs(64), TablePolicy(TOY.reference_logits))


@pytest.mark.parametrize("agent", [GRPO, RLOO, REINFORCE])
def test_values_are_left_alone(agent):
    learner = table_agent(agent)
    learner.step()
    assert (learner.policy.values == 0).all()
    assert math.isnan(learner.step().value_loss)


@pytest.mark.parametrize("agent", [GRPO, RLOO, REINFORCE])
def test_equal_rewards_teach_nothing_and_say_so(agent):
    language = dataclasses.replace(TOY, token_scores=np.zeros(6), unfinished_score=0.0)
    envs = toy_envs(64, kl_coef=None, language=language)
    learner = table_agent(agent, envs=envs)
    before = parameters(learner)
    with pytest.warns(UserWarning, match="Every advantage of a batch is 0"):
        learner.step()
    assert same(before, parameters(learner))


@pytest.mark.parametrize("agent", AGENTS)
def test_dropped_samples_change_no_other_advantage(agent):
    """What stands at a dropped sample's rewards, NaN included, moves nothing."""
    learner = table_agent(agent)
    rewards, values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(64, 8)
    mask = torch.arange(8) < torch.arange(64)[:, None] % 8 + 1
    mask[5] = False
    garbage = torch.where(mask, rewards, torch.tensor(math.nan))
    for one, other in zip(
        learner.advantages(rewards, values, mask), learner.advantages(garbage, values, mask), strict=True
    ):
        assert torch.equal(one, other)
    assert (one[~mask] == 0).all()


def test_every_token_of_a_response_has_its_groups_advantage():
    learner = table_agent(GRPO, scale_by="none")
    rollout = learner.rollout()
    totals = rollout.rewards.where(rollout.response_mask, torch.tensor(0.0)).sum(-1).view(16, 4)
    expected = (totals - totals.mean(-1, keepdim=True)).flatten()[:, None] * rollout.response_mask
    torch.testing.assert_close(rollout.advantages, expected)


def test_a_response_has_one_ratio_the_geometric_mean_of_its_tokens():
    learner = table_agent(GRPO, ratio_level="sequence", clip_range=0.05, clip_range_high=0.1)
    rollout = learner.rollout()
    with torch.no_grad():
        output = learner._evaluate(rollout)
    moved = dataclasses.replace(output, logprobs=output.logprobs + 0.2 * torch.rand_like(output.logprobs))
    terms = learner.loss_terms(rollout, moved, rollout.logprobs, None, lambda x: x.sum())
    expected = 0.0
    for row in range(len(rollout.input_ids)):
        tokens = rollout.response_mask[row]
        ratio = float((moved.logprobs[row] - rollout.logprobs[row])[tokens].mean().exp())
        advantage = float(rollout.advantages[row, 0])
        expected += int(tokens.sum()) * max(-advantage * ratio, -advantage * min(max(ratio, 0.95), 1.1))
    assert float(terms["policy_loss"][1]) == pytest.approx(expected, rel=1e-5)
    plain = clipped_policy_loss(moved.logprobs, rollout.logprobs, rollout.advantages, rollout.response_mask, 0.05, 0.1)
    assert float(plain.sum()) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: GRPOConfig(scale_by="prompt"), r"`scale_by` should be one of .*'prompt'"),
        (lambda: GRPOConfig(ratio_level="word"), "`ratio_level` should be 'token' or 'sequence', got 'word'"),
        (lambda: REINFORCEConfig(baseline="value"), "`baseline` should be 'batch' or 'none', got 'value'"),
        (lambda: RLOOConfig(epochs=0), "`epochs` should be an integer of at least 1"),
        (lambda: PPOConfig(samples_per_prompt=0), "`samples_per_prompt` should be an integer of at least 1"),
    ],
)
def test_settings_that_cannot_train_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config()


@pytest.mark.parametrize("agent", [GRPO, RLOO, REINFORCE])
def test_language_models_learn_and_share_the_trunk(agent, tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    learner = agent(policy, lm_envs(tiny_model, num_envs=32), agent.config_class(learning_rate=1e-2), seed=0)
    stats = [learner.step() for _ in range(8)]
    assert stats[0].kl == pytest.approx(0.0, abs=1e-5)
    assert stats[0].ratio_q50 == 1.0
    assert stats[-1].score > stats[0].score
