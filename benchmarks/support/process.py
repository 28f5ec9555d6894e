"""A measurement in a process of its own, so that nothing another one left behind counts. Standard library alone.

The side that runs is a module with `run(main)` at its end: it reads a job from one JSON file and writes its result to
another. It may belong to another interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(module: str, job: dict[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """Run a side and return what it measured.

    Args:
        module: its name, ``"support.ours"`` for example.
        job: what it is told; ``job["threads"]`` is how many threads its libraries may use.
        python: the interpreter.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("job.json", "result.json")]
        paths[0].write_text(json.dumps(job))
        environment = os.environ | {
            "PYTHONPATH": str(FOLDER),
            "OMP_NUM_THREADS": str(job["threads"]),
            "CUDA_VISIBLE_DEVICES": "",  # what is compared is the processor
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [python, "-m", module, *map(str, paths)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0 or not paths[1].exists():
            said = "\n".join(done.stdout.splitlines()[-30:])
            brief = {name: value for name, value in job.items() if name not in ("config", "prompts")}
            raise RuntimeError(f"{module} should have measured {brief}, but ended with {done.returncode}:\n{said}")
        result: dict[str, Any] = json.loads(paths[1].read_text())
        return result


def run(main: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What a side calls: measure its job, add the process's peak memory, write the result."""
    job, result = map(Path, sys.argv[1:3])
    measured = main(json.loads(job.read_text()))
    result.write_text(json.dumps(measured | {"peak_memory": peak_memory()}))


def peak_memory() -> int:
    """The most bytes that this process held in memory at once.

    On Linux VmHWM, which begins anew with the program; `getrusage` would hand on the parent's peak. The kernel keeps
    that mark by counters which each processor adds to in batches of pages, so it may lag behind what is held right now,
    which is counted exactly.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(_kilobytes(status, "VmHWM:"), resident_memory())


def resident_memory() -> int:
    """Bytes that this process holds in memory, page by page; Linux only.

    Raises:
        OSError: the system does not tell.
    """
    return _kilobytes(Path("/proc/self/smaps_rollup").read_text(), "Rss:")


def _kilobytes(text: str, name: str) -> int:
    return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) * 1024
