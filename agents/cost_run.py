"""The price of an agent that has been made: one line before it starts, and a word where memory will not do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from textenv.agents.cost import GIB, Cost
from textenv.agents.cost_memory import ADAM
from textenv.agents.cost_setup import Setup
from textenv.agents.cost_shape import shape_of
from textenv.agents.language_model import LanguageModelPolicy
from textenv.agents.policy import device_of
from textenv.layers import reference_of, text_envs

if TYPE_CHECKING:
    from textenv.agents.agent import Agent


def cost_of(agent: Agent) -> Cost | None:
    """The estimate for an agent as it is configured; None where its policy is no language model.

    A scorer of its own counts as a reward model of the policy's size where it is a model, and as nothing where it is a
    function.
    """
    policy, config = agent.policy, agent.config
    if not isinstance(policy, LanguageModelPolicy):
        return None
    task = text_envs(agent.envs).task
    settings = policy.settings
    setup = Setup(
        shape=shape_of(policy.lm.model, settings.get("model", "")),
        lora_rank=settings.get("lora_rank"),
        value=settings.get("value", "trunk"),
        reward=_reward_kind(task.scorer, reference_of(policy, agent.envs)),
        engine=_engine_kind(agent.engine),
        dtype=policy.lm.dtype,
        device=str(policy.lm.device),
        batch=agent.batch_size,
        prompt_tokens=task.mdp.max_prompt_tokens,
        response_tokens=task.mdp.max_response_tokens,
        epochs=config.epochs,
        num_minibatches=min(config.num_minibatches, agent.batch_size),
        micro_batch_tokens=config.micro_batch_tokens,
        logprobs_from=config.logprobs_from,
        checkpointing=settings.get("checkpointing", False),
        kv_cache_gib=float(getattr(agent.engine, "kv_cache_gib", 1.0)),
    )
    return Cost.of(setup)


def _reward_kind(scorer: Any, reference: Any) -> Any:
    from textenv.rewards import RewardModel, SequenceClassificationReward
    from textenv.rewards.shared import shares_trunk

    if shares_trunk(scorer, reference):
        return "shared"
    return "separate" if isinstance(scorer, RewardModel | SequenceClassificationReward) else "none"


def _engine_kind(engine: Any) -> Any:
    return {"VLLMEngine": "vllm", "VLLMServerEngine": "server"}.get(type(engine).__name__, "hf")


def run_line(agent: Agent) -> str | None:
    """What the run needs, in a line to print before it starts; None for a policy without parameters.

    Policies that are no language models are counted from their parameters, without activations: 2 operations per
    parameter and token forward, 6 forward and backward.
    """
    cost = cost_of(agent)
    if cost is not None:
        return cost.line()
    sizes = [(p.numel(), p.requires_grad) for p in agent.policy.parameters()]
    everything, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    if not everything:
        return None
    memory, flops = 4 * everything + (4 + ADAM) * trained, (4 + 6 * agent.config.epochs) * everything
    return (
        f"This run needs about {memory / 2**20:.2g} MiB for weights, gradients and optimiser, and {flops:.2g} "
        "FLOP per token."
    )


def memory_warning(agent: Agent) -> str | None:
    """Say that an agent will need more memory than its device has free, or None where it will do or cannot be told.

    What the process holds already is not asked for again.
    """
    cost = cost_of(agent)
    if cost is None:
        return None
    device = device_of(agent.policy)
    free, held = _cuda_memory(device) if device.type == "cuda" else _host_memory()
    missing = cost.total - held
    if free is None or missing <= free:
        return None
    return (
        f"This run needs about {cost.total / GIB:.2g} GiB at its peak ({cost.peak}), {missing / GIB:.2g} GiB more than "
        f"it holds now, and only {free / GIB:.2g} GiB are free: it may be killed. Lower micro_batch_tokens or "
        "episodes_per_iteration, train adapters (lora_rank) rather than all weights, or use dtype='bfloat16'."
    )


def _cuda_memory(device: torch.device) -> tuple[int | None, int]:
    """Bytes that are free on the card, and that this process holds."""
    return torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)


def _host_memory() -> tuple[int | None, int]:
    """Bytes that are free on the machine (None where it does not tell), and that this process holds."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        held = int(Path("/proc/self/statm").read_text().split()[1]) * page
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024  # SC_AVPHYS_PAGES leaves out what the file cache would give
    except (OSError, ValueError, KeyError):  # not Linux
        return None, 0
    return min(free, _container_memory(free)), held


def _container_memory(otherwise: int) -> int:
    """Bytes that are left of the container's limit, where it has one."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return otherwise
