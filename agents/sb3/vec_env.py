"""`SB3VecEnv`: our vector environments as Stable-Baselines3 steps them.

Legend: N environments, L columns, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from textenv.layers import layers, text_envs

Indices = None | int | Iterable[int]


class SB3VecEnv(VecEnv):
    """N text environments in the interface of Stable-Baselines3, all rows in one call.

    An episode that ends is followed by the next one in the same step, whatever the environments' autoreset mode: the
    last state is in ``info["terminal_observation"]``, what `reset` told of the next episode in `reset_infos`.
    ``info["episode"]`` has return, length and time as `Monitor` writes them, so that ``ep_rew_mean`` is logged.

    A response that the budget cuts is the end of the task, so there is no ``TimeLimit.truncated`` in its info and
    nothing is bootstrapped there; ``info["finish_reason"]`` is ``"length"``.

    Wrappers go on the environments before they come here. `get_attr` and `env_method` look from the outermost layer
    inwards and ask once for all rows: ``env_method("action_masks")`` gives one (V,) mask per row.

    Args:
        envs: vector text environments, wrapped as one likes.

    Raises:
        TypeError: `envs` are no text environments.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self.text_envs = text_envs(envs)
        self.envs = envs
        super().__init__(self.text_envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self._same_step = envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        self._actions: NDArray[Any] | None = None
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._began = time.time()

    def reset(self) -> dict[str, NDArray[Any]]:
        """Start all rows, with the seeds and options that `seed` and `set_options` were given for this once."""
        seeds: Any = (
            None if all(seed is None for seed in self._seeds) else list(self._seeds)
        )  # one per row, as ours take
        observations, infos = self.envs.reset(seed=seeds, options=joint_options(self._options))
        self.reset_infos = rows_of(infos, range(self.num_envs))
        self._returns[:], self._lengths[:] = 0, 0
        self._reset_seeds()
        self._reset_options()
        return own(observations)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Remember the actions (N,) for `step_wait`."""
        self._actions = np.array(actions)

    def step_wait(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Append a token to every row.

        Returns:
            observations (N, L), of the next episode where one ended; rewards (N,); whether it ended (N,); infos.
        """
        assert self._actions is not None, "step_async comes first"
        observations, rewards, terminations, truncations, infos = self.envs.step(self._actions)
        ended = np.logical_or(terminations, truncations)
        self._returns += rewards
        self._lengths += 1
        if not ended.any():
            rows = rows_of(infos, range(self.num_envs))
        elif self._same_step:
            rows = self._after_autoreset(infos, ended)
        else:
            rows = self._reset_ended(observations, infos, ended)
            observations = self._observations
        for row in np.flatnonzero(ended):
            rows[row]["episode"] = self._monitored(row)
            self._returns[row], self._lengths[row] = 0, 0
        return own(observations), np.array(rewards, dtype=np.float32), np.array(ended), rows

    def _after_autoreset(self, infos: dict[str, Any], ended: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """Infos of a step after which the ended rows show their next episode already (SAME_STEP)."""
        others = {key: value for key, value in infos.items() if key.lstrip("_") not in ("final_obs", "final_info")}
        now, ends = rows_of(others, range(self.num_envs)), rows_of(infos["final_info"], range(self.num_envs))
        for row in np.flatnonzero(ended):
            self.reset_infos[row], now[row] = now[row], ends[row]
            now[row]["terminal_observation"] = own(infos["final_obs"][row])
        return now

    def _reset_ended(
        self, observations: dict[str, Any], infos: dict[str, Any], ended: NDArray[np.bool_]
    ) -> list[dict[str, Any]]:
        """The same in the other modes: the ended rows are reset here."""
        rows = rows_of(infos, range(self.num_envs))
        for row in np.flatnonzero(ended):
            rows[row]["terminal_observation"] = {key: np.array(value[row]) for key, value in observations.items()}
        self._observations, starts = self.envs.reset(options={"reset_mask": ended.copy()})
        for row, start in zip(np.flatnonzero(ended), rows_of(starts, np.flatnonzero(ended)), strict=True):
            self.reset_infos[row] = start
        return rows

    def _monitored(self, row: int) -> dict[str, float]:
        """Return, length and time of an episode, as `Monitor` has them."""
        return {
            "r": round(float(self._returns[row]), 6),
            "l": int(self._lengths[row]),
            "t": round(time.time() - self._began, 6),
        }

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    def render(self, mode: str | None = None) -> Any:  # noqa: ARG002 - Stable-Baselines3's signature
        """The N texts so far, whatever `mode` says; None for environments without a render mode."""
        return None if self.render_mode is None else self.envs.render()

    def get_images(self) -> Sequence[None]:
        """There are none: text has no pixels."""
        return [None] * self.num_envs

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of the outermost layer that has it, once per row.

        Raises:
            AttributeError: no layer has it.
        """
        return [getattr(self._layer_with(attr_name), attr_name)] * len(self._rows(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute on the outermost layer that has it, or on the outermost.

        Raises:
            ValueError: for some rows only: they share it.
        """
        if self._rows(indices) != list(range(self.num_envs)):
            raise ValueError(
                f"`{attr_name}` should be set for all rows at once, got indices={indices}: they are rows of one vector "
                "environment and share its attributes. Leave `indices` out."
            )
        holders = [layer for layer in layers(self.envs) if hasattr(layer, attr_name)]
        setattr(holders[0] if holders else self.envs, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of the outermost layer that has it, once; what comes back with N entries is given by row.

        Raises:
            AttributeError: no layer has it.
        """
        result = getattr(self._layer_with(method_name), method_name)(*args, **kwargs)
        by_row = isinstance(result, np.ndarray | list | tuple) and len(result) == self.num_envs
        return [result[row] if by_row else result for row in self._rows(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Whether a layer is of that class; `Monitor` counts as one, because its figures are in the infos."""
        found = wrapper_class is Monitor or any(isinstance(layer, wrapper_class) for layer in layers(self.envs))
        return [found] * len(self._rows(indices))

    def _layer_with(self, name: str) -> Any:
        for layer in layers(self.envs):
            if hasattr(layer, name):
                return layer
        raise AttributeError(
            f"No layer of the environments has {name!r}. For action masks wrap them in MinLength or ActionMask."
        )

    def _rows(self, indices: Indices) -> list[int]:
        return [int(row) for row in self._get_indices(indices)]


def vector_envs(envs: Any) -> Any:
    """Vector text environments, also from inside a `SB3VecEnv` and Stable-Baselines3's own wrappers around it."""
    inside = envs.unwrapped if isinstance(envs, VecEnv) else envs
    return inside.envs if isinstance(inside, SB3VecEnv) else inside


def own(observations: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Observations in arrays of their own: Stable-Baselines3 keeps them from one step to the next."""
    return {key: np.array(value) for key, value in observations.items()}


def rows_of(infos: Mapping[str, Any], rows: Iterable[int]) -> list[dict[str, Any]]:
    """Vector infos, an (N,) array per key and a bool array ``_key``, as a dict for each of some rows."""
    present = [key for key in infos if f"_{key}" in infos]
    return [{key: _entry(infos[key], row) for key in present if infos[f"_{key}"][row]} for row in map(int, rows)]


def _entry(column: Any, row: int) -> Any:
    """One row of a column; numbers as Python's own, arrays as copies, columns that are infos themselves as a dict."""
    if isinstance(column, Mapping):
        return {key: _entry(value, row) for key, value in column.items() if not key.startswith("_")}
    value = column[row]
    return value.item() if isinstance(value, np.generic) else value.copy() if isinstance(value, np.ndarray) else value


def joint_options(options: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Options of single rows as those of all of them.

    Raises:
        ValueError: the rows have different ones, of another kind than a prompt each.
    """
    if not any(options):
        return None
    if all(set(row) == {"prompt"} for row in options):
        return {"prompts": [row["prompt"] for row in options]}
    if any(row != options[0] for row in options):
        raise ValueError(
            f"Options should be the same for all rows, or a 'prompt' for each, got {list(options)}. The rows are reset "
            "in one call. Pass set_options({...}), or [{'prompt': ...}, ...] with one dict per row."
        )
    return dict(options[0])
