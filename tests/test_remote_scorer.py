"""Scorers over HTTP against servers with injected faults: an error each time, a zero never."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from helpers import BAD, END, GOOD, count_good, text_task, write
from http_helpers import CHUNKED, DRIP, DROP, HANG, REDIRECT, SHORT, fake_servers, nobody, timed

from textenv import ScorerError, TextGenerationVectorEnv, replay
from textenv.env import TextGenerationEnv
from textenv.http_json import JSONServer, RequestError, bounded_map
from textenv.prompts import PromptRecord
from textenv.rewards import ExactMatch, RemoteScorer, WeightedReward, serve_scorer
from textenv.scoring import call_scorer

HASTY = {"timeout": 5.0, "attempts": 3, "first_pause": 0.01}
PROMPTS, RESPONSES = ["ab", "cd", "ef"], [" good", " bad", " good good"]
SCORES = [1.2, -0.8, 2.2]


@pytest.fixture
def serve():
    """Makes fake servers, and closes them after the test."""
    with fake_servers() as started:
        yield started


def counted(_number, request):
    """What a right server says."""
    return {"scores": count_good(request["body"]["prompts"], request["body"]["responses"]).tolist()}


# A right server


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_scores_come_back_in_order_whatever_the_batches(serve, batch_size, concurrency):
    server = serve(counted)
    scores = RemoteScorer(server.url, batch_size=batch_size, concurrency=concurrency)(PROMPTS, RESPONSES)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, SCORES)
    assert len(server.requests) == -(-3 // batch_size)


def test_slow_batches_do_not_change_the_order(serve):
    def slow_at_first(number, request):
        time.sleep(0.2 if request["body"]["responses"] == ["0"] else 0)
        return {"scores": [float(text) for text in request["body"]["responses"]]}

    scores = RemoteScorer(serve(slow_at_first).url, batch_size=1, concurrency=8)([""] * 20, [str(n) for n in range(20)])
    assert scores.tolist() == list(range(20))


def test_at_most_so_many_requests_at_a_time(serve):
    def slow(_number, request):
        time.sleep(0.05)
        return {"scores": [0.0]}

    server = serve(slow)
    RemoteScorer(server.url, batch_size=1, concurrency=3)([""] * 12, [""] * 12)
    assert server.most_at_once == 3


def test_nothing_to_score_asks_nothing(serve):
    server = serve(counted)
    assert RemoteScorer(server.url)([], []).shape == (0,) and not server.requests


def test_context_goes_along(serve):
    server = serve({"scores": [1.0, 2.0]})
    given = {"answer": ["4", "5"], "size": [np.int64(3), np.float32(0.5)], "vector": [np.arange(2), np.arange(1)]}
    RemoteScorer(server.url)(["a", "b"], ["c", "d"], **given)
    RemoteScorer(server.url, columns=["answer"])(["a", "b"], ["c", "d"], **given, unsendable=[object(), object()])
    sent = [request["body"]["context"] for request in server.requests]
    assert sent == [{"answer": ["4", "5"], "size": [3, 0.5], "vector": [[0, 1], [0]]}, {"answer": ["4", "5"]}]


def test_columns_are_required_of_the_prompts():
    with pytest.raises(TypeError, match="requires 'gold'"):
        text_task(scorer=RemoteScorer("http://127.0.0.1:1", columns=["gold"]))


def test_texts_of_any_kind_arrive(serve):
    texts = ["ünï ☃ 🎬", "", 'a "quote"\n\t\\', "half \ud83d", "\x00"]
    server = serve(lambda _n, request: {"scores": [float(len(text)) for text in request["body"]["responses"]]})
    assert RemoteScorer(server.url)(texts, texts).tolist() == [len(text) for text in texts]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scorer: pickle.loads(pickle.dumps(scorer))])
def test_it_can_be_copied_and_pickled(serve, copied):
    np.testing.assert_allclose(copied(RemoteScorer(serve(counted).url))(PROMPTS, RESPONSES), SCORES)


def test_the_key_is_read_from_the_environment_and_kept_nowhere(serve, monkeypatch):
    server = serve(counted)
    scorer = RemoteScorer(server.url, key_variable="SCORER_KEY", **HASTY)
    monkeypatch.setenv("SCORER_KEY", " secret-7 ")
    scorer(PROMPTS, RESPONSES)
    assert server.requests[0]["headers"]["Authorization"] == "Bearer secret-7"
    assert b"secret-7" not in pickle.dumps(scorer)
    monkeypatch.delenv("SCORER_KEY")
    with pytest.raises(ScorerError, match="'SCORER_KEY' should hold its key, but is not set"):
        scorer(PROMPTS, RESPONSES)
    assert len(server.requests) == 1


# Faults that pass


@pytest.mark.parametrize("fault", [DROP, SHORT, (429, b"busy"), (502, b""), (503, b"{}"), (504, b"late")])
def test_a_fault_that_passes_is_tried_again(serve, fault):
    server = serve(lambda number, request: fault if number < 2 else counted(number, request))
    np.testing.assert_allclose(RemoteScorer(server.url, **HASTY)(PROMPTS, RESPONSES), SCORES)
    assert len(server.requests) == 3


def test_a_server_that_hangs_once_is_asked_again(serve):
    server = serve(lambda number, request: HANG if number < 1 else counted(number, request))
    np.testing.assert_allclose(RemoteScorer(server.url, timeout=0.3)(PROMPTS, RESPONSES), SCORES)


def test_pauses_double(serve, monkeypatch):
    pauses = []
    monkeypatch.setattr("textenv.http_json.time.sleep", pauses.append)
    with pytest.raises(ScorerError):
        RemoteScorer(serve((503, b"")).url, attempts=5, first_pause=0.25)(["a"], ["b"])
    assert pauses == [0.25, 0.5, 1.0, 2.0]


def test_a_busy_servers_wish_is_granted_up_to_the_timeout(serve, monkeypatch):
    pauses = []
    monkeypatch.setattr("textenv.http_json.time.sleep", pauses.append)
    wishes = ["3", "0.1", "900", "Wed, 21 Oct 2026 07:28:00 GMT"]
    server = serve(
        lambda number, _request: (429, b"", {"Retry-After": wishes[number]}) if number < 4 else {"scores": [1]}
    )
    RemoteScorer(server.url, attempts=5, first_pause=0.25, timeout=10.0)(["a"], ["b"])
    assert pauses == [3.0, 0.5, 10.0, 2.0]


# Faults that stay: (what the server does, attempts, what the error says)

STAYING = {
    "dropped": (DROP, 3, r"could not be asked \(.*\), in 3 attempts"),
    "short": (SHORT, 3, r"could not be asked \(IncompleteRead.*\), in 3 attempts"),
    "busy": ((503, b"overloaded"), 3, "answered with status 503: 'overloaded', in 3 attempts"),
    "broken": ((500, {"error": "no words left"}), 1, "answered with status 500: .*no words left.*, in 1 attempt"),
    "absent": ((404, b"no such page"), 1, "answered with status 404: 'no such page', in 1 attempt"),
    "forbidden": ((401, b"who are you?"), 1, "answered with status 401: 'who are you"),
    "elsewhere": (REDIRECT, 1, "answered with status 302"),
    "a page": ((200, b"<html>Welcome</html>"), 1, "answered with what is no JSON: '<html>Welcome"),
    "bytes": ((200, b"\xff\xfe\x00"), 1, "answered with what is no JSON"),
    "empty": ((200, b""), 1, "answered with what is no JSON: ''"),
}


@pytest.mark.parametrize(("fault", "attempts", "message"), STAYING.values(), ids=STAYING)
@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_fault_that_stays_is_an_error_in_every_mode(serve, fault, attempts, message, on_error):
    server = serve(fault)
    shown = rf"The scorer at {server.url} {message}(.|\n)*3 samples is prompt 'ab', response ' good'"
    with pytest.raises(ScorerError, match=shown) as caught:
        call_scorer(RemoteScorer(server.url, scorer_errors=on_error, **HASTY), PROMPTS, RESPONSES, on_error)
    assert caught.value.whole_batch
    assert len(server.requests) == attempts


@pytest.mark.parametrize("fault", [HANG, DRIP])
def test_a_server_that_hangs_or_drips_is_an_error_in_time(serve, fault):
    scorer = RemoteScorer(serve(fault).url, timeout=0.3, attempts=2, first_pause=0.01)

    def fails():
        with pytest.raises(ScorerError, match=r"did not answer within 0\.3 s, in 2 attempts"):
            scorer(["a"], ["b"])

    assert 0.6 < timed(fails) < 3


def test_nobody_there():
    url = nobody()
    with pytest.raises(ScorerError, match=rf"{url} could not be asked \(ConnectionRefusedError.*, in 3 attempts"):
        RemoteScorer(url, **HASTY)(PROMPTS, RESPONSES)


ANSWERS = {
    "one too few": ({"scores": [1.0, 2.0]}, "status 200 and 2 scores, where .* of 3 numbers was expected"),
    "one too many": ({"scores": [1.0] * 4}, "status 200 and 4 scores"),
    "nothing": ({}, "status 200 and {}"),
    "a number": ({"scores": 1.0}, r"status 200 and {'scores': 1\.0}"),
    "a list": ([1.0, 2.0, 3.0], r"status 200 and \[1\.0, 2\.0, 3\.0\]"),
    "null": (None, "status 200 and None"),
    "words": ({"scores": ["1.0", 2.0, 3.0]}, "status 200 and the score '1.0', which is no number"),
    "truth": ({"scores": [1.0, True, 3.0]}, "status 200 and the score True, which is no number"),
    "rows": ({"scores": [[1.0], [2.0], [3.0]]}, r"status 200 and the score \[1\.0\], which is no number"),
}


@pytest.mark.parametrize(("answer", "message"), ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_an_answer_that_is_none_is_an_error_in_every_mode(serve, answer, message, on_error):
    server = serve((200, answer))
    shown = rf"The scorer at {server.url} answered with {message}(.|\n)*prompt 'ab', response ' good'"
    with pytest.raises(ScorerError, match=shown):
        call_scorer(RemoteScorer(server.url, scorer_errors=on_error), PROMPTS, RESPONSES, on_error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("bad", [b"null", b"NaN", b"Infinity", b"-1e999"])
def test_a_score_that_is_not_finite_is_an_error_or_dropped(serve, bad):
    server = serve((200, b'{"scores": [1.0, ' + bad + b", 3.0]}"))
    shown = rf"{server.url} answered with status 200, but: .*one finite number.*prompt 'cd', response ' bad'"
    with pytest.raises(ScorerError, match=shown) as caught:
        call_scorer(RemoteScorer(server.url), PROMPTS, RESPONSES)
    assert not caught.value.whole_batch
    scores = call_scorer(RemoteScorer(server.url, scorer_errors="drop"), PROMPTS, RESPONSES, "drop")
    np.testing.assert_array_equal(scores, [1.0, np.nan, 3.0])


def test_a_number_beyond_floats_is_an_error(serve):
    server = serve((200, b'{"scores": [1' + b"0" * 400 + b"]}"))
    with pytest.raises(ScorerError, match="should return 1 numbers"):
        RemoteScorer(server.url)(["a"], ["b"])


def test_context_that_json_cannot_hold_is_an_error_in_every_mode(serve):
    server = serve(counted)
    for values in ([object()], [float("nan")]):
        with pytest.raises(ScorerError, match="was not asked: the request should be JSON, but"):
            call_scorer(RemoteScorer(server.url), ["a"], ["b"], "drop", {"thing": values})
    with pytest.raises(ScorerError, match=r"column 'gold' of .* got the columns \['answer'\]"):
        RemoteScorer(server.url, columns=["gold"])(["a"], ["b"], answer=["4"])
    assert not server.requests


def test_after_a_failure_no_more_batches_are_sent(serve):
    server = serve((500, b"broken"))
    with pytest.raises(ScorerError):
        RemoteScorer(server.url, batch_size=1, concurrency=2)([""] * 200, [""] * 200)
    assert len(server.requests) < 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:9000"}, "scheme and port included, got '127"),
        ({"url": "http://"}, "scheme and port included"),
        ({"url": None}, "scheme and port included, got None"),
        ({"batch_size": 0}, "`batch_size` and `concurrency` should be at least 1"),
        ({"concurrency": 0}, "should be at least 1"),
        ({"timeout": 0}, "`timeout` should be above 0"),
        ({"timeout": float("nan")}, "`timeout` should be above 0"),
        ({"attempts": 0}, "`attempts` at least 1"),
        ({"columns": "answer"}, r"Write columns=\['answer'\]"),
        ({"scorer_errors": "ignore"}, "`scorer_errors` should be one of"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteScorer(**({"url": "http://127.0.0.1:1"} | options))


# Faults in environments and in a weighted sum


def test_a_fault_reaches_the_environment_and_nothing_is_stepped(serve):
    server = serve((503, b"down"))
    for mode in ("raise", "drop"):
        task = text_task(scorer=RemoteScorer(server.url, **HASTY), scorer_errors=mode)
        with pytest.raises(ScorerError, match="status 503"):
            write(TextGenerationEnv(task), [BAD, END], options={"prompt": " a film"})
        envs = TextGenerationVectorEnv(2, task)
        envs.reset(options={"prompt": " films"})
        with pytest.raises(ScorerError, match="status 503"):
            replay(envs, [" films", " a film"], [[GOOD, END], [BAD, END]])
        assert envs.render() == (" films", " films")


@pytest.mark.parametrize("inner", ["raise", "drop"])
def test_a_fault_in_a_weighted_sum_names_the_part_and_the_server(serve, inner):
    server = serve((503, b"down"))
    parts = {"near": (1.0, count_good), "far": (1.0, RemoteScorer(server.url, **HASTY))}
    with pytest.raises(ScorerError, match=rf"The part 'far' of a WeightedReward: The scorer at {server.url} .*503"):
        call_scorer(WeightedReward(parts, scorer_errors=inner), PROMPTS, RESPONSES, "drop")
    assert len(server.requests) == 3


# `serve_scorer`


def test_a_scorer_behind_http_scores_as_it_does_here():
    with serve_scorer(count_good) as server:
        scores = RemoteScorer(server.url, batch_size=2)(PROMPTS, RESPONSES)
    np.testing.assert_array_equal(scores, count_good(PROMPTS, RESPONSES))
    with pytest.raises(ScorerError, match="could not be asked"):
        RemoteScorer(server.url, **HASTY)(PROMPTS, RESPONSES)


def test_context_reaches_the_scorer_that_takes_it():
    prompts = [PromptRecord(" a film", {"answer": "good", "source": "x"})]
    with serve_scorer(ExactMatch()) as exact, serve_scorer(count_good) as plain:
        scorer = WeightedReward({"exact": (1.0, RemoteScorer(exact.url)), "plain": (0.5, RemoteScorer(plain.url))})
        end = write(TextGenerationEnv(text_task(scorer=scorer, prompts=prompts)), [GOOD, END])["info"]
    assert end["score/exact"] == 1.0 and end["score/plain"] == pytest.approx(1.7)


@pytest.mark.parametrize("concurrent", [False, True])
def test_calls_wait_for_each_other_unless_the_scorer_may_be_shared(concurrent):
    running, most, lock = 0, 0, threading.Lock()

    def slow(prompts, responses):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return [0.0] * len(responses)

    with serve_scorer(slow, concurrent=concurrent) as server:
        RemoteScorer(server.url, batch_size=1, concurrency=4)([""] * 8, [""] * 8)
    assert most == 4 if concurrent else most == 1


def faulty(prompts, responses):
    if " bad" in responses:
        raise ZeroDivisionError("no words left")
    return [1.0] * len(responses)


def test_a_scorers_fault_is_told_to_the_client():
    with serve_scorer(faulty) as server:
        with pytest.raises(ScorerError, match=r"status 500: .*ZeroDivisionError: no words left.*prompt 'cd'"):
            RemoteScorer(server.url)(PROMPTS, RESPONSES)
        assert RemoteScorer(server.url)(["a"], ["b"]).tolist() == [1.0]  # it goes on
    with serve_scorer(faulty, scorer_errors="drop") as server:
        with pytest.raises(ScorerError, match="one finite number per response, got None for prompt 'cd'"):
            RemoteScorer(server.url)(PROMPTS, RESPONSES)
        scores = RemoteScorer(server.url, scorer_errors="drop")(PROMPTS, RESPONSES)
    np.testing.assert_array_equal(scores, [1.0, np.nan, 1.0])


def test_a_wrong_number_of_scores_is_told_to_the_client():
    with serve_scorer(lambda p, r: [1.0], scorer_errors="drop") as server:
        with pytest.raises(ScorerError, match=r"status 500: .*should return 3 scores"):
            RemoteScorer(server.url, scorer_errors="drop")(PROMPTS, RESPONSES)


REFUSED = {
    "no JSON": (b"{", 400, "should be JSON"),
    "a list": (b"[]", 400, "the body should be"),
    "no responses": (b'{"prompts": ["a"]}', 400, "the body should be"),
    "numbers": (b'{"prompts": [1], "responses": ["a"]}', 400, "the body should be"),
    "unequal": (b'{"prompts": ["a"], "responses": []}', 400, "a list of 1 values"),
    "short column": (b'{"prompts": ["a"], "responses": ["b"], "context": {"c": []}}', 400, "a list of 1 values"),
    "no columns": (b'{"prompts": ["a"], "responses": ["b"], "context": 3}', 400, "a list of 1 values"),
}


def ask(url, body=None):
    try:
        with urllib.request.urlopen(url, body, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize(("body", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_requests_that_are_none_are_refused(body, status, message):
    with serve_scorer(count_good) as server:
        answer = ask(server.url, body)
        assert answer[0] == status and message in answer[1]["error"]
        assert ask(server.url, b'{"prompts": ["ab"], "responses": [" good"]}') == (200, {"scores": [1.2]})


def test_other_paths():
    with serve_scorer(count_good) as server:
        base = server.url.removesuffix("/score")
        assert ask(f"{base}/health") == (200, {"status": "ok"})
        assert ask(f"{base}/elsewhere")[0] == 404
        assert ask(f"{base}/elsewhere", b"{}")[0] == 404


def test_a_port_that_is_taken_is_an_error():
    with serve_scorer(count_good) as server:
        with pytest.raises(OSError, match="in use"):
            serve_scorer(count_good, port=int(server.url.split(":")[2].split("/")[0]))


# The parts beneath


def test_errors_survive_the_way_between_processes():
    error = pickle.loads(pickle.dumps(RequestError("http://a", 3, 503, "answered with status 503: ''")))
    assert (error.url, error.attempts, error.status) == ("http://a", 3, 503)
    assert str(error) == "The server at http://a answered with status 503: '', in 3 attempts."
    scorer_error = pickle.loads(pickle.dumps(ScorerError("down", whole_batch=True)))
    assert scorer_error.whole_batch and str(scorer_error) == "down"


def test_proxies_are_not_asked_for_loopback_addresses(serve, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, nobody())
    assert JSONServer(serve({"a": 1}).url).post({}) == {"a": 1}


def test_long_answers_are_read_whole(serve):
    long = {"scores": [0.125] * 100_000}
    assert JSONServer(serve(long).url).post({}) == long
    assert JSONServer(serve((CHUNKED, long)).url).post({}) == long


def test_bounded_map_keeps_order_raises_and_tells_progress():
    done = []
    assert bounded_map(lambda n: n * n, range(10), 3, lambda: done.append(1)) == [n * n for n in range(10)]
    assert len(done) == 10
    with pytest.raises(ZeroDivisionError):
        bounded_map(lambda n: 1 // n, range(10), 3)
    assert bounded_map(lambda n: n, [], 3) == []
