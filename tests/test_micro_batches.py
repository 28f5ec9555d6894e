"""Rows go through a policy in blocks of like length, within a budget of tokens."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from textenv.agents.micro_batches import by_length, micro_batches, token_budget


def mask_of(lengths, width=12):
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


def blocks(lengths, budget, index=None):
    index = torch.arange(len(lengths)) if index is None else torch.tensor(index)
    return [block.tolist() for block in micro_batches(mask_of(lengths), index, budget)]


@pytest.mark.parametrize(
    "budget, expected",
    [
        (None, [[1, 3, 0, 2]]),
        (100, [[1, 3, 0, 2]]),
        (18, [[1, 3, 0], [2]]),  # 3 rows of 6 at most; a fourth of 9 would make 36
        (17, [[1, 3], [0], [2]]),
        (8, [[1, 3], [0], [2]]),  # the row of 9 is longer than the budget and goes alone
        (1, [[1], [3], [0], [2]]),
    ],
)
def test_blocks_by_hand(budget, expected):
    assert blocks([6, 2, 9, 4], budget) == expected


def test_only_the_rows_asked_for():
    assert blocks([6, 2, 9, 4], 12, index=[2, 3, 1]) == [[1, 3], [2]]
    assert blocks([6, 2], 12, index=[]) == []


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 60))
def test_every_row_once_within_the_budget_and_no_block_too_small(lengths, budget):
    found = blocks(lengths, budget)
    assert sorted(row for block in found for row in block) == list(range(len(lengths)))
    for block in found:
        assert len(block) == 1 or len(block) * max(lengths[row] for row in block) <= budget
    for block, following in itertools.pairwise(found):
        assert (len(block) + 1) * lengths[following[0]] > budget  # one more would not have fitted
        assert max(lengths[row] for row in block) <= min(lengths[row] for row in following)


def test_rows_of_equal_length_keep_their_order():
    assert by_length(mask_of([3, 1, 3, 1]), torch.tensor([2, 3, 0, 1])).tolist() == [3, 1, 2, 0]


def test_the_budget_asked_for_comes_before_the_policys():
    class Policy:
        tokens_per_pass = 7

    assert (token_budget(Policy(), 3), token_budget(Policy(), None), token_budget(object(), None)) == (3, 7, None)
