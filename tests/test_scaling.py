"""`benchmarks/scaling.py`: exponents and claims by hand, memory measured as it says, and the tables it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(*arguments, cwd):
    command = [sys.executable, str(BENCHMARKS / "scaling.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900)


JOB = {
    "model": None,
    "vocab_size": 300,
    "prompt_tokens": 2,
    "response_tokens": 3,
    "batch_size": 4,
    "dtype": "float32",
    "lora_rank": 2,
    "repetitions": 1,
    "threads": 1,
    "seed": 0,
    "whole_update": False,
    "profile": True,
}

RESULT = {
    "seconds": 0.12,
    "memory": 5e6,
    "process_memory": 90e6,
    "vocabulary_weights": 20e6,
    "vocab_size": 300,
    "budget": 40,
    "attention": 0.25,
}


# Fits


def test_exponents_by_hand():
    from support.scaling_fits import exponent

    assert exponent([2, 4, 8], [5, 10, 20]) == pytest.approx(1)
    assert exponent([1, 10], [3, 300]) == pytest.approx(2)
    assert exponent([1, 2, 4], [7, 7, 7]) == pytest.approx(0)
    # log2 figures 0, 0, 3 over 0, 1, 2: the slope is (0 * -1 + 3 * 1) / 2
    assert exponent([1, 2, 4], [1, 1, 8]) == pytest.approx(1.5)
    assert exponent([4], [1]) is None
    assert exponent([1, 2], [0, 1]) is None


def test_the_last_slope_is_that_of_the_two_largest():
    from support.scaling_fits import fit

    rows = [{"tokens": n, "memory": m} for n, m in ((1, 1), (2, 1), (4, 8))]
    found = fit(rows, "memory", "tokens")
    assert (found.exponent, found.last) == (pytest.approx(1.5), pytest.approx(3))


def test_a_row_by_hand():
    """4 responses of 3 tokens after prompts of 2: 20 tokens, 12 of them responses'; 120 ms, a quarter attention."""
    from support.scaling_fits import to_row

    row = to_row(JOB, RESULT)
    assert row["tokens"] == 20
    assert row["per_response_token"] == pytest.approx(10)
    assert row["apart_per_response_token"] == pytest.approx(7.5)
    assert row["apart_per_token"] == pytest.approx(4.5)
    assert row["besides_vocabulary"] == 70e6
    assert "apart_per_token" not in to_row(JOB, RESULT | {"attention": None})


# Claims


def sweeps(memory=1.0, flat=1.0, vocabulary=1.0, time=1.0, spread=1.0):
    """All four sweeps; exponents and ratios as asked for."""
    sizes = (10, 20, 40, 80)
    grown = [{"tokens": n, "budget": 20, "memory": n**memory, "response_tokens": n} for n in sizes]
    last = {"apart_per_response_token": time, "apart_per_token": spread}
    times = [row | {"apart_per_response_token": 1, "apart_per_token": 1} for row in grown[:3]] + [grown[3] | last]
    # The first batch does not fill a micro-batch of 20 tokens: what it takes says nothing.
    flats = [row | {"memory": m} for row, m in zip(grown, (1, 100, 100, 100 * flat), strict=True)]
    words = [{"besides_vocabulary": m} for m in (500, 9000, 500 * vocabulary)]
    return {"length": times, "batch": grown, "update": flats, "vocabulary": words}


@pytest.mark.parametrize(
    "changes, broken",
    [
        ({}, []),
        ({"memory": 1.2}, ["length: exponent", "batch: exponent"]),
        ({"flat": 1.2}, ["whole update"]),
        ({"vocabulary": 1.2}, ["vocabulary"]),
        ({"time": 1.3}, ["length: time per response token"]),
        ({"spread": 1.3}, ["length: time per token"]),
        ({"spread": 0.7}, ["length: time per token"]),
        ({"memory": 0.5, "flat": 0.5, "vocabulary": 0.5, "time": 0.5}, []),
    ],
)
def test_each_claim_fails_for_its_own_reason(changes, broken):
    from support.scaling_fits import claims

    found = claims(sweeps(**changes))
    assert len(found) == 6
    failed = [claim.text for claim in found if not claim.holds]
    assert len(failed) == len(broken) and all(a.startswith(b) for a, b in zip(failed, broken, strict=True))


def test_time_is_claimed_up_to_256_tokens_only():
    from support.scaling_fits import time_claims

    measured = ((16, 1.0, 2.0), (256, 1.1, 1.6), (512, 9.0, 9.0))
    rows = [
        {"response_tokens": n, "apart_per_response_token": response, "apart_per_token": token}
        for n, response, token in measured
    ]
    found = time_claims(rows)
    assert [claim.measured for claim in found] == pytest.approx([1.1, 1.25])
    assert all("16 to 256" in claim.text for claim in found)


def test_sweeps_that_were_not_measured_claim_nothing():
    from support.scaling_fits import claims

    assert claims({}) == []
    assert claims({"length": sweeps()["length"][:1]}) == []


# One point


def test_memory_begins_anew_where_it_is_asked_for():
    """256 MB that were held and freed before do not count; 64 MB that come after do."""
    from support.process import peak_memory
    from support.scaling_side import held_memory

    before = bytearray(b"\1") * 2**28
    del before
    held = held_memory()
    after = bytearray(b"\1") * 2**26
    assert len(after) <= peak_memory() - held < 1.5 * len(after)


def test_whole_logits_would_show_in_a_points_memory():
    """1,024 response tokens are 8 chunks: memory is above one chunk's logits, and below the logits of all."""
    from support.process import measure

    result = measure("support.scaling_side", JOB | {"vocab_size": 60_000, "batch_size": 32, "response_tokens": 32})
    logits = 4 * 60_000 * 32 * 32
    assert logits / 8 < result["memory"] < logits
    assert result["vocabulary_weights"] == 4 * 60_000 * 64
    assert result["vocab_size"] == 60_000 and len(result["times"]) == 1
    assert 0 < result["attention"] < 1


# The command


def test_vocabularies_are_measured_without_a_model(tmp_path):
    done = run(
        *("--sweeps", "vocabulary", "--vocabularies", "600", "300", "--vocabulary-batch", "2", "--held-length", "4"),
        *("--repetitions", "1", "--threads", "1", "--json", "deep/report.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Growth exponents" in done.stdout and "largest V over smallest" in done.stdout
    report = json.loads((tmp_path / "deep" / "report.json").read_text())
    rows = report["rows"]["vocabulary"]
    assert [row["vocab_size"] for row in rows] == [300, 600]  # sorted
    assert all(row["seconds"] > 0 and row["process_memory"] > 50e6 and row["tokens"] == 16 for row in rows)
    assert report["claims"][0]["bound"] == 1.15


@pytest.mark.parametrize(
    "option, message",
    [
        (("--lengths", "16", "0"), "`lengths` should be at least 1, got 0"),
        (("--repetitions", "0"), "`repetitions` should be at least 1, got 0"),
        (("--batches",), "`batches` should name at least one"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused_first(option, message, tmp_path):
    done = run(*option, cwd=tmp_path)
    assert done.returncode != 0 and message in done.stderr


@pytest.mark.slow
def test_length_batch_and_whole_update_of_a_model(tmp_path):
    done = run(
        *("--model", "tiny", "--sweeps", "length", "update", "--lengths", "4", "8", "--batches", "2", "80"),
        *("--held-batch", "2", "--repetitions", "1", "--threads", "1", "--json", "report.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "whole update (1 epoch)" in done.stdout and "apart from attention" in done.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["response_tokens"], row["tokens"]) for row in rows["length"]] == [(4, 16), (8, 24)]
    assert all(0 < row["attention"] < 1 for row in rows["length"])
    assert [row["batch_size"] for row in rows["update"]] == [2, 80] and rows["update"][0]["attention"] is None
