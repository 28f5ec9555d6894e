"""Advantages by hand: worked examples, closed forms, and what stands at masked positions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv.agents.advantages import gae, whiten


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def everything(x):
    return torch.ones_like(x, dtype=torch.bool)


def ragged(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def close(x, expected, tolerance=1e-9):
    torch.testing.assert_close(x, rows(*expected), atol=tolerance, rtol=0)


# Worked examples


def test_worked_example_with_lambda():
    rewards = rows([-0.03, -0.01, 0.1, 1.2])
    advantages, returns = gae(rewards, rows([0.5, 0.6, 0.9, 1.1]), everything(rewards), gamma=1.0, gae_lambda=0.95)
    close(advantages, [[0.702, 0.665, 0.395, 0.10]], 5e-4)  # the digits as printed
    close(returns, [[1.202, 1.265, 1.295, 1.2]], 5e-4)


def test_worked_example_from_probabilities():
    """Policy (.50 .45 .60 .85), reference (.50 .30 .55 .50), coefficient 0.2, score 2, lambda 1."""
    tolls = [0.2 * math.log(p / q) for p, q in zip((0.50, 0.45, 0.60, 0.85), (0.50, 0.30, 0.55, 0.50), strict=True)]
    rewards = rows([-toll for toll in tolls]) + rows([0, 0, 0, 2])
    close(rewards, [[0.00, -0.08, -0.02, 1.89]], 5e-3)
    advantages, returns = gae(rewards, rows([1.50, 1.60, 1.85, 1.95]), everything(rewards), gae_lambda=1.0)
    close(returns, [[1.80, 1.80, 1.88, 1.89]], 5e-3)
    close(advantages, [[0.30, 0.20, 0.03, -0.06]], 5e-3)


def test_discount_of_a_tenth_writes_rewards_as_digits():
    rewards = rows([1, 2, 3])
    advantages, returns = gae(rewards, torch.zeros_like(rewards), everything(rewards), gamma=0.1, gae_lambda=1.0)
    close(returns, [[1.23, 2.3, 3]])
    close(advantages, [[1.23, 2.3, 3]])


def test_lambda_is_a_discount_of_surprises():
    """Digits again: with values of 0 and gamma 1 each step's surprise is its reward."""
    rewards = rows([1, 2, 3])
    advantages, _ = gae(rewards, torch.zeros_like(rewards), everything(rewards), gamma=1.0, gae_lambda=0.1)
    close(advantages, [[1.23, 2.3, 3]])


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_constant_values_leave_one_surprise(gae_lambda):
    """V = c everywhere and a reward R at the end: A_t = (R - c) lambda^(tokens after t)."""
    rewards = rows([0, 0, 0, 0, 3.0])
    advantages, _ = gae(rewards, torch.full_like(rewards, 1.25), everything(rewards), gae_lambda=gae_lambda)
    close(advantages, [[1.75 * gae_lambda**after for after in (4, 3, 2, 1, 0)]])


batches = st.integers(1, 6).flatmap(
    lambda width: st.tuples(st.just(width), st.lists(st.integers(1, width), min_size=1, max_size=5), st.integers(0, 99))
)


@settings(max_examples=50, deadline=None)
@given(batches, st.floats(0, 1))
def test_lambda_one_is_monte_carlo_and_zero_is_one_step(batch, gamma):
    width, lengths, seed = batch
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, len(lengths), width))
    mask = ragged(lengths, width)
    inputs = (torch.as_tensor(rewards), torch.as_tensor(values), mask, gamma)
    advantages, returns = (x.numpy() for x in gae(*inputs, 1.0))
    one_step, targets = (x.numpy() for x in gae(*inputs, 0.0))
    for row, length in enumerate(lengths):
        discounted = [np.sum(rewards[row, t:length] * gamma ** np.arange(length - t)) for t in range(length)]
        np.testing.assert_allclose(returns[row, :length], discounted, atol=1e-9)
        np.testing.assert_allclose(advantages[row, :length], discounted - values[row, :length], atol=1e-9)
        ahead = np.append(values[row, 1:length], 0.0)
        np.testing.assert_allclose(targets[row, :length], rewards[row, :length] + gamma * ahead, atol=1e-9)
        np.testing.assert_allclose(one_step[row, :length], targets[row, :length] - values[row, :length], atol=1e-9)


# Ends and masks


def test_nothing_is_bootstrapped_beyond_the_last_token():
    """A stop at the second token, and the budget at the third: the last advantage is reward - value in both."""
    rewards, values = rows([0, 1, 9], [0, 0, 1]), rows([0.5, 0.25, 7], [0.5, 0.5, 0.25])
    mask = ragged([2, 3], 3)
    advantages, returns = gae(rewards, values, mask, gae_lambda=1.0)
    close(advantages, [[0.5, 0.75, 0], [0.5, 0.5, 0.75]])
    close(returns, [[1, 1, 0], [1, 1, 1]])
    bootstrapped, _ = gae(rewards, values, everything(mask), gae_lambda=1.0)  # had column 3 been taken for a state
    assert bootstrapped[0, 1] != advantages[0, 1]


def test_a_row_alone_equals_the_row_in_a_wider_batch():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=generator)
    mask = ragged([1, 4, 6], 6)
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    for row, length in enumerate([1, 4, 6]):
        alone = gae(
            rewards[row : row + 1, :length], values[row : row + 1, :length], mask[row : row + 1, :length], 0.9, 0.8
        )
        assert torch.equal(alone[0][0], advantages[row, :length]) and torch.equal(alone[1][0], returns[row, :length])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_masked_values_move_nothing_by_a_bit(garbage):
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 4, 5, generator=generator)
    mask = ragged([1, 3, 5, 2], 5)

    def poisoned(x):
        return torch.where(mask, x, torch.tensor(garbage))

    clean = (*gae(rewards, values, mask), whiten(rewards, mask))
    dirty = (*gae(poisoned(rewards), poisoned(values), mask), whiten(poisoned(rewards), mask))
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)
        assert (other[~mask] == 0).all()


def test_every_real_token_has_an_advantage_and_no_other():
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 6, 7, generator=generator)
    mask = ragged([1, 2, 3, 5, 7, 7], 7)
    advantages, _ = gae(rewards, values, mask)
    assert (advantages != 0).sum() == mask.sum()
    assert (whiten(advantages, mask) != 0).sum() == mask.sum()


def test_inputs_are_left_alone():
    rewards, values = rows([1, 2, 3]), rows([4, 5, 6])
    gae(rewards, values, ragged([2], 3))
    whiten(rewards, ragged([2], 3))
    assert rewards.tolist() == [[1, 2, 3]] and values.tolist() == [[4, 5, 6]]


# Whitening


def test_whitening_by_hand():
    """(1, 3) has mean 2 and population standard deviation 1; the sample's, sqrt(2), would give 0.71."""
    close(whiten(rows([1, 77], [3, 77]), ragged([1, 1], 2)), [[-1, 0], [1, 0]], 1e-6)


def test_whitening_takes_the_batch_together_and_centres():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 8, generator=generator, dtype=torch.float64) * 3 + 2.9
    mask = ragged([1, 8, 3, 8, 5], 8)
    white = whiten(x, mask)[mask]
    assert white.mean().abs() < 1e-9 and (white.square().mean() - 1).abs() < 1e-6
    uncentred = white + x[mask].mean()  # what a known library returns
    assert uncentred.mean() > 2
    padded = (x * mask - (x * mask).mean()) / (x * mask).std()  # padding counted as zeros
    assert padded[mask].mean().abs() > 0.1


@pytest.mark.parametrize("scale, shift", [(100.0, 0.0), (1.0, 50.0), (0.01, -3.0)])
def test_whitening_forgets_scale_and_shift(scale, shift):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = ragged([6, 2, 3, 1], 6)
    torch.testing.assert_close(whiten(x * scale + shift, mask), whiten(x, mask), atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
@pytest.mark.parametrize("lengths", [[3, 1, 2], [1]])
def test_equal_entries_become_zero(value, lengths):
    mask = ragged(lengths, 3)
    x = torch.full(mask.shape, value)
    assert torch.equal(whiten(x, mask), torch.zeros_like(x))


def test_no_token_at_all():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    nan = torch.full((2, 3), float("nan"))
    assert torch.equal(whiten(nan, mask), torch.zeros(2, 3))
    assert all(torch.equal(x, torch.zeros(2, 3)) for x in gae(nan, nan, mask))
