"""Early stopping: by hand, by property, and around `learn`."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from agent_helpers import CUT, TOY, toy_agent, toy_envs
from hypothesis import given
from hypothesis import strategies as st

from textenv.agents import PPO, TablePolicy
from textenv.rewards import EarlyStopping
from textenv.rewards.early_stopping import Watched, watch

pytestmark = pytest.mark.filterwarnings(CUT)


def run(scores, **options):
    """Where it says stop, and where the best was."""
    stopping = EarlyStopping(**options)
    for iteration, score in enumerate(scores, start=1):
        if stopping(iteration, score):
            return iteration, stopping.best_iteration
    return None, stopping.best_iteration


@pytest.mark.parametrize(
    "scores, options, wanted",
    [
        ([1, 2, 3, 2, 2, 2], {"patience": 3}, (6, 3)),
        ([1, 2, 3, 2, 2, 4, 2, 2], {"patience": 3}, (None, 6)),
        ([5, 4], {"patience": 1}, (2, 1)),
        ([1, 1, 1], {"patience": 2}, (3, 1)),  # the same again is no improvement
        ([1.0, 1.05, 1.1, 1.15], {"patience": 3, "min_delta": 0.2}, (4, 1)),
        ([1.0, 1.05, 1.1, 1.15, 1.21], {"patience": 5, "min_delta": 0.2}, (None, 5)),  # a slow rise adds up
        ([-3, -2, -4], {"patience": 2}, (None, 2)),
    ],
)
def test_by_hand(scores, options, wanted):
    assert run(scores, **options) == wanted


def test_one_step_of_the_state():
    state = watch(Watched(), 1, 0.5)
    assert state == Watched(0.5, 1, 0, 1)
    assert watch(state, 7, 0.6, min_delta=0.2) == Watched(0.5, 1, 1, 7)
    assert state == Watched(0.5, 1, 0, 1)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.integers(1, 4))
def test_it_stops_at_the_first_run_without_a_record(scores, patience):
    stop, best = run(scores, patience=patience)
    seen = scores[: stop or len(scores)]
    assert best == seen.index(max(seen)) + 1
    waited = len(seen) - best
    assert waited == patience if stop else waited < patience


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_says_nothing_is_refused(score):
    with pytest.raises(ValueError, match=r"`score` should be finite, got .* at iteration 3"):
        EarlyStopping()(3, score)


def test_iterations_go_forward():
    stopping = EarlyStopping()
    stopping(4, 1.0)
    for iteration in (4, 3):
        with pytest.raises(ValueError, match=f"later than the last one, 4, got {iteration}"):
            stopping(iteration, 2.0)


@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": 1.5}, {"patience": True}, {"min_delta": -0.1}, {"min_delta": math.nan}]
)
def test_settings_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EarlyStopping(**options)


def test_its_state_goes_through_json():
    one, other = EarlyStopping(2), EarlyStopping(2)
    one(1, 0.5)
    one(2, 0.4)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state == one.state and one(3, 0.1) and other(3, 0.1)
    assert other.best == 0.5


# Around learn


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def falling():
    """Environments whose score falls while training's rises: they pay for what training's do not."""
    envs = toy_envs(64)
    scorer = envs.unwrapped.task.scorer
    envs.unwrapped.task = dataclasses.replace(envs.unwrapped.task, scorer=lambda p, r: -scorer(p, r))
    return envs


def learner(**options):
    return toy_agent(envs=toy_envs(32, kl_coef=0.0), learning_rate=0.1, **options)


def test_learn_stops_and_keeps_the_best(tmp_path):
    agent = learner()
    stopping = EarlyStopping(3)
    agent.learn(3200, tmp_path / "run", progress=False, eval_envs=falling(), eval_every=1, early_stopping=stopping)
    scores = {row["iteration"]: row["eval/score"] for row in lines(tmp_path / "run")}
    best = max(scores, key=scores.__getitem__)
    assert stopping.best_iteration == best and agent.iteration == best + 3 < 100
    assert scores[best] == stopping.best
    kept = json.loads((tmp_path / "run" / "best" / "state.json").read_text())
    last = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    assert (kept["iteration"], last["iteration"]) == (best, best + 3)
    assert agent.learn(3200, tmp_path / "run", progress=False, eval_envs=falling(), early_stopping=stopping)
    assert agent.iteration == best + 3  # it has been enough


def test_it_says_why_it_stopped(tmp_path, capsys):
    agent = learner()
    agent.learn(3200, tmp_path / "run", eval_envs=falling(), eval_every=1, early_stopping=EarlyStopping(1))
    out = capsys.readouterr().out
    assert "Stopped early: the evaluation's score was best after iteration" in out
    assert f"kept in {tmp_path / 'run' / 'best'}" in out.replace("\n", "")


def test_training_is_what_it_would_have_been(tmp_path):
    plain, watched = learner(), learner()
    plain.learn(160, None, progress=False)
    watched.learn(160, None, progress=False, eval_envs=toy_envs(8), early_stopping=EarlyStopping(50))
    for one, other in zip(plain.policy.parameters(), watched.policy.parameters(), strict=True):
        assert one.equal(other)


def test_a_resumed_run_waits_no_longer_than_one_that_never_stopped(tmp_path):
    def evaluation():
        return {"progress": False, "eval_envs": falling(), "eval_every": 1}

    whole = learner()
    whole.learn(3200, tmp_path / "whole", early_stopping=EarlyStopping(4), **evaluation())
    first = learner()
    first.learn(64, tmp_path / "parts", early_stopping=EarlyStopping(4), **evaluation())
    assert first.iteration == 2 < whole.iteration
    again = PPO.load(tmp_path / "parts", toy_envs(32, kl_coef=0.0), TablePolicy(TOY.reference_logits))
    again.learn(3200, tmp_path / "parts", early_stopping=EarlyStopping(4), **evaluation())
    assert again.iteration == whole.iteration


def test_early_stopping_needs_evaluations_of_this_run(tmp_path):
    with pytest.raises(ValueError, match="`early_stopping` watches the score of evaluations"):
        learner().learn(32, None, progress=False, early_stopping=EarlyStopping())
    used = EarlyStopping()
    used(9, 1.0)
    with pytest.raises(ValueError, match="has seen iteration 9 of a run, and the agent is at 0"):
        learner().learn(32, None, progress=False, eval_envs=toy_envs(4), early_stopping=used)
