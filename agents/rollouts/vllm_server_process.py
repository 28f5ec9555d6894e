"""Starting vLLM servers for a policy, on this machine, and stopping them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from textenv.agents.rollouts.vllm_loading import CPU_BLOCK, CPU_PROMPT_TOKENS
from textenv.agents.rollouts.vllm_server_http import Server, ServerError
from textenv.agents.rollouts.vllm_server_weights import write_weights
from textenv.agents.rollouts.vllm_server_worker import EXTENSION
from textenv.agents.rollouts.vllm_weights import write_config
from textenv.optional import require

LOG_LINES = 25
"""Of a server's log in the error that says it died."""

WATCH = Path(__file__).with_name("vllm_server_watch.py")
"""Ends a server when this process does, however that happens."""

STOP_SECONDS = 20.0
"""For a server to end by itself before it is killed."""


def server_environment(device: str = "cpu") -> dict[str, str]:
    """What a server needs in its environment besides what is there.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    everywhere = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # the endpoints that take new weights
    # Else every server takes the same cores, and compiles small functions at its first batch (with a C++ compiler).
    on_cpus = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return {**everywhere, **(on_cpus if device == "cpu" else {})}


def server_command(
    folder: str | os.PathLike[str],
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    dtype: str = "float32",
    max_model_len: int | None = None,
    device: str = "cpu",
    options: Sequence[str] = (),
) -> list[str]:
    """The command line of a server that `VLLMServerEngine` can use; it also needs `server_environment`.

    It is what ``vllm serve`` runs. The CPU build's own ``vllm`` command looks for a package of that name and stops.

    Args:
        folder: see `write_server_folder`.
        port: of the server.
        host: address that it listens on. Whoever reaches it can replace its weights: keep to loopback or a network of
            your own.
        dtype: of its arithmetic, the policy's.
        max_model_len: prompt and response tokens together; None: the model's context, or what the cache holds of it.
        device: ``"cpu"`` or ``"cuda"``. On CPUs nothing is compiled, small blocks of the prefix cache are shared, and
            the server's Python must have textenv too, see `vllm_server_worker`.
        options: further ones of vLLM, such as ``["--gpu-memory-utilization", "0.4"]``.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", os.fspath(folder)]
    command += ["--host", host, "--port", str(port), "--dtype", dtype, "--tokens-only"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if device == "cpu":
        command += ["--enforce-eager", "--block-size", str(CPU_BLOCK), "--worker-extension-cls", EXTENSION]
        # A seeded request whose prompt is read in parts makes vLLM set back a generator, which CPU ones cannot do.
        tokens = max(CPU_PROMPT_TOKENS, max_model_len or _context(folder))
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
    length = "auto" if max_model_len is None else str(max_model_len)
    return [*command, "--max-model-len", length, *options]


def _context(folder: str | os.PathLike[str]) -> int:
    """Tokens that the model of a folder attends to; 0 where that is not known."""
    path = Path(folder) / "config.json"
    return int(json.loads(path.read_text()).get("max_position_embeddings", 0)) if path.exists() else 0


def command_line(folder: str, dtype: str, device: str) -> str:
    """`server_command` with its environment, to be pasted into a shell."""
    variables = " ".join(f"{name}={value}" for name, value in server_environment(device).items())
    return f"{variables} {shlex.join(['python', *server_command(folder, dtype=dtype, device=device)[1:]])}"


def write_server_folder(policy: Any, folder: str | os.PathLike[str]) -> None:
    """Write what a server loads: the policy's configuration and its weights, adapters merged. No tokenizer: ids go in
    and out. Rows of the embeddings that the tokenizer does not name are left out, so that they are never sampled.

    Args:
        policy: a `LanguageModelPolicy`.
        folder: made where it does not exist.
    """  # noqa: D205
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_config(policy, folder)
    write_weights(policy, folder, getattr(torch, policy.lm.dtype))


@contextlib.contextmanager
def serve(
    policy: Any,
    servers: int = 1,
    *,
    max_model_len: int | None = None,
    threads: int | None = None,
    kv_cache_gib: float = 1.0,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    log_folder: str | os.PathLike[str] | None = None,
    timeout: float = 600.0,
) -> Iterator[list[str]]:
    """Start vLLM servers that hold the policy's weights, on free ports of the loopback address; stop them at the end.

    ``with serve(policy) as urls: PPO(policy, envs, engine=VLLMServerEngine(policy, urls))``

    Args:
        policy: a `LanguageModelPolicy`.
        servers: how many; they start at the same time.
        max_model_len: see `server_command`.
        threads: of each server's arithmetic on a CPU; None: vLLM's choice.
        kv_cache_gib: GiB of each server's key-value cache on a CPU.
        environment: further variables of the servers, such as ``{"CUDA_VISIBLE_DEVICES": "1"}``.
        options: further command-line options of vLLM.
        log_folder: where the logs stay; None: they go with the servers, their last lines into errors.
        timeout: seconds that starting may take.

    Yields:
        The URLs.

    Raises:
        ImportError: vLLM is not installed.
        ServerError: a server died or did not come up in time.
    """
    device = policy.lm.device.type
    require("vllm", "vllm-cpu" if device == "cpu" else "vllm", "serve")
    folder = Path(tempfile.mkdtemp(prefix="textenv-server-"))
    logs = Path(log_folder) if log_folder is not None else folder
    if device == "cpu":
        options = ["--kv-cache-memory-bytes", str(int(kv_cache_gib * 2**30)), *options]
    given = {"dtype": policy.lm.dtype, "max_model_len": max_model_len, "device": device}
    threads_variable = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    variables = {**os.environ, **server_environment(device), **threads_variable, **(environment or {})}
    started: list[_Started] = []
    try:
        write_server_folder(policy, folder / "model")
        logs.mkdir(parents=True, exist_ok=True)
        for number in range(servers):
            port = _free_port()
            command = server_command(folder / "model", port=port, options=options, **given)
            started.append(start_watched(command, variables, f"http://127.0.0.1:{port}", logs / f"server-{number}.log"))
        deadline = time.monotonic() + timeout
        for server in started:
            _wait(server, deadline)
        yield [server.url for server in started]
    finally:
        _stop([server.process for server in started])
        shutil.rmtree(folder, ignore_errors=True)


class _Started(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def error(self, what: str) -> ServerError:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        text = f"The vLLM server for {self.url} should have come up, but {what}. The end of its log:"
        return ServerError("\n".join([text, *lines]))


def start_watched(command: Sequence[str], variables: Mapping[str, str], url: str, log: Path) -> _Started:
    """Run a server that ends when its standard input does, in a process group of its own, with its workers."""
    watched = [sys.executable, "-I", str(WATCH), str(STOP_SECONDS), *command]
    with log.open("wb") as file:
        process = subprocess.Popen(
            watched, env=variables, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
        )
    return _Started(url, process, log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(server: _Started, deadline: float) -> None:
    """Return when the server is healthy."""
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise server.error(f"it ended with status {server.process.returncode}")
        if _healthy(server.url):
            return
        time.sleep(0.2)
    raise server.error("it was not ready in time (see `timeout`)")


def _healthy(url: str) -> bool:
    server = Server(url, timeout=5.0)
    try:
        server.ask("GET", "/health", None, "be healthy", attempts=1)
    except ServerError:
        return False
    finally:
        server.close()
    return True


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the servers with all their workers."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS + 5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers outlive a server that died by itself
        process.wait()
