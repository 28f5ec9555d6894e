"""Row i of N is the single environment of seed + i."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from textenv.testing.comparing import difference
from textenv.testing.episodes import END_KEYS
from textenv.testing.rows import Rows
from textenv.testing.run import Run
from textenv.testing.walking import Episode, RowWalk, row_info, row_of, walk_rows


def check_seeds(run: Run, rows: Rows) -> None:
    """Row i of ``reset(seed=s)`` starts as seed s + i alone does, and so it goes on."""
    if run.in_order:
        run.findings.skip("row seeds", "the rows share out prompts in sequential order, whatever the seeds")
        return
    with run.findings.checking("row seeds", where=rows.where) as violated:
        seeds = [run.seed + row for row in range(rows.num_envs)]
        for given in (run.seed, seeds):
            drawn = _drawn(rows, given)
            for row, seed in enumerate(seeds):
                alone = _drawn_alone(rows, seed)
                found = difference(alone, [one[row] for one in drawn], 0.0, "(alone, row)")
                if found:
                    violated(f"row {row} of reset(seed={given}) should draw what seed {seed} alone draws, got {found}")
                    return


def _drawn(rows: Rows, seed: Any) -> list[list[Any]]:
    """(observation, prompt) per row, of a seeded reset and two more."""
    envs, found = rows.make(rows.num_envs), []
    for options in ({"seed": seed}, {}, {}):
        observations, infos = envs.reset(**options)
        found.append([(row_of(observations, row), row_info(infos, row).get("prompt")) for row in range(envs.num_envs)])
    return found


def _drawn_alone(rows: Rows, seed: int) -> list[Any]:
    if rows.single is None:  # then by the first row of the same environments
        return [one[0] for one in _drawn(rows, [seed] * rows.num_envs)]
    env = rows.single()
    resets = [env.reset(seed=seed), env.reset(), env.reset()]
    return [(observation, info.get("prompt")) for observation, info in resets]


def check_equality(run: Run, rows: Rows, walk: RowWalk) -> None:
    """Every episode of row i is what the single environment of that seed gives for the same actions."""
    name = f"vector {rows.mode.name}"
    if rows.single is None:
        run.findings.skip(f"{name} (equal to single)", "no single form with the same wrappers is known; pass an id")
        return
    with run.findings.checking(name, where=rows.where) as violated:
        reason = run.one_row_only(rows.bare)
        if reason:
            run.findings.skip("vector (several rows equal to single)", f"{reason}, so one row was compared")
            try:
                walk = walk_rows(rows.make(1), rows.mode, run.chooser, run.seed)
            except LookupError as error:
                run.findings.skip(f"{name} (equal to single)", str(error))
                return
        for row, episodes in enumerate(walk.episodes):
            found = _differs_from_single(rows.single(), run.seed + row, episodes, run.tolerance)
            if found:
                violated(f"row {row} should equal a single environment reset(seed={run.seed + row}), got {found}")


def _differs_from_single(env: Any, seed: int, episodes: Sequence[Episode], tolerance: float) -> str | None:
    for place, episode in enumerate(episodes):
        single = env.reset(seed=seed) if place == 0 else env.reset()
        rows: Any = (episode.observations[0], episode.infos[0])
        found = _difference(single, rows, tolerance, f"episode {place}, reset")
        for step, action in enumerate(episode.actions):
            if found:
                return found
            rows = (
                *(episode.observations[step + 1], episode.rewards[step]),
                *(*episode.ends[step], episode.infos[step + 1]),
            )
            found = _difference(env.step(action), rows, tolerance, f"episode {place}, token {step + 1}")
        if found:
            return found
    return None


def _difference(single: tuple[Any, ...], row: tuple[Any, ...], tolerance: float, at: str) -> str | None:
    """Of one reset or step; infos where both have an entry, the task's own entries always."""
    left, right = (
        (one[0], *map(float, one[1:-1]), _comparable(one[-1], other[-1]))
        for one, other in ((single, row), (row, single))
    )
    return difference(left, right, tolerance, f"(single, row) of {at}")


def _comparable(info: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in info.items() if key in other or key in END_KEYS}
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in kept.items() if not isinstance(v, Mapping)}
