"""A language model as a judge, behind a fake endpoint: what is read, what is refused, what position bias does."""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import time

import numpy as np
import pytest
from helpers import END, GOOD, text_task, write
from http_helpers import DROP, HANG, fake_servers, nobody

from textenv import ScorerError
from textenv.env import TextGenerationEnv
from textenv.prompts import PromptRecord
from textenv.rewards import (
    ComparingJudge,
    Comparison,
    Judge,
    Preference,
    Reply,
    ScoringJudge,
    WeightedReward,
)
from textenv.rewards.judge import choice_probabilities
from textenv.scorer_columns import required_columns
from textenv.scoring import call_scorer

HASTY = {"timeout": 5.0, "attempts": 2, "first_pause": 0.01}


@pytest.fixture
def endpoint():
    """Makes fake endpoints, and closes them after the test."""
    with fake_servers() as started:
        yield started


def chat(text, top=None):
    """An answer of /chat/completions; `top` are the first token's likeliest, as probabilities."""
    choice = {"message": {"role": "assistant", "content": text}}
    if top is not None:
        likeliest = [{"token": token, "logprob": math.log(p)} for token, p in top.items()]
        choice["logprobs"] = {"content": [{"token": text, "logprob": -0.1, "top_logprobs": likeliest}]}
    return {"choices": [choice]}


def completion(text, top=None):
    """An answer of /completions."""
    logprobs = None if top is None else {t: math.log(p) for t, p in top.items()}
    return {"choices": [{"text": text, "logprobs": logprobs and {"tokens": [text], "top_logprobs": [logprobs]}}]}


def asked(request):
    """The text that was asked."""
    body = request["body"]
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def shown(request, tag):
    """What a request shows between tags."""
    return re.search(rf"<{tag}>\n(.*?)\n</{tag}>", asked(request), re.DOTALL)[1]


def rating(text, top=None):
    """A scoring judge's endpoint that always says the same."""
    return lambda *_: chat(text, top)


def scoring(server, judge=None, **options):
    return ScoringJudge(Judge(f"{server.url}/v1", "rater", **(HASTY | (judge or {}))), **options)


# Scores


def test_scores_are_the_numbers_said_in_the_order_of_the_responses(endpoint):
    server = endpoint(lambda _n, request: chat(str(len(shown(request, "response")))))
    scores = scoring(server)(["p"] * 9, ["x" * n for n in range(1, 10)])
    assert scores.dtype == np.float64 and scores.tolist() == list(range(1, 10))
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}


def test_what_is_asked(endpoint):
    server = endpoint(rating("7"))
    judge = {"system": "Be strict.", "max_tokens": 4, "seed": 5, "options": {"top_p": 0.9, "max_tokens": None}}
    scoring(server, judge, high=8.5)(["the {prompt}"], ["the response"])
    body = server.requests[0]["body"]
    assert body["model"] == "rater" and body["temperature"] == 0 and body["seed"] == 5 and body["top_p"] == 0.9
    assert (body["logprobs"], body["top_logprobs"]) == (True, 20) and "max_tokens" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be strict."}
    assert shown(server.requests[0], "prompt") == "the {prompt}"
    assert shown(server.requests[0], "response") == "the response"
    assert "from 1 to 8.5" in asked(server.requests[0])


def test_completions_of_models_without_a_chat_template(endpoint):
    server = endpoint(lambda *_: completion(" 4"))
    scorer = scoring(server, {"chat": False, "system": "Be strict."})
    assert scorer(["p"], ["r"]).tolist() == [4.0]
    assert server.requests[0]["path"] == "/v1/completions"
    assert server.requests[0]["body"]["logprobs"] == 20
    assert asked(server.requests[0]).startswith("Be strict.\n\nRate the response")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 7),
        (" 7.\n", 7),
        ("**7**", 7),
        ("7.5", 7.5),
        ("Score: 7", 7),
        ("The rating is 7", 7),
        ("7/9, since it is good", 7),
        ("7 out of 9", 7),
        ("7/10", None),  # of another scale
        ("On a scale from 1 to 9 it is 7", None),
        ("seven", None),
        ("", None),
        ("0", None),
        ("10", None),
        ("-3", None),
        ("Score: -3", None),
        ("7 8", 7),
        ("1.2.3", None),
        ("nan", None),
    ],
)
def test_what_a_reply_says(endpoint, reply, score):
    scores = scoring(endpoint(rating(reply)), unreadable="drop", tries=1)(["p"], ["r"])
    np.testing.assert_array_equal(scores, [np.nan if score is None else score])


def test_a_pattern_of_ones_own(endpoint):
    scorer = scoring(endpoint(rating("Thinking: 3 flaws. [[6]]")), pattern=r"\[\[(\d)\]\]")
    assert scorer(["p"], ["r"]).tolist() == [6.0]


def test_a_reply_that_cannot_be_read_is_asked_for_again_otherwise(endpoint):
    server = endpoint(lambda number, _request: chat("hm" if number < 2 else "4"))
    assert scoring(server, {"seed": 3})(["p"], ["r"]).tolist() == [4.0]
    sent = [(request["body"]["seed"], request["body"]["temperature"]) for request in server.requests]
    assert sent == [(3, 0.0), (4, 0.7), (5, 0.7)]


def test_and_refused_in_the_end(endpoint):
    server = endpoint(rating("I would rather not."))
    scorer = scoring(server, tries=2)
    message = r"rate from 1 to 9, but in 2 tries .*last 'I would rather not\.', for prompt 'p', response 'r'"
    with pytest.raises(ScorerError, match=message):
        scorer(["p"], ["r"])
    assert len(server.requests) == 2
    np.testing.assert_array_equal(call_scorer(scorer, ["p"], ["r"], "drop"), [np.nan])
    np.testing.assert_array_equal(scoring(server, unreadable="drop")(["p"], ["r"]), [np.nan])


def test_expected_scores_are_the_mean_of_the_judges_distribution(endpoint):
    """(0.5 x 8 + 0.25 x 7 + 0.05 x 1) / 0.8, the probability of other words left aside."""
    top = {"8": 0.4, " 8": 0.1, "7": 0.25, "1": 0.05, "0": 0.1, "I": 0.1}
    scores = scoring(endpoint(rating("8", top)), reading="expected")(["p"], ["r"])
    assert scores[0] == pytest.approx((0.5 * 8 + 0.25 * 7 + 0.05) / 0.8)


def test_expected_scores_need_probability_on_the_numbers(endpoint):
    server = endpoint(rating("I", {"I": 0.9, "7": 0.05}))
    with pytest.raises(ScorerError, match="nothing that could be read, last 'I'"):
        scoring(server, reading="expected")(["p"], ["r"])
    assert scoring(server, reading="expected", min_mass=0.04)(["p"], ["r"]).tolist() == [7.0]


def test_expected_scores_need_logprobs(endpoint):
    server = endpoint(rating("7"))
    with pytest.raises(ScorerError, match=r"needs log-probabilities, which .* did not give") as caught:
        call_scorer(scoring(server, reading="expected"), ["p"], ["r"], "drop")
    assert caught.value.whole_batch


def test_columns_of_context_can_be_shown(endpoint):
    server = endpoint(rating("5"))
    template = "{prompt} {response} {reference_answer} from {low} to {high}, {{as it is}}"
    scorer = scoring(server, template=template)
    assert required_columns(scorer) == ("reference_answer",)
    scorer(["p"], ["r"], reference_answer=["the {right} one"], other=[1])
    assert asked(server.requests[0]) == "p r the {right} one from 1 to 9, {as it is}"
    with pytest.raises(ScorerError, match="ScoringJudge should be given the column 'reference_answer'"):
        scorer(["p"], ["r"])
    with pytest.raises(TypeError, match="requires 'reference_answer'"):
        text_task(scorer=scorer)


def test_it_scores_an_environment_beside_other_scorers(endpoint):
    server = endpoint(lambda _n, request: chat(str(len(shown(request, "response")))))
    scorer = WeightedReward({"judge": (0.5, scoring(server)), "plain": (1.0, lambda p, r: [0.25] * len(r))})
    end = write(TextGenerationEnv(text_task(scorer=scorer)), [GOOD, END])["info"]
    assert (end["score"], end["score/judge"]) == (2.75, 5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 5, "high": 5}, "`low` should be below `high`"),
        ({"high": math.inf}, "`low` should be below `high`"),
        ({"tries": 0}, "`tries` at least 1"),
        ({"reading": "guess"}, "`reading` should be one of"),
        ({"unreadable": "zero"}, "`unreadable` should be one of"),
        ({"reading": "expected", "high": 10}, "whole numbers of one digit, 0 to 9, got 1 to 10"),
        ({"reading": "expected", "low": 0.5}, "whole numbers of one digit"),
        ({"pattern": r"\d"}, "should have a group"),
        ({"template": "{prompt}"}, r"the fields \{prompt\}, \{response\}"),
        ({"template": "{prompt} {response} {}"}, "others only for columns"),
        ({"template": "{prompt} {response} {a.b}"}, "others only for columns"),
        ({"template": "{prompt} {response"}, "such as str.format fills"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ScoringJudge(Judge("http://127.0.0.1:1/v1", "rater"), **options)


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"max_tokens": 0}, {"temperature": -1}, {"timeout": 0}])
def test_judges_that_cannot_ask_are_refused(options):
    with pytest.raises(ValueError, match="should be"):
        Judge("http://127.0.0.1:1/v1", "rater", **options)


# Faults of the endpoint

FAULTS = {
    "down": ((503, b"down"), r"status 503: 'down', in 2 attempts"),
    "dropped": (DROP, r"could not be asked .* in 2 attempts"),
    "broken": ((500, b"oh"), r"status 500: 'oh', in 1 attempt"),
    "no such path": ((404, b"no page"), r"status 404: 'no page', in 1 attempt\. Its URL should end .* in /v1"),
    "no such model": ((400, {"message": "no model rater"}), "status 400: .*no model rater"),
    "no key": ((401, b"key?"), "status 401"),
    "no choices": ({"choices": []}, "no choice as OpenAI's endpoints do"),
    "no message": ({"choices": [{}]}, "no choice as OpenAI's endpoints do"),
    "a list": ([], "no choice as OpenAI's endpoints do"),
    "a page": ((200, b"<html>"), "what is no JSON"),
    "no text": ({"choices": [{"text": None}]}, "no choice as OpenAI's endpoints do"),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_fault_of_the_endpoint_is_an_error_in_every_mode(endpoint, fault, message, on_error):
    server = endpoint(fault)
    with pytest.raises(ScorerError, match=rf"The judge 'rater': The server at {server.url}/v1.*{message}") as caught:
        call_scorer(scoring(server, unreadable=on_error), ["p", "q"], ["r", "s"], on_error)
    assert caught.value.whole_batch


def test_an_endpoint_that_hangs_or_is_not_there(endpoint):
    with pytest.raises(ScorerError, match=r"did not answer within 0\.3 s, in 2 attempts"):
        scoring(endpoint(HANG), {"timeout": 0.3})(["p"], ["r"])
    with pytest.raises(ScorerError, match="ConnectionRefusedError"):
        ScoringJudge(Judge(f"{nobody()}/v1", "rater", **HASTY))(["p"], ["r"])


def test_a_fault_that_passes_is_tried_again(endpoint):
    server = endpoint(lambda number, _request: (503, b"") if number == 0 else chat("6"))
    assert scoring(server)(["p"], ["r"]).tolist() == [6.0]


def test_an_endpoint_without_logprobs_is_asked_without_them_from_then_on(endpoint):
    def refuses(_number, request):
        return (400, {"error": "unknown: top_logprobs"}) if "logprobs" in request["body"] else chat("6")

    server = endpoint(refuses)
    scorer = scoring(server, {"concurrency": 1})
    assert scorer(["p"] * 3, ["r"] * 3).tolist() == [6.0] * 3
    assert ["logprobs" in request["body"] for request in server.requests] == [True, False, False, False]
    with pytest.raises(ScorerError, match="status 400"):
        scoring(server, {"logprobs": True})(["p"], ["r"])


def test_concurrency_is_bounded(endpoint):
    server = endpoint(lambda *_: time.sleep(0.05) or chat("6"))
    scoring(server, {"concurrency": 3})(["p"] * 12, ["r"] * 12)
    assert server.most_at_once == 3


def test_keys_are_read_from_the_environment(endpoint, monkeypatch):
    server = endpoint(rating("6"))
    scorer = scoring(server, {"key_variable": "JUDGE_KEY"})
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    assert pickle.loads(pickle.dumps(scorer))(["p"], ["r"]).tolist() == [6.0]
    assert server.requests[0]["headers"]["Authorization"] == "Bearer secret-7"
    assert b"secret-7" not in pickle.dumps(scorer)


# Comparisons


def comparing(server, judge=None, **options):
    return ComparingJudge(Judge(f"{server.url}/v1", "rater", **(HASTY | (judge or {}))), **options)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def bradley_terry(bias, strength=0.5):
    """A judge whose log-odds for the first place are the difference in length, and a liking for that place."""

    def behaviour(_number, request):
        first, second = (len(shown(request, f"response {letter}")) for letter in "AB")
        p = sigmoid(strength * (first - second) + bias)
        return chat("A" if p > 0.5 else "B", {"A": 0.9 * p, "B": 0.9 * (1 - p), "The": 0.1})

    return behaviour


@pytest.mark.parametrize("bias", [0.0, 1.5, -0.75])
def test_both_orders_are_asked_and_averaged(endpoint, bias):
    """By hand: forth = s(d + b), back = s(-d + b); without a bias the preference is the judge's own s(d)."""
    server = endpoint(bradley_terry(bias))
    found = comparing(server).compare(["p", "q"], ["four", "x"], ["xx", "four"])
    assert len(server.requests) == 4
    for comparison, difference in zip(found, (1.0, -1.5), strict=True):
        forth, back = sigmoid(difference + bias), sigmoid(-difference + bias)
        assert comparison.forth == pytest.approx(forth) and comparison.back == pytest.approx(back)
        assert comparison.preference == pytest.approx((forth + 1 - back) / 2)
        assert comparison.position_bias == pytest.approx((forth + back) / 2 - 0.5)
        if bias == 0:
            assert comparison.preference == pytest.approx(sigmoid(difference))
            assert comparison.position_bias == pytest.approx(0)
        else:
            assert np.sign(comparison.position_bias) == np.sign(bias)


def test_swapping_the_responses_turns_the_preference_round(endpoint):
    judge = comparing(endpoint(bradley_terry(0.8)))
    (one,), (other,) = judge.compare(["p"], ["a"], ["bbb"]), judge.compare(["p"], ["bbb"], ["a"])
    assert one.preference == pytest.approx(1 - other.preference)
    assert one.position_bias == pytest.approx(other.position_bias)


def test_a_judge_that_sees_places_alone_prefers_nobody(endpoint):
    for text, bias in (("A", 0.5), ("B", -0.5)):
        judge = comparing(endpoint(rating(text)))
        (comparison,) = judge.compare(["p"], ["good"], ["bad"])
        assert (comparison.preference, comparison.position_bias, comparison.consistent) == (0.5, bias, False)
        labels = judge.label(["p"], ["good"], ["bad"])
        assert (labels.preferences, labels.undecided, labels.consistency) == ([], [0], 0.0)
        assert labels.position_bias == bias


def test_equal_texts_are_even_and_not_asked_about(endpoint):
    server = endpoint(bradley_terry(1.0))
    (comparison,) = comparing(server).compare(["p"], ["same"], ["same"])
    assert (comparison.preference, comparison.position_bias, server.requests) == (0.5, 0.0, [])


@pytest.mark.parametrize(
    ("reply", "p"),
    [
        ("A", 1),
        ("B.", 0),
        ("**B**", 0),
        ("Response A", 1),
        ("The answer is B", 0),
        ("The better response is A, since", 1),
        ("b", 0),
        ("A is better", 1),
        ("A: clear", 1),
        ("A\nIt is clear.", 1),
        ("A good question", None),
        ("Both", None),
        ("Neither A nor B", None),
        ("C", None),
        ("", None),
    ],
)
def test_letters_in_replies_without_logprobs(endpoint, reply, p):
    (comparison,) = comparing(endpoint(rating(reply)), unreadable="drop", tries=1).compare(["p"], ["x"], ["y"])
    assert (math.isnan(comparison.forth) and math.isnan(comparison.preference)) if p is None else comparison.forth == p


def test_a_comparison_that_cannot_be_read_is_refused(endpoint):
    message = "answer A or B, but in 3 tries .*last 'Both', for prompt 'p', responses 'x' and 'y'"
    with pytest.raises(ScorerError, match=message):
        comparing(endpoint(rating("Both")), {"concurrency": 1}).compare(["p"], ["x"], ["y"])
    with pytest.raises(ScorerError, match="last 'The'"):
        comparing(endpoint(rating("The", {"The": 0.99, "A": 0.005}))).compare(["p"], ["x"], ["y"])


def test_labels_train_reward_models(endpoint):
    """Longer is better; rows that are even, empty or too near are told apart from those that are decided."""
    judge = comparing(endpoint(bradley_terry(0.3)))
    firsts, seconds = ["aaaa", "b", "same", "", "aa"], ["b", "aaaa", "same", "aa", "a"]
    labels = judge.label(["0", "1", "2", "3", "4"], firsts, seconds, threshold=0.7)
    assert labels.preferences == [Preference("0", "aaaa", "b"), Preference("1", "aaaa", "b")]
    assert (labels.decided, labels.undecided) == ([0, 1], [2, 3, 4])
    asked_about = [(4, 1), (1, 4), (0, 2), (2, 1)]
    biases = [(sigmoid((a - b) / 2 + 0.3) + sigmoid((b - a) / 2 + 0.3)) / 2 - 0.5 for a, b in asked_about]
    assert labels.position_bias == pytest.approx(np.mean(biases)) and labels.consistency == 1.0


def test_labels_of_dropped_replies_are_undecided(endpoint):
    labels = comparing(endpoint(rating("Both")), unreadable="drop").label(["p"], ["x"], ["y"])
    assert labels.undecided == [0] and math.isnan(labels.position_bias) and math.isnan(labels.consistency)


@pytest.mark.parametrize("threshold", [0.4, 1.0, math.nan])
def test_thresholds_that_let_the_loser_win_are_refused(endpoint, threshold):
    with pytest.raises(ValueError, match="at least 1/2 and below 1"):
        comparing(endpoint(rating("A"))).label(["p"], ["x"], ["y"], threshold=threshold)


def test_as_a_scorer_it_gives_the_chance_to_beat_a_rival(endpoint):
    server = endpoint(bradley_terry(0.0))
    prompts = [PromptRecord(" a film", {"reference_response": " not very good"})]
    end = write(TextGenerationEnv(text_task(scorer=comparing(server), prompts=prompts)), [GOOD, END])["info"]
    assert end["score"] == pytest.approx(sigmoid(0.5 * (len(" good") - len(" not very good"))))
    with pytest.raises(TypeError, match="requires 'reference_response'"):
        text_task(scorer=comparing(server))


def test_templates_of_comparisons_can_show_columns(endpoint):
    server = endpoint(rating("A"))
    judge = comparing(server, template="{prompt}|{first}|{second}|{rule}", column="rival")
    assert required_columns(judge) == ("rival", "rule")
    judge.compare(["p", "q"], ["x", "y"], ["u", "v"], rule=["short", "long"])
    assert sorted(map(asked, server.requests)) == ["p|u|x|short", "p|x|u|short", "q|v|y|long", "q|y|v|long"]


def test_a_bar_can_be_shown(endpoint, monkeypatch):
    bars = []

    @contextlib.contextmanager
    def bar(description, total, shown):
        bars.append([description, total, shown, 0])

        def advance():
            bars[-1][-1] += 1

        yield advance

    monkeypatch.setattr("textenv.rewards.judge_comparisons.progress_bar", bar)
    judge = comparing(endpoint(rating("A")), {"concurrency": 1})
    judge.compare(["p"] * 3, ["x", "y", "same"], ["u", "v", "same"], progress=True)
    assert bars == [["Comparing ...", 4, True, 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tries": 0}, "`tries` should be at least 1"),
        ({"unreadable": "zero"}, "`unreadable` one of"),
        ({"min_mass": 2}, "`min_mass` between 0 and 1"),
        ({"pattern": "A|B"}, "group for the letter"),
        ({"template": "{prompt} {first}"}, r"\{prompt\}, \{first\}, \{second\}"),
    ],
)
def test_comparisons_that_cannot_be_asked_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ComparingJudge(Judge("http://127.0.0.1:1/v1", "rater"), **options)


def test_lengths_must_agree(endpoint):
    with pytest.raises(ValueError, match="pair up, got 1 and 2"):
        comparing(endpoint(rating("A"))).compare(["p"], ["x"], ["y", "z"])


# What is read


def test_choices_are_read_where_the_judge_made_its_choice():
    tops = ({"Response": -0.1, "A": -9.0}, {" B": math.log(0.6), " A": math.log(0.3)})
    late = Reply("Response B", ("Response", " B"), tops)
    found = choice_probabilities(late, ("A", "B"), r"(?:response\W*)?")
    assert found == {"A": pytest.approx(0.3), "B": pytest.approx(0.6)}
    assert choice_probabilities(late, ("A", "B"))["A"] == pytest.approx(math.exp(-9))  # no word may lead
    assert choice_probabilities(Reply("B"), ("A", "B")) is None


@pytest.mark.parametrize(
    ("forth", "back", "consistent"), [(0.9, 0.2, True), (0.1, 0.8, True), (0.9, 0.8, False), (0.5, 0.1, False)]
)
def test_consistency(forth, back, consistent):
    assert Comparison("p", "x", "y", forth, back).consistent is consistent
