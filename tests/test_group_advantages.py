"""Advantages relative to other responses: by hand, against brute force, and what must not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv.agents.advantages import SCALE_BY, grpo, leave_one_out, returns_to_go, rloo
from textenv.agents.losses import response_means


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


ALL = torch.ones(3, dtype=torch.bool)


def test_rloo_by_hand():
    torch.testing.assert_close(rloo(row(1, 2, 6), ALL, 3), row(-3, -1.5, 4.5))


@pytest.mark.parametrize(
    ("scale_by", "std"), [("group", math.sqrt(7)), ("batch", math.sqrt((14 + 14 * 4) / 5)), ("none", 1.0)]
)
def test_grpo_by_hand(scale_by, std):
    """Groups (1, 2, 6) and twice that: means 3 and 6, squares 14 and 56."""
    returns = row(1, 2, 6, 2, 4, 12)
    expected = row(-2, -1, 3, -4, -2, 6) / std
    if scale_by == "group":
        expected[3:] /= 2
    torch.testing.assert_close(grpo(returns, torch.ones(6, dtype=torch.bool), 3, scale_by), expected, atol=1e-7, rtol=0)


@settings(max_examples=50, deadline=None)
@given(
    returns=st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8),
    kept=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_groups_are_what_a_loop_over_them_gives(returns, kept):
    returns, kept = row(*returns), torch.tensor(kept)
    ours, centred = rloo(returns, kept, 4), grpo(returns, kept, 4, "none")
    for i in range(8):
        group = [j for j in range(i // 4 * 4, i // 4 * 4 + 4) if kept[j]]
        others = [float(returns[j]) for j in group if j != i]
        alone = not kept[i] or not others
        expected = 0.0 if alone else float(returns[i]) - sum(others) / len(others)
        assert float(ours[i]) == pytest.approx(expected, abs=1e-9)
        assert float(centred[i]) == pytest.approx(expected * (0 if alone else len(others) / len(group)), abs=1e-9)


@pytest.mark.parametrize("scale_by", SCALE_BY)
def test_dropped_samples_take_part_in_nothing(scale_by):
    kept = torch.tensor([True, False, True, True])
    clean = grpo(row(1, 2, 6), ALL, 3, scale_by)
    torch.testing.assert_close(grpo(row(1, math.nan, 2, 6), kept, 4, scale_by), row(*clean[:1], 0, *clean[1:]))
    torch.testing.assert_close(rloo(row(1, math.inf, 2, 6), kept, 4), row(-3, 0, -1.5, 4.5))


@pytest.mark.parametrize("scale_by", SCALE_BY)
@pytest.mark.parametrize("size", [1, 3])
def test_equal_returns_and_lone_responses_teach_nothing(scale_by, size):
    """0.1 + 0.2 is not 0.3 in floating point: rounding must not be blown up to advantages of size 1."""
    returns = torch.tensor([0.1 + 0.2, 0.3, 0.3] if size == 3 else [0.4], dtype=torch.float32)
    kept = torch.ones(size, dtype=torch.bool)
    assert float(grpo(returns, kept, size, scale_by).abs().max()) <= 1e-6
    assert float(rloo(returns, kept, size).abs().max()) <= 1e-6


def test_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"scale_by.*'group', 'batch', 'none'.*'prompt'"):
        grpo(row(1, 2, 6), ALL, 3, "prompt")


def test_returns_to_go_are_digits_under_a_discount_of_a_tenth():
    rewards = row(1, 2, 3)[None]
    torch.testing.assert_close(returns_to_go(rewards, ALL[None], 0.1), row(1.23, 2.3, 3)[None])


def test_leave_one_out_by_hand():
    """Position 0: 6, 2, 1. Position 1: 5 and 1 alone. Position 2: 3 alone, which keeps its return."""
    returns = torch.tensor([[6.0, 5, 3], [2, 1, math.nan], [1, math.nan, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    expected = torch.tensor([[4.5, 4, 3], [-1.5, -4, 0], [-3, 0, 0]])
    torch.testing.assert_close(leave_one_out(returns, mask), expected)


def test_response_means_ignore_what_is_no_token():
    x = torch.tensor([[1.0, 3.0, math.nan], [4.0, math.inf, math.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    torch.testing.assert_close(response_means(x, mask), torch.tensor([[2.0, 2.0, 0.0], [4.0, 0.0, 0.0]]))
