"""Toy languages: scores, the text of an episode, the reference, and what the constructor refuses."""

from __future__ import annotations

import copy
import doctest
import itertools
import pickle
import re
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textenv import oracle_evaluation, oracle_listing, oracle_optimum, toy, toy_reference, toy_text
from textenv.toy import ToyLanguage, ToyReference, ToyTokenizer, standard_toy

FORBIDDEN = -np.inf


def has_double_three(responses):
    """Score 1 where token 3 stands twice in a row: no sum over tokens can say that."""
    return [float((3, 3) in itertools.pairwise(y)) for y in responses]


def small(**changes) -> ToyLanguage:
    """Two tokens, two positions; the reference stops with probability 1/4, then 1/2."""
    arguments = {
        "reference_logits": np.log([[0.25, 0.75], [0.5, 0.5]]),
        "stop_id": 0,
        "token_scores": np.array([0.0, 1.0]),
    }
    return ToyLanguage(**(arguments | changes))


@pytest.mark.parametrize("module", [toy, toy_reference, toy_text, oracle_listing, oracle_optimum, oracle_evaluation])
def test_docstring_examples_run(module: ModuleType):
    assert doctest.testmod(module).failed == 0


class TestScore:
    @pytest.mark.parametrize(
        ("response", "score"),
        [
            ((3,) * 8, 3.0),  # 8 * 0.5 - 1 for never stopping
            ((3,) * 7 + (0,), 3.5),  # stopping with the last token is stopping
            ((0,), 0.0),
            ((5, 3, 5, 0), -0.5),
            ((1, 2, 4, 1, 2, 4, 1, 2), -1.0),
        ],
    )
    def test_standard_toy(self, response: tuple[int, ...], score: float):
        assert standard_toy().score([response]).tolist() == [score]

    def test_a_score_per_position(self):
        language = small(token_scores=np.array([[1.0, 10.0], [100.0, 1000.0]]), unfinished_score=0.5)
        assert language.score([(0,), (1, 0), (1, 1)]).tolist() == [1.0, 110.0, 1010.5]

    def test_any_function_sees_the_stop_token(self):
        seen = []

        def record(responses):
            seen.extend(responses)
            return np.zeros(len(responses))

        language = small(token_scores=None, score_fn=record)
        assert language.score([[1, 0], np.array([1, 1])]).dtype == np.float64
        assert seen == [(1, 0), (1, 1)]
        assert type(seen[1][0]) is int

    def test_a_score_that_no_sum_gives(self):
        language = ToyLanguage(reference_logits=np.zeros((4, 6)), stop_id=0, score_fn=has_double_three)
        assert language.score([(3, 3, 0), (3, 1, 3, 0), (1, 2, 3, 3)]).tolist() == [1.0, 0.0, 1.0]
        assert not language.additive
        assert standard_toy().additive

    def test_no_responses_no_scores(self):
        assert standard_toy().score([]).shape == (0,)

    @pytest.mark.parametrize(
        ("response", "message"),
        [
            ((), "1 to 8 tokens, got 0"),
            ((1,) * 9, "1 to 8 tokens, got 9"),
            ((0, 3), "first stop token"),
            ((3, 3), "unfinished"),
            ((6, 0), "0 to 5, got 6"),
            ((-1, 0), "0 to 5, got -1"),
            ((1.0, 0), "0 to 5, got 1.0"),
        ],
    )
    def test_refuses_what_is_no_finished_response(self, response, message: str):
        with pytest.raises(ValueError, match=message):
            standard_toy().score([(0,), response])

    @pytest.mark.parametrize(
        ("returned", "message"), [([1.0], r"shape \(2,\)"), ([1.0, np.nan], r"got nan for the response \(1, 0\)")]
    )
    def test_refuses_what_a_faulty_function_returns(self, returned, message: str):
        language = small(token_scores=None, score_fn=lambda _: returned)
        with pytest.raises(ValueError, match=message):
            language.score([(0,), (1, 0)])


class TestText:
    @given(st.lists(st.integers(0, 10**6)))
    @settings(max_examples=50, deadline=None, database=None)
    def test_ids_survive_the_text(self, ids: list[int]):
        tokenizer = ToyTokenizer()
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
        assert tokenizer.decode(tokenizer.encode(tokenizer.decode(ids))) == tokenizer.decode(ids)

    def test_empty_and_array(self):
        assert ToyTokenizer().decode([]) == ""
        assert ToyTokenizer().encode("") == []
        assert ToyTokenizer().decode(np.array([3, 0], dtype=np.int32)) == " 3 0"

    def test_texts_read_on_when_they_are_put_together(self):
        tokenizer = ToyTokenizer()
        assert tokenizer.decode([0]) + tokenizer.decode([3, 3, 0]) == " 0 3 3 0" == tokenizer.decode([0, 3, 3, 0])

    @pytest.mark.parametrize("text", ["3 12 0", " 3 12 0", "3  12\t0", " 3 12\n0\n"])
    def test_any_whitespace_separates(self, text: str):
        assert ToyTokenizer().encode(text) == [3, 12, 0]

    @pytest.mark.parametrize("text", ["3,3", "03", "-1", "+1", "3.0", "1_0", "three", "٣"])
    def test_refuses_words_that_would_change(self, text: str):
        with pytest.raises(ValueError, match=f"decimal ids .* got '{re.escape(text)}'"):
            ToyTokenizer().encode(text)

    def test_refuses_ids_that_are_none(self):
        with pytest.raises(ValueError, match="non-negative integer, got -1"):
            ToyTokenizer().decode([3, -1])

    def test_the_scorer_reads_the_text(self):
        scores = standard_toy().scorer(
            [" 0", " 0"], [" 3 3 3 3 3 3 3 3", " 3 3 3 3 3 3 3 0"], finish_reason=["length", "stop"]
        )
        assert scores.tolist() == [3.0, 3.5]
        with pytest.raises(ValueError, match="equally long, got 1 and 2"):
            standard_toy().scorer(["0"], ["0", "0"])


class TestReference:
    def test_logprobs_by_hand(self):
        language = small(reference_logits=[[1.0, 1.0 + np.log(3.0)], [FORBIDDEN, -7.0]])
        np.testing.assert_allclose(np.exp(language.reference_logprobs), [[0.25, 0.75], [0.0, 1.0]], rtol=1e-12)

    def test_logits_at_the_edge_of_float64_warn_of_nothing(self):
        language = small(reference_logits=[[1e308, -1e308], [-1e308, FORBIDDEN]])
        assert language.reference_logprobs.tolist() == [[0.0, FORBIDDEN], [0.0, FORBIDDEN]]

    def test_next_token_by_hand(self):
        # Prompt 0 in column 0, responses (), (1) and (1, 1): the last state is full.
        observations = {
            "input_ids": np.array([[0, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=np.int32),
            "attention_mask": np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=np.int8),
        }
        logprobs = small().reference(observations, np.array([1, 0, 1]))
        np.testing.assert_allclose(logprobs, [np.log(0.75), np.log(0.5), 0.0], rtol=1e-12)

    def test_step_by_step_is_all_at_once(self):
        rng = np.random.default_rng(0)
        language = ToyLanguage(reference_logits=rng.normal(size=(5, 4)), stop_id=2, token_scores=np.zeros(4))
        responses = [(2,), (0, 1, 2), (3, 3, 3, 3, 3), (1, 1, 1, 1, 2)]
        ids, mask = np.full((4, 6), 2, dtype=np.int32), np.zeros((4, 6), dtype=np.int8)
        for row, response in enumerate(responses):
            ids[row, 1 : 1 + len(response)] = response
            mask[row, : 1 + len(response)] = 1
        at_once = language.reference.response_logprobs(ids, mask, 5)
        for row, response in enumerate(responses):
            for t in range(5):
                state = {"input_ids": ids[[row]], "attention_mask": mask[[row]] * (np.arange(6) <= t)}
                stepped = language.reference(state, ids[row, [t + 1]]) if t < len(response) else [0.0]
                assert at_once[row, t] == stepped[0]

    def test_a_wider_prompt_and_garbage_in_the_padding_do_not_matter(self):
        ids = np.array([[99, 0, 1, -5]])
        mask = np.array([[0, 1, 1, 0]])
        np.testing.assert_allclose(small().response_logprobs(ids, mask, 2), [[np.log(0.75), 0.0]], rtol=1e-12)

    @pytest.mark.parametrize(
        ("mask", "actions", "message"),
        [
            ([1, 0, 0], [1], r"\(N, L\)"),
            ([[1, 0, 0]], [1, 1], r"\(N,\)"),
            ([[0, 0, 0]], [1], "1 prompt token"),
            ([[1, 1, 1, 1]], [1], "1 prompt token"),
            ([[1, 0, 0]], [2], "0 to 1, got 2"),
            ([[1, 0, 0]], [0.5], "dtype float64"),
        ],
    )
    def test_refuses_states_it_does_not_have(self, mask, actions, message: str):
        with pytest.raises(ValueError, match=message):
            small().ref_logprobs({"input_ids": np.zeros_like(mask), "attention_mask": mask}, actions)

    @pytest.mark.parametrize(
        ("ids", "response_tokens", "message"),
        [([[0, 1, 1]], 3, "response_tokens=3"), ([[0, 1, 1]], 0, "response_tokens=0"), ([[0, 1, 2]], 2, "got 2")],
    )
    def test_refuses_responses_it_does_not_have(self, ids, response_tokens: int, message: str):
        with pytest.raises(ValueError, match=message):
            small().response_logprobs(ids, np.ones_like(ids), response_tokens)


class TestConstruction:
    def test_properties(self):
        language = standard_toy()
        assert (language.horizon, language.vocab_size, language.stop_id, language.stop_ids) == (8, 6, 0, (0,))
        assert language.token_scores.shape == (8, 6)
        assert language.reference == ToyReference(language)

    def test_does_not_share_the_callers_arrays(self):
        logits, scores = np.zeros((2, 2)), np.zeros((2, 2))
        language = small(reference_logits=logits, token_scores=scores)
        logits[:], scores[:] = 7.0, 7.0
        assert language.reference_logits.max() == language.token_scores.max() == 0.0
        for array in (language.reference_logits, language.token_scores, language.reference_logprobs):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1.0

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    @pytest.mark.parametrize("score", [{}, {"token_scores": None, "score_fn": has_double_three}])
    def test_copies_are_equal_and_read_only(self, duplicate, score):
        language = small(**score)
        twin = duplicate(language)
        assert twin == language
        assert hash(twin) == hash(language)
        assert not twin.reference_logits.flags.writeable
        assert twin.score([(1, 1)]) == language.score([(1, 1)])

    @pytest.mark.parametrize(
        "change",
        [
            {"reference_logits": np.zeros((2, 2))},
            {"reference_logits": np.zeros((3, 2))},
            {"stop_id": 1},
            {"token_scores": np.array([0.0, 2.0])},
            {"unfinished_score": 1.0},
            {"token_scores": None, "score_fn": has_double_three},
        ],
    )
    def test_another_language_is_not_equal(self, change):
        assert small(**change) != small()
        assert replace(small(), stop_id=0) == small()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"reference_logits": np.zeros(2)}, r"\(T, V\).*got shape \(2,\)"),
            ({"reference_logits": np.zeros((0, 2))}, "T >= 1"),
            ({"reference_logits": [[0.0, np.nan]]}, "got nan at position 0, token 1"),
            ({"reference_logits": [[0.0, np.inf]]}, "got inf at position 0, token 1"),
            ({"reference_logits": [[0.0, 0.0], [FORBIDDEN, FORBIDDEN]]}, "only -inf at 1"),
            ({"stop_id": 2}, "0 to 1, got 2"),
            ({"stop_id": -1}, "0 to 1, got -1"),
            ({"stop_id": 0.0}, "0 to 1, got 0.0"),
            ({"token_scores": None}, "got neither"),
            ({"score_fn": has_double_three}, "got both"),
            ({"token_scores": np.zeros(3)}, r"\(2,\) or \(2, 2\).*got \(3,\)"),
            ({"token_scores": [0.0, -np.inf]}, "finite, got -inf"),
            ({"unfinished_score": np.nan}, "`unfinished_score`.*got nan"),
            ({"token_scores": None, "score_fn": has_double_three, "unfinished_score": -1.0}, "ignored"),
        ],
    )
    def test_errors_say_what_came(self, change, message: str):
        with pytest.raises(ValueError, match=message):
            small(**change)
