"""All checks of the vector form: N rows in each autoreset mode, and N rows against N single environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from textenv.prompts import decoder
from textenv.testing.behaviour import (
    check_aliasing,
    check_bad_actions,
    check_determinism,
    check_other_seeds,
    check_reset_needed,
    skip_comparisons,
)
from textenv.testing.case import Case, contract_of, may_pay_per_token
from textenv.testing.equality import check_equality, check_seeds
from textenv.testing.persistence import check_copies
from textenv.testing.replaying import check_replay
from textenv.testing.rows import Rows
from textenv.testing.run import Run
from textenv.testing.spaces import vector_spaces
from textenv.testing.walking import Episode, RowWalk, finished, row_info, walk_rows


def check_vectors(run: Run) -> None:
    """Every check of every autoreset mode that can be reached."""
    reached = False
    for mode in AutoresetMode:
        name = f"vector {mode.name}"
        if mode not in run.subject.vectors:
            run.findings.skip(name, run.subject.reasons.get(name) or run.subject.reasons["vector"])
            continue
        try:
            envs = run.subject.make_vector(mode, run.subject.num_envs)
        except LookupError as error:
            run.findings.skip(name, str(error))
            continue
        _check_mode(run, mode, envs, first=not reached)
        reached = True
        del run.subject.vectors[mode]  # and with it the models that its environments hold


def _check_mode(run: Run, mode: AutoresetMode, envs: Any, first: bool) -> None:
    """Without wrappers, then with all of them."""
    subject, before = run.subject, run.broken
    make_single = subject.make_single if subject.single is not None else None
    bare = Rows(
        f"vector {mode.name}, {envs.unwrapped}",
        mode,
        lambda num_envs: subject.make_vector(mode, num_envs).unwrapped,
        (lambda: subject.make_single().unwrapped) if make_single else None,
        envs.num_envs,
        bare=True,
    )
    if envs is envs.unwrapped:
        _check_rows(run, bare, first, outermost=True)
        return
    _check_rows(run, bare, first, outermost=False)
    if run.broken > before:
        run.findings.skip(f"vector {mode.name} (with its wrappers)", "what is inside breaks rules already")
        return
    pays = may_pay_per_token(envs)
    if pays:
        run.findings.skip("rewards (0 before the end, with wrappers)", f"{', '.join(pays)} may pay per token")
    wrapped = Rows(
        f"vector {mode.name}, {envs}",
        mode,
        lambda num_envs: subject.make_vector(mode, num_envs),
        make_single if subject.same_stack else None,
        envs.num_envs,
        bare=False,
    )
    _check_rows(run, wrapped, first, outermost=True)


def _check_rows(run: Run, rows: Rows, first: bool, outermost: bool) -> None:
    """One level of a stack in one mode."""
    before = run.broken
    walk = _walk(run, rows)
    # Rows that break the rules by themselves differ from single environments, and from replay, for that reason.
    if run.broken > before or walk is None:
        return
    check_seeds(run, rows)
    if outermost:
        _check_behaviour(run, rows, walk, first)
    if run.broken:
        for name in (f"vector {rows.mode.name} (equal to single)", "replay"):
            run.findings.skip(name, "not compared, since rules are broken that do not take a comparison")
        return
    # With the same wrappers on both sides the stacks are compared, and their insides through them.
    if outermost or run.history or not run.subject.same_stack:
        check_equality(run, rows, walk)
        check_replay(run, rows)


def _walk(run: Run, rows: Rows) -> RowWalk | None:
    """Spaces, the rules of episodes, and what the mode promises."""
    with run.findings.checking(f"vector {rows.mode.name}", where=rows.where) as violated:
        envs = rows.make(rows.num_envs)
        if envs is envs.unwrapped:
            with run.findings.checking("spaces", where=rows.where) as wrong_space:
                for problem in vector_spaces(envs, run.subject.task, rows.mode):
                    wrong_space(problem)
        walk = walk_rows(envs, rows.mode, run.chooser, run.seed)
        for problem in walk.problems:
            violated(problem)
        contract = contract_of(envs, run.subject.task, walk.episodes[0][0].observations[0])
        for row, place, episode in _walked(walk):
            run.judge(f"{rows.where}, row {row}, episode {place}", contract, episode)
        return walk
    return None


def _walked(walk: RowWalk) -> list[tuple[int, int, Episode]]:
    """Row, place and episode; unfinished ones only where a row never finished any."""
    ended = list(finished(walk))
    rows = {row for row, _, _ in ended}
    return ended + [(row, 0, episodes[0]) for row, episodes in enumerate(walk.episodes) if row not in rows]


def _check_behaviour(run: Run, rows: Rows, walk: RowWalk, first: bool) -> None:
    """What single environments are checked for too; all of it in the first mode, in the others what modes touch."""
    findings, subject = run.findings, run.subject
    case = Case(
        rows.where,
        lambda: rows.make(rows.num_envs),
        subject.task,
        run.seed,
        run.tolerance,
        [walk.actions],
        vector=True,
        bare=rows.bare,
        fresh="fresh copies (vector)" not in subject.reasons,
        untouched="vector" not in subject.touched,
    )
    check_reset_needed(findings, case)
    before = run.broken
    if first:
        run.history |= check_determinism(findings, case)
        if run.broken > before:
            skip_comparisons(findings)
            return
    check_aliasing(findings, case)
    if first:
        check_other_seeds(findings, case)
        check_bad_actions(findings, case)
        check_copies(findings, case)
        _check_render(run, rows, walk.actions[0])


def _check_render(run: Run, rows: Rows, actions: NDArray[np.int64]) -> None:
    """The N texts so far."""
    envs = rows.make(rows.num_envs)
    _, infos = envs.reset(seed=run.seed)
    expected = [row_info(infos, row).get("prompt") for row in range(rows.num_envs)]
    if envs.render_mode != "ansi" or None in expected:
        run.findings.skip("render (vector)", f"render_mode is {envs.render_mode!r}, and the prompts are {expected}")
        return
    with run.findings.checking("render", where=rows.where) as violated:
        if list(envs.render()) != expected:
            violated(f"render should give the prompts after reset, {expected}, got {envs.render()}")
        _, _, terminations, truncations, _ = envs.step(actions)
        written = decoder(run.subject.task.tokenizer)([[int(action)] for action in actions])
        for row in np.flatnonzero(~np.logical_or(terminations, truncations)):
            if envs.render()[row] != f"{expected[row]}{written[row]}":
                violated(
                    f"render should give prompt and response, {expected[row]}{written[row]}, got {envs.render()[row]}"
                )
