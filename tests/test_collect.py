"""From prompts to a rollout: which ids train, which distribution they come from, who is called and how often."""

from __future__ import annotations

import math

import numpy as np
import pytest
from agent_helpers import CUT, Counting, letters, lm_agent, lm_envs, toy_agent, toy_envs
from lm_helpers import EOS, NAMED, byte_tokenizer, llama, save_model

from textenv.agents import PPO, LanguageModelPolicy, TablePolicy
from textenv.agents.types import Generation
from textenv.lm import LanguageModel

# Ends, ids, prompts


def test_ids_that_were_sampled_are_the_ids_that_train(tiny_model):
    """An engine spells `the` letter by letter; encoding its text again would give one id."""
    tokenizer = byte_tokenizer()
    spelled = [tokenizer(letter).input_ids[0] for letter in "the."]

    class Speller:
        synced = 0

        def generate(self, prompts, _sampling):
            return Generation([np.array(spelled) for _ in prompts])

        def sync(self, _policy):
            self.synced += 1

    engine = Speller()
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    agent = PPO(policy, lm_envs(tiny_model), engine=engine)
    rollout = agent.rollout()
    assert rollout.input_ids[:, -6:-2].tolist() == [spelled] * 8 and engine.synced == 1
    assert rollout.response_mask.sum(-1).tolist() == [4] * 8 and set(rollout.responses) == {"the."}
    assert tokenizer("the.").input_ids != spelled
    reference = policy.reference.response_logprobs(rollout.input_ids.numpy(), rollout.attention_mask.numpy(), 6)
    np.testing.assert_allclose(rollout.logprobs, reference, atol=1e-5)


@pytest.mark.filterwarnings(CUT)
def test_temperature_is_in_the_samples_and_in_every_logprob(tiny_model):
    agent = lm_agent(tiny_model, lm_envs(tiny_model, 16, stop=()), temperature=0.6, epochs=1, learning_rate=1e-9)
    rollout = agent.rollout()
    plain = LanguageModel(llama(), source="tiny", named_size=NAMED)
    cold = LanguageModel(llama(), source="tiny", named_size=NAMED, temperature=0.6)
    arguments = rollout.input_ids.numpy(), rollout.attention_mask.numpy(), 6
    for ours in (rollout.logprobs, rollout.ref_logprobs):
        np.testing.assert_allclose(ours, cold.response_logprobs(*arguments), atol=1e-5)
        assert np.abs(ours.numpy() - plain.response_logprobs(*arguments)).max() > 0.3
    assert agent.step().kl == pytest.approx(0, abs=1e-4)


def test_batches_of_another_size_than_the_number_of_environments():
    agent = toy_agent(envs=toy_envs(8), episodes_per_iteration=20)
    stats = agent.step()
    assert agent.batch_size == stats.episodes == 20 and len(agent.rollout().responses) == 20


# Who is called, and how often


def test_each_piece_is_called_once_per_batch(tiny_model, monkeypatch):
    """Three rounds of environments to a batch, two minibatches, two epochs."""
    scorer = Counting(letters)
    envs = lm_envs(tiny_model, 4, scorer)
    agent = lm_agent(tiny_model, envs, episodes_per_iteration=12, num_minibatches=2, epochs=2)
    counters = {
        "generate": (agent.engine, "generate"),
        "reference": (agent.policy.reference, "hidden_states"),
        "evaluate": (agent.policy, "evaluate"),
    }
    counts = {name: Counting(getattr(owner, attribute)) for name, (owner, attribute) in counters.items()}
    for name, (owner, attribute) in counters.items():
        monkeypatch.setattr(owner, attribute, counts[name])
    agent.step()
    assert scorer.calls == counts["generate"].calls == counts["reference"].calls == 1
    assert counts["evaluate"].calls == 1 + 2 * 2  # the rollout's, and one per optimiser step
    assert envs.unwrapped.task.reference._model is None  # the environment's own copy was never loaded


def reward_model(folder):
    from textenv.lm import LazyLanguageModel, load_tokenizer
    from textenv.rewards import RewardModel

    tokenizer = load_tokenizer(folder)
    trunk = LazyLanguageModel(folder, named_size=tokenizer.named_size)
    return RewardModel(trunk, tokenizer, np.random.default_rng(0).normal(size=32))


def spelled_again(rollout):
    """Rows whose text has other ids than were sampled; they are scored by a pass of their own."""
    tokenizer = byte_tokenizer()
    changed = 0
    for row in range(len(rollout.input_ids)):
        ids = rollout.input_ids[row][rollout.attention_mask[row].bool()].tolist()
        ids = ids[:-1] if ids[-1] == EOS else ids
        changed += ids != tokenizer(rollout.prompts[row] + rollout.responses[row]).input_ids
    return changed


@pytest.mark.parametrize("lora_rank", [4, None])
def test_reward_model_and_reference_share_one_pass(tiny_model, lora_rank):
    scorer = reward_model(tiny_model)
    envs = lm_envs(tiny_model, 8, scorer)
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=lora_rank)
    agent = PPO(policy, envs, seed=1)
    assert envs.unwrapped.task.scorer.trunk is policy.reference
    agent.rollout()  # the first one also tries out what the model can do
    passes = []
    trunk = policy.reference.model.base_model
    hook = trunk.register_forward_hook(lambda _module, args, kwargs, _out: passes.append(kwargs), with_kwargs=True)
    rollout = agent.rollout()
    hook.remove()
    whole = [kwargs for kwargs in passes if not kwargs["use_cache"]]  # not decoding
    frozen = whole[: len(whole) - 1] if lora_rank else whole  # with adapters the policy's own pass is the last
    assert len(frozen) == 1 + (spelled_again(rollout) > 0)
    assert scorer.trunk._model is None  # and no second trunk was loaded
    np.testing.assert_allclose(rollout.scores, scorer(list(rollout.prompts), list(rollout.responses)), atol=1e-4)
    reference = LanguageModel(llama(), source="tiny", named_size=NAMED)
    expected = reference.response_logprobs(rollout.input_ids.numpy(), rollout.attention_mask.numpy(), 6)
    np.testing.assert_allclose(rollout.ref_logprobs, expected, atol=1e-5)


def test_scores_stay_those_of_the_frozen_trunk_while_adapters_train(tiny_model):
    scorer = reward_model(tiny_model)
    agent = lm_agent(tiny_model, lm_envs(tiny_model, 8, scorer), learning_rate=0.05)
    for _ in range(2):
        agent.step()
    rollout = agent.rollout()
    assert rollout.kl().abs().mean() > 0.1
    np.testing.assert_allclose(rollout.scores, scorer(list(rollout.prompts), list(rollout.responses)), atol=1e-4)


def test_reward_model_on_other_weights_keeps_its_own_trunk(tiny_model, tmp_path):
    other = save_model(tmp_path, llama(seed=1))
    scorer = reward_model(other)
    envs = lm_envs(tiny_model, 8, scorer)
    agent = lm_agent(tiny_model, envs)
    rollout = agent.rollout()
    assert envs.unwrapped.task.scorer is scorer and scorer.trunk._model is not None
    np.testing.assert_allclose(rollout.scores, scorer(list(rollout.prompts), list(rollout.responses)), atol=1e-5)


def test_a_reference_that_is_a_plain_function_is_measured_against():
    from textenv.wrappers.vector import KLPenalty

    def uniform(_observations, actions):
        return np.full(len(actions), math.log(1 / 6))

    envs = KLPenalty(toy_envs(kl_coef=None), ref_logprobs=uniform, kl_coef=0.1)
    logits = np.random.default_rng(0).normal(size=(8, 6))
    plain = toy_agent(TablePolicy(logits), envs, check_start=False).step()
    known = toy_agent(TablePolicy(logits), check_start=False).step()
    assert plain.kl == pytest.approx(known.kl, abs=1e-5) and known.kl > 0.1
    assert plain.shaped_return == pytest.approx(known.shaped_return, abs=1e-5)


def test_without_a_penalty_there_is_no_coefficient_and_no_toll():
    stats = toy_agent(TablePolicy(np.eye(8, 6)), toy_envs(kl_coef=None), check_start=False).step()
    assert math.isnan(stats.kl_coef) and math.isnan(stats.kl)
    assert stats.shaped_return == pytest.approx(stats.score, abs=1e-6)
