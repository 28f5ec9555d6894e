"""Engine against trainer: figures by hand, and a policy trained on an engine's log-probabilities."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agent_helpers import lm_agent, lm_envs, toy_agent, toy_envs

from textenv.agents import PPO, LanguageModelPolicy, PPOConfig, TablePolicy
from textenv.agents.mismatch import MISMATCH, Proximal, mismatch_figures
from textenv.agents.rollouts import StepwiseEngine
from textenv.agents.start_check import StartError
from textenv.oracle import evaluate
from textenv.toy import standard_toy

MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_figures_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, math.nan, math.nan]])
    engine = torch.tensor([[-1.0, -2.2, -2.95], [-1.0, 9.0, 9.0]])
    figures = mismatch_figures(logprobs, engine, MASK)
    # Gaps 0, 0.2, -0.05, 0; ratios 1, 1.22, 0.951, 1.
    assert figures["mismatch_max"] == pytest.approx(0.2, abs=1e-6)
    assert figures["mismatch_q50"] == pytest.approx(0, abs=1e-6)
    assert figures["mismatch_q01"] == pytest.approx(np.quantile([0, 0.2, -0.05, 0], 0.01), abs=1e-6)
    assert figures["mismatch_q99"] == pytest.approx(np.quantile([0, 0.2, -0.05, 0], 0.99), abs=1e-6)
    assert figures["mismatch_outside"] == 0.25


@pytest.mark.parametrize("logprobs, engine", [(None, torch.zeros(2, 3)), (torch.zeros(2, 3), None)])
def test_unknown_is_nan(logprobs, engine):
    figures = mismatch_figures(logprobs, engine, MASK)
    assert tuple(figures) == MISMATCH and all(math.isnan(value) for value in figures.values())


@dataclasses.dataclass
class Batch:
    logprobs: torch.Tensor
    response_mask: torch.Tensor
    engine_logprobs: torch.Tensor | None = None


def test_the_first_pass_is_what_later_ones_are_compared_with():
    mu = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]])
    batch = Batch(mu, MASK, mu)
    proximal = Proximal(batch, importance_clip=2.0)
    first = torch.tensor([[-1.0, -0.5, 0.0]], requires_grad=True)
    old, weights = proximal.of(torch.tensor([0]), first)
    assert torch.equal(old, first.detach()) and not old.requires_grad
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(0.5), 2.0]]))  # e is cut to 2
    later = torch.tensor([[-3.0, math.nan, math.nan], [-9.0, -9.0, -9.0]])
    old, weights = proximal.of(torch.tensor([1, 0]), later)
    torch.testing.assert_close(old, torch.tensor([[-3.0, math.nan, math.nan], [-1.0, -0.5, 0.0]]), equal_nan=True)
    torch.testing.assert_close(weights[0], torch.tensor([math.exp(-1), 1.0, 1.0]))  # what is masked weighs 1
    assert proximal.figures()["mismatch_max"] == pytest.approx(1.0)


def test_the_trainers_own_need_no_weight():
    batch = Batch(torch.zeros(2, 3), MASK)
    old, weights = Proximal(batch, None).of(torch.tensor([1]), torch.ones(1, 3))
    assert torch.equal(old, torch.zeros(1, 3)) and weights is None


class OffEngine(StepwiseEngine):
    """Draws from the policy's table, tilted: another distribution than the trainer's, honestly reported."""

    def __init__(self, policy, tilt):
        super().__init__(policy)
        self.tilt = torch.as_tensor(tilt, dtype=torch.float32)

    def generate(self, prompts, sampling):
        held = self.policy.logits.detach().clone()
        with torch.no_grad():
            self.policy.logits += self.tilt
            try:
                return super().generate(prompts, sampling)
            finally:
                self.policy.logits.copy_(held)


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_the_engines_logprobs_train_to_the_optimum_as_the_trainers_do(num_minibatches):
    toy, found = standard_toy(), {}
    for source in ("trainer", "engine"):
        policy = TablePolicy(toy.reference_logprobs)
        config = {"gae_lambda": 1.0, "vf_coef": 0.5, "learning_rate": 0.05, "lr_schedule": "linear"}
        agent = toy_agent(
            policy, toy_envs(256), logprobs_from=source, num_minibatches=num_minibatches, epochs=2, **config
        )
        agent.learn(20_000, run_dir=None, progress=False)
        logprobs = torch.log_softmax(policy.logits.detach().double(), -1).numpy()
        found[source] = evaluate(toy, logprobs, kl_coef=0.1).regret
    start = evaluate(toy, toy.reference_logprobs, kl_coef=0.1).regret
    assert found["trainer"] < 0.03 * start and found["engine"] < 0.03 * start


def test_with_an_engine_that_is_off_the_weights_undo_its_tilt():
    """The expected first gradient is that of an engine that is not off; without weights it would be another."""
    toy = standard_toy()
    tilt = 0.4 * np.random.default_rng(1).normal(size=(1, 6))
    gradients = {}
    for name, source, off in (("exact", "trainer", 0.0), ("weighted", "engine", 1.0), ("ignored", "trainer", 1.0)):
        policy = TablePolicy(toy.reference_logprobs)
        options = {"whiten_advantages": False, "gae_lambda": 1.0, "max_grad_norm": 1e9, "epochs": 1}
        agent = toy_agent(
            policy, toy_envs(4096), logprobs_from=source, importance_clip=100.0, check_start=False,
            loss_mode="seq-mean-token-sum", vf_coef=0.0, learning_rate=1e-12, **options,
        )  # fmt: skip
        agent.engine = OffEngine(policy, off * tilt)
        agent.step()
        gradients[name] = policy.logits.grad.flatten().clone()
    near = (gradients["weighted"] - gradients["exact"]).norm()
    far = (gradients["ignored"] - gradients["exact"]).norm()
    assert near < 0.6 * far


def test_every_iteration_logs_the_gap(tiny_model):
    stats = lm_agent(tiny_model, epochs=1).step()
    figures = stats.metrics()
    assert 0 <= figures["mismatch_max"] < 1e-3 and figures["mismatch_outside"] == 0
    assert figures["mismatch_q01"] <= figures["mismatch_q50"] <= figures["mismatch_q99"]


@pytest.mark.parametrize("value", ["trunk", "separate"])
def test_with_the_engines_logprobs_the_policy_is_asked_for_values_alone(tiny_model, value, monkeypatch):
    policy = LanguageModelPolicy.from_pretrained(tiny_model, lora_rank=4, value=value)
    agent = PPO(policy, lm_envs(tiny_model), PPOConfig(logprobs_from="engine", epochs=1, num_minibatches=2))
    calls, own = [], LanguageModelPolicy.evaluate
    monkeypatch.setattr(LanguageModelPolicy, "evaluate", lambda self, *a, **k: calls.append(1) or own(self, *a, **k))
    rollout = agent.rollout()
    assert not calls and torch.equal(rollout.logprobs, rollout.engine_logprobs)
    output = own(policy, rollout.input_ids, rollout.attention_mask, rollout.response_tokens)
    torch.testing.assert_close(rollout.values, output.values.detach(), atol=1e-5, rtol=1e-5)


def test_an_engine_that_writes_something_else_is_found(tiny_model):
    agent = toy_agent(TablePolicy(standard_toy().reference_logprobs))
    agent.engine = OffEngine(agent.policy, 0.5 * np.random.default_rng(1).normal(size=(1, 6)))
    with pytest.raises(StartError, match="weights that were not synced"):
        agent.step()


def test_an_engine_without_logprobs_is_refused():
    class Silent(StepwiseEngine):
        def generate(self, prompts, sampling):
            return dataclasses.replace(super().generate(prompts, sampling), logprobs=None)

    agent = toy_agent(TablePolicy(standard_toy().reference_logprobs), logprobs_from="engine")
    agent.engine = Silent(agent.policy)
    with pytest.raises(ValueError, match="should report log-probabilities, got none from Silent"):
        agent.step()
    assert math.isnan(toy_agent_stats(Silent).mismatch_max)


def toy_agent_stats(engine):
    agent = toy_agent(TablePolicy(standard_toy().reference_logprobs))
    agent.engine = engine(agent.policy)
    return agent.step()
