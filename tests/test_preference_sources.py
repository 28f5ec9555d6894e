"""Comparisons from single raters' scores, and from pairs of responses that a scorer judges."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from textenv.rewards import (
    Preference,
    RatedSentence,
    draw_comparisons,
    label_pairs,
    load_ratings,
    preference_sources,
    preferences_from_ratings,
)
from textenv.scoring import ScorerError


def rng(seed=0):
    return np.random.default_rng(seed)


def lengths(_prompts, responses):
    return [len(response) for response in responses]


def test_documented_examples():
    assert doctest.testmod(preference_sources) == (0, 2)


SENTENCES = [
    RatedSentence(0, "A film to love", (3, 4)),
    RatedSentence(1, "A film to hate", (-3,)),
    RatedSentence(2, "A film to love", (-4,)),  # the same words, rated by somebody else
    RatedSentence(3, "Nothing", (0,)),
]


class TestRatings:
    def test_whole_sentences_are_the_draws_of_single_raters(self):
        sentences = load_ratings()[:200]
        drawn = draw_comparisons(sentences, 50, rng(1))
        ours = preferences_from_ratings(sentences, 50, rng(1), margin=True)
        assert ours == [
            Preference("", sentences[c].text, sentences[r].text, float(high - low))
            for c, r, high, low in zip(*drawn, strict=True)
        ]

    def test_equal_texts_are_drawn_again_and_margins_are_optional(self):
        found = preferences_from_ratings(SENTENCES, 300, rng())
        assert len(found) == 300 and {p.prompt for p in found} == {""} and {p.margin for p in found} == {None}
        assert {(p.chosen, p.rejected) for p in found} == {
            ("A film to love", "A film to hate"),
            ("A film to hate", "A film to love"),
            ("A film to love", "Nothing"),
            ("Nothing", "A film to love"),
            ("Nothing", "A film to hate"),
        }
        margins = {p.margin for p in preferences_from_ratings(SENTENCES, 300, rng(), margin=True)}
        assert margins == {7.0, 6.0, 1.0, 3.0, 4.0}

    def test_sentences_that_begin_alike_share_their_opening_as_prompt(self):
        found = preferences_from_ratings(SENTENCES, 100, rng(), opening_words=3)
        assert {(p.prompt, p.chosen, p.rejected) for p in found} == {
            ("A film to", " love", " hate"),
            ("A film to", " hate", " love"),
        }

    def test_openings_of_the_film_data_join_to_sentences_of_it(self):
        sentences = load_ratings()
        texts = {s.text for s in sentences}
        found = preferences_from_ratings(sentences, 500, rng(), opening_words=2, margin=True)
        assert len(found) == 500 and len({p.prompt for p in found}) > 50
        for p in found:
            assert len(p.prompt.split()) == 2 and {p.prompt + p.chosen, p.prompt + p.rejected} <= texts
            assert 1 <= p.margin <= 8

    def test_groups_are_drawn_in_proportion_to_their_pairs(self):
        """Two groups of 2 and 3 sentences hold 2 and 6 ordered pairs: a quarter of the draws is from the first."""
        sentences = [RatedSentence(i, f"{'ab'[i > 1]} {i}", (i,)) for i in range(5)]
        found = preferences_from_ratings(sentences, 4000, rng(), opening_words=1)
        share = np.mean([p.prompt == "a" for p in found])
        assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 4000))

    @pytest.mark.parametrize(
        ("sentences", "options"),
        [
            ([], {}),
            (SENTENCES[:1], {}),
            ([SENTENCES[0], SENTENCES[2]], {}),  # two sentences, one text
            ([RatedSentence(0, "a", (1,)), RatedSentence(1, "b", (1,))], {}),
            ([SENTENCES[0], SENTENCES[3]], {"opening_words": 1}),
            (SENTENCES, {"opening_words": 4}),  # nothing would be left to respond
        ],
    )
    def test_nothing_to_compare(self, sentences, options):
        with pytest.raises(ValueError, match="no two can be compared"):
            preferences_from_ratings(sentences, 10, rng(), **options)

    def test_none_and_fewer_than_none(self):
        assert preferences_from_ratings(SENTENCES, 0, rng()) == []
        with pytest.raises(ValueError, match="at least 0, got -1"):
            preferences_from_ratings(SENTENCES, -1, rng())


class TestLabels:
    def test_the_higher_score_wins_and_every_pair_is_accounted_for(self):
        found = label_pairs(
            ["p", "q", "r", "s", "t"], ["a", "bbb", "same", "", "xy"], ["aa", "b", "same", "c", "yx"], lengths, rng()
        )
        assert found.preferences == [Preference("p", "aa", "a"), Preference("q", "bbb", "b")]
        assert found.rows.tolist() == [0, 1]
        assert (found.pairs, found.equal, found.empty, found.ties, found.dropped_ties) == (5, 1, 1, 1, 1)
        assert found.agreement == 1.0

    def test_margins_are_differences_of_scores(self):
        found = label_pairs(["p", "q"], ["a", "bbbb"], ["aa", "b"], lengths, rng(), margin=True)
        assert [p.margin for p in found.preferences] == [1.0, 3.0]

    def test_ties_broken_by_a_fair_coin(self):
        n = 4000
        found = label_pairs(["p"] * n, ["ab"] * n, ["ba"] * n, lengths, rng(), ties="random")
        assert len(found.preferences) == found.ties == n and found.dropped_ties == 0 and found.agreement == 0.5
        share = np.mean([p.chosen == "ab" for p in found.preferences])
        assert share == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))

    @pytest.mark.parametrize("noise", [0.5, 2.0])
    def test_noise_draws_by_bradley_terry(self, noise):
        """Scores 3 and 1: a wins with probability 1 / (1 + exp(-2 / noise))."""
        n = 20_000
        found = label_pairs(["p"] * n, ["aaa"] * n, ["b"] * n, lengths, rng(), noise=noise)
        expected = 1 / (1 + math.exp(-2 / noise))
        share = np.mean([p.chosen == "aaa" for p in found.preferences])
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / n))
        assert found.agreement == pytest.approx(share) and found.ties == 0

    def test_sides_are_treated_alike(self):
        """Who is called a makes no difference but through chance: the exact complement of its number decides."""
        n = 2000
        ab = label_pairs(["p"] * n, ["aaa"] * n, ["b"] * n, lengths, rng(), noise=2.0)
        ba = label_pairs(["p"] * n, ["b"] * n, ["aaa"] * n, lengths, rng(1), noise=2.0)
        assert ab.agreement == pytest.approx(ba.agreement, abs=0.06)

    def test_noise_treats_ties_as_even_odds(self):
        found = label_pairs(["p"] * 500, ["ab"] * 500, ["ba"] * 500, lengths, rng(), noise=1.0)
        assert len(found.preferences) == 500 and found.agreement == 0.5
        assert 0.4 < np.mean([p.chosen == "ab" for p in found.preferences]) < 0.6

    def test_huge_gaps_overflow_nothing(self):
        scores = lambda _, responses: [float(r) for r in responses]  # noqa: E731
        with np.errstate(all="raise", under="ignore"):
            found = label_pairs(["p", "p"], ["-1e300", "1e300"], ["1e300", "-1e300"], scores, rng(), noise=1e-3)
        assert [p.chosen for p in found.preferences] == ["1e300", "1e300"]

    def test_a_label_depends_on_its_own_pair_alone(self):
        a, b = [f"{'x' * i}a" for i in range(30)], [f"{'y' * (i % 7)}b" for i in range(30)]
        whole = label_pairs(["p"] * 30, a, b, lengths, rng(3), noise=3.0)
        changed = label_pairs(["p"] * 30, ["same", *a[1:]], ["same", *b[1:]], lengths, rng(3), noise=3.0)
        assert changed.preferences == whole.preferences[1:] and changed.rows.tolist() == list(range(1, 30))

    def test_the_scorer_is_called_once_with_the_context_of_what_counts(self):
        calls = []

        def scorer(prompts, responses, answer):
            calls.append((prompts, responses, answer))
            return [float(r == a) for r, a in zip(responses, answer, strict=True)]

        found = label_pairs(["p", "q"], ["2", "same"], ["3", "same"], scorer, rng(), context={"answer": ["3", "4"]})
        assert found.preferences == [Preference("p", "3", "2")] and calls == [(["p", "p"], ["2", "3"], ["3", "3"])]

    def test_nothing_to_compare(self):
        found = label_pairs(["p"], ["a"], ["a"], lengths, rng())
        assert found.preferences == [] and math.isnan(found.agreement)
        assert label_pairs([], [], [], lengths, rng()).pairs == 0

    def test_faults_of_a_scorer_are_errors(self):
        with pytest.raises(ScorerError, match="one finite number per response, got nan"):
            label_pairs(["p"], ["a"], ["b"], lambda p, r: [math.nan, 1.0], rng())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"noise": -1.0}, "`noise` should be a finite number of at least 0, got -1.0"),
            ({"noise": math.inf}, "`noise` should be"),
            ({"noise": math.nan}, "`noise` should be"),
            ({"ties": "keep"}, r"`ties` should be one of \('drop', 'random'\), got 'keep'"),
            ({"noise": 1.0, "margin": True}, "`margin` should be left out with noise"),
        ],
    )
    def test_options_that_make_no_sense(self, options, message):
        with pytest.raises(ValueError, match=message):
            label_pairs(["p"], ["a"], ["b"], lengths, rng(), **options)

    def test_sides_of_unequal_length(self):
        with pytest.raises(ValueError, match="got 2 prompts, 2 and 1 responses"):
            label_pairs(["p", "q"], ["a", "b"], ["c"], lengths, rng())

    @given(
        st.lists(st.tuples(st.text("ab ", max_size=3), st.text("ab ", max_size=3)), max_size=12),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from(["drop", "random"]),
    )
    def test_every_pair_is_accounted_for(self, pairs, noise, ties):
        a, b = [p[0] for p in pairs], [p[1] for p in pairs]
        found = label_pairs([""] * len(pairs), a, b, lengths, rng(), noise=noise, ties=ties)
        assert len(found.preferences) + found.equal + found.empty + found.dropped_ties == found.pairs == len(pairs)
        for row, preference in zip(found.rows, found.preferences, strict=True):
            assert {preference.chosen, preference.rejected} == {a[row], b[row]}
