"""How fast SmolLM2-135M writes: `HFEngine`, transformers' own `generate` and `VLLMEngine`, side by side in one process.

    python benchmarks/generation.py                                     # float32, downloads nothing
    python benchmarks/generation.py --dtype bfloat16 --json results.json

All write the same number of tokens after the same prompts, at temperature 1, from the whole vocabulary; nothing ends a
response early. The engines write for one policy with adapters that are not the identity. `generate` is measured twice:
as it comes (the base model without adapters, torch's precision of float32 products untouched), and on the policy's own
model and arithmetic, which is the same work as the engines' on the same weights. In bfloat16 the former is the model
loaded in bfloat16, the latter autocast, as the policy trains.

Within a repetition contenders take turns, and each has written once before the first. Medians count. What an engine
does at every call (merging adapters, packing weights) is in its time; loading and vLLM's `sync` are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from support.process import cores

from textenv.agents import LanguageModelPolicy
from textenv.agents.rollouts import Engine, HFEngine
from textenv.agents.types import Sampling
from textenv.lm import load_causal_lm

ENGINE, GENERATE, GENERATE_POLICY, VLLM = "HFEngine", "generate", "generate, policy", "VLLMEngine"
Writer = Callable[[list[list[int]], int], int]
"""Writes after prompts, given a seed; returns how many tokens."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the benchmark."""

    sequences: tuple[int, ...] = (1, 8, 16, 64, 256)
    """Responses that are written together."""
    prompt_tokens: int = 16
    """Of each prompt."""
    new_tokens: int = 32
    """Of each response."""
    repetitions: int = 5
    """Of every measurement; the median counts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic."""
    lora_rank: int = 16
    """Of the policy's adapters; 0: all weights train."""
    samples_per_prompt: int = 1
    """Responses that share a prompt; `sequences` counts responses."""
    threads: int | None = None
    """torch's; None: one per core that this process may use."""
    vllm: bool = True
    """Measure vLLM too, where it is installed."""
    json: Path | None = None
    """Where to write the figures."""


def make_policy(arguments: Arguments) -> LanguageModelPolicy:
    """SmolLM2, its adapters moved as training moves them."""
    rank = arguments.lora_rank or None
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=rank, dtype=arguments.dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.lm.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def make_prompts(arguments: Arguments, sequences: int, vocab_size: int) -> list[list[int]]:
    """Random ids: prompts by `samples_per_prompt` are `sequences` responses."""
    count = -(-sequences // arguments.samples_per_prompt)
    drawn = np.random.default_rng(0).integers(3, vocab_size, (count, arguments.prompt_tokens))
    prompts: list[list[int]] = drawn.tolist()
    return prompts


def by_engine(engine: Engine, arguments: Arguments) -> Writer:
    """One of our engines."""

    def write(prompts: list[list[int]], seed: int) -> int:
        sampling = Sampling(
            max_tokens=arguments.new_tokens,
            stop_ids=(),
            seed=seed,
            samples_per_prompt=arguments.samples_per_prompt,
        )
        return engine.generate(prompts, sampling).tokens

    return write


def by_generate(model: Any, arithmetic: Callable[[], Any], arguments: Arguments) -> Writer:
    """Transformers' own decoding, sampling from the whole distribution."""

    @torch.no_grad()
    def write(prompts: list[list[int]], seed: int) -> int:
        ids = torch.tensor(prompts)
        torch.manual_seed(seed)
        with arithmetic():
            written = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=arguments.samples_per_prompt,
                min_new_tokens=arguments.new_tokens,
                max_new_tokens=arguments.new_tokens,
                pad_token_id=0,
            )
        return int(written[:, ids.shape[1] :].numel())

    return write


def contenders(arguments: Arguments, policy: LanguageModelPolicy, console: Console) -> dict[str, Writer | None]:
    """Who takes part, and None for those that are not installed."""
    plain = load_causal_lm("smollm2-135m", "cpu").to(getattr(torch, arguments.dtype))
    found: dict[str, Writer | None] = {
        GENERATE: by_generate(plain, contextlib.nullcontext, arguments),
        GENERATE_POLICY: by_generate(policy.lm.model, policy.arithmetic, arguments),
        ENGINE: by_engine(HFEngine(policy), arguments),
    }
    if not arguments.vllm:
        return found
    found[VLLM] = None
    if importlib.util.find_spec("vllm") is not None:
        from textenv.agents.rollouts import VLLMEngine

        length = arguments.prompt_tokens + arguments.new_tokens
        with console.status("loading vLLM"):
            engine = VLLMEngine(policy, max_model_len=length, max_rows=max(arguments.sequences))
        found[VLLM] = by_engine(engine, arguments)
    return found


def rates(
    arguments: Arguments, writers: dict[str, Writer], prompts: list[list[int]], advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Tokens per second of each, repetition by repetition; the first of all warms up."""
    found: dict[str, list[float]] = {name: [] for name in writers}
    for repetition in range(arguments.repetitions + 1):
        for name, write in writers.items():
            gc.collect()
            start = time.perf_counter()
            tokens = write(prompts, repetition)
            rate = tokens / (time.perf_counter() - start)
            if tokens != len(prompts) * arguments.samples_per_prompt * arguments.new_tokens:
                raise RuntimeError(f"{name} should have written all tokens, got {tokens}; rates would not compare.")
            if repetition:
                found[name].append(rate)
            advance()
    return found


def table(arguments: Arguments, medians: dict[int, dict[str, float]], absent: list[str]) -> Table:
    """Tokens per second, and the ratio to each `generate`."""
    shown = Table(
        title=f"SmolLM2-135M, {arguments.dtype}, {torch.get_num_threads()} threads: tokens/s of {arguments.new_tokens} "
        f"tokens after prompts of {arguments.prompt_tokens}",
        caption="in brackets: times generate as it comes / generate on the policy's own model and arithmetic",
    )
    shown.add_column("sequences", justify="right")
    names = list(next(iter(medians.values())))
    for name in [*names, *absent]:
        shown.add_column(name, justify="right")
    for sequences, found in medians.items():
        cells = []
        for name in names:
            ratios = [f"{found[name] / found[other]:.2f}" for other in (GENERATE, GENERATE_POLICY)]
            brackets = "" if name in (GENERATE, GENERATE_POLICY) else f" ({' / '.join(ratios)})"
            cells.append(f"{found[name]:,.0f}{brackets}")
        shown.add_row(str(sequences), *cells, *("not installed" for _ in absent))
    return shown


def main(arguments: Arguments) -> None:
    console = Console()
    threads = arguments.threads or cores()
    torch.set_num_threads(threads)
    policy = make_policy(arguments)
    everybody = contenders(arguments, policy, console)
    writers = {name: writer for name, writer in everybody.items() if writer is not None}
    absent = [name for name, writer in everybody.items() if writer is None]
    found: dict[int, dict[str, list[float]]] = {}
    with Progress(console=console, transient=True) as progress:
        total = len(arguments.sequences) * len(writers) * (arguments.repetitions + 1)
        bar = progress.add_task("writing", total=total)
        for sequences in arguments.sequences:
            prompts = make_prompts(arguments, sequences, policy.lm.vocab_size)
            found[sequences] = rates(arguments, writers, prompts, lambda: progress.advance(bar))
    medians = {
        sequences: {name: statistics.median(values) for name, values in by_name.items()}
        for sequences, by_name in found.items()
    }
    console.print(table(arguments, medians, absent))
    if arguments.json is not None:
        settings = {**dataclasses.asdict(arguments), "json": str(arguments.json), "threads": threads}
        record = {"settings": settings, "torch": torch.__version__, "tokens_per_second": found, "medians": medians}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
