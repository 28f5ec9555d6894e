"""Losses by hand: clipping, averaging, estimators, and what stands at masked positions."""

from __future__ import annotations

import math

import pytest
import torch

from textenv.agents.losses import (
    LOSS_MODES,
    Counts,
    aggregate,
    approx_kl,
    clipped_policy_loss,
    clipped_value_loss,
    explained_variance,
    log_ratio,
)

NAN = float("nan")


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def ragged(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def one(value, grad=False):
    return torch.tensor([[value]], dtype=torch.float64, requires_grad=grad)


HERE = torch.ones(1, 1, dtype=torch.bool)

# The clipped policy loss


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.0, 2.0, -2.0, -2.0),  # at the start the gradient is the policy gradient
        (1.0, -2.0, 2.0, 2.0),
        (1.5, 1.0, -1.2, 0.0),  # already far enough up
        (0.5, 1.0, -0.5, -0.5),  # a good token lost probability: bring it back
        (1.5, -1.0, 1.5, 1.5),  # a bad token gained some: push it back
        (0.5, -1.0, 0.8, 0.0),  # already far enough down
        (1.1, 1.0, -1.1, -1.1),
        (0.9, -1.0, 0.9, 0.9),
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, gradient):
    """d ratio / d logprob = ratio, so the gradient of an unclipped token is -A ratio."""
    logprobs = one(-1.0 + math.log(ratio), grad=True)
    value = clipped_policy_loss(logprobs, one(-1.0), one(advantage), HERE, clip_range=0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-9)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-9)


def test_clip_range_is_a_setting():
    assert clipped_policy_loss(one(math.log(1.5)), one(0.0), one(1.0), HERE, 0.4).item() == pytest.approx(-1.4)


BY_SIGN_AND_REGION = [  # ratio, advantage, loss, gradient; range 0.8 to 1.4, dual clip 3
    (0.5, 1.0, -0.5, -0.5),
    (0.9, 1.0, -0.9, -0.9),
    (1.3, 1.0, -1.3, -1.3),  # the lower end's 1.2 does not hold it back
    (1.5, 1.0, -1.4, 0.0),
    (5.0, 2.0, -2.8, 0.0),  # the dual clip has no say over good tokens
    (0.5, -1.0, 0.8, 0.0),
    (0.7, -2.0, 1.6, 0.0),  # the upper end's 0.6 does not let it sink further
    (0.9, -1.0, 0.9, 0.9),
    (1.3, -1.0, 1.3, 1.3),
    (2.0, -1.0, 2.0, 2.0),  # beyond the upper end a bad token is still pushed down
    (2.9, -2.0, 5.8, 5.8),
    (5.0, -1.0, 3.0, 0.0),  # beyond the dual clip no longer
    (5.0, -2.0, 6.0, 0.0),
    (5.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize("ratio, advantage, loss, gradient", BY_SIGN_AND_REGION)
def test_asymmetric_and_dual_clipping_by_hand(ratio, advantage, loss, gradient):
    logprobs = one(-1.0 + math.log(ratio), grad=True)
    value = clipped_policy_loss(logprobs, one(-1.0), one(advantage), HERE, 0.2, 0.4, 3.0)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-9)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-9)


def held(ratio, low=0.8, high=1.4):
    return min(max(ratio, low), high)


WRONG = {
    "ends swapped": lambda r, a: min(max(-a * r, -a * held(r, 0.6, 1.2)), 3 * abs(a) if a < 0 else math.inf),
    "one range for both": lambda r, a: min(max(-a * r, -a * held(r, 0.8, 1.2)), 3 * abs(a) if a < 0 else math.inf),
    "minimum of losses": lambda r, a: min(-a * r, -a * held(r), 3 * abs(a) if a < 0 else math.inf),
    "no dual clip": lambda r, a: max(-a * r, -a * held(r)),
    "dual clip for both signs": lambda r, a: min(max(-a * r, -a * held(r)), -3 * a),
    "dual clip at the range": lambda r, a: -a * held(r),
    "dual clip without the advantage": lambda r, a: min(max(-a * r, -a * held(r)), 3.0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_other_clippings_would_not_pass(wrong):
    assert any(abs(wrong(r, a) - loss) > 0.1 for r, a, loss, _ in BY_SIGN_AND_REGION)


def test_the_defaults_are_the_symmetric_clip_without_a_bound():
    """All advantages and ratios at once, and the bound's own side: a ratio of 1e4 costs 1e4."""
    generator = torch.Generator().manual_seed(3)
    logratio, advantages = 3 * torch.randn(2, 40, 5, generator=generator, dtype=torch.float64)
    mask = torch.ones(40, 5, dtype=torch.bool)
    plain = clipped_policy_loss(logratio, torch.zeros_like(logratio), advantages, mask)
    spelled_out = clipped_policy_loss(logratio, torch.zeros_like(logratio), advantages, mask, 0.2, 0.2, None)
    bounded = clipped_policy_loss(logratio, torch.zeros_like(logratio), advantages, mask, 0.2, None, 2.0)
    assert torch.equal(plain, spelled_out)
    touched = (advantages < 0) & (logratio.exp() > 2)
    assert torch.equal(plain != bounded, touched) and 10 < touched.sum() < 190
    assert clipped_policy_loss(one(math.log(1e4)), one(0.0), one(-1.0), HERE).item() == pytest.approx(1e4)


# The value loss


@pytest.mark.parametrize(
    "value, old, target, clip, loss, gradient",
    [
        (1.5, 1.0, 2.0, None, 0.125, -0.5),  # 0.5 (V - G)^2
        (1.5, 1.0, 2.0, 0.2, 0.32, 0.0),  # moved far enough: 0.5 (1.2 - 2)^2
        (1.5, 1.0, 1.0, 0.2, 0.125, 0.5),  # moved away from the target: no protection
        (1.1, 1.0, 2.0, 0.2, 0.405, -0.9),  # inside the range
        (0.5, 1.0, 0.0, 0.2, 0.32, 0.0),
    ],
)
def test_value_loss_by_hand(value, old, target, clip, loss, gradient):
    values = one(value, grad=True)
    result = clipped_value_loss(values, one(old), one(target), HERE, clip)
    result.sum().backward()
    assert result.item() == pytest.approx(loss, abs=1e-9)
    assert values.grad.item() == pytest.approx(gradient, abs=1e-9)


# Averaging


X, MASK = rows([1, 2, 3], [10, NAN, NAN]), ragged([3, 1], 3)
BY_HAND = {
    "token-mean": (1 + 2 + 3 + 10) / 4,
    "seq-mean-token-mean": ((1 + 2 + 3) / 3 + 10) / 2,
    "seq-mean-token-sum": ((1 + 2 + 3) + 10) / 2,
}


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_aggregate_by_hand(mode):
    assert aggregate(X, MASK, mode).item() == pytest.approx(BY_HAND[mode])


def test_token_mean_is_the_default():
    assert aggregate(X, MASK) == aggregate(X, MASK, "token-mean")


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_responses_without_a_real_token_do_not_count(mode):
    with_empty = aggregate(torch.cat([X, rows([NAN, NAN, NAN])]), ragged([3, 1, 0], 3), mode)
    assert with_empty == aggregate(X, MASK, mode)


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_nothing_real_is_zero(mode):
    x = torch.full((2, 2), NAN, requires_grad=True)
    total = aggregate(x, torch.zeros(2, 2, dtype=torch.bool), mode)
    total.backward()
    assert total.item() == 0 and torch.equal(x.grad, torch.zeros(2, 2))


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_shards_add_up_to_the_whole(mode):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = ragged([5, 1, 2, 5, 3, 1, 4, 0], 5)
    whole = aggregate(x, mask, mode)
    for size in (1, 3, 8):
        shards = [aggregate(x[i : i + size], mask[i : i + size], mode, Counts.of(mask)) for i in range(0, len(x), size)]
        assert sum(shards).item() == pytest.approx(whole.item(), abs=1e-12)


def test_means_of_shards_with_their_own_denominators_are_another_number():
    """The mistake that `counts` is there for: short responses in short shards would weigh more."""
    whole = aggregate(X, MASK, "token-mean")
    means = [aggregate(X[i : i + 1], MASK[i : i + 1], "token-mean") for i in range(2)]
    assert sum(means) / 2 != whole


def test_counts():
    assert Counts.of(ragged([3, 0, 1], 3)) == (4.0, 2.0)


def test_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match=r"should be one of \('token-mean', .* got 'mean'"):
        aggregate(X, MASK, "mean")


# Estimators


def test_approx_kl_is_the_exact_kl_in_expectation():
    generator = torch.Generator().manual_seed(1)
    old, new = torch.log_softmax(torch.randn(2, 7, generator=generator, dtype=torch.float64) * 2, -1)
    probabilities = old.exp()
    exact = torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum")  # KL(old || new)
    expected = (probabilities * approx_kl((new - old)[None])[0]).sum()
    assert expected.item() == pytest.approx(exact.item(), abs=1e-12) and exact > 0.5
    other_way = (new.exp() * approx_kl((new - old)[None])[0]).sum()
    assert abs(other_way - exact) > 0.1


def test_approx_kl_is_never_negative_and_keeps_small_digits():
    logratio = torch.linspace(-6, 6, 2001)[None]
    assert (approx_kl(logratio) >= 0).all()
    # x^2 / 2 + x^3 / 6 + ...; exp(x) - 1 - x in float32 would be off by a tenth.
    assert approx_kl(torch.tensor([[1e-3]])).item() == pytest.approx(5.0017e-7, rel=1e-3)


@pytest.mark.parametrize(
    "values, expected",
    [
        ((0, 2, 4), 1.0),
        ((5, 7, 9), 1.0),  # an offset explains all variance
        ((2, 2, 2), 0.0),
        ((1, 2, 3), 0.75),  # residuals -1, 0, 1: variance 2/3 of 8/3
        ((4, 2, 0), -3.0),
    ],
)
def test_explained_variance_by_hand(values, expected):
    assert explained_variance(rows([*values, NAN]), rows([0, 2, 4, NAN]), ragged([3], 4)) == pytest.approx(expected)


@pytest.mark.parametrize("lengths", [[3], [1], [0]])
def test_explained_variance_without_variance_is_nan(lengths):
    assert math.isnan(explained_variance(rows([1, 2, 3]), rows([5, 5, 5]), ragged(lengths, 3)))


def test_log_ratio_is_zero_at_masked_positions():
    result = log_ratio(rows([-1, NAN]), rows([-3, NAN]), ragged([1], 2))
    assert result.tolist() == [[2, 0]]


# Masked positions


def losses(logprobs, old_logprobs, advantages, values, old_values, returns, mask, mode):
    """Everything that training adds up."""
    policy = aggregate(clipped_policy_loss(logprobs, old_logprobs, advantages, mask, 0.2, 0.3, 1.5), mask, mode)
    value = aggregate(clipped_value_loss(values, old_values, returns, mask, 0.2), mask, mode)
    kl = aggregate(approx_kl(log_ratio(logprobs, old_logprobs, mask)), mask, mode)
    return policy, value, kl


@pytest.mark.parametrize("mode", LOSS_MODES)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), -1e30])
def test_masked_values_move_no_loss_and_no_gradient_by_a_bit(mode, garbage):
    generator = torch.Generator().manual_seed(2)
    arrays = torch.randn(6, 4, 5, generator=generator)
    mask = ragged([1, 5, 3, 2], 5)
    results = []
    for fill in (0.0, garbage):
        inputs = [torch.where(mask, x, torch.tensor(fill)).requires_grad_() for x in arrays]
        values = losses(*inputs, mask, mode)
        gradients = torch.autograd.grad(sum(values), inputs)
        results.append((*values, *gradients))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and torch.isfinite(dirty).all()
