"""Copies: deep copies and pickles go on as the original does, and a spec survives a trip through JSON."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from textenv.layers import layers
from textenv.task import TextTask
from textenv.testing.case import Case
from textenv.testing.comparing import difference
from textenv.testing.report import Findings
from textenv.testing.subject import Subject, copied, task_of
from textenv.testing.walking import steps, transcript

RESETS = 8
"""Resets after which generators that two copies share would show."""

Duplicate = Callable[[Any], Any]


def check_copies(findings: Findings, case: Case) -> None:
    """Copies before the first reset and in mid-episode behave as the original."""
    ways: list[tuple[str, Duplicate, Duplicate]] = [
        ("deepcopy", copy.deepcopy, copied),
        ("pickle", pickled, pickled_beside_task),
    ]
    for check, whole, beside_task in ways:
        with findings.checking(check, where=case.where) as violated:
            for started in (False, True):
                env = case.make()
                if started:
                    env.reset(seed=case.seed)
                    steps(env, case.first_actions[:1])
                twin = _duplicate(findings, check, env, whole, beside_task)
                if twin is None:
                    break
                found = _goes_on_differently(env, twin, case, started)
                if found:
                    when = "in mid-episode" if started else "before its episodes"
                    violated(f"a copy made {when} should go on as the original does, got {found}")


def _goes_on_differently(env: Any, twin: Any, case: Case, started: bool) -> str | None:
    """Play the original to the end, then the copy: what they share would have moved in between."""
    results, actions = [], case.first_actions
    for one in (env, twin):
        if started:
            results.append([*steps(one, actions[1:]), *transcript(one, None, [[]] * RESETS)])
        else:
            results.append(transcript(one, case.seed, [actions, *[[]] * RESETS]))
    return difference(results[0], results[1], case.tolerance, "results")


def _duplicate(findings: Findings, check: str, env: Any, whole: Duplicate, beside_task: Duplicate) -> Any:
    """The copy; None where a wrapper or the task prevents it, which the report then says.

    Raises:
        Exception: the environment itself cannot be copied.
    """
    try:
        return _usable(whole(env))
    except Exception as error:
        part = _unfit_part(task_of(env), whole)
        if part is not None:
            findings.skip(f"{check} ({part})", f"{type(error).__name__}: {error}; the rest was copied beside it")
    try:
        return _usable(beside_task(env))
    except Exception as error:
        beside_task(env.unwrapped)
        findings.skip(f"{check} (wrappers)", f"one of {env} cannot be copied, {type(error).__name__}: {error}")
    return None


def _usable(twin: Any) -> Any:
    """The copy, unless a layer was taken to pieces without an error: some of Gymnasium's converting wrappers are."""
    for layer in layers(twin):
        _ = layer.metadata, layer.observation_space, layer.action_space, layer.render_mode
    return twin


def _unfit_part(task: TextTask, whole: Duplicate) -> str | None:
    for name, part in vars(task).items():
        try:
            whole(part)
        except Exception:
            return f"task.{name}"
    return None


def pickled(env: Any) -> Any:
    """Through pickle and back."""
    return pickle.loads(pickle.dumps(env))


def pickled_beside_task(env: Any) -> Any:
    """Through pickle and back, all but the task and its parts, which are shared."""
    task = task_of(env)
    shared = {str(id(part)): part for part in (task, *vars(task).values())}

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> str | None:
            key = str(id(thing))
            return key if key in shared else None

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key: str) -> Any:
            return shared[key]

    buffer = io.BytesIO()
    Pickler(buffer).dump(env)
    buffer.seek(0)
    return Unpickler(buffer).load()


def check_spec(findings: Findings, subject: Subject, case: Case) -> None:
    """`env.spec` through JSON makes an equal environment."""
    spec = subject.spec
    reason = "the environment was not made by gym.make" if spec is None else _why_no_json(spec)
    if spec is None or reason:
        findings.skip("spec", str(reason))
        return
    with findings.checking("spec", where=case.where) as violated:
        twin = subject.prepared(gym.make(EnvSpec.from_json(spec.to_json())))
        original = case.make()
        if str(twin) != str(original):
            violated(f"gym.make(env.spec) should make {original}, got {twin}")
        left, right = (transcript(env, case.seed, case.actions) for env in (original, twin))
        found = difference(left, right, case.tolerance, "results")
        if found:
            violated(f"an environment made from the spec should behave as the original, got {found}")


def _why_no_json(spec: EnvSpec) -> str | None:
    """Why a spec cannot go through JSON through no fault of the environment's."""
    if callable(spec.entry_point) or callable(spec.vector_entry_point):
        return "it was registered with a function as its entry point; use the text 'module:name'"
    for wrapper in spec.additional_wrappers:
        if wrapper.kwargs is None:
            return f"the wrapper {wrapper.name} does not record its arguments (RecordConstructorArgs)"
    for name, value in spec.kwargs.items():
        if not _plain(value):
            return f"the argument {name!r} is a {type(value).__name__}, which JSON cannot hold"
    return None


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | int | float | bool)
