"""The rules that one recorded episode must keep. Pure functions of the record; whose environment it was is not known.

Legend: P prompt columns, T response tokens at most, L = P + T, T' tokens of this episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from textenv.prompts import decoder
from textenv.task import TextTask
from textenv.testing.walking import Episode

END_KEYS = ("prompt", "response", "score", "finish_reason", "response_length")
"""What the info of an episode's end holds, and no other step's."""

Broken = tuple[str, str]
"""Name of a check, and what is wrong."""


@dataclass(frozen=True)
class Contract:
    """What episodes are held to.

    Attributes:
        task: budgets, stop ids, tokenizer.
        bare: no wrapper is around: rewards must be exactly the score at the end and 0 before it.
        sparse: no wrapper pays per token: rewards must be 0 before the end.
        observations: observations are the task's own, not transformed by a wrapper.
        texts: no wrapper takes texts out of the infos.
    """

    task: TextTask
    bare: bool = True
    sparse: bool = True
    observations: bool = True
    texts: bool = True


def broken_rules(contract: Contract, episode: Episode) -> Iterator[Broken]:
    """Every rule that the episode breaks; each kind of mistake breaks one rule only."""
    if contract.observations:
        malformed = list(_form(contract.task, episode))
        yield from malformed
        # Columns of arrays that lack their keys or shapes cannot be read.
        if not any("shape" in message or "keys" in message for _, message in malformed):
            yield from _prompt_columns(contract.task, episode)
            yield from _response_columns(contract.task, episode)
    yield from _ends(contract.task, episode)
    yield from _rewards(contract, episode)
    if contract.texts:
        yield from _infos(contract.task, episode)
    yield from _render(contract.task, episode)


def _form(task: TextTask, episode: Episode) -> Iterator[Broken]:
    space = task.observation_space()
    for place, observation in enumerate(episode.observations):
        if not isinstance(observation, dict) or not {*space.keys()} <= observation.keys():
            yield (
                "observations",
                f"observation {place} should be a dict with the keys {list(space)}, got {observation!r}",
            )
            return
        for key, box in space.items():
            yield from _array(f"observation {place}, {key!r}", box, observation[key])


def _array(name: str, box: spaces.Space[Any], array: Any) -> Iterator[Broken]:
    got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
    if not isinstance(array, np.ndarray) or array.shape != box.shape:
        yield "observations", f"{name} should be an array of shape {box.shape}, got {got}"
    elif array.dtype != box.dtype:
        yield "observations", f"{name} should be {box.dtype}, got {got}"
    elif not box.contains(array):
        yield "observations", f"{name} should lie in {box}, got values from {array.min()} to {array.max()}"


def _prompt_columns(task: TextTask, episode: Episode) -> Iterator[Broken]:
    width = task.mdp.max_prompt_tokens
    first = episode.observations[0]
    real = first["attention_mask"][:width]
    if not (real == 1).any() or not _is_suffix(real):
        yield (
            "prompt columns",
            f"the prompt should be padded on the left to {width} columns, its last token in column {width - 1}, got "
            f"attention_mask {real.tolist()} there",
        )
    for place, observation in enumerate(episode.observations):
        for key in ("input_ids", "attention_mask"):
            if not np.array_equal(observation[key][:width], first[key][:width]):
                yield (
                    "prompt columns",
                    f"the prompt should stay as reset showed it, {key} {first[key][:width].tolist()}, got "
                    f"{observation[key][:width].tolist()} after {place} tokens",
                )
                return


def _is_suffix(real: NDArray[Any]) -> bool:
    return bool((np.diff(real.astype(np.int64)) >= 0).all())


def _response_columns(task: TextTask, episode: Episode) -> Iterator[Broken]:
    width, budget = task.mdp.max_prompt_tokens, task.mdp.max_response_tokens
    for place, observation in enumerate(episode.observations[: budget + 1]):
        ids = observation["input_ids"][width : width + place].tolist()
        if ids != episode.actions[:place]:
            yield (
                "response columns",
                f"response token t should stand in column P + t = {width} + t: {episode.actions[:place]} after {place} "
                f"tokens, got {ids}",
            )
            return
        real = observation["attention_mask"][width:].tolist()
        expected = [1] * place + [0] * (budget - place)
        if real != expected:
            yield (
                "response columns",
                f"attention_mask should be 1 on {place} response columns and 0 behind them, whatever the ids are, got "
                f"{real}",
            )
            return


def _ends(task: TextTask, episode: Episode) -> Iterator[Broken]:
    stops, budget = task.mdp.is_stop, task.mdp.max_response_tokens
    for place, (action, ends) in enumerate(zip(episode.actions, episode.ends, strict=True), 1):
        if not all(isinstance(end, bool | np.bool_) for end in ends):
            yield "ends", f"terminated and truncated should be bools, got {ends!r}"
            return
        stopped = bool(stops[action])
        cut = place >= budget and not stopped
        expected = (stopped or (cut and task.length_limit == "terminate"), cut and task.length_limit == "truncate")
        if (bool(ends[0]), bool(ends[1])) != expected:
            what = f"token {action}, {'a' if stopped else 'no'} stop id, at place {place} of {budget}"
            yield (
                "ends",
                f"(terminated, truncated) after {what} (length_limit={task.length_limit!r}) should be {expected}, got "
                f"({bool(ends[0])}, {bool(ends[1])})",
            )
            return


def _rewards(contract: Contract, episode: Episode) -> Iterator[Broken]:
    for place, reward in enumerate(episode.rewards, 1):
        last = episode.ended and place == len(episode.rewards)
        if np.ndim(reward) != 0 or not isinstance(reward, int | float | np.number | np.ndarray):
            yield "rewards", f"a reward should be one number, got {reward!r} at token {place}"
            return
        if not np.isfinite(float(reward)):
            yield "rewards", f"rewards should be finite, got {reward} at token {place}"
            return
        if not last and contract.sparse and float(reward) != 0.0:
            yield "rewards", f"the reward should be 0 before the episode's end, got {reward} at token {place}"
            return
        score = episode.infos[-1].get("score")
        if last and contract.bare and isinstance(score, float) and float(reward) != float(np.nan_to_num(score)):
            yield "rewards", f"the last reward should be the score {score}, once, got {reward}"


def _infos(task: TextTask, episode: Episode) -> Iterator[Broken]:
    first, last = episode.infos[0], episode.infos[-1]
    if not isinstance(first.get("prompt"), str):
        yield "infos", f"the info of reset should hold the text of the prompt, got {_shown(first)}"
    early: list[tuple[int, Any, tuple[str, ...]]] = [(0, first, END_KEYS[1:])]
    early += [(place, info, END_KEYS) for place, info in enumerate(episode.infos[1:], 1)]
    for place, info, keys in early[:-1] if episode.ended else early:
        found = [key for key in keys if key in info]
        if found:
            yield "infos", f"{found} belong into the info of the episode's end only, got them after {place} tokens"
            break
    if not episode.ended:
        return
    missing = [key for key in END_KEYS if key not in last]
    if missing:
        yield "infos", f"the info of the episode's end should hold {list(END_KEYS)}, got {_shown(last)}: no {missing}"
    expected = {
        "prompt": first.get("prompt"),
        "response": decoder(task.tokenizer)([list(episode.actions)])[0],
        "finish_reason": "stop" if task.mdp.is_stop[episode.actions[-1]] else "length",
        "response_length": len(episode.actions),
    }
    for key, value in expected.items():
        if key in last and last[key] != value:
            yield "infos", f"info[{key!r}] of the ids {episode.actions} should be {value!r}, got {last[key]!r}"
    yield from _score(task, last)


def _score(task: TextTask, last: Any) -> Iterator[Broken]:
    score = last.get("score", 0.0)
    if not isinstance(score, float) or not (np.isfinite(score) or task.scorer_errors == "drop"):
        yield "infos", f"info['score'] should be the scorer's number, a finite float, got {score!r}"


def _shown(info: Any) -> str:
    return repr({key: info[key] for key in info})


def _render(task: TextTask, episode: Episode) -> Iterator[Broken]:
    prompt = episode.infos[0].get("prompt")
    for place, text in enumerate(episode.renders):
        if text is None or not isinstance(prompt, str):
            continue
        expected = prompt + decoder(task.tokenizer)([episode.actions[:place]])[0]
        if text != expected:
            yield "render", f"render should give prompt and response so far, {expected!r}, got {text!r}"
            return
