"""One point of `scaling.py` in a process of its own: seconds, memory and attention's share of an update.

Memory is the process's high-water mark over several passes, begun anew just before the first, less what the process
held then. A pass over one row has gone before, so that libraries are loaded and the optimiser's moments are there. One
pass would show less: what the allocator cannot reuse gathers over the next.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from support.process import peak_memory, resident_memory, run
from support.update_side import by_group
from textenv.agents import PPO, LanguageModelPolicy, PPOConfig
from textenv.agents.losses import aggregate, clipped_policy_loss, clipped_value_loss
from textenv.agents.micro_batches import token_budget
from textenv.agents.types import Rollout

Work = Callable[[Rollout], Any]
"""What is measured, on the episodes it is given."""


def make_policy(job: dict[str, Any]) -> LanguageModelPolicy:
    """Adapters on one trunk: a model's folder, or a random Llama of two layers with the vocabulary asked for."""
    if job["model"] is not None:
        return LanguageModelPolicy.from_pretrained(job["model"], lora_rank=job["lora_rank"], dtype=job["dtype"])
    from transformers import LlamaConfig, LlamaForCausalLM

    from textenv.bytes import ByteTokenizer
    from textenv.lm import LanguageModel
    from textenv.lm.adapters import AdapterFree, add_lora, round_frozen_layers

    config = LlamaConfig(
        vocab_size=job["vocab_size"],
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=job["prompt_tokens"] + job["response_tokens"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(job["seed"])
    module: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    if job["dtype"] == "bfloat16":
        round_frozen_layers(module)
    lm = LanguageModel(module, source="random", dtype=job["dtype"])
    add_lora(module, job["lora_rank"], 2 * job["lora_rank"], job["seed"])
    tokenizer: Any = ByteTokenizer()  # no text is read or written
    return LanguageModelPolicy(lm, AdapterFree(module, source="random", dtype=job["dtype"]), tokenizer, settings={})


def make_rollout(policy: LanguageModelPolicy, job: dict[str, Any]) -> Rollout:
    """Responses of random ids, all of full length, with random advantages and returns."""
    generator = torch.Generator().manual_seed(job["seed"])
    rows, width = job["batch_size"], job["response_tokens"]
    ids = torch.randint(3, policy.lm.vocab_size, (rows, job["prompt_tokens"] + width), generator=generator)
    mask = torch.ones_like(ids)
    noise = torch.randn(rows, width, generator=generator)
    zeros = torch.zeros_like(noise)
    old = policy.response_logprobs(ids.numpy(), mask.numpy(), width)
    return Rollout(
        input_ids=ids,
        attention_mask=mask,
        response_mask=torch.ones(rows, width, dtype=torch.bool),
        logprobs=torch.as_tensor(old, dtype=torch.float32),
        ref_logprobs=None,
        values=zeros,
        rewards=zeros,
        advantages=noise,
        returns=noise,
        scores=zeros[:, 0],
        finish_reason=(),
        prompts=(),
        responses=(),
        seconds={},
    )


def micro_batch(policy: LanguageModelPolicy) -> Work:
    """Forward, PPO's losses and backward of all episodes at once."""

    def work(batch: Rollout) -> None:
        policy.zero_grad(set_to_none=True)
        with policy.arithmetic():
            output = policy.evaluate(batch.input_ids, batch.attention_mask, batch.response_tokens)
            losses = clipped_policy_loss(output.logprobs, batch.logprobs, batch.advantages, batch.response_mask)
            losses = losses + 0.1 * clipped_value_loss(output.values, batch.values, batch.returns, batch.response_mask)
            aggregate(losses, batch.response_mask).backward()

    return work


def whole_update(policy: LanguageModelPolicy, job: dict[str, Any]) -> Work:
    """An epoch of `PPO.optimise` as it comes: micro-batches of the policy's own token budget, one optimiser step."""
    import gymnasium as gym

    def no_scorer(prompts: list[str], responses: list[str]) -> list[float]:
        raise AssertionError(f"Nothing should be scored here, got {len(prompts)} prompts, {len(responses)} responses.")

    prompt = list(range(3, 3 + job["prompt_tokens"]))
    envs = gym.make_vec("RLHF-v0", num_envs=1, model=job["model"], prompts=[prompt], scorer=no_scorer)
    agent = PPO(policy, envs, PPOConfig(epochs=1, num_minibatches=1, check_start=False), seed=job["seed"])
    return agent.optimise


def held_memory() -> int:
    """Bytes that the process holds; its high-water mark begins anew from there. Freed memory is given back before.

    Raises:
        RuntimeError: the system has no such mark to begin anew.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return resident_memory()
    except (AttributeError, OSError) as error:
        raise RuntimeError(
            "Memory should be measured on Linux, with glibc and a writable /proc/self/clear_refs: elsewhere the peak "
            f"of loading the model would hide that of the update ({error})."
        ) from error


def attention_share(work: Work, rollout: Rollout, vocab_size: int) -> float:
    """Attention's share of the time of a profiled pass: products of queries, keys and values, and their softmax."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work(rollout)
    seconds = by_group(profiler.key_averages(group_by_input_shape=True), vocab_size)
    return seconds.get("attention", 0.0) / sum(seconds.values())


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of all passes after one over a single row; median seconds of those after the first of them."""
    torch.set_num_threads(job["threads"])
    policy = make_policy(job)
    rollout = make_rollout(policy, job)
    work = whole_update(policy, job) if job["whole_update"] else micro_batch(policy)
    work(rollout.rows(torch.tensor([0])))
    held = held_memory()
    work(rollout)
    times = []
    for _ in range(job["repetitions"]):
        start = time.perf_counter()
        work(rollout)
        times.append(time.perf_counter() - start)
    peak = peak_memory()
    weights = policy.lm.model.get_input_embeddings().weight, policy.lm.model.get_output_embeddings().weight
    return {
        "seconds": statistics.median(times),
        "times": times,
        "memory": peak - held,
        "process_memory": peak,
        "vocabulary_weights": sum({w.data_ptr(): w.numel() * w.element_size() for w in weights}.values()),
        "vocab_size": policy.lm.vocab_size,
        "budget": token_budget(policy, None),
        "attention": attention_share(work, rollout, policy.lm.vocab_size) if job["profile"] else None,
    }


if __name__ == "__main__":
    run(main)
