"""One level of a vector stack in one autoreset mode, and the single environment that its rows should equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode


@dataclass(frozen=True)
class Rows:
    """All of a stack, or what is inside of its wrappers.

    Attributes:
        where: for messages.
        mode: the autoreset mode.
        make: gives fresh rows of a number.
        single: gives the single environment that each row should equal; None: none is known.
        num_envs: N.
        bare: whether no wrapper is around.
    """

    where: str
    mode: AutoresetMode
    make: Callable[[int], Any]
    single: Callable[[], Any] | None
    num_envs: int
    bare: bool
