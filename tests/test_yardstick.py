"""`benchmarks/agents.py`: what it measures is measured right, and it leaves what it promises."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lm_helpers import PROMPTS, llama, save_model

from textenv.oracle import enumerate_responses
from textenv.toy import ToyLanguage, sum_over_tokens

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUIET = (
    "ignore:Every response of a batch was cut",
    "ignore:Every advantage of a batch is 0",
)

SMALL = ToyLanguage(
    reference_logits=np.array([[0.0, 1.0, 0.5], [0.2, 0.0, -0.4], [0.0, 0.0, 0.0]]),
    stop_id=0,
    token_scores=np.array([0.0, 1.0, -0.5]),
    unfinished_score=-0.3,
)


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def small():
    from support.yard_toys import Toy

    return Toy("small", SMALL, 0.5)


# Toys


def test_the_best_of_n_by_listing_pairs(small):
    from support.yard_toys import best_of_n

    responses, _ = enumerate_responses(SMALL)
    chances = np.exp(sum_over_tokens(SMALL.reference_logprobs, responses))
    scores = SMALL.score_padded(responses)
    law = np.zeros(len(scores))
    for i, j in itertools.product(range(len(scores)), repeat=2):
        best = [k for k in (i, j) if scores[k] >= max(scores[i], scores[j]) - 1e-12]
        for k in best:
            law[k] += chances[i] * chances[j] / len(best)
    found = best_of_n(small, 2)
    assert found.score == pytest.approx(law @ scores)
    assert found.kl == pytest.approx(law @ np.log(law / chances))
    assert best_of_n(small, 1).kl == pytest.approx(0, abs=1e-12)


def test_mean_length_is_that_of_the_list():
    from support.yard_toys import mean_length

    responses, lengths = enumerate_responses(SMALL)
    chances = np.exp(sum_over_tokens(SMALL.reference_logprobs, responses))
    assert mean_length(SMALL) == pytest.approx(chances @ lengths)


def test_toys_are_the_same_every_time_and_have_something_to_learn():
    from support.yard_toys import listable, make_toy

    toy = make_toy("64x16", 0.1)
    assert toy.language == make_toy("64x16", 0.1).language
    assert toy.language.reference_logits.shape == (16, 64) and not listable(toy.language)
    assert toy.measure(toy.language.reference_logprobs).distance > 5
    assert listable(make_toy("standard", 0.1).language)


# Runs


def contender_of(steps, **fields):
    from support.yard_agents import Contender

    def train(_toy, _seed, _budget, settings):
        yield from steps(settings)

    return Contender(train, **{"settings": {}, "grid": ({},)} | fields)


def towards(optimum, share):
    """A table between the reference and the optimum."""
    mixed = (1 - share) * np.exp(SMALL.reference_logprobs) + share * np.exp(optimum)
    return np.log(mixed)


def test_a_run_keeps_to_its_budget_and_shows_its_checkpoints(small):
    from support.yard_runs import run

    from textenv.oracle import solve

    optimum = solve(SMALL, 0.5).policy_logprobs
    tables = [(tokens, towards(optimum, min(1, tokens / 100))) for tokens in (10, 30, 60, 90, 110)]
    found = run(contender_of(lambda _: tables), small, 0, 100, 2)
    assert [point.tokens for point in found.points] == [
        0,
        60,
        90,
    ]  # half is passed at 60; 110 is too much
    for point, share in zip(found.points, (0, 0.6, 0.9), strict=True):
        assert point.distance == pytest.approx(small.measure(towards(optimum, share)).distance)
    last = found.last.distance
    assert found.reaches(last, "tokens") == 90 and found.reaches(last / 2, "tokens") == math.inf
    assert found.reaches(found.points[0].distance, "tokens") == 0


def test_reaching_means_staying():
    from support.yard_runs import Point, Run

    points = [
        Point(tokens, tokens / 10, distance, 0, 0) for tokens, distance in ((0, 9), (1, 1), (2, 3), (3, 1), (4, 1))
    ]
    assert Run(0, points).reaches(2, "tokens") == 3
    assert Run(0, points).reaches(2, "seconds") == pytest.approx(0.3)


def test_a_summary_by_hand():
    from support.yard_runs import Point, Run, summary

    runs = [Run(i, [Point(0, 0, 5, 0, 0), Point(10, 2.0, end, 1.0, 3.0)]) for i, end in enumerate((0.01, 0.02, 0.09))]
    found = summary(runs, 0.05)
    assert found["median"] == 0.02 and found["mean"] == pytest.approx(0.04) and found["worst"] == 0.09
    assert found["std"] == pytest.approx(math.sqrt((0.03**2 + 0.02**2 + 0.05**2) / 2))
    assert found["within_target"] == 2 and found["tokens_to_target"] == 10


def test_the_search_takes_the_nearest_to_the_optimum(small):
    from support.yard_runs import search

    from textenv.oracle import solve

    optimum = solve(SMALL, 0.5).policy_logprobs
    contender = contender_of(
        lambda settings: [(100, towards(optimum, settings["share"]))], grid=tuple({"share": x} for x in (0.2, 0.9, 0.5))
    )
    found = search(contender, small, [0, 1], 100)
    assert [row["settings"]["share"] for row in found] == [0.9, 0.5, 0.2]


def test_every_agent_is_searched_alike():
    from support.yard_agents import CONTENDERS

    assert len({len(contender.grid) for contender in CONTENDERS.values()}) == 1
    for contender in CONTENDERS.values():
        chosen = {key: contender.settings[key] for key in contender.grid[0]}
        assert chosen in contender.grid, (contender, "what runs was among what was tried")


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize(
    "name",
    [
        "PPO",
        "GRPO",
        "GRPO, unbiased",
        "RLOO",
        "REINFORCE",
        "OnlineDPO",
        "ExpertIteration",
        "DPO",
        "PPO of Stable-Baselines3",
    ],
)
def test_every_agent_comes_nearer(name):
    from support.yard_agents import CONTENDERS
    from support.yard_runs import run
    from support.yard_toys import make_toy

    assert set(CONTENDERS) >= {name}
    found = run(CONTENDERS[name], make_toy("standard", 0.1), 0, 20_000, 4)
    share = found.last.distance / found.points[0].distance
    assert share < 0.9, found.points
    assert 14_000 < found.last.tokens <= 20_000 and found.last.seconds > 0


# Files


def test_rows_take_the_place_of_earlier_ones_and_hold_json(tmp_path):
    from support.yard_report import add

    path = tmp_path / "report.json"
    add(path, "first", [{"agent": "a", "x": math.inf}, {"agent": "b", "x": 1.23456789}], ("agent",))
    found = add(path, "second", [{"agent": "a", "x": 2.0}], ("agent",))
    stored = json.loads(path.read_text())
    assert {row["agent"]: row["x"] for row in stored["rows"]} == {"b": 1.23457, "a": 2.0}
    assert found["commands"] == stored["commands"] == ["first", "second"]
    assert set(stored["versions"]) == {"python", "torch", "transformers", "stable-baselines3", "gymnasium", "numpy"}


@pytest.mark.filterwarnings(*QUIET)
def test_toys_leave_a_table_a_figure_and_rows(tmp_path, monkeypatch):
    place = importlib.util.spec_from_file_location("yardstick", BENCHMARKS / "agents.py")  # `agents` is the users' name
    yardstick = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, "yardstick", yardstick)
    place.loader.exec_module(yardstick)
    options = yardstick.Toys(agents=("PPO", "RLOO"), seeds=2, tokens=8_000, checkpoints=3, output=tmp_path)
    yardstick.toys(options)
    rows = {row["agent"]: row for row in json.loads((tmp_path / "agents_toys.json").read_text())["rows"]}
    assert set(rows) == {"PPO", "RLOO", "reference", "best of 16", "best of 1024"}
    assert rows["PPO"]["seeds"] == 2 and len(rows["PPO"]["ends"]) == 2
    assert rows["best of 1024"]["median"] < rows["best of 16"]["median"] < rows["reference"]["median"]
    text = (tmp_path / "agents_toys.md").read_text()
    assert "| PPO |" in text and "8,000 tokens, 2 seeds" in text
    assert (tmp_path / "agents_toys.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_names_its_parts():
    command = [sys.executable, str(BENCHMARKS / "agents.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(part in done.stdout for part in ("toys", "search", "reviews"))


# Film reviews


def record(tokens, score, kl):
    return {"tokens": tokens, "seconds": tokens / 10, "score": score, "kl": kl, "shaped_return": score}


def test_the_race_by_hand():
    from support.yard_policies import SB3_NAME
    from support.yard_reviews import race, race_text

    fast = [record(10 * i, 0.1 * i, 0.2 * i) for i in range(11)]
    slow = [record(50 * i, 0.05 * i, 0.2 * i) for i in range(11)]
    rows = [{"agent": name, "runs": [{"curve": curve}]} for name, curve in (("PPO", fast), (SB3_NAME, slow))]
    found = race({"rows": rows}, 0.4)
    # The mean of the last three is the middle one's: 0.4 at the record of 0.5, whose KL is 1.0.
    assert found["PPO"]["tokens"] == 50 and found["PPO"]["seconds"] == 5
    assert found["kl"] == pytest.approx(1.25)
    assert found[SB3_NAME]["seconds"] == math.inf  # it has 0.4 at 1.6 nats only
    assert "not reached within 50 s and 500 tokens" in race_text(found)
    assert race({"rows": rows[:1]}, 0.4) is None


def vowels(_prompts, responses, **_):
    return [sum(char in "aeiou" for char in response) for response in responses]


@pytest.mark.filterwarnings(*QUIET)
def test_reviews_leave_a_frontier_a_race_and_an_optimum(tmp_path):
    from support.yard_policies import AGENTS, SB3_NAME
    from support.yard_reviews import Reviews, reviews

    options = Reviews(
        agents=("PPO", "RLOO", "DPO", SB3_NAME),
        seeds=2,
        tokens=100,
        search_tokens=40,
        learning_rates=(1e-3, 1e-2),
        model=save_model(tmp_path / "model", llama()),
        prompts=PROMPTS,
        scorer=vowels,
        max_response_tokens=5,
        num_envs=8,
        lora_rank=2,
        dtype="float32",
        kl_coef=2.0,
        eval_episodes=16,
        optimum_prompts=2,
        optimum_samples=128,
        output=tmp_path,
    )
    reviews(options, "the command")
    rows = {row["agent"]: row for row in json.loads((tmp_path / "agents_reviews.json").read_text())["rows"]}
    assert set(rows) == {
        *options.agents,
        "reference",
        "best of 2",
        "best of 4",
        "best of 8",
        "best of 16",
        "best of 32",
    }
    assert set(AGENTS) > {"PPO", "GRPO", "OnlineDPO", "ExpertIteration"}
    assert rows["reference"]["optimum_value"][1] <= rows["reference"]["optimum_value"][0]
    assert rows["reference"]["optimum_value"][0] > rows["reference"]["score"]
    assert rows["best of 32"]["score"] > rows["best of 2"]["score"] > rows["reference"]["score"]
    for name in options.agents:
        row = rows[name]
        assert len(row["runs"]) == 2 and len(row["search"]) == 2 and row["learning_rate"] in options.learning_rates
        assert row["runs"][0]["distance"][1] < row["runs"][0]["distance"][0] < row["runs"][0]["distance"][2]
    curve = rows[SB3_NAME]["runs"][0]["curve"]
    assert curve[-1]["tokens"] >= 100 and curve[0]["seconds"] < curve[-1]["seconds"]
    text = (tmp_path / "agents_reviews.md").read_text()
    assert "To a score of" in text and "The optimum of 2 prompts" in text and "the command" in text
    assert (tmp_path / "agents_reviews.png").exists()


@pytest.mark.filterwarnings(*QUIET)
def test_a_run_that_is_cut_by_time_says_so(tmp_path):
    from support.yard_policies import SB3_NAME, train
    from support.yard_reviews import Reviews

    options = Reviews(
        tokens=10**6,
        model=save_model(tmp_path / "model", llama()),
        prompts=PROMPTS,
        scorer=vowels,
        max_response_tokens=5,
        num_envs=8,
        lora_rank=2,
        dtype="float32",
        seconds=0.5,
    )
    for name in ("REINFORCE", SB3_NAME):
        _, records = train(name, options, 0, 1e-3, options.tokens)
        assert records and records[-1]["tokens"] < options.tokens
    assert dataclasses.replace(options, dtype="auto").arithmetic in ("float32", "bfloat16")
