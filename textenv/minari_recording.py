"""Episodes as a Minari dataset on disk: the format in which offline reinforcement learning shares its data.

Minari's own `DataCollector` records single environments, too, and needs JAX. What is here records vector environments
and needs no more than Minari with HDF5.

Legend: B episodes, T response tokens, L columns.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from textenv.evaluation import check_episodes, finish_episodes, put_back
from textenv.layers import text_envs
from textenv.mdp import TokenMDP
from textenv.optional import require
from textenv.replay import Replay

FIGURES = ("score", "shaped_score", "kl")
"""End-of-episode infos that are kept. Texts are not: the ids say all, and Minari wants every info at every step."""

VECTOR_OPTIONS = ("autoreset_mode", "num_envs", "vectorization_mode")
"""Options of an id that its single form does not have."""


def record_minari(
    policy: Any,
    envs: VectorEnv[Any, Any, Any],
    episodes: int,
    dataset_id: str,
    *,
    seed: int = 0,
    samples_per_prompt: int = 1,
    deterministic: bool = False,
    progress: bool = False,
    **about: Any,
) -> Any:
    """Let a policy finish episodes, and keep them as a Minari dataset.

    Prompts come from the environments' resets; the policy writes; observations, actions, rewards and ends are those
    that stepping the wrapped environments gives. The environments get their state back afterwards, as in `evaluate`.
    ``infos`` has an entry for each observation, NaN but for the last: ``score``, the scorer's number, ``shaped_score``
    and ``kl`` where wrappers tell them.

    Args:
        policy: see `textenv.evaluate`.
        envs: vector text environments, wrapped as one likes.
        episodes: at least 1.
        dataset_id: ``"namespace/name-v0"``, see Minari. The folder is that of ``MINARI_DATASETS_PATH``.
        seed: of prompts and sampling.
        samples_per_prompt: episodes that answer one prompt, next to each other: at least 2 for preferences, unless the
            prompts are few. It divides `episodes` and the number of environments.
        deterministic: take the most likely token everywhere.
        progress: show a bar while responses are written.
        **about: what Minari keeps beside the data (``algorithm_name``, ``author``, ``author_email``,
            ``code_permalink``, ``description``, ``requirements``), and ``data_format``.

    Returns:
        The `minari.MinariDataset`. Its ``recover_environment()`` works where the environments are those of an id, made
        with options that JSON can hold.

    Raises:
        ValueError: `episodes` below 1 or no multiple of `samples_per_prompt`, or (Minari's) a dataset of that id
            exists.
        TypeError: no text environments, or nothing that acts.
        ImportError: Minari or h5py is not installed.
    """
    require("minari", "minari", "`record_minari`")
    require("h5py", "minari", "`record_minari`")
    check_episodes(episodes)
    import minari

    base = text_envs(envs)
    with put_back(envs):
        finished = finish_episodes(policy, envs, episodes, seed, deterministic, progress, samples_per_prompt)
    spec = _spec(envs)
    spaces = {"observation_space": base.single_observation_space, "action_space": base.single_action_space}
    with warnings.catch_warnings():  # Minari reminds of everything that nobody has to say about a dataset
        warnings.filterwarnings("ignore", "`.*` is set to None", UserWarning)
        warnings.filterwarnings("ignore", "env_spec is None", UserWarning)
        buffers = minari_episodes(finished.replayed, base.task.mdp)
        return minari.create_dataset_from_buffers(dataset_id, buffers, env=spec, eval_env=spec, **spaces, **about)


def minari_episodes(replayed: Replay, mdp: TokenMDP) -> list[Any]:
    """Replayed responses as `minari.data_collector.EpisodeBuffer`s, in the form that stepping has.

    Args:
        replayed: B episodes.
        mdp: of their task.
    """
    require("minari", "minari", "`minari_episodes`")
    from minari.data_collector import EpisodeBuffer

    figures = [key for key in FIGURES if key in replayed.infos]
    buffers = []
    for row, length in enumerate(replayed.response_mask.sum(1).tolist()):
        ends = np.zeros(length, np.bool_)
        ends[-1] = True
        start = mdp.max_prompt_tokens
        infos = {key: [math.nan] * length + [float(replayed.infos[key][row])] for key in figures}
        buffers.append(
            EpisodeBuffer(
                observations=_observations(replayed, mdp, row, length),
                actions=replayed.input_ids[row, start : start + length].astype(np.int64),
                rewards=replayed.rewards[row, :length].tolist(),
                terminations=(ends & replayed.terminated[row]).tolist(),
                truncations=(ends & replayed.truncated[row]).tolist(),
                infos=infos,
            )
        )
    return buffers


def _observations(replayed: Replay, mdp: TokenMDP, row: int, length: int) -> dict[str, Any]:
    """What one episode showed, from its reset to its end: (length + 1, L) per key."""
    seen = np.arange(mdp.length) < mdp.max_prompt_tokens + np.arange(length + 1)[:, None]
    return {
        "input_ids": np.where(seen, replayed.input_ids[row], mdp.pad_id).astype(np.int32),
        "attention_mask": np.where(seen, replayed.attention_mask[row], 0).astype(np.int8),
    }


def _spec(envs: VectorEnv[Any, Any, Any]) -> Any:
    """The spec of the single form of an id's environments; None where there is none that JSON could hold."""
    if envs.spec is None:
        return None
    kwargs = {key: value for key, value in envs.spec.kwargs.items() if key not in VECTOR_OPTIONS}
    spec = dataclasses.replace(envs.spec, kwargs=kwargs)
    try:
        spec.to_json()
    except TypeError:
        return None
    return spec
