"""Before the first update the policy is the reference and every ratio is 1, or an error says what is to blame."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agent_helpers import lm_agent, lm_envs, parameters, same, toy_agent, toy_envs
from lm_helpers import NAMED, GRUPolicy, llama
from torch import nn

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, TablePolicy
from textenv.agents.start_check import StartError, check_ratios
from textenv.lm import LanguageModel


def refused(agent, *expected):
    """The agent refuses to start, says all that, and has changed nothing."""
    before = parameters(agent)
    with pytest.raises(StartError) as caught:
        agent.step()
    for words in expected:
        assert words in str(caught.value)
    assert same(parameters(agent), before) and agent.iteration == 0


# What starts


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 60])
@pytest.mark.parametrize("lora_rank", [4, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_ratios_are_one_and_kl_is_zero(tiny_model, lora_rank, temperature, micro_batch_tokens):
    """One pass that moves nothing: the quantiles are those of the first minibatch."""
    config = {"epochs": 1, "learning_rate": 1e-12, "micro_batch_tokens": micro_batch_tokens}
    stats = lm_agent(tiny_model, lora_rank=lora_rank, temperature=temperature, **config).step()
    assert stats.kl == pytest.approx(0, abs=1e-5)
    for ratio in (stats.ratio_q01, stats.ratio_q50, stats.ratio_q99):
        assert ratio == pytest.approx(1, abs=1e-5)
    assert stats.approx_kl < 1e-9 and stats.clip_fraction == 0


def test_bfloat16_starts_within_its_rounding(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, dtype="bfloat16")
    stats = PPO(policy, lm_envs(tiny_model), PPOConfig(micro_batch_tokens=40, epochs=1)).step()
    assert abs(stats.kl) < 0.3


def test_small_policies_start():
    for policy in (TablePolicy(np.zeros((8, 6))), GRUPolicy(6)):
        assert toy_agent(policy).step().kl == pytest.approx(0, abs=1e-5)


def test_checks_come_once_before_the_first_update():
    agent = toy_agent(learning_rate=0.5)
    agent.step()
    assert agent.step().kl > 0.1  # far from the reference by now, and rightly so


# What does not


def test_policy_that_starts_elsewhere():
    elsewhere = np.random.default_rng(0).normal(size=(8, 6))
    refused(
        toy_agent(TablePolicy(elsewhere)),
        "should be the reference, but their log-probabilities differ by",
        "look for weights that were changed",
        "PPOConfig(check_start=False)",
    )
    toy_agent(TablePolicy(elsewhere), check_start=False).step()


class Stubborn(GRUPolicy):
    """Has dropout and never leaves training mode."""

    def __init__(self):
        super().__init__(6)
        nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(0))
        self.dropout = nn.Dropout(0.5)

    def states(self, input_ids, attention_mask):
        return self.dropout(super().states(input_ids, attention_mask))

    def eval(self):
        return self


class FunctionalDropout(Stubborn):
    """The same without a module to see."""

    def states(self, input_ids, attention_mask):
        return nn.functional.dropout(GRUPolicy.states(self, input_ids, attention_mask), 0.5, self.training)


def test_dropout_is_found():
    """Without a reference it shows in the ratios alone."""
    agent = toy_agent(Stubborn(), toy_envs(kl_coef=None))
    refused(agent, "every ratio should be 1, but log-ratios reach", "dropout is on (dropout): call policy.eval()")


def test_functional_dropout_is_suspected():
    policy = FunctionalDropout()
    policy.dropout.p = 0.0
    refused(toy_agent(policy, toy_envs(kl_coef=None)), "the policy is in training mode, where functional dropout acts")


def test_dropout_that_listens_to_eval_is_turned_off():
    class Obedient(Stubborn):
        eval = nn.Module.eval

    agent = toy_agent(Obedient(), toy_envs(kl_coef=None))
    agent.policy.train()
    agent.step()
    assert not agent.policy.training


def test_evaluate_that_is_not_deterministic_is_suspected():
    class Noisy(TablePolicy):
        def evaluate(self, *arguments):
            output = super().evaluate(*arguments)
            output.logprobs.data += 0.1 * torch.rand(output.logprobs.shape)
            return output

    refused(toy_agent(Noisy(np.zeros((8, 6))), toy_envs(kl_coef=None)), "an `evaluate` that is not deterministic")


def test_other_temperature_of_the_reference_is_found(tiny_model):
    agent = lm_agent(tiny_model, temperature=0.6)
    agent.policy.reference.temperature = 1.0
    refused(agent, "temperature: policy 0.6, reference 1.0; make them equal")


def test_other_weights_of_the_reference_are_found(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    policy.reference = LanguageModel(llama(seed=1), source="somewhere/else", named_size=NAMED)
    refused(PPO(policy, lm_envs(tiny_model)), f"other weights: policy {tiny_model}, reference somewhere/else")


def test_other_precision_of_the_reference_is_found(tiny_model):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4)
    policy.reference = LanguageModel(llama(), source=tiny_model, named_size=NAMED, dtype="bfloat16")
    refused(PPO(policy, lm_envs(tiny_model)), "precision: policy float32, reference bfloat16")


def test_adapters_that_were_trained_before_are_found(tiny_model):
    agent = lm_agent(tiny_model)
    with torch.no_grad():
        for name, parameter in agent.policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    refused(agent, "should be the reference", "look for weights that were changed")


def test_reference_that_says_nan_is_no_reference():
    class Broken:
        def response_logprobs(self, input_ids, _attention_mask, response_tokens):
            return np.full((len(input_ids), response_tokens), np.nan)

    policy = TablePolicy(np.zeros((8, 6)))
    policy.reference = Broken()
    refused(toy_agent(policy), "differ by nan nats")


def test_one_wandering_token_counts_in_float32():
    """In bfloat16 single tokens wander and the mean decides."""
    policy = TablePolicy(np.zeros((8, 6)))
    logratio = torch.zeros(4, 8)
    logratio[1, 2] = 0.01
    mask = torch.ones(4, 8, dtype=torch.bool)
    with pytest.raises(StartError, match=r"log-ratios reach 0\.01"):
        check_ratios(policy, logratio, mask)
    mask[1, 2] = False
    check_ratios(policy, logratio, mask)
    logratio[:] = float("nan")
    with pytest.raises(StartError, match="reach nan"):
        check_ratios(policy, logratio, mask)
