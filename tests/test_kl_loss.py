"""The KL in the loss: values by hand, and gradients against the exact objective, enumerated on small vocabularies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from textenv.agents.kl_loss import KL_LOSS_ESTIMATORS, kl_loss

NAN = float("nan")
V = 4


def kl(log_p, log_q):
    """KL(p || q) of distributions along the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def random_logits(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradient(objective, logits):
    logits = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(objective(logits), logits)
    return grad


def by_differences(objective, logits, step=1e-5):
    """The same without autograd: central differences, entry by entry."""
    result = torch.zeros_like(logits)
    for at in np.ndindex(*logits.shape):
        shift = torch.zeros_like(logits)
        shift[at] = step
        result[at] = (objective(logits + shift) - objective(logits - shift)) / (2 * step)
    return result


def close(one, other, atol=1e-8):
    return torch.allclose(one, other, atol=atol, rtol=0)


# By hand


@pytest.mark.parametrize(
    "estimator, ratio, value, slope",
    [
        ("k1", 2.0, math.log(2), 1.0),
        ("k2", 2.0, 0.5 * math.log(2) ** 2, math.log(2)),
        ("k3", 2.0, 0.5 - 1 + math.log(2), 0.5),
        ("k1", 0.25, -math.log(4), 1.0),  # negative on a token that lost probability
        ("k2", 0.25, 0.5 * math.log(4) ** 2, -math.log(4)),
        ("k3", 0.25, 4 - 1 - math.log(4), -3.0),
        ("k2", 1.0, 0.0, 0.0),
        ("k3", 1.0, 0.0, 0.0),
    ],
)
def test_estimators_by_hand(estimator, ratio, value, slope):
    logprobs = torch.tensor([[-2.0 + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.tensor([[-2.0]], dtype=torch.float64)
    loss = kl_loss(logprobs, ref_logprobs, torch.ones(1, 1, dtype=torch.bool), estimator)
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, abs=1e-12)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)


def test_k2_is_the_default():
    logprobs, mask = random_logits(2, 3), torch.ones(2, 3, dtype=torch.bool)
    ref = random_logits(2, 3, seed=1)
    assert torch.equal(kl_loss(logprobs, ref, mask), kl_loss(logprobs, ref, mask, "k2"))


def test_unknown_estimators_name_the_known_ones():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"should be one of \('k1', 'k2', 'k3'\), got 'abs'"):
        kl_loss(x, x, torch.ones(1, 1, dtype=torch.bool), "abs")


@pytest.mark.parametrize("estimator", KL_LOSS_ESTIMATORS)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e30])
def test_masked_values_move_neither_loss_nor_gradient_by_a_bit(estimator, garbage):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    results = []
    for fill in (0.0, garbage):
        inputs = [torch.where(mask, random_logits(2, 3, seed=s), fill).requires_grad_() for s in (0, 1)]
        loss = kl_loss(*inputs, mask, estimator)
        results.append((loss, *torch.autograd.grad(loss.sum(), inputs)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and not dirty[~mask].any()


# One token: the expected gradient of each, by enumeration


def expected_gradient(estimator, logits, ref, sampled_from=None, weighted=False):
    """sum_y p(y) grad loss(y), with p the policy itself or an older one, held constant."""

    def objective(x):
        log_pi = torch.log_softmax(x, -1)
        p = torch.log_softmax(logits if sampled_from is None else sampled_from, -1)
        losses = kl_loss(log_pi[:, None], ref[:, None], torch.ones(V, 1, dtype=torch.bool), estimator)[:, 0]
        if weighted:
            losses = losses * (log_pi.detach() - p).exp()
        return (p.exp() * losses).sum()

    return gradient(objective, logits)


@pytest.fixture
def token():
    """Logits of a policy, and the log-probabilities of a reference well away from it."""
    logits, ref = 1.5 * random_logits(V), torch.log_softmax(1.5 * random_logits(V, seed=1), -1)
    return logits, ref


def forward_kl(ref):
    return lambda x: kl(torch.log_softmax(x, -1), ref)


def reverse_kl(ref):
    return lambda x: kl(ref, torch.log_softmax(x, -1))


def test_k2_in_the_loss_has_the_exact_gradient(token):
    logits, ref = token
    exact = by_differences(forward_kl(ref), logits)
    assert exact.abs().max() > 0.1
    assert close(expected_gradient("k2", logits, ref), exact)


def test_k1_in_the_loss_has_none(token):
    logits, ref = token
    assert close(expected_gradient("k1", logits, ref), torch.zeros(V, dtype=torch.float64))


def test_k3_in_the_loss_has_that_of_the_other_kl(token):
    logits, ref = token
    found = expected_gradient("k3", logits, ref)
    assert close(found, by_differences(reverse_kl(ref), logits))
    assert not close(found, by_differences(forward_kl(ref), logits), atol=0.1)


def test_k1_in_the_reward_has_the_exact_gradient(token):
    """As a constant that multiplies grad log pi, the place where KLPenalty puts it."""
    logits, ref = token

    def objective(x):
        log_pi = torch.log_softmax(x, -1)
        u = (log_pi - ref).detach()
        return (log_pi.exp().detach() * u * log_pi).sum()

    assert close(gradient(objective, logits), by_differences(forward_kl(ref), logits))


def test_values_of_k1_and_k3_are_unbiased_that_of_k2_is_not(token):
    logits, ref = token
    log_pi = torch.log_softmax(logits, -1)
    mask = torch.ones(V, 1, dtype=torch.bool)
    means = {
        e: (log_pi.exp() * kl_loss(log_pi[:, None], ref[:, None], mask, e)[:, 0]).sum() for e in KL_LOSS_ESTIMATORS
    }
    exact = kl(log_pi, ref)
    assert means["k1"].item() == pytest.approx(exact.item()) == means["k3"].item()
    assert abs(means["k2"] - exact) > 0.05


def test_samples_of_an_older_policy_need_their_ratio(token):
    logits, ref = token
    older = logits + 0.5 * random_logits(V, seed=2)
    exact = by_differences(forward_kl(ref), logits)
    assert not close(expected_gradient("k2", logits, ref, older), exact, atol=0.01)
    assert close(expected_gradient("k2", logits, ref, older, weighted=True), exact)


# Two tokens: what a loss per token leaves out


class TwoTokens:
    """Policies over responses of two tokens: logits (1 + V, V), of the first and of the second after each first."""

    def __init__(self):
        self.logits = random_logits(1 + V, V)
        self.ref = torch.log_softmax(1.5 * random_logits(1 + V, V, seed=1), -1)
        self.scores = random_logits(V, V, seed=2)

    @staticmethod
    def parts(logits):
        """log pi of the first token (V, 1) and of the second (V, V) of every response."""
        log_pi = torch.log_softmax(logits, -1)
        return log_pi[0][:, None], log_pi[1:]

    def probabilities(self, logits):
        return sum(self.parts(logits)).exp().detach()

    def exact_kl(self, logits):
        """KL of whole responses, over the list of all of them."""
        joint, ref = sum(self.parts(logits)), self.ref[0][:, None] + self.ref[1:]
        return (joint.exp() * (joint - ref)).sum()

    def k2_in_the_loss(self, logits):
        """Each response's own loss, summed over its two tokens, weighted by its probability."""
        first, second = (part.expand(V, V).reshape(-1) for part in self.parts(logits))
        refs = [part.expand(V, V).reshape(-1) for part in (self.ref[0][:, None], self.ref[1:])]
        mask = torch.ones(V * V, 2, dtype=torch.bool)
        losses = kl_loss(torch.stack([first, second], 1), torch.stack(refs, 1), mask, "k2")
        return (self.probabilities(logits).reshape(-1) * losses.sum(-1)).sum()

    def k1_in_the_reward(self, logits):
        """Policy gradient on the tolls from each token on."""
        first, second = self.parts(logits)
        tolls = [(first - self.ref[0][:, None]).detach(), (second - self.ref[1:]).detach()]
        surrogate = first * (tolls[0] + tolls[1]) + second * tolls[1]
        return (self.probabilities(logits) * surrogate).sum()

    def prefixes_held(self, logits):
        """KL of each token's distribution, averaged over prefixes whose distribution is held constant."""
        log_pi = torch.log_softmax(logits, -1)
        return kl(log_pi[0], self.ref[0]) + (log_pi[0].exp().detach() * kl(log_pi[1:], self.ref[1:])).sum()

    def score_gradient(self, logits):
        """A surrogate whose gradient is that of -E[score]."""
        return -(self.probabilities(logits) * sum(self.parts(logits)) * self.scores).sum()


@pytest.fixture
def two():
    return TwoTokens()


def test_k1_in_the_reward_is_exact_over_two_tokens(two):
    assert close(gradient(two.k1_in_the_reward, two.logits), by_differences(two.exact_kl, two.logits))


def test_k2_in_the_loss_holds_the_prefixes_fixed(two):
    found, exact = gradient(two.k2_in_the_loss, two.logits), by_differences(two.exact_kl, two.logits)
    assert close(found, gradient(two.prefixes_held, two.logits))
    assert not close(found, exact, atol=0.05)
    assert close(found[1:], exact[1:])  # the last token has no later one
    # What is left out is how the first token's choice moves the KL of the second.
    later = kl(torch.log_softmax(two.logits, -1)[1:], two.ref[1:]).detach()
    assert close(exact[0] - found[0], gradient(lambda x: (torch.softmax(x[0], -1) * later).sum(), two.logits)[0])


def test_where_no_choice_changes_the_kl_to_come_nothing_is_left_out(two):
    two.logits[1:], two.ref[1:] = two.logits[1].clone(), two.ref[1].clone()  # the second token knows no first
    assert close(gradient(two.k2_in_the_loss, two.logits), by_differences(two.exact_kl, two.logits))


@pytest.mark.parametrize("coefficient", [0.3, 1.0])
def test_where_each_of_the_two_settles(two, coefficient):
    """KL in the loss: the tilt by the expected score alone. KL in the reward: the tilt by the soft value."""

    def tilted(soft):
        second = torch.log_softmax(two.ref[1:] + two.scores / coefficient, -1)
        q = (second.exp() * two.scores).sum(-1)
        if soft:
            q = coefficient * torch.logsumexp(two.ref[1:] + two.scores / coefficient, -1)
        return torch.cat([torch.log_softmax(two.ref[0] + q / coefficient, -1)[None], second])

    zero = torch.zeros(1 + V, V, dtype=torch.float64)
    for soft, term, other in (
        (False, two.k2_in_the_loss, two.k1_in_the_reward),
        (True, two.k1_in_the_reward, two.k2_in_the_loss),
    ):
        score = gradient(two.score_gradient, tilted(soft))
        assert close(score + coefficient * gradient(term, tilted(soft)), zero)
        assert not close(score + coefficient * gradient(other, tilted(soft)), zero, atol=1e-3)
