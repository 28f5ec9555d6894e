"""Around every call into vLLM: what it changes in the process is put back, what it says is kept quiet.

Measured with vLLM 0.32 on a CPU, loading alone changes: 11 environment variables (`LD_PRELOAD` among them), the random
states of torch, numpy and Python, `torch.set_num_threads` (replaced by a function that does nothing),
`torch.accelerator.synchronize`, the float32 precision of matrix products, the log record factory, httpx's log level,
`sys.excepthook`, the garbage collector (everything alive is frozen), and it leaves a default process group, which
libraries like Accelerate take for a distributed run. Generating draws from torch's global generator.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, where the weights are
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set while vLLM loads, and only then."""

CHATTY = ("vllm", "torch._library.triton")
"""Loggers of what is not the caller's concern."""

SET_BY_VLLM = ("httpx", "httpx2")
"""Loggers whose level vLLM sets."""

UNREADABLE = ("llvmlite.binding.ffi",)
"""Modules that numba has loaded where it was imported before. On CPUs vLLM reads the namespaces of all modules when it
loads, and one object in there has no ``__dict__`` that could be read."""


@contextlib.contextmanager
def undisturbed(*, cpu: bool, level: int = logging.ERROR) -> Iterator[None]:
    """The process's state after the block is that before it.

    Args:
        cpu: the engine runs on a CPU: its stand-ins for accelerator calls hold inside the block, and small functions
            that vLLM would compile (4 s and a C++ compiler at the first batch) run as they are.
        level: below which vLLM's log records are dropped.
    """
    with contextlib.ExitStack() as stack:
        for keep in (_environment, _random_states, _torch_settings, _python_hooks, _collector):
            stack.enter_context(keep())
        stack.enter_context(_quiet(level))
        if cpu:
            stack.enter_context(_no_accelerator())
            stack.enter_context(_hidden(UNREADABLE))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    python, global_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - vLLM seeds the global one
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(global_numpy)  # noqa: NPY002


@contextlib.contextmanager
def _torch_settings() -> Iterator[None]:
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _python_hooks() -> Iterator[None]:
    hook, factory, limit = sys.excepthook, logging.getLogRecordFactory(), sys.getrecursionlimit()
    try:
        yield
    finally:
        sys.excepthook = hook
        logging.setLogRecordFactory(factory)
        sys.setrecursionlimit(limit)


@contextlib.contextmanager
def _collector() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if frozen == 0 and gc.get_freeze_count():
            gc.unfreeze()  # the caller's objects were frozen too, and would never be collected


@contextlib.contextmanager
def _quiet(level: int) -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in CHATTY + SET_BY_VLLM}
    try:
        for name in CHATTY:
            logging.getLogger(name).setLevel(level)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


@contextlib.contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Without some modules in `sys.modules`; whoever holds them goes on using them."""
    modules = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.modules.update(modules)


@contextlib.contextmanager
def _no_accelerator() -> Iterator[None]:
    accelerator: Any = torch.accelerator
    before = {name: getattr(accelerator, name) for name in ("synchronize", "empty_cache")}
    try:
        for name in before:
            setattr(accelerator, name, _nothing)
        yield
    finally:
        for name, function in before.items():
            setattr(accelerator, name, function)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What there is to synchronise on a CPU."""
