"""The token process as pure functions: where tokens go, what ends a response, and that nothing is edited in place."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers import assert_same, random_responses
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv.mdp import (
    TokenMDP,
    TokenState,
    initial_state,
    is_terminated,
    is_truncated,
    replace_rows,
    responses,
    transition,
)

MDP = TokenMDP(vocab_size=10, stop_ids=(7, 9), max_prompt_tokens=3, max_response_tokens=2, pad_id=7)


def frozen(state: TokenState) -> TokenState:
    """The state with arrays that raise when they are written to."""
    for array in state:
        array.setflags(write=False)
    return state


class TestByHand:
    def test_prompts_end_where_responses_begin(self):
        state = initial_state(MDP, [[4], [1, 2, 3]])
        assert state.input_ids.tolist() == [[7, 7, 4, 7, 7], [1, 2, 3, 7, 7]]
        assert state.attention_mask.tolist() == [[0, 0, 1, 0, 0], [1, 1, 1, 0, 0]]
        assert state.response_lengths.tolist() == [0, 0]
        assert (state.input_ids.dtype, state.attention_mask.dtype) == (np.int32, np.int8)

    def test_two_tokens(self):
        state = transition(MDP, initial_state(MDP, [[4], [1, 2, 3]]), np.array([5, 6]))
        state = transition(MDP, state, np.array([7, 8]))
        assert state.input_ids.tolist() == [[7, 7, 4, 5, 7], [1, 2, 3, 6, 8]]
        assert state.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]  # the 7 chosen is no padding
        assert [ids.tolist() for ids in responses(MDP, state, [1, 0])] == [[6, 8], [5, 7]]

    def test_rows_that_stand_still(self):
        state = initial_state(MDP, [[4], [5], [6]])
        moved = transition(MDP, state, np.array([1, 2, 3]), rows=np.array([2]))
        assert moved.response_lengths.tolist() == [0, 0, 1]
        assert moved.input_ids[:, 3].tolist() == [7, 7, 3]

    @pytest.mark.parametrize(
        ("lengths", "actions", "terminated", "truncated"),
        [
            ([1, 1, 1], [7, 9, 8], [True, True, False], [False, False, False]),
            ([2, 2, 2], [7, 9, 8], [True, True, False], [False, False, True]),  # a stop at the budget is a stop
        ],
    )
    def test_stop_ids_terminate_and_the_budget_truncates(self, lengths, actions, terminated, truncated):
        state = TokenState(np.zeros((3, 5), np.int32), np.zeros((3, 5), np.int8), np.array(lengths))
        stopped = is_terminated(MDP, np.array(actions))
        assert stopped.tolist() == terminated
        assert is_truncated(MDP, state, stopped).tolist() == truncated

    def test_the_pad_id_ends_nothing_unless_it_is_a_stop_id(self):
        mdp = TokenMDP(vocab_size=10, stop_ids=(9,), max_prompt_tokens=1, max_response_tokens=2, pad_id=7)
        assert is_terminated(mdp, np.array([7, 9])).tolist() == [False, True]

    def test_no_stop_ids_leave_the_budget_to_end(self):
        mdp = TokenMDP(vocab_size=3, stop_ids=(), max_prompt_tokens=1, max_response_tokens=1)
        assert not is_terminated(mdp, np.arange(3)).any()

    def test_replaced_rows(self):
        state = replace_rows(initial_state(MDP, [[1], [2], [3]]), np.array([0, 2]), initial_state(MDP, [[4, 5], [6]]))
        assert state.input_ids.tolist() == [[7, 4, 5, 7, 7], [7, 7, 2, 7, 7], [7, 7, 6, 7, 7]]


def test_no_function_edits_the_state_it_was_given():
    state = frozen(initial_state(MDP, [[1], [2]]))
    transition(MDP, state, np.array([3, 4]))
    transition(MDP, state, np.array([3, 4]), rows=np.array([1]))
    replace_rows(state, np.array([0]), frozen(initial_state(MDP, [[5]])))
    (ids,) = responses(MDP, frozen(transition(MDP, state, np.array([3, 4]))), [0])
    ids[:] = 0  # a copy: this does not raise


@given(seed=st.integers(0, 10**6), prompt_lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None, database=None)
def test_response_token_t_is_in_column_p_plus_t(seed: int, prompt_lengths: list[int]):
    rng = np.random.default_rng(seed)
    mdp = TokenMDP(vocab_size=12, stop_ids=(0,), max_prompt_tokens=4, max_response_tokens=5, pad_id=0)
    prompts = [rng.integers(0, 12, length).tolist() for length in prompt_lengths]
    state = initial_state(mdp, prompts)
    texts = random_responses(rng, len(prompts))
    for t in range(5):
        rows = np.array([row for row, text in enumerate(texts) if t < len(text)], dtype=np.int64)
        actions = np.array([text[t] if t < len(text) else 0 for text in texts])
        state = transition(mdp, state, actions, rows)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        real = state.attention_mask[row] == 1
        assert real.tolist() == [False] * (4 - len(prompt)) + [True] * (len(prompt) + len(text)) + [False] * (
            5 - len(text)
        )
        assert state.input_ids[row, real].tolist() == prompt + text
        assert state.input_ids[row, 4 : 4 + len(text)].tolist() == text
        assert (state.input_ids[row, ~real] == mdp.pad_id).all()
    assert [ids.tolist() for ids in responses(mdp, state, range(len(prompts)))] == texts


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda mdp: pickle.loads(pickle.dumps(mdp))])
def test_copies_are_equal(duplicate):
    MDP.is_stop.sum()  # a cached table is no part of the contents
    twin = duplicate(MDP)
    assert twin == MDP
    assert_same(twin.is_stop, MDP.is_stop)
