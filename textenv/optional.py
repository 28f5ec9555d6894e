"""Optional dependencies: a missing one is an error that names the exact install command."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator


def require(module: str, extra: str, why: str) -> None:
    """Raise where a module is not installed, without importing it.

    Args:
        module: the import name.
        extra: textenv's extra that brings it.
        why: what needs it, the start of a sentence.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{why} needs {module}, which is not installed: pip install 'textenv[{extra}]'")


@contextlib.contextmanager
def progress_bar(description: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar that disappears when the block ends; calling what comes back moves it on by one.

    Args:
        description: stands before it.
        total: of steps.
        shown: False: there is no bar, and nothing is needed.

    Raises:
        ImportError: a bar is wanted and rich is not installed.
    """
    if not shown:
        yield lambda: None
        return
    require("rich", "train", "A progress bar")
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
