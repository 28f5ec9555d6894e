"""The conformance kit: what keeps the rules passes, and each broken environment is named for the rule it breaks."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import gymnasium as gym
import pytest
from helpers import END, text_task
from mutants import SINGLE, VECTOR, ScoresOfTheNeighbour

from textenv import TextGenerationEnv, TextGenerationVectorEnv, wrappers
from textenv.testing import CHECKS, ConformanceError, check_text_env


def task():
    return text_task(pad_id=END)  # the pad is a stop id, as in SmolLM2


def make_vector(num_envs, mode, kind=TextGenerationVectorEnv):
    return kind(num_envs, task(), autoreset_mode=mode)


def broken_checks(*args, **kwargs):
    with pytest.raises(ConformanceError) as caught:
        check_text_env(*args, **kwargs)
    return {violation.check for violation in caught.value.violations}, caught.value


@pytest.mark.parametrize(("mutant", "check"), SINGLE.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_environment_is_named_for_the_rule_it_breaks(mutant, check):
    found, error = broken_checks(lambda: mutant(task()))
    assert found == {check}, str(error)


@pytest.mark.parametrize(("mutant", "check"), VECTOR.items(), ids=lambda value: getattr(value, "__name__", None))
def test_broken_rows_are_named_for_the_rule_they_break(mutant, check):
    found, error = broken_checks(
        lambda: TextGenerationEnv(task()), make_vector=lambda n, mode: make_vector(n, mode, mutant)
    )
    assert found == {check}, str(error)


def test_scores_of_the_neighbour_are_noticed():
    found, _ = broken_checks(
        lambda: TextGenerationEnv(task()), make_vector=lambda n, mode: make_vector(n, mode, ScoresOfTheNeighbour)
    )
    assert found == {"vector NEXT_STEP", "replay"}  # by two comparisons of the first mode; then no more are made


# What keeps the rules.

IDS = sorted(i for i, spec in gym.registry.items() if str(spec.entry_point).startswith("textenv."))
BUILT_ON_MODELS = {"RLHF-v0"}


def test_the_ids_are_found():
    assert {"RLHF-v0", "textenv/Toy-v0"} <= set(IDS)


@pytest.mark.parametrize(
    "env_id", [pytest.param(i, marks=[pytest.mark.slow] if i in BUILT_ON_MODELS else []) for i in IDS]
)
def test_every_id_passes(env_id):
    report = check_text_env(env_id)
    assert set(report.passed) == set(CHECKS), report


@pytest.mark.parametrize("length_limit", ["truncate", "terminate"])
@pytest.mark.parametrize("shaping", [{}, {"kl_coef": 0.1, "target_kl": 2.0, "missing_eos_penalty": 0.5}])
def test_options_of_an_id_pass(length_limit, shaping):
    report = check_text_env("textenv/Toy-v0", length_limit=length_limit, **shaping)
    assert set(report.passed) == set(CHECKS), report


WRAPPED = {
    "ActionMask": lambda kind, env: kind(env, allowed_ids=[END, 1, 2, 3, 4]),
    "ClipScore": lambda kind, env: kind(env, -0.5, 0.5),
    "KLPenalty": lambda kind, env: kind(env, kl_coef=0.3),
    "LengthPenalty": lambda kind, env: kind(env, 0.1),
    "MinLength": lambda kind, env: kind(env, 2),
    "MissingEOSPenalty": lambda kind, env: kind(env, 0.5),
    "NormalizeScore": lambda kind, env: kind(env),
    "RecordResponses": lambda kind, env: kind(env, Path(tempfile.mkdtemp()) / "episodes.jsonl"),
    "RepetitionPenalty": lambda kind, env: kind(env, 0.1, 1),
    "ScoreEvery": lambda kind, env: kind(env, 2),
    "ArrayInfos": lambda kind, env: kind(env),
}


def stacked(names, wrappers, env):
    for name in names:
        env = WRAPPED[name](getattr(wrappers, name), env)
    return env


def test_every_wrapper_is_in_a_stack():
    assert WRAPPED.keys() == set(wrappers.__all__) - {"vector"}


@pytest.mark.parametrize(
    "names", [(), *((name,) for name in WRAPPED), *itertools.pairwise(WRAPPED)], ids=lambda names: "-".join(names)
)
def test_every_wrapper_passes(names):
    report = check_text_env(
        lambda: stacked(names, wrappers, TextGenerationEnv(task())),
        make_vector=lambda n, mode: stacked(names, wrappers.vector, make_vector(n, mode)),
    )
    assert set(report.passed) == set(CHECKS) - {"spec"}, report
