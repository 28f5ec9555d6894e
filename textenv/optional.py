"""Optional dependencies: a missing one is an error that names the exact install command."""

from __future__ import annotations

import importlib.util


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
