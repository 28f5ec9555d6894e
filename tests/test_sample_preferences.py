"""Comparisons of what policies write, on the toy language whose distributions are known, and through HF's engine."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from agent_helpers import TOY, letters, lm_envs, toy_envs

from textenv.agents import LanguageModelPolicy, TablePolicy, sample_preferences
from textenv.agents.rollouts import StepwiseEngine
from textenv.rewards import Preference


def lengths(_prompts, responses):
    return [len(response) for response in responses]


def policy():
    return TablePolicy(TOY.reference_logits)


def shifted(seed=1):
    noise = np.random.default_rng(seed).normal(size=TOY.reference_logits.shape)
    return TablePolicy(TOY.reference_logits + 2 * noise)


def test_equal_seeds_give_equal_comparisons_and_others_do_not():
    envs = toy_envs(8)
    found = [sample_preferences(policy(), None, envs, None, 60, seed) for seed in (0, 0, 1)]
    assert found[0].preferences == found[1].preferences != found[2].preferences
    for pairs in found:
        assert len(pairs.preferences) + pairs.equal + pairs.empty + pairs.dropped_ties == pairs.pairs == 60
        assert all(isinstance(p, Preference) for p in pairs.preferences)


def test_two_samples_of_one_policy_differ():
    pairs = sample_preferences(policy(), None, toy_envs(8), lengths, 200, 0)
    assert pairs.equal < 150 and len(pairs.preferences) > 20


def test_the_preferred_response_has_the_higher_score():
    scorer = toy_envs(2).unwrapped.task.scorer
    pairs = sample_preferences(policy(), shifted(), toy_envs(8), None, 100, 3, margin=True)
    prompts, chosen, rejected = (
        [getattr(p, key) for p in pairs.preferences] for key in ("prompt", "chosen", "rejected")
    )
    gaps = np.asarray(scorer(prompts, chosen)) - np.asarray(scorer(prompts, rejected))
    assert (gaps > 0).all() and pairs.agreement == 1.0
    np.testing.assert_allclose([p.margin for p in pairs.preferences], gaps)


def test_sides_come_from_their_policies():
    """One policy always ends at once and leaves the end's own text, the other never ends: each writes its own side."""
    stop = np.zeros_like(TOY.reference_logits)
    stop[..., toy_envs(2).unwrapped.task.mdp.stop_ids[0]] = 50.0
    silent, talker = TablePolicy(stop), TablePolicy(-stop)
    for policies in ((silent, talker), (talker, silent)):
        pairs = sample_preferences(*policies, toy_envs(8), lengths, 30, 0)
        assert len(pairs.preferences) == 30 and {p.rejected for p in pairs.preferences} == {" 0"}
        assert not any(" 0" in p.chosen for p in pairs.preferences)


def test_noise_makes_labels_err_as_often_as_bradley_terry_says():
    envs = toy_envs(32)
    exact = sample_preferences(policy(), shifted(), envs, None, 1500, 5, margin=True)
    noisy = sample_preferences(policy(), shifted(), envs, None, 1500, 5, noise=0.7)
    gaps = np.array([p.margin for p in exact.preferences])
    untied = noisy.pairs - noisy.equal - noisy.empty
    expected = (np.sum(1 / (1 + np.exp(-gaps / 0.7))) + 0.5 * exact.ties) / untied
    assert noisy.agreement == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(untied))
    assert noisy.agreement < 1


def test_environments_and_policies_are_left_as_they_were():
    envs, policies = toy_envs(4), (policy(), shifted())
    envs.reset(seed=7)
    twin = toy_envs(4)
    twin.reset(seed=7)
    torch_state, weights = torch.random.get_rng_state(), copy.deepcopy([p.state_dict() for p in policies])
    for one in policies:
        one.train()
    sample_preferences(*policies, envs, None, 10, 0)
    assert all(one.training for one in policies)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    for one, old in zip(policies, weights, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in one.state_dict().items())
    observed, expected = envs.reset()[0], twin.reset()[0]  # the next prompts are those that would have come
    assert all(np.array_equal(observed[key], expected[key]) for key in expected)


def test_an_engine_of_ones_own_serves_both_and_stays_open():
    class Watched(StepwiseEngine):
        closed = 0
        synced = ()

        def sync(self, policy):
            self.synced += (policy,)
            super().sync(policy)

        def close(self):
            self.closed += 1

    policies = policy(), shifted()
    engine = Watched(policies[0])
    found = sample_preferences(*policies, toy_envs(8), None, 40, 0, engine=engine)
    assert engine.synced == policies and engine.closed == 0
    assert found.preferences == sample_preferences(*policies, toy_envs(8), None, 40, 0).preferences


@pytest.mark.parametrize("n", [0, -1, True, 2.5])
def test_numbers_of_pairs_that_compare_nothing(n):
    with pytest.raises(ValueError, match="`n` should be an integer of at least 1"):
        sample_preferences(policy(), None, toy_envs(2), None, n, 0)


def test_options_are_refused_before_anything_is_written():
    with pytest.raises(ValueError, match="`margin` should be left out with noise"):
        sample_preferences(None, None, toy_envs(2), None, 1, 0, margin=True, noise=1.0)
    with pytest.raises(TypeError):
        sample_preferences(policy(), None, None, None, 1, 0)


def test_a_language_model_through_its_engine_with_context(tiny_model):
    asked = []

    def scorer(prompts, responses, wanted):
        asked.append((prompts, responses, wanted))
        return letters(prompts, responses)

    prompts = [{"prompt": "the a", "wanted": "x"}, {"prompt": "good", "wanted": "y"}]
    envs = lm_envs(tiny_model, 4, scorer, prompts=prompts, context_columns=["wanted"], stop=())
    model = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    pairs = sample_preferences(model, model, envs, None, 300, 0, progress=True)
    assert len(asked) == 1 and set(zip(asked[0][0], asked[0][2], strict=True)) == {("the a", "x"), ("good", "y")}
    assert len(pairs.preferences) > 100 and {p.prompt for p in pairs.preferences} == {"the a", "good"}
    for p in pairs.preferences:
        assert letters([], [p.chosen]) > letters([], [p.rejected])
