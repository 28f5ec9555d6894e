"""Finished episodes as lines of JSON in a file. Knows no environment.

Nothing is kept open or buffered between lines: each is handed to the operating system in one write, in append mode, as
soon as its episode ends. A crash of the program loses none of them, several writers may share a file, and a copy of a
recorder goes on in the same one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from textenv.task import PART

MODES = ("x", "w", "a")

INFO_KEYS = ("prompt", "response", "score", "shaped_score", "finish_reason", "response_length", "kl")
"""What is taken from the info of an episode's end; null where no layer below says it."""


def info_keys(info: Iterable[str]) -> list[str]:
    """`INFO_KEYS`, and the parts of the score that an info names."""
    return [*INFO_KEYS, *(key for key in info if key.startswith(PART))]


def record_line(episode: int, episode_return: float, info: Mapping[str, Any]) -> str:
    r"""One episode as a line of JSON, without its line feed.

    Example:
        >>> end = {"prompt": "a", "response": " b", "score": 1.5, "finish_reason": "stop", "response_length": 2}
        >>> record_line(0, 1.25, end)[:62]
        '{"episode": 0, "prompt": "a", "response": " b", "score": 1.5, '

    Args:
        episode: its number.
        episode_return: sum of its rewards.
        info: the info of its end.
    """
    taken = {key: _plain(info.get(key)) for key in info_keys(info)}
    return json.dumps({"episode": _plain(episode), **taken, "return": _plain(episode_return)}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """As JSON knows it: numpy's numbers as Python's, what is not finite (the score of a dropped sample) as null."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EpisodeFile:
    """A file of JSON lines and the number of its next one.

    Args:
        path: the file; missing folders are made.
        mode: ``"x"`` refuses a file that exists, ``"w"`` empties it, ``"a"`` goes on behind its last line, also where a
            crash of the machine left half of one.

    Raises:
        TypeError: `path` is no path.
        ValueError: an unknown mode.
        FileExistsError: the file exists, in mode ``"x"``.
        IsADirectoryError: it is a folder.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"`path` should be the path of a file, got {type(path).__name__}. An open file could not be copied or "
                "pickled with the environment; pass its name."
            )
        if mode not in MODES:
            raise ValueError(
                f"`mode` should be 'x' (refuse a file that exists), 'w' (empty it) or 'a' (go on in it), got {mode!r}."
            )
        self.path = Path(path).absolute()  # a copy in another process, or after a chdir, finds the same file
        if self.path.is_dir():
            raise IsADirectoryError(f"`path` should be a file, got the folder {self.path}. Add a name: episodes.jsonl.")
        if mode == "x" and self.path.exists():
            raise FileExistsError(
                f"`path` should be a new file, but {self.path} exists and would be mixed with this run's episodes. "
                "Choose another name, or pass mode='a' to go on in it or mode='w' to empty it."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.episodes = self._open(mode)

    def _open(self, mode: str) -> int:
        """Make the file what the mode promises; returns the number of its lines."""
        with open(self.path, f"{mode}b"):
            pass
        lines, last = 0, b"\n"
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                lines, last = lines + block.count(b"\n"), block[-1:]
        if last != b"\n":
            self._append("\n")
            lines += 1
        return lines

    def write(self, returns: Sequence[float], infos: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per episode."""
        lines = [
            record_line(self.episodes + place, episode_return, info)
            for place, (episode_return, info) in enumerate(zip(returns, infos, strict=True))
        ]
        self._append("".join(f"{line}\n" for line in lines))
        self.episodes += len(lines)

    def _append(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its own JSON escape
        with open(self.path, "ab", buffering=0) as file:
            while data:  # one write, unless the disk takes less
                data = data[file.write(data) :]
