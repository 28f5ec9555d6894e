"""Forward and backward of one batch, ours or plain, timed and profiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from support.process import run

GROUPS = {
    "optimiser": ("adamw", "_foreach_", "clip_grad"),
    "attention": ("scaled_dot_product", "flash_attention", "bmm", "softmax"),
    "matmul": ("::mm", "addmm", "mkldnn_linear", "_linear_pointwise", "::linear", "::matmul"),
    "copies": ("::copy_", "::_to_copy", "::to", "::clone", "::contiguous", "::cat", "::fill_", "::zero_"),
}
"""Parts of an operation's name, by the group it is counted in; the first that fits."""


def group_of(name: str, shapes: list[Any], vocab_size: int) -> str:
    """Where an operation's time is counted.

    All that touches a side of V numbers belongs to the head (tied embeddings too); the rest is norms and other
    elementwise work.
    """
    if name.split("#")[0].lower().startswith("optimizer") or any(part in name for part in GROUPS["optimiser"]):
        return "optimiser"
    if any(vocab_size in shape for shape in shapes if isinstance(shape, list)):
        return "head"
    for group, parts in GROUPS.items():
        if any(part in name for part in parts):
            return group
    return "rest"


def by_group(events: Any, vocab_size: int) -> dict[str, float]:
    """Seconds of a profile by group."""
    seconds: dict[str, float] = {}
    for event in events:
        group = group_of(event.key, event.input_shapes, vocab_size)
        seconds[group] = seconds.get(group, 0.0) + event.self_cpu_time_total / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


Side = tuple[Callable[[], Tensor], list[Any], Callable[[], AbstractContextManager[Any]]]
"""The loss of a batch, the parameters that train, and the arithmetic of its passes."""


def ours(job: dict[str, Any], ids: Tensor) -> Side:
    """Our policy's `evaluate` under PPO's losses, with the value head on its trunk."""
    from textenv.agents import LanguageModelPolicy
    from textenv.agents.losses import aggregate, clipped_policy_loss, clipped_value_loss

    rank = job["lora_rank"] if job["layout"] == "adapters" else None
    policy = LanguageModelPolicy.from_pretrained(job["model"], lora_rank=rank, dtype=job["dtype"])
    mask, width = torch.ones_like(ids), job["response_tokens"]
    response_mask = mask[:, -width:].bool()
    advantages = torch.randn(response_mask.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), policy.arithmetic():
        old = policy.evaluate(ids, mask, width)

    def loss() -> Tensor:
        output = policy.evaluate(ids, mask, width)
        policy_loss = clipped_policy_loss(output.logprobs, old.logprobs, advantages, response_mask)
        value_loss = clipped_value_loss(output.values, old.values, advantages, response_mask)
        return aggregate(policy_loss, response_mask) + 0.1 * aggregate(value_loss, response_mask)

    return loss, [p for p in policy.parameters() if p.requires_grad], policy.arithmetic


def plain(job: dict[str, Any], ids: Tensor) -> Side:
    """What one writes first: logits of the response's positions, their log-softmax, the tokens' entries."""
    from transformers import AutoModelForCausalLM

    torch.set_float32_matmul_precision(job["matmul"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"])
    if job["layout"] == "adapters":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=job["lora_rank"], lora_alpha=2 * job["lora_rank"], target_modules="all-linear")
        model = get_peft_model(model, lora)
    mask, width = torch.ones_like(ids), job["response_tokens"]
    chosen = ids[:, -width:, None]
    advantages = torch.randn(chosen.shape[:2], generator=torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=width + 1)
        logprobs = torch.log_softmax(output.logits[:, :-1], -1).gather(-1, chosen).squeeze(-1)
        return -(advantages * logprobs).mean()

    return loss, [p for p in model.parameters() if p.requires_grad], nullcontext


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of forward and backward and of the optimiser's step; in the first round their profile, too."""
    torch.set_num_threads(job["threads"])
    generator = torch.Generator().manual_seed(job["seed"])
    length, vocab_size = job["prompt_tokens"] + job["response_tokens"], job["config"]["vocab_size"]
    ids = torch.randint(3, vocab_size, (job["batch_size"], length), generator=generator)
    loss, parameters, arithmetic = (ours if job["ours"] else plain)(job, ids)
    optimizer = torch.optim.AdamW(parameters, 1e-6, fused=True)

    def gradient() -> None:
        with arithmetic():
            loss().backward()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {"seconds": [], "optimiser_seconds": []}
    for _ in range(1 + job["iterations"]):
        for name, part in (("seconds", gradient), ("optimiser_seconds", step)):
            start = time.perf_counter()
            part()
            times[name].append(time.perf_counter() - start)
    result: dict[str, Any] = {name: statistics.median(found[1:]) for name, found in times.items()}
    if job["first_round"]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            gradient()
            step()
        result["profile"] = by_group(profiler.key_averages(group_by_input_shape=True), vocab_size)
    return result


if __name__ == "__main__":
    run(main)
