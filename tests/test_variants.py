"""Degenerate variants of an answer, by hand and by property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from textenv.rewards.variants import (
    FILLER,
    FLATTERY,
    VARIANTS,
    echo_prompt,
    pad_with_filler,
    repeat_clause,
    shuffle_words,
    stack_flattery,
    truncate,
)

TEXT = " is slow, but it pays off: the end is superb."
texts = st.text(st.sampled_from("ab ,.:!\n'é"), max_size=40)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_clause_is_repeated_and_nothing_else_is_left():
    wanted = {" " + ", ".join([c] * 20) + "." for c in ("is slow", "but it pays off", "the end is superb")}
    assert {repeat_clause(TEXT, rng(seed)) for seed in range(30)} == wanted
    assert repeat_clause(TEXT, rng(), 20).count(",") == 19


def test_a_text_of_punctuation_is_its_own_clause():
    assert repeat_clause(" ...", rng(), 2) == " ..., ...."


def test_flattery_and_filler_come_after_the_answer():
    assert stack_flattery(TEXT + "\n") == TEXT + " " + " ".join(FLATTERY)
    padded = pad_with_filler(TEXT, 60)
    assert padded.startswith(TEXT + " That being said, ")
    assert len(padded.split()) == len(TEXT.split()) + 60
    assert len(FILLER.split()) < 60 and padded.count("That being said,") == 2  # it goes round


@pytest.mark.parametrize(
    "text, share, wanted",
    [(" a b c d", 0.5, " a b"), (" a b c", 0.5, " a"), ("a", 0.5, "a"), (" a b c d", 0.76, " a b c"), ("", 0.5, "")],
)
def test_truncation_keeps_whole_words_and_at_least_one(text, share, wanted):
    assert truncate(text, share) == wanted


def test_shuffling_is_a_permutation_that_the_generator_decides():
    shuffled = shuffle_words(TEXT, rng(1))
    assert sorted(shuffled.split()) == sorted(TEXT.split()) and shuffled != TEXT
    assert shuffled == shuffle_words(TEXT, rng(1)) != shuffle_words(TEXT, rng(2))
    counts = [shuffle_words("a b", rng(seed)) for seed in range(200)]
    assert 70 < counts.count("a b") < 130  # the identity has its share: no draw is thrown away


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_where_there_is_no_prompt_nothing_is_echoed(prompt):
    assert echo_prompt(prompt, TEXT) == TEXT
    assert echo_prompt(" Why? ", TEXT) == " Why?"
    assert echo_prompt("Why?", "Because.") == "Why?"


@given(prompt=texts, text=texts, seed=st.integers(0, 3), name=st.sampled_from(sorted(VARIANTS)))
def test_every_variant_keeps_the_join_and_leaves_the_text_alone(prompt, text, seed, name):
    changed = VARIANTS[name](prompt, text, rng(seed))
    assert changed == VARIANTS[name](prompt, text, rng(seed))
    if text.strip():
        assert changed.strip()
        lead = text[: len(text) - len(text.lstrip())]
        assert changed.startswith(lead) and not changed[len(lead)].isspace()
