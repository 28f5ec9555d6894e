"""What wrappers need to know of the text environment at the bottom of their stack."""

from __future__ import annotations

from typing import Any

from textenv.layers import layers
from textenv.task import TextTask


def task_of(env: Any, wrapper: str) -> TextTask:
    """The text task at the bottom of a stack, single or vector.

    Raises:
        TypeError: there is none; `wrapper` says who needed it.
    """
    task = getattr(env.unwrapped, "task", None)
    if not isinstance(task, TextTask):
        raise TypeError(
            f"{wrapper} should wrap a text environment, whose task it reads, got {type(env.unwrapped).__name__}. Wrap "
            "what gym.make or gym.make_vec gives for an id of textenv; for single environments below a SyncVectorEnv "
            "use the wrapper of `textenv.wrappers` on each."
        )
    return task


def need_texts(env: Any, wrapper: str) -> None:
    """Refuse a stack whose infos have lost the texts that a wrapper reads.

    Raises:
        TypeError: there is an `ArrayInfos` below; `wrapper` says who needed them.
    """
    if any(getattr(type(layer), "hides_texts", False) for layer in layers(env)):
        raise TypeError(
            f"{wrapper} should be below ArrayInfos, got it above: the responses that it reads are no longer in the "
            f"infos there. Wrap ArrayInfos({wrapper}(env)) instead."
        )
