"""New weights for vLLM servers through a checkpoint folder in shared memory; `vllm_server_nccl` is the GPUs' road."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from textenv.agents.rollouts.vllm_server_http import Server, ServerError
from textenv.agents.rollouts.vllm_weights import engine_weights

SHARED_MEMORY = Path("/dev/shm")
"""A folder in memory, where the system has one."""

FILE_BYTES = 2**30
"""Weights that are held at once while a folder is written."""


def everywhere(servers: Sequence[Server], call: Callable[[Server], Any]) -> list[Any]:
    """Results of one call per server, all at the same time.

    Raises:
        ServerError: of the first server in the list whose call failed, after all have ended.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        return [future.result() for future in [pool.submit(call, server) for server in servers]]


def write_weights(policy: Any, folder: str | os.PathLike[str], dtype: torch.dtype) -> None:
    """Write merged weights as safetensors files of about `FILE_BYTES`; no second model is held.

    Args:
        policy: a `LanguageModelPolicy`.
        folder: that exists.
        dtype: of the server: it would round to it anyway.
    """
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    files = size = 0
    for name, tensor in engine_weights(policy):
        held[name] = tensor.to("cpu", dtype).contiguous()
        size += held[name].nbytes
        if size >= FILE_BYTES:
            save_file(held, Path(folder) / f"model-{files:05d}.safetensors")
            held, files, size = {}, files + 1, 0
    if held:
        save_file(held, Path(folder) / f"model-{files:05d}.safetensors")


class FolderTransfer:
    """Writes a checkpoint folder that every server reads.

    Args:
        dtype: of the servers, ``"float32"`` or ``"bfloat16"``.
        folder: where folders are made that all servers can read under the same path; None: shared memory, else the
            folder for temporary files. Servers on other machines or in containers need one that they share.
        method: of the servers' workers that reads a folder.

    Raises:
        ValueError: the folder is not there, or cannot be written to.
    """

    def __init__(
        self, dtype: str, folder: str | os.PathLike[str] | None = None, method: str = "reload_weights"
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.method = method
        self.parent = Path(folder) if folder is not None else shared_folder()
        if not self.parent.is_dir() or not os.access(self.parent, os.W_OK):
            raise ValueError(
                f"`weights_folder` should be a folder that can be written to, got {str(self.parent)!r}. New "
                "weights are handed to the servers in it, so that they must see it under the same path."
            )

    def send(self, policy: Any, servers: Sequence[Server]) -> None:
        """Give the policy's weights to all servers.

        Raises:
            ServerError: a server could not read them.
        """
        folder = tempfile.mkdtemp(prefix="textenv-weights-", dir=self.parent)
        body = {"method": self.method, "kwargs": {"weights_path": folder}}
        try:
            write_weights(policy, folder, self.dtype)
            task = f"read new weights from {folder}"
            everywhere(servers, lambda server: server.post("/collective_rpc", body, task))
        except ServerError as error:
            raise ServerError(
                f"{error} Two things to look at: the server must see that folder under the same path (other machines "
                "and containers need a shared one, `weights_folder`), and it must have been started with a model of "
                "the policy's shapes, from write_server_folder."
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing is kept."""


def shared_folder() -> Path:
    """Shared memory where it can be written to, else the folder for temporary files."""
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return SHARED_MEMORY if usable else Path(tempfile.gettempdir())
