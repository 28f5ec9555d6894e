"""Behaviour over several episodes: determinism, ownership of arrays, refusals. Single and vector alike."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from textenv.testing.case import Case
from textenv.testing.comparing import difference
from textenv.testing.report import Findings
from textenv.testing.walking import steps, transcript


def check_determinism(findings: Findings, case: Case) -> bool:
    """The same seed gives the same episodes, in two fresh environments and twice in one.

    Returns:
        Whether rewards through the wrappers depend on earlier episodes, as those of running statistics do.
    """
    with findings.checking("determinism", where=case.where) as violated:
        env = case.make()
        first = transcript(env, case.seed, case.actions)
        if case.fresh:
            found = difference(first, transcript(case.make(), case.seed, case.actions), case.tolerance, "results")
            if found:
                violated(f"two fresh environments should give the same after reset(seed={case.seed}), got {found}")
                return False
        again = transcript(env, case.seed, case.actions)
        found = difference(first, again, case.tolerance, "results")
        observations = difference(_observations(first), _observations(again), case.tolerance, "observations")
        if found and (case.bare or observations):
            violated(f"reset(seed={case.seed}) should start the same episodes again, got {observations or found}")
        elif found:
            findings.skip(
                "determinism (rewards after other episodes)",
                f"through the wrappers they depend on earlier episodes, as running statistics do: {found}",
            )
            return True
    return False


def skip_comparisons(findings: Findings) -> None:
    """Nothing can be told from comparing environments that differ anyway."""
    for name in ("aliasing", "bad actions", "deepcopy", "pickle", "spec"):
        findings.skip(name, "two environments of the same seed differ already")


def _observations(results: list[Any]) -> list[Any]:
    return [result[0] for result in results]


def check_other_seeds(findings: Findings, case: Case) -> None:
    """Say so where seeds cannot be told apart by what they draw."""
    env = case.make()
    drawn = [env.reset(seed=case.seed + i)[0] for i in range(8)]
    if all(difference(drawn[0], other, 0.0) is None for other in drawn):
        prompts = len(case.task.prompts)
        findings.skip(
            "determinism (other seeds)",
            f"eight seeds began with one and the same prompt (of {prompts}), so that generators cannot be told apart",
        )


def check_aliasing(findings: Findings, case: Case) -> None:
    """What was returned belongs to the agent: later steps leave it alone, and editing it changes nothing."""
    with findings.checking("aliasing", where=case.where) as violated:
        env = case.make()
        returned = [env.reset(seed=case.seed)[0]]
        kept = [copy.deepcopy(returned[0])]
        for action in case.actions[0]:
            result = env.step(action)
            ended = np.logical_or(result[2], result[3])
            returned.append(result[0])
            kept.append(copy.deepcopy(result[0]))
            if ended.any() and env.metadata.get("autoreset_mode") is AutoresetMode.DISABLED:
                env.reset(options={"reset_mask": ended})
        for place, (array, copied) in enumerate(zip(returned, kept, strict=True)):
            found = difference(array, copied, 0.0, f"observation {place}")
            if found:
                violated(f"a returned observation should stay as it was when later steps are taken, got {found}")
                break
        if not case.fresh:
            findings.skip("aliasing (edited observations)", "there is only one environment, so nothing to compare with")
            return
        plain = transcript(case.make(), case.seed, case.actions)
        spoilt = transcript(case.make(), case.seed, case.actions, spoil=True)
        found = difference(plain, spoilt, case.tolerance, "results")
        if found:
            violated(f"overwriting returned observations and infos should change nothing, got {found}")


def check_reset_needed(findings: Findings, case: Case) -> None:
    """`step` before `reset`, or after an end that nobody resets, is refused."""
    with findings.checking("reset needed", where=case.where) as violated:
        action = case.actions[0][0]
        if case.untouched and case.fresh:
            _refuses(case.make(), action, gym.error.ResetNeeded, "step before reset", violated)
        else:
            findings.skip("reset needed (before the first reset)", "it may have been reset; pass an id or a factory")
        env = case.make()
        if case.vector and env.metadata.get("autoreset_mode") is not AutoresetMode.DISABLED:
            return
        env.reset(seed=case.seed)
        for action in case.actions[0]:
            result = env.step(action)
            if np.logical_or(result[2], result[3]).any():
                _refuses(env, action, gym.error.ResetNeeded, "step after the end of an episode", violated)
                return


def check_bad_actions(findings: Findings, case: Case) -> None:
    """Actions that are no token id are refused, and leave the episode where it is."""
    size = case.task.mdp.vocab_size
    with findings.checking("bad actions", where=case.where) as violated:
        env = case.make()
        env.reset(seed=case.seed)
        good = case.actions[0][0]
        bad: list[Any] = [size, -1, 0.5, [0, 0]]
        if case.vector:
            bad = [np.append(good[:-1], size), np.append(good[:-1], -1), good + 0.5, np.append(good, good[:1])]
        for action in bad:
            _refuses(env, action, ValueError, f"the action {action!r}", violated)
        if case.fresh:
            other = case.make()
            other.reset(seed=case.seed)
            rest = case.actions[0][:1]
            found = difference(steps(other, rest), steps(env, rest), case.tolerance, "results")
            if found:
                violated(f"a refused action should leave the episode where it is, got {found}")


def _refuses(env: Any, action: Any, kind: type[Exception], what: str, violated: Any) -> None:
    try:
        env.step(action)
    except kind:
        return
    except Exception as error:
        violated(f"{what} should raise {kind.__name__}, got {type(error).__name__}: {error}")
        return
    violated(f"{what} should raise {kind.__name__}, but was taken")
