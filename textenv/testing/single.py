"""All checks of the single environment: without wrappers, then with all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textenv.testing.behaviour import (
    check_aliasing,
    check_bad_actions,
    check_determinism,
    check_other_seeds,
    check_reset_needed,
    skip_comparisons,
)
from textenv.testing.case import Case, contract_of, may_pay_per_token
from textenv.testing.persistence import check_copies, check_spec
from textenv.testing.run import Run
from textenv.testing.spaces import single_spaces
from textenv.testing.walking import walk_single


def check_singles(run: Run) -> None:
    """Every check that needs one environment only."""
    if run.subject.single is None:
        return
    env = run.subject.make_single()
    if env is not env.unwrapped:
        _check_single(run, lambda: run.subject.make_single().unwrapped, f"single, {env.unwrapped}")
        if run.broken:
            run.findings.skip("single (with its wrappers)", "what is inside breaks rules already")
            return
        pays = may_pay_per_token(env)
        if pays:
            run.findings.skip("rewards (0 before the end, with wrappers)", f"{', '.join(pays)} may pay per token")
    _check_single(run, run.subject.make_single, f"single, {env}", outermost=True)


def _check_single(run: Run, make: Callable[[], Any], where: str, outermost: bool = False) -> None:
    env, findings, subject = make(), run.findings, run.subject
    bare = env is env.unwrapped
    if bare:
        with findings.checking("spaces", where=where) as violated:
            for problem in single_spaces(env, subject.task):
                violated(problem)
    walked = False
    with findings.checking("episodes", where=where):
        episodes = walk_single(env, run.chooser, run.seed, run.chooser.plans())
        walked = True
    if not walked:
        return
    for place, episode in enumerate(episodes):
        contract = contract_of(env, subject.task, episode.observations[0])
        run.judge(f"{where}, episode {place}", contract, episode)
    case = Case(
        where,
        make,
        subject.task,
        run.seed,
        run.tolerance,
        [episode.actions for episode in episodes],
        bare=bare,
        fresh="fresh copies (single)" not in subject.reasons,
        untouched="single" not in subject.touched,
    )
    check_reset_needed(findings, case)
    before = run.broken
    run.history |= check_determinism(findings, case)
    if run.broken > before:
        skip_comparisons(findings)
        return
    if not outermost:  # what follows would find the inside's mistakes through the wrappers as well
        return
    check_other_seeds(findings, case)
    check_aliasing(findings, case)
    check_bad_actions(findings, case)
    check_copies(findings, case)
    check_spec(findings, subject, case)
