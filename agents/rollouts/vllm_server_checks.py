"""Is a vLLM server what `VLLMServerEngine` needs? Asked once, before any work; errors say how to start one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from textenv.agents.rollouts.vllm_server_http import GENERATE, Server, ServerError
from textenv.agents.rollouts.vllm_server_process import command_line
from textenv.agents.rollouts.vllm_server_worker import EXTENSION
from textenv.agents.rollouts.vllm_weights import context_length

ONE_TOKEN = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False}}
MOST_ROWS = 256
"""Requests that are open at the same time on a server, each in a thread of its own."""

WHY = {
    "logprobs_mode": "log-probabilities would be those of another distribution than the one that is sampled",
    "dtype": "its log-probabilities would differ from the policy's by rounding",
    "worker_extension_cls": "on a CPU an output head tied to the embeddings would keep its old weights",
}


class ServerSettings(NamedTuple):
    """What a server was started with."""

    max_model_len: int
    rows: int
    """Responses that it writes at the same time."""
    cpu: bool
    """Whether it computes on a CPU."""
    nccl: bool
    """Whether it takes weights through NCCL."""


def check_policy(policy: Any) -> None:
    """Refuse policies that vLLM cannot hold.

    Raises:
        TypeError: not a language-model policy.
    """
    if not hasattr(policy, "lm"):
        raise TypeError(
            f"vLLM runs language models: `policy` should be a LanguageModelPolicy, got {type(policy).__name__}. Other "
            "policies write with their own engine: engine=None."
        )


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """The URLs as a list.

    Raises:
        ValueError: there is none, or one is there twice.
    """
    listed = [urls] if isinstance(urls, str) else list(urls)
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(
            f"`urls` should name at least one vLLM server, and each once, got {listed}. Weights are sent to each of "
            "them, and rows are spread over them."
        )
    return listed


def open_server(server: Server, policy: Any) -> ServerSettings:
    """Ask a server how it was started.

    Raises:
        ServerError: it does not answer, or was started in another way than the policy needs.
    """
    command = command_line("FOLDER", policy.lm.dtype, policy.lm.device.type)
    start = f"\nStart it with a folder from write_server_folder(policy, FOLDER):\n{command}"
    try:
        server.get("/health", "say whether it is healthy")
        config = server.get("/server_info?config_format=json", "say how it was started")["vllm_config"]
        server.post(GENERATE, ONE_TOKEN, "write a token")
    except ServerError as error:
        raise ServerError(f"{error}{start}") from error
    model, parallel = config["model_config"], config["parallel_config"]
    cpu = config["device_config"]["device"] == "cpu"
    extension = parallel["worker_extension_cls"]
    found_and_wanted = {
        "logprobs_mode": (model["logprobs_mode"], "processed_logprobs"),
        "dtype": (model["dtype"].removeprefix("torch."), policy.lm.dtype),
        "worker_extension_cls": (extension, EXTENSION if cpu else extension),
    }
    for name, (found, wanted) in found_and_wanted.items():
        if found != wanted:
            raise ServerError(
                f"The vLLM server at {server.url} should have {name} {wanted!r}, it has {found!r}: {WHY[name]}.{start}"
            )
    transfer = config["weight_transfer_config"] or {}
    return ServerSettings(
        max_model_len=model["max_model_len"],
        rows=min(config["scheduler_config"]["max_num_seqs"], MOST_ROWS),
        cpu=cpu,
        nccl=transfer.get("backend") == "nccl",
    )


def context_of(policy: Any, settings: Sequence[ServerSettings]) -> int:
    """Tokens of prompt and response that all servers hold, and the model attends to."""
    own = context_length(policy)
    return min([found.max_model_len for found in settings] + ([] if own is None else [own]))
