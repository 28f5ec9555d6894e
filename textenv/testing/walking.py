"""Stepping environments while keeping everything they return: as episodes, and as flat transcripts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from textenv.testing.choosing import Allowed, Chooser
from textenv.testing.comparing import difference


@dataclass
class Episode:
    """One episode of one row, T' tokens long so far.

    Attributes:
        observations: T' + 1 of them, in arrays of their own.
        actions: T' ids.
        rewards: T', as they came.
        ends: T' pairs (terminated, truncated), as they came.
        infos: T' + 1, the reset's first.
        renders: T' + 1 of what `render` gave, or empty.
    """

    observations: list[Any]
    infos: list[Mapping[str, Any]]
    actions: list[int] = field(default_factory=list)
    rewards: list[Any] = field(default_factory=list)
    ends: list[tuple[Any, Any]] = field(default_factory=list)
    renders: list[Any] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the environment said so."""
        return bool(self.ends) and bool(self.ends[-1][0] or self.ends[-1][1])

    def append(self, action: int, observation: Any, reward: Any, ends: tuple[Any, Any], info: Any) -> None:
        """One step more."""
        self.actions.append(action)
        self.observations.append(copy.deepcopy(observation))
        self.rewards.append(reward)
        self.ends.append(ends)
        self.infos.append(copy.deepcopy(info))


def walk_single(env: Any, chooser: Chooser, seed: int, plans: Sequence[int | None]) -> list[Episode]:
    """One episode per plan; the first is seeded, the others go on with the generator there is."""
    allowed = Allowed(env)
    episodes = []
    for place, stop_at in enumerate(plans):
        observation, info = env.reset(seed=seed) if place == 0 else env.reset()
        episode = Episode([copy.deepcopy(observation)], [copy.deepcopy(info)], renders=[_render(env)])
        while not episode.ended and len(episode.actions) < chooser.task.mdp.max_response_tokens:
            action = chooser.token(len(episode.actions), stop_at, allowed([observation])[0])
            observation, reward, terminated, truncated, info = env.step(action)
            episode.append(action, observation, reward, (terminated, truncated), info)
            episode.renders.append(_render(env))
        episodes.append(episode)
    return episodes


def _render(env: Any) -> Any:
    return env.render() if env.render_mode == "ansi" else None


def transcript(env: Any, seed: int | None, actions: Sequence[Sequence[int]], spoil: bool = False) -> list[Any]:
    """Everything that episodes of given actions return from a single environment, in arrays of its own.

    Args:
        env: a single environment.
        seed: of the first reset; None goes on from where the environment stands.
        actions: one list per episode.
        spoil: overwrite each returned observation and info once it has been copied.
    """
    kept: list[Any] = []
    for place, episode in enumerate(actions):
        _keep(kept, env.reset(seed=seed) if place == 0 and seed is not None else env.reset(), spoil)
        kept.extend(steps(env, episode, spoil))
    return kept


def steps(env: Any, actions: Sequence[Any], spoil: bool = False) -> list[Any]:
    """What stepping these actions returns, single or vector; rows that ended are reset where that is the caller's."""
    kept: list[Any] = []
    disabled = env.metadata.get("autoreset_mode") is AutoresetMode.DISABLED
    for action in actions:
        result = env.step(action)
        ended = np.logical_or(result[2], result[3])
        _keep(kept, result, spoil)
        if disabled and ended.any():
            _keep(kept, env.reset(options={"reset_mask": ended}), spoil)
    return kept


def _keep(kept: list[Any], result: tuple[Any, ...], spoil: bool) -> None:
    kept.append(copy.deepcopy(result))
    if spoil:
        overwrite(result[0])
        overwrite(result[-1].get("final_obs"))
        result[-1].clear()


def overwrite(observation: Any) -> None:
    """Put other numbers into every array of an observation, in place."""
    if isinstance(observation, Mapping):
        for value in observation.values():
            overwrite(value)
    elif isinstance(observation, np.ndarray) and observation.dtype == object:
        for value in observation:
            overwrite(value)
    elif isinstance(observation, np.ndarray) and observation.flags.writeable:
        observation[...] = 1 - np.minimum(observation, 1)


def row_of(observations: Any, row: int) -> Any:
    """One row of batched observations."""
    if isinstance(observations, Mapping):
        return {key: row_of(value, row) for key, value in observations.items()}
    return observations[row]


def row_info(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The entries of one row: those whose ``_key`` says so, numpy scalars as Python's."""
    found = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None and bool(mask[row]):
            # Observations are batched as `step` returns them, or an object per row; other dicts have their own masks.
            nested = isinstance(values, Mapping) and key != "final_obs"
            value = row_info(values, row) if nested else row_of(values, row)
            found[key] = value.item() if isinstance(value, np.generic) else value
    return found


@dataclass
class RowWalk:
    """What the rows of a vector environment went through.

    Attributes:
        episodes: per row, in order; the last may be unfinished.
        actions: (N,) of each step.
        problems: what broke the promise of the autoreset mode.
    """

    episodes: list[list[Episode]]
    actions: list[NDArray[np.int64]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def walk_rows(
    envs: Any, mode: AutoresetMode, chooser: Chooser, seed: Any, options: Any = None, count: int = 2
) -> RowWalk:
    """Step until every row has finished `count` episodes; rows end in pairs, so that some end together, some alone.

    Args:
        envs: vector environments.
        mode: the autoreset mode that they should have.
        chooser: draws the actions.
        seed: for `reset`.
        options: for `reset`.
        count: episodes per row.
    """
    allowed, plans = Allowed(envs), chooser.plans()
    observations, infos = envs.reset(seed=seed, options=options)
    rows = range(envs.num_envs)
    walk = RowWalk([[_begin(observations, infos, row)] for row in rows])
    idle = np.zeros(envs.num_envs, dtype=np.bool_)  # rows whose coming action is ignored
    for _ in range(3 * chooser.task.mdp.max_response_tokens + 6):
        masks = allowed([row_of(observations, row) for row in rows])
        actions = np.array(
            [
                chooser.token(
                    len(walk.episodes[row][-1].actions),
                    plans[(row // 2 + len(walk.episodes[row])) % len(plans)],
                    masks[row],
                )
                for row in rows
            ]
        )
        walk.actions.append(actions)
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        ended = np.logical_or(terminations, truncations)
        for row in rows:
            step = (rewards[row], (terminations[row], truncations[row]))
            _advance(walk, mode, row, int(actions[row]), observations, step, infos, bool(idle[row]))
        idle = ended if mode is AutoresetMode.NEXT_STEP else idle
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, infos = envs.reset(options={"reset_mask": ended})
            for row in np.flatnonzero(ended):
                walk.episodes[row].append(_begin(observations, infos, row))
        if all(sum(episode.ended for episode in episodes) >= count for episodes in walk.episodes):
            break
    return walk


def _begin(observations: Any, infos: Mapping[str, Any], row: int) -> Episode:
    return Episode([copy.deepcopy(row_of(observations, row))], [copy.deepcopy(row_info(infos, row))])


def _advance(
    walk: RowWalk,
    mode: AutoresetMode,
    row: int,
    action: int,
    observations: Any,
    step: tuple[Any, tuple[Any, Any]],
    infos: Mapping[str, Any],
    idle: bool,
) -> None:
    """Read one row of one step as the mode promises it."""
    reward, ends = step
    if idle:
        if float(reward) != 0.0 or any(ends):
            walk.problems.append(
                f"row {row} only resets in this step, so its reward should be 0 and it should not end, got reward "
                f"{reward} and (terminated, truncated) = {ends}"
            )
        walk.episodes[row].append(_begin(observations, infos, row))
        return
    info, observation = row_info(infos, row), row_of(observations, row)
    if mode is not AutoresetMode.SAME_STEP or not any(ends):
        walk.episodes[row][-1].append(action, observation, reward, ends, info)
        return
    final = info.pop("final_obs", None), info.pop("final_info", None)
    if final[0] is None or final[1] is None:
        walk.problems.append(
            f"row {row} ended, so infos['final_obs'] and infos['final_info'] should hold its last observation and "
            f"info (their masks _final_obs and _final_info True there), got the keys {sorted(infos)}"
        )
    elif difference(final[0], observation, 0.0) is None:
        walk.problems.append(
            f"infos['final_obs'][{row}] should be the last observation of the ended episode, got the first of the next"
        )
    else:
        walk.episodes[row][-1].append(action, final[0], reward, ends, final[1])
    walk.episodes[row].append(Episode([copy.deepcopy(observation)], [info]))


def finished(walk: RowWalk) -> Iterator[tuple[int, int, Episode]]:
    """Row, place in the row, and the episodes that reached their end."""
    for row, episodes in enumerate(walk.episodes):
        for place, episode in enumerate(episodes):
            if episode.ended:
                yield row, place, episode
