"""Scores that can be checked: exact matches, patterns, numbers, functions; and right answers that are none."""

from __future__ import annotations

import copy
import pickle
import re
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from helpers import PROMPTS, text_task, write
from hypothesis import given
from hypothesis import strategies as st

from textenv import ScorerError
from textenv.env import TextGenerationEnv
from textenv.prompts import PromptRecord
from textenv.rewards import ExactMatch, Normalize, NumericMatch, PythonCheck, RegexMatch, as_number, numbers_in
from textenv.scorer_columns import check_takes_columns, required_columns, signature_of, taken_columns


def score(check, response, answer=None):
    column = {} if answer is None else {check.column: [answer]}
    (found,) = check(["the prompt"], [response], **column)
    return found


# What is compared


@pytest.mark.parametrize(
    ("options", "text", "left"),
    [
        ({}, " A  b.\n", "A  b."),
        ({"strip": False}, " a ", " a "),
        ({"unicode": True}, "\ufb01ve \uff21", "five A"),
        ({"unicode": False}, "\ufb01ve", "\ufb01ve"),
        ({"lowercase": True}, "Straße", "strasse"),
        ({"spaces": True}, "a \t\n b", "a b"),
        ({"punctuation": True}, "¿no, “yes”!", "no yes"),
        ({"punctuation": True}, "$3+4", "$3+4"),  # symbols are no punctuation
        ({"articles": True}, "The cat on a mat, another", "cat on mat, another"),
        ({"articles": True, "punctuation": True, "lowercase": True}, "An 'Answer'.", "answer"),
    ],
)
def test_normalising(options, text, left):
    assert Normalize(**options)(text) == left


# Exact match


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("4", "4", 1),
        (" 4\n", "4", 1),
        ("4.", "4", 0),
        ("four", ["4", "four"], 1),
        ("4", 4, 1),
        ("", "4", 0),
        ("", "", 1),
    ],
)
def test_exact_match(response, answer, right):
    assert score(ExactMatch(), response, answer) == right


def test_what_does_not_count_counts_on_neither_side():
    assert score(ExactMatch(normalize=Normalize(lowercase=True, punctuation=True)), "Yes!", "YES.") == 1
    assert score(ExactMatch(), "Yes!", "YES.") == 0


def test_a_part_of_the_response_can_be_compared():
    last_line = ExactMatch(extract=lambda response: response.splitlines()[-1] if response else None)
    assert [score(last_line, text, "4") for text in ("2 + 2\n4", "4\n2 + 2", "")] == [1, 0, 0]


def test_rows_are_not_mixed_up():
    scores = ExactMatch("gold")(["p"] * 3, ["a", "b", "c"], gold=["a", "c", "c"], other=[1, 2, 3])
    assert (scores.dtype, scores.tolist()) == (np.float64, [1.0, 0.0, 1.0])
    assert ExactMatch()([], [], answer=[]).shape == (0,)


# Regular expressions


@pytest.mark.parametrize(
    ("which", "response", "right"),
    [
        ("last", "#### 3 no, #### 4", 1),
        ("last", "#### 4 no, #### 3", 0),
        ("first", "#### 4 no, #### 3", 1),
        ("first", "#### 3 no, #### 4", 0),
        ("any", "#### 4 #### 5", 1),
        ("any", "#### 3 #### 5", 0),
        ("whole", " #### 4 ", 1),
        ("whole", "so #### 4", 0),
        ("last", "4", 0),
        ("last", "", 0),
    ],
)
def test_which_match_counts(which, response, right):
    assert score(RegexMatch(r"#### (-?\d+)", "answer", which=which), response, "4") == right


def test_without_a_column_a_match_is_enough():
    check = RegexMatch(re.compile("^yes", re.IGNORECASE | re.MULTILINE))
    assert [score(check, text) for text in ("Yes.", "well\nyes", "oh yes")] == [1, 1, 0]
    assert required_columns(check) == ()


def test_a_pattern_without_a_group_is_compared_whole():
    assert score(RegexMatch(r"\d+", "answer"), "from 3 to 4", "4") == 1


def test_a_group_that_took_no_part_is_an_empty_answer():
    assert score(RegexMatch(r"x(\d)?", "answer"), "x", "4") == 0
    assert score(RegexMatch(r"x(\d)?", "answer"), "x", "") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, "regular expression, got '\\(': missing"),
        ({"pattern": "(a)(b)", "column": "answer"}, "at most one group beside a column of answers, got 2"),
        ({"pattern": "a", "which": "second"}, "`which` should be one of .* got 'second'"),
    ],
)
def test_patterns_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RegexMatch(**options)


# Numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", [7]),
        ("It is 72.", [72]),
        ("-1,234.50 and +.5", [Fraction(-2469, 2), Fraction(1, 2)]),
        ("10-3=7", [10, 3, 7]),
        ("(4)-3 = −1", [4, 3, -1]),
        ("x2 = 5kg", [5]),
        ("3/4 of 1e3, 6.02E-2", [Fraction(3, 4), 1000, Fraction(301, 5000)]),
        ("1/0 2/3/4", [1, 2]),
        ("12,34 1,2345", [12, 34, 1, 2345]),
        ("$1,200.5, 50%", [Fraction(2401, 2), 50]),
        ("none, nan, inf, 1e999999999", []),
        ("٣", [3]),
    ],
)
def test_numbers_in_texts(text, found):
    assert numbers_in(text) == found


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_a_number_is_found_as_python_writes_it(whole, places):
    number = Fraction(whole, 10**places)
    for written in (f"{Decimal(whole).scaleb(-places):f}", f"{Decimal(whole).scaleb(-places):,f}", str(number)):
        assert numbers_in(f"It is {written}.") == [number], written


def test_long_numbers_take_no_time():
    start = time.perf_counter()
    for text in ("9" * 100_000, "1e" + "9" * 100_000, "1," * 50_000, "-" * 100_000, "1/" * 50_000, "1." * 50_000):
        numbers_in(text)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (4, 4),
        (0.1, Fraction(1, 10)),
        (np.float32(0.5), Fraction(1, 2)),
        ("1,200", 1200),
        ("1,2", None),
        (" 3/4 ", Fraction(3, 4)),
        (True, None),
        (float("nan"), None),
        (float("inf"), None),
        (None, None),
        ("four", None),
    ],
)
def test_what_is_a_number(value, number):
    assert as_number(value) == number


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("6*7 = 42.0", 42, 1),
        ("42 no, 41", 42, 0),
        ("0.1", "1/10", 1),
        ("0.30000000000000004", 0.3, 0),
        ("1,200 dollars", "He pays #### 1200", 1),
        ("no number", 42, 0),
    ],
)
def test_numeric_match(response, answer, right):
    assert score(NumericMatch(), response, answer) == right


def test_which_number_counts():
    response = "3, 4, 5"
    assert [score(NumericMatch(which="first"), response, n) for n in (3, 4, 5)] == [1, 0, 0]
    assert [score(NumericMatch(which="last"), response, n) for n in (3, 4, 5)] == [0, 0, 1]
    assert [score(NumericMatch(which="any"), response, n) for n in (3, 4, 6)] == [1, 1, 0]
    assert [score(NumericMatch(which="whole"), text, 4) for text in (" 4.0 ", "4 5", "x", "")] == [1, 0, 0, 0]


def test_tolerances():
    """200 within 1% is 198 to 202, both ends included."""
    one_percent = NumericMatch(rel_tol=0.0078125)  # 2 ** -7, which floats hold exactly: 256 +- 2
    assert [score(one_percent, text, 256) for text in ("254", "258", "253.999", "-256")] == [1, 1, 0, 0]
    half = NumericMatch(abs_tol=0.5)
    assert [score(half, text, 0) for text in ("0.5", "-1/2", "0.51")] == [1, 1, 0]
    assert score(NumericMatch(rel_tol=0.1), "0.1", 0) == 0


@pytest.mark.parametrize("options", [{"rel_tol": -1}, {"abs_tol": float("nan")}, {"abs_tol": float("inf")}])
def test_tolerances_that_cannot_be_used_are_refused(options):
    with pytest.raises(ValueError, match="finite and at least 0"):
        NumericMatch(**options)


# Right answers that are none


@pytest.mark.parametrize(
    ("check", "answer", "message"),
    [
        (ExactMatch(), None, "the column 'answer' should hold a text, a number, or a list of them, got None"),
        (ExactMatch(), [], r"got \[\]"),
        (ExactMatch(), {"a": 1}, "got {'a': 1}"),
        (ExactMatch(), float("nan"), "got nan"),
        (RegexMatch("(.)", "answer"), ["4", None], r"got \['4', None\]"),
        (NumericMatch(), "no number", "should hold a finite number, or a text with one, got 'no number'"),
        (NumericMatch(), float("nan"), "got nan"),
        (NumericMatch(), True, "got True"),
    ],
)
def test_a_right_answer_that_is_none_is_an_error_and_no_zero(check, answer, message):
    with pytest.raises(ScorerError, match=f"{message} for prompt 'second', response ' 4'"):
        check(["first", "second"], ["1", " 4"], answer=["1", answer])


@pytest.mark.parametrize("check", [ExactMatch("gold"), RegexMatch("4", "gold"), NumericMatch("gold")])
def test_a_column_that_is_missing_is_an_error(check):
    with pytest.raises(
        ScorerError, match=r"given the column 'gold' of .* 2 values, got the columns \['answer'\]"
    ) as caught:
        check(["p", "q"], ["4", "4"], answer=["4", "4"])
    assert caught.value.whole_batch
    with pytest.raises(ScorerError, match="got 1 values"):
        check(["p", "q"], ["4", "4"], gold=["4"])


# Functions


def test_a_function_is_given_what_it_takes():
    def brief(prompt, response, limit, unit=1.0):
        return unit * (len(response) <= limit)

    check = PythonCheck(brief)
    scores = check(["a", "b"], ["four", "four"], limit=[3, 4], unit=[1.0, 2.5], source=["x", "y"])
    assert (scores.dtype, scores.tolist()) == (np.float64, [0.0, 2.5])
    assert required_columns(check) == ("limit",)
    assert check.name == "brief"


def test_a_function_may_take_all_context():
    check = PythonCheck(lambda prompt, response, **context: sum(context.values()))
    assert check(["a"], ["b"], one=[1], two=[2]).tolist() == [3.0]


def fails(prompt, response, answer):
    raise KeyError("no such answer")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "The check fails raised KeyError: 'no such answer', for"),
        (lambda p, r, answer: None, "one finite number, or True or False, got None for"),
        (lambda p, r, answer: float("nan"), "got nan for"),
        (lambda p, r, answer: "1", "got '1' for"),
        (lambda p, r, answer: [1.0, 2.0], r"got \[1.0, 2.0\] for"),
    ],
)
def test_a_function_that_fails_shows_itself_and_the_sample(function, message):
    with pytest.raises(ScorerError, match=f"{message} prompt 'p', response 'r', answer '4'") as caught:
        PythonCheck(function)(["p"], ["r"], answer=["4"])
    assert not caught.value.whole_batch


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="got str"):
        PythonCheck("lambda p, r: 1")


# In environments


CHECKS = [ExactMatch(), RegexMatch("(good)", "answer"), NumericMatch(), PythonCheck(fails)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: type(check).__name__)
def test_prompts_without_the_column_are_refused_when_the_environment_is_made(check):
    with pytest.raises(TypeError, match=r"requires 'answer'.*context=\['answer'\]"):
        text_task(scorer=check)


def test_the_column_reaches_the_check():
    prompts = [PromptRecord(prompt, {"answer": answer}) for prompt, answer in zip(PROMPTS, "abcd", strict=True)]
    prompts[0] = PromptRecord(PROMPTS[0], {"answer": "good film"})
    env = TextGenerationEnv(text_task(scorer=ExactMatch(), prompts=prompts))
    right = write(env, [1, 3, 0], options={"prompt": prompts[0]})
    wrong = write(env, [1, 3, 0], options={"prompt": prompts[1]})
    assert (right["rewards"], wrong["rewards"]) == ([0.0, 0.0, 1.0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("check", [*CHECKS[:3], PythonCheck(fails)], ids=lambda check: type(check).__name__)
def test_checks_can_be_copied_and_pickled(check):
    for copied in (copy.deepcopy(check), pickle.loads(pickle.dumps(check))):
        assert required_columns(copied) == ("answer",)
        if not isinstance(check, PythonCheck):
            assert score(copied, "good", "good 4") == score(check, "good", "good 4")


# Columns


def test_columns_that_a_scorer_takes():
    assert taken_columns(lambda p, r, a, *, b=1: [1.0], ["a", "b", "c", "p"]) == ["a", "b"]
    assert taken_columns(lambda prompts, responses, **_: [1.0], ["a", "responses"]) == ["a"]
    assert taken_columns(ExactMatch("gold answer"), ["gold answer", "x"]) == ["gold answer", "x"]


def test_signatures_leave_out_what_no_argument_can_be_called():
    signature = signature_of(["a", "b c", "class", "context", "prompts", "a"])
    assert str(signature) == "(prompts, responses, *, a, **context)"
    check_takes_columns(ExactMatch("b c"), ["b c"])
    assert ExactMatch("b c")(["p"], ["4"], **{"b c": ["4"]}).tolist() == [1.0]
