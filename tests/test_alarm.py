"""The alarm: what sets it off, what does not, and that training does not notice."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from agent_helpers import CUT, TOY, lm_agent, lm_envs, toy_agent, toy_envs
from hypothesis import given
from hypothesis import strategies as st
from test_run_log import stats_of

from textenv.agents import PPO, Alarm, AlarmLimits, RewardHackingWarning, TablePolicy
from textenv.agents.alarm import CURES, FIGURES, judge
from textenv.agents.stats import UpdateStats, iteration_stats
from textenv.agents.types import Rollout
from textenv.metrics import repetition_rate

pytestmark = pytest.mark.filterwarnings(CUT)

HEALTHY = {
    "score": 0.0,
    "score_std": 1.0,
    "repetition": 0.05,
    "distinct_2": 0.9,
    "response_length": 20.0,
    "ref_perplexity": 30.0,
    "score_surprise": 0.1,
}
HACKED = {
    "repetition": {"repetition": 0.21},
    "diversity": {"distinct_2": 0.69},
    "length": {"response_length": 30.5},
    "perplexity": {"score": 1.1, "ref_perplexity": 61.0},
    "surprise": {"score": 1.1, "score_surprise": 0.65},
}


def feed(alarm, rows, start=1):
    """Kinds of alarm by iteration."""
    heard = {}
    for iteration, row in enumerate(rows, start):
        notices = alarm({"iteration": iteration, **HEALTHY, **row})
        assert all(notice.iteration == iteration for notice in notices)
        if notices:
            heard[iteration] = [notice.kind for notice in notices]
    return heard


# What it makes of figures


@pytest.mark.parametrize("kind", HACKED)
def test_each_alarm_has_its_own_cause(kind):
    found = judge(HEALTHY, HEALTHY | HACKED[kind], AlarmLimits())
    assert list(found) == [kind]
    saw, cure = found[kind]
    assert cure == CURES[kind] and "Usual cures: " in cure
    figure = {"repetition": "21%", "diversity": "0.69", "length": "30.5", "perplexity": "61", "surprise": "0.65"}[kind]
    assert figure in saw and judge(HEALTHY, HEALTHY, AlarmLimits()) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"repetition": 0.19},
        {"distinct_2": 0.71},
        {"response_length": 29.5},
        {"response_length": 13.6},
        {"ref_perplexity": 600.0},  # odd texts that bring no score are no hack of the score
        {"score": 0.9, "ref_perplexity": 600.0, "score_surprise": 0.9},
        {"score": 9.0},  # a score that rises is what training is for
        {"score": 9.0, "ref_perplexity": 3.0, "score_surprise": -0.9},
        {"repetition": 0.0, "distinct_2": 1.0},
    ],
)
def test_healthy_figures_are_left_alone(change):
    assert judge(HEALTHY, HEALTHY | change, AlarmLimits()) == {}


def test_length_drifts_both_ways():
    assert list(judge(HEALTHY, HEALTHY | {"response_length": 13.3}, AlarmLimits())) == ["length"]


def test_a_negative_correlation_at_first_does_not_count_as_a_head_start():
    """From -0.4 to 0.3 is a rise of 0.7, but 0.3 alone is no sign that oddness pays."""
    first = HEALTHY | {"score_surprise": -0.4}
    assert judge(first, first | {"score": 2.0, "score_surprise": 0.3}, AlarmLimits()) == {}


@given(st.sampled_from(FIGURES), st.sampled_from(["first", "now"]))
def test_what_is_not_defined_sets_nothing_off(name, which):
    rows = {"first": dict(HEALTHY), "now": HEALTHY | {k: v for hacked in HACKED.values() for k, v in hacked.items()}}
    everything = set(judge(**rows, limits=AlarmLimits()))
    assert everything == set(HACKED)
    rows[which][name] = math.nan
    assert set(judge(**rows, limits=AlarmLimits())) < everything or name == "score_std"


def test_scores_that_did_not_vary_at_first_have_no_deviation_to_gain():
    first = HEALTHY | {"score_std": 0.0}
    assert "perplexity" not in judge(first, first | HACKED["perplexity"], AlarmLimits())


@pytest.mark.parametrize(
    "limit", [{"repetition": 0.0}, {"length": 1.0}, {"perplexity": 0.5}, {"score_gain": -1.0}, {"surprise": math.nan}]
)
def test_limits_that_chance_would_cross_are_refused(limit):
    with pytest.raises(ValueError, match=f"`{next(iter(limit))}` should be above"):
        AlarmLimits(**limit)


def test_a_limit_can_be_left_out():
    assert judge(HEALTHY, HEALTHY | HACKED["length"], AlarmLimits(length=math.inf)) == {}


# When it sounds


def test_it_compares_means_of_the_last_with_those_of_the_first():
    alarm = Alarm(baseline=2, window=2)
    lengths = [10, 30, 20, 31, 28, 33, 20]  # first two: 20; pairs from iteration 4: 25.5, 29.5, 30.5, 26.5
    heard = feed(alarm, [{"response_length": length} for length in lengths])
    assert heard == {6: ["length"]}


def test_it_sounds_once_until_the_figures_have_recovered():
    alarm = Alarm(baseline=1, window=1)
    bad, good = HACKED["repetition"], {}
    heard = feed(alarm, [good, bad, bad, bad | HACKED["diversity"], bad, good, bad])
    assert heard == {2: ["repetition"], 4: ["diversity"], 7: ["repetition"]}
    assert [notice.iteration for notice in alarm.notices] == [2, 4, 7]


def test_a_figure_that_is_null_in_the_log_is_not_defined():
    alarm = Alarm(baseline=1, window=1)
    assert feed(alarm, [{}, {"ref_perplexity": None, "score": 3.0}, {"ref_perplexity": 90.0, "score": 3.0}]) == {
        3: ["perplexity"]
    }


def test_records_and_lines_of_metrics_are_the_same_to_it():
    by_record, by_line = Alarm(baseline=1, window=1), Alarm(baseline=1, window=1)
    for iteration in range(1, 5):
        stats = stats_of(iteration, repetition=iteration / 10)
        assert by_record(stats) == by_line(json.loads(json.dumps(stats.metrics())))
    assert "repetition" in {notice.kind for notice in by_record.notices}


def test_an_alarm_belongs_to_one_run():
    alarm = Alarm()
    feed(alarm, [{}] * 4)
    with pytest.raises(ValueError, match=r"after 4, got 4.*another\s+Alarm"):
        feed(alarm, [{}], start=4)
    for options in ({"baseline": 0}, {"window": 0}, {"window": 1.5}, {"baseline": True}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` should be an integer of at least 1"):
            Alarm(**options)


def test_a_notice_is_one_line_that_says_when_what_and_what_to_do():
    alarm = Alarm(baseline=1, window=1)
    feed(alarm, [{}, HACKED["diversity"]])
    line = str(alarm.notices[0])
    assert line.startswith(
        "iteration 2, diversity: Responses have grown alike: distinct-2 fell from 0.90 to 0.69. Usual"
    )
    assert "\n" not in line


# The figures it needs


def test_repetition_by_hand():
    text = "so good so good so good"  # 4-grams: sgsg gsgs sgsg
    assert repetition_rate([text]) == pytest.approx(1 / 3)
    assert repetition_rate([text, "four words of text", "too short"]) == pytest.approx(1 / 6)
    assert repetition_rate(["So GOOD so good so"], 2) == pytest.approx(2 / 4)
    assert math.isnan(repetition_rate(["too short"])) and math.isnan(repetition_rate([]))
    assert repetition_rate(["word " * 50]) == pytest.approx(46 / 47)


def rollout_of(scores, ref_logprobs, mask, responses):
    count, width = len(scores), len(mask[0])
    zeros = torch.zeros(count, width)
    return Rollout(
        input_ids=torch.zeros(count, width, dtype=torch.long),
        attention_mask=torch.ones(count, width, dtype=torch.long),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        logprobs=zeros,
        ref_logprobs=None if ref_logprobs is None else torch.tensor(ref_logprobs),
        values=zeros,
        rewards=zeros,
        advantages=zeros,
        returns=zeros,
        scores=torch.tensor(scores),
        finish_reason=("stop",) * count,
        prompts=("p",) * count,
        responses=tuple(responses),
        seconds={},
    )


def figures_of(*rollout):
    numbers = {"iteration": 1, "episodes": 1, "kl_coef": 0.1, "learning_rate": 0.1}
    return iteration_stats(rollout_of(*rollout), UpdateStats(0.2), **numbers)


def test_perplexity_and_its_price_by_hand():
    """Nats per token 1, 2 and 4 with scores 0, 1 and 3: 9 nats over 4 tokens. Padding and dropped rows are out."""
    nan = math.nan
    stats = figures_of(
        [0.0, 1.0, 3.0, nan],
        [[-1.0, nan], [-1.5, -2.5], [-4.0, 99.0], [-50.0, -50.0]],
        [[1, 0], [1, 1], [1, 0], [1, 1]],
        ["a a a a a", "b", "c", "d d d d d d"],
    )
    assert stats.ref_perplexity == pytest.approx(math.exp(9 / 4))
    assert stats.score_surprise == pytest.approx(np.corrcoef([0, 1, 3], [1, 2, 4])[0, 1])
    assert stats.repetition == pytest.approx(1 / 2)


def test_without_a_reference_there_is_no_perplexity():
    for stats in (
        figures_of([0.0, 1.0], None, [[1], [1]], ["a", "b"]),
        figures_of([math.nan], [[-1.0]], [[1]], ["a"]),
    ):
        assert math.isnan(stats.ref_perplexity) and math.isnan(stats.score_surprise)
    same = figures_of([2.0, 2.0], [[-1.0], [-3.0]], [[1], [1]], ["a", "b"])
    assert same.ref_perplexity == pytest.approx(math.exp(2)) and math.isnan(same.score_surprise)


# Around learn


def collapsing(**options):
    """An agent that soon writes the one best string and nothing else."""
    return toy_agent(envs=toy_envs(32, kl_coef=0.0), learning_rate=0.3, epochs=4, **options)


def test_learn_warns_and_keeps_what_it_said(tmp_path):
    alarm = Alarm(AlarmLimits(diversity=0.05, repetition=0.01, length=1.2), baseline=1, window=1)
    with pytest.warns(RewardHackingWarning) as caught:
        collapsing().learn(640, tmp_path / "run", progress=False, alarm=alarm)
    heard = [warning for warning in caught if warning.category is RewardHackingWarning]
    said = [str(warning.message) for warning in heard]
    assert said == [str(notice) for notice in alarm.notices]
    assert (tmp_path / "run" / "alarms.txt").read_text().splitlines() == said
    assert {warning.filename for warning in heard} == {__file__}


def test_training_does_not_notice():
    plain, watched = collapsing(), collapsing()
    plain.learn(320, None, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RewardHackingWarning)
        watched.learn(320, None, progress=False, alarm=Alarm(AlarmLimits(length=1.01), baseline=1, window=1))
    for one, other in zip(plain.policy.parameters(), watched.policy.parameters(), strict=True):
        assert one.equal(other)


def test_a_resumed_run_remembers_how_it_began(tmp_path):
    def learn(agent, total, folder):
        alarm = Alarm(AlarmLimits(length=1.05), baseline=2, window=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RewardHackingWarning)
            agent.learn(total, folder, progress=False, alarm=alarm)
        return alarm

    whole = learn(collapsing(), 320, tmp_path / "whole")
    learn(collapsing(), 128, tmp_path / "run")
    loaded = PPO.load(tmp_path / "run", toy_envs(32, kl_coef=0.0), TablePolicy(TOY.reference_logits))
    assert learn(loaded, 320, tmp_path / "run").notices == whole.notices != []
    assert (tmp_path / "run" / "alarms.txt").read_text() == (tmp_path / "whole" / "alarms.txt").read_text()


def test_alarms_of_an_abandoned_attempt_are_dropped(tmp_path):
    from textenv.agents.run_log import RunLog

    with RunLog(tmp_path / "run", 30, progress=False) as log:
        for iteration in (1, 2, 12):
            log.record(stats_of(iteration))
            log.alarm(f"iteration {iteration}, length: x")
    with RunLog(tmp_path / "run", 30, iteration=2, progress=False, goes_on=True):
        pass
    assert (tmp_path / "run" / "alarms.txt").read_text().splitlines() == [f"iteration {i}, length: x" for i in (1, 2)]


def test_an_alarm_of_another_run_is_refused_before_training():
    alarm = Alarm()
    feed(alarm, [{}] * 3)
    agent = collapsing()
    with pytest.raises(ValueError, match="`alarm` should be new or of this run"):
        agent.learn(64, None, progress=False, alarm=alarm)
    assert agent.iteration == 0


def test_made_an_error_it_stops_after_the_checkpoint(tmp_path):
    agent = collapsing()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RewardHackingWarning)
        with pytest.raises(RewardHackingWarning):
            agent.learn(
                6400, tmp_path / "run", progress=False, alarm=Alarm(AlarmLimits(length=1.01), baseline=1, window=1)
            )
    saved = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    assert saved["iteration"] == agent.iteration < 200


def test_a_language_model_that_is_paid_for_one_word_sets_it_off(tiny_model):
    """A tiny model whose score is the number of letters e: it soon writes little else."""

    def scorer(_prompts, responses):
        return [response.count("e") for response in responses]

    envs = lm_envs(tiny_model, 16, scorer=scorer, kl_coef=0.0, max_response_tokens=12, stop=None)
    agent = lm_agent(tiny_model, envs, learning_rate=0.05, epochs=4)
    alarm = Alarm()
    for _, stats in zip(range(12), agent.iterate(), strict=False):
        alarm(stats)
    assert {"perplexity"} <= {notice.kind for notice in alarm.notices}
