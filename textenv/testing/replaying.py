"""Whole responses through `textenv.replay` against the same responses stepped."""

from __future__ import annotations

from typing import Any

import numpy as np

from textenv.replay import replay
from textenv.testing.comparing import difference
from textenv.testing.rows import Rows
from textenv.testing.run import Run
from textenv.testing.walking import Episode, walk_rows
from textenv.vector_env import TextGenerationVectorEnv

INFO_KEYS = ("prompt", "response", "score", "finish_reason", "response_length", "shaped_score", "kl")


def check_replay(run: Run, rows: Rows) -> None:
    """Rewards, ends, scores and infos of replayed responses are those that stepping gave."""
    with run.findings.checking("replay", where=rows.where) as violated:
        num_envs = 1 if run.history and not rows.bare else rows.num_envs
        try:
            envs = rows.make(num_envs)
        except LookupError as error:
            run.findings.skip(f"replay ({rows.mode.name})", str(error))
            return
        if not isinstance(envs.unwrapped, TextGenerationVectorEnv):
            run.findings.skip(
                f"replay ({rows.mode.name})",
                f"textenv.replay takes TextGenerationVectorEnv, and this is a {type(envs.unwrapped).__name__}",
            )
            return
        task = run.subject.task
        prompts = [task.start(None, np.random.default_rng(run.seed + row)) for row in range(num_envs)]
        walk = walk_rows(envs, rows.mode, run.chooser, run.seed, {"prompts": prompts}, count=1)
        episodes = [row[0] for row in walk.episodes]
        replayed = replay(rows.make(num_envs), prompts, [episode.actions for episode in episodes])
        for row, episode in enumerate(episodes):
            found = difference(
                _stepped(episode), _replayed(replayed, row, episode), run.tolerance, "(stepped, replayed)"
            )
            if found:
                violated(f"response {episode.actions} should give by replay what it gives by steps, got {found}")


def _stepped(episode: Episode) -> dict[str, Any]:
    info = episode.infos[-1]
    return {
        "rewards": [float(reward) for reward in episode.rewards],
        "terminated": bool(episode.ends[-1][0]),
        "truncated": bool(episode.ends[-1][1]),
        "infos": {key: info[key] for key in INFO_KEYS if key in info},
    }


def _replayed(replayed: Any, row: int, episode: Episode) -> dict[str, Any]:
    rewards = replayed.rewards[row][replayed.response_mask[row]]
    infos = {key: replayed.infos[key][row] for key in INFO_KEYS if key in replayed.infos and key in episode.infos[-1]}
    return {
        "rewards": rewards.tolist(),
        "terminated": bool(replayed.terminated[row]),
        "truncated": bool(replayed.truncated[row]),
        "infos": {key: value.item() if isinstance(value, np.generic) else value for key, value in infos.items()},
    }
