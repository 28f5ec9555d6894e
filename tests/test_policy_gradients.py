"""The expected gradient of every policy-gradient agent, by enumeration: all responses, or all groups of them.

Each group goes through the agent's own road (engine, wrapped environments, advantages, loss); its gradient is weighted
by the group's probability. The sum is the expectation that sampling only estimates, and is held against the gradient of
the objective E[score] - kl_coef KL, which autograd takes from the same list of responses.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from textenv.agents import GRPO, PPO, REINFORCE, RLOO
from textenv.agents.advantages import grpo
from textenv.agents.losses import Counts, aggregate
from textenv.agents.policy import last_columns, output_from_logits
from textenv.agents.stats import UpdateStats
from textenv.agents.types import Generation
from textenv.oracle import enumerate_responses
from textenv.toy import ToyLanguage

KL_COEF, V, T, PROMPT = 0.3, 3, 2, 1
DOCUMENT = Path(__file__).parent.parent / "docs" / "learning_theory.md"
EXACT = {"whiten_advantages": False, "loss_mode": "seq-mean-token-sum", "gae_lambda": 1.0}


def score(responses):
    """Not additive: what a token is worth depends on the one before it."""
    return [
        {(0,): 0.2, (1, 0): 1.5, (1, 1): -1.0, (1, 2): 0.4, (2, 0): -0.3, (2, 1): 2.0}.get(r, -1.4) for r in responses
    ]


LANGUAGE = ToyLanguage(reference_logits=np.array([[0.3, 0.0, -0.5], [0.0, 0.8, -0.2]]), stop_id=0, score_fn=score)
RESPONSES = [tuple(row[row >= 0].tolist()) for row in enumerate_responses(LANGUAGE)[0]]


class PrefixPolicy(nn.Module):
    """Logits and a value of their own after every prefix: nothing that a policy could be is left out."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(1 + V, V, generator=generator, dtype=torch.float64))
        self.values = nn.Parameter(torch.zeros(1 + V, dtype=torch.float64))

    def places(self, response_ids):
        return torch.stack([torch.zeros_like(response_ids[:, 0]), 1 + response_ids[:, 0]], 1)

    def evaluate(self, input_ids, attention_mask, response_tokens):
        places = self.places(input_ids[:, -response_tokens:].long())
        mask = attention_mask[:, -response_tokens:]
        return output_from_logits(self.logits[places], self.values[places], input_ids, mask)

    def next_logits(self, input_ids, attention_mask):
        first = last_columns(attention_mask) < PROMPT
        return self.logits[torch.where(first, 0, 1 + input_ids[:, PROMPT].long())]


class Given:
    """An engine that writes what it is told."""

    def __init__(self):
        self.responses = []

    def generate(self, _prompts, _sampling):
        return Generation([np.array(response) for response in self.responses])

    def sync(self, policy):
        """Nothing to take over."""

    def close(self):
        """Nothing to close."""


def response_logprobs(policy):
    """log pi (M,) of all responses, with gradient."""
    ids = torch.tensor([[0] * PROMPT + list(r) + [0] * (T - len(r)) for r in RESPONSES])
    mask = torch.tensor([[1] * (PROMPT + len(r)) + [0] * (T - len(r)) for r in RESPONSES])
    return policy.evaluate(ids, mask, T).logprobs.sum(-1)


def ref_logprobs():
    log_ref = torch.log_softmax(torch.tensor(LANGUAGE.reference_logits), -1)
    return torch.stack([sum(log_ref[t, token] for t, token in enumerate(r)) for r in RESPONSES])


def objective(policy):
    """J by the list of all responses."""
    log_pi, scores = response_logprobs(policy), torch.tensor(score(RESPONSES), dtype=torch.float64)
    return (log_pi.exp() * (scores - KL_COEF * (log_pi - ref_logprobs()))).sum()


def exact_gradient(policy):
    (gradient,) = torch.autograd.grad(objective(policy), policy.logits)
    return gradient


def exact_values(policy):
    """What each prefix still earns on average: (1 + V,)."""
    with torch.no_grad():
        log_pi = torch.log_softmax(policy.logits, -1)
        log_ref = torch.log_softmax(torch.tensor(LANGUAGE.reference_logits), -1)
        values = torch.zeros(1 + V, dtype=torch.float64)
        for token in (1, 2):
            ends = torch.tensor(score([(token, last) for last in range(V)]), dtype=torch.float64)
            tolls = KL_COEF * (log_pi[1 + token] - log_ref[1])
            values[1 + token] = (log_pi[1 + token].exp() * (ends - tolls)).sum()
        after = torch.tensor([score([(0,)])[0], values[2], values[3]], dtype=torch.float64)
        values[0] = (log_pi[0].exp() * (after - KL_COEF * (log_pi[0] - log_ref[0]))).sum()
    return values


def expected_gradient(agent_class, size, values=None, **config):
    """Of minus the loss, over all batches of `size` responses to one prompt; and the policy it is taken at."""
    policy, engine = PrefixPolicy(), Given()
    if values is not None:
        policy.values.data = values(policy)
    envs = gym.make_vec("textenv/Toy-v0", num_envs=size, kl_coef=KL_COEF, language=LANGUAGE)
    settings = agent_class.config_class(check_start=False, **config)
    agent = agent_class(policy, envs, settings, engine=engine)
    probabilities = response_logprobs(policy).detach().exp()
    total = torch.zeros_like(policy.logits)
    for group in itertools.product(range(len(RESPONSES)), repeat=size):
        engine.responses = [RESPONSES[i] for i in group]
        rollout = agent.rollout()
        policy.zero_grad()
        counts = Counts.of(rollout.response_mask)
        loss = agent._loss(rollout, agent._evaluate(rollout), rollout.logprobs, None, counts, UpdateStats(0.2))
        loss.backward()
        total -= probabilities[list(group)].prod() * policy.logits.grad
    return total, policy


def cosine(one, other):
    return float((one * other).sum() / (one.norm() * other.norm()))


def wrong_values(_policy):
    return torch.tensor([3.0, -2.0, 1.5, 4.0], dtype=torch.float64)


AGENTS = {
    "REINFORCE": (REINFORCE, 2, {}, 1.0),
    "REINFORCE, no baseline": (REINFORCE, 1, {"baseline": "none"}, 1.0),
    "RLOO, 2 a prompt": (RLOO, 2, {"samples_per_prompt": 2}, 1.0),
    "RLOO, 3 a prompt": (RLOO, 3, {"samples_per_prompt": 3}, 1.0),
    "Dr. GRPO, 2 a prompt": (
        GRPO,
        2,
        {"samples_per_prompt": 2, "scale_by": "none", "loss_mode": "seq-mean-token-sum"},
        1 / 2,
    ),
    "Dr. GRPO, 3 a prompt": (
        GRPO,
        3,
        {"samples_per_prompt": 3, "scale_by": "none", "loss_mode": "seq-mean-token-sum"},
        2 / 3,
    ),
    "PPO, lambda 1, any values": (PPO, 1, {**EXACT, "values": wrong_values}, 1.0),
    "PPO, lambda 1/2, exact values": (PPO, 1, {**EXACT, "gae_lambda": 0.5, "values": exact_values}, 1.0),
    "PPO, lambda 1/2, wrong values": (PPO, 1, {**EXACT, "gae_lambda": 0.5, "values": wrong_values}, None),
    "GRPO as published, 3 a prompt": (GRPO, 3, {"samples_per_prompt": 3}, None),
    "GRPO, scaled by its group": (GRPO, 3, {"samples_per_prompt": 3, "loss_mode": "seq-mean-token-sum"}, None),
    "GRPO, unscaled, mean over tokens": (GRPO, 3, {"samples_per_prompt": 3, "scale_by": "none"}, None),
    "REINFORCE, token-mean": (REINFORCE, 2, {"loss_mode": "token-mean"}, None),
}
"""Agent, size of the batch, settings, and the factor of the exact gradient; None: another direction."""


@pytest.fixture(scope="module")
def measured():
    """Length against the exact gradient, and cosine with it, by name."""
    found = {}
    for name, (agent, size, config, _) in AGENTS.items():
        gradient, policy = expected_gradient(agent, size, **config)
        exact = exact_gradient(policy)
        found[name] = gradient, exact, cosine(gradient, exact)
    return found


def test_the_exact_gradient_is_that_of_finite_differences():
    policy, step = PrefixPolicy(), 1e-6
    exact = exact_gradient(policy)
    for place in np.ndindex(1 + V, V):
        sides = []
        for sign in (1, -1):
            moved = PrefixPolicy()
            moved.logits.data[place] += sign * step
            sides.append(objective(moved).item())
        assert float(exact[place]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("name", [name for name, (*_, factor) in AGENTS.items() if factor is not None])
def test_unbiased_agents_follow_the_gradient_of_the_objective(measured, name):
    gradient, exact, _ = measured[name]
    torch.testing.assert_close(gradient, AGENTS[name][3] * exact, atol=1e-6, rtol=1e-5)
    assert exact.abs().max() > 0.05


@pytest.mark.parametrize("name", [name for name, (*_, factor) in AGENTS.items() if factor is None])
def test_biased_agents_follow_another_direction(measured, name):
    assert measured[name][2] < 1 - 1e-5


def test_the_documentation_has_these_numbers(measured):
    rows = re.findall(
        r"^\| ([^|]+?) \| (exact|[\d/]+ of it|biased) \| ([\d.]+) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    words = {None: "biased", 1.0: "exact", 1 / 2: "1/2 of it", 2 / 3: "2/3 of it"}
    expected = [(name, words[AGENTS[name][3]], f"{measured[name][2]:.4f}") for name in AGENTS]
    assert rows == expected


# GRPO's two biases, each alone


def test_a_prompt_of_little_spread_pulls_as_much_as_one_of_much():
    """Returns 0 and 0.01 to one prompt, 0 and 1 to the other: advantages of +-0.71 for both; unscaled, 100 to 1."""
    returns, kept = torch.tensor([0.0, 0.01, 0.0, 1.0], dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    scaled = grpo(returns, kept, 2, "group")
    torch.testing.assert_close(scaled.abs(), torch.full((4,), 0.5**0.5, dtype=torch.float64), atol=1e-5, rtol=0)
    unscaled = grpo(returns, kept, 2, "none")
    assert float(unscaled[3] / unscaled[1]) == pytest.approx(100)


def test_a_long_bad_response_loses_less_per_token_than_a_short_one():
    """The same advantage for one token and for four: a token's share is 1/2, or 1/8 where lengths divide."""
    mask = torch.arange(4) < torch.tensor([1, 4])[:, None]
    shares = {}
    for mode in ("seq-mean-token-mean", "seq-mean-token-sum"):
        logprobs = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
        aggregate(logprobs, mask, mode).backward()
        shares[mode] = logprobs.grad[:, 0].tolist()
    assert shares == {"seq-mean-token-mean": [0.5, 0.125], "seq-mean-token-sum": [0.5, 0.5]}


def test_a_ratio_of_whole_responses_starts_as_the_mean_over_tokens(measured):
    """At ratio 1 GSPO's gradient is that of the published GRPO: sequences share one ratio, tokens share its slope."""
    gradient, _ = expected_gradient(GRPO, 3, samples_per_prompt=3, ratio_level="sequence")
    torch.testing.assert_close(gradient, measured["GRPO as published, 3 a prompt"][0], atol=1e-6, rtol=1e-5)
