"""How fast the environment steps: alone, against Gymnasium's own vectorisation, by N, and with a real reference.

    python benchmarks/env_speed.py               # all tables, a bit over a minute; downloads nothing
    python benchmarks/env_speed.py --no-model    # without the language model

Tokens are response tokens appended. Rows compare medians of interleaved repetitions in one process on one thread.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from rich.console import Console
from rich.table import Table

from textenv import TextGenerationEnv, TextGenerationVectorEnv, TextTask
from textenv.wrappers.vector import KLPenalty

VOCAB, STOP = 49_152, 2


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the benchmark."""

    num_envs: int = 256
    """N of the first table."""
    prompt_tokens: int = 16
    """P."""
    response_tokens: int = 48
    """T; an observation has P + T columns."""
    repetitions: int = 7
    """Of every measurement; the median counts."""
    model: bool = True
    """Measure the KL wrapper on SmolLM2-135M, too."""
    model_envs: int = 16
    """N of that measurement."""


class OneWord:
    """A tokenizer that costs nothing."""

    def encode(self, text: str) -> list[int]:
        return [3] * len(text.split())

    def decode(self, ids: Sequence[int]) -> str:
        return "word" if len(ids) else ""

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return ["word" if len(row) else "" for row in rows]


def no_score(_prompts: list[str], responses: list[str]) -> Any:
    return np.zeros(len(responses))


def make_task(arguments: Arguments) -> TextTask:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, arguments.prompt_tokens).tolist() for _ in range(64)]
    return TextTask.build(
        prompts=prompts,
        scorer=no_score,
        tokenizer=OneWord(),
        vocab_size=VOCAB,
        stop_ids=[STOP],
        max_response_tokens=arguments.response_tokens,
    )


def random_actions(steps: int, num_envs: int, stop_chance: float, seed: int = 0) -> Any:
    """Uniform tokens (steps, N), a stop with some probability."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(3, VOCAB, (steps, num_envs))
    return np.where(rng.random(actions.shape) < stop_chance, STOP, actions)


def rate(envs: Any, actions: Any) -> float:
    """Tokens per second of stepping: ignored actions (rows that only reset) do not count."""
    envs.reset(seed=0)
    resetting = np.zeros(actions.shape[1], dtype=bool)
    next_step = envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    tokens = 0
    start = time.perf_counter()
    for row in actions:
        _, _, terminated, truncated, _ = envs.step(row)
        tokens += actions.shape[1] - int(resetting.sum())
        resetting = (terminated | truncated) & next_step
    return tokens / (time.perf_counter() - start)


def medians(measurements: dict[str, Callable[[], float]], repetitions: int) -> dict[str, float]:
    """Median of each, repetitions interleaved so that all meet the same machine."""
    values: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(repetitions):
        for name, measure in measurements.items():
            gc.collect()
            values[name].append(measure())
    return {name: statistics.median(found) for name, found in values.items()}


def against_sync(arguments: Arguments, console: Console) -> None:
    """Our vector environment and `SyncVectorEnv` over our single one, the same actions."""
    task, n = make_task(arguments), arguments.num_envs
    table = Table(title=f"Stepping, no model: N = {n}, V = {VOCAB}, L = {task.mdp.length}")
    for column in ("episodes end by", "autoreset", "textenv, tokens/s", "SyncVectorEnv, tokens/s", "ratio"):
        table.add_column(column, justify="left" if column in ("episodes end by", "autoreset") else "right")
    for label, chance in (("budget", 0.0), ("stop, 1 token in 32", 1 / 32)):
        for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            ours = TextGenerationVectorEnv(n, task, autoreset_mode=mode, render_mode=None)
            theirs = SyncVectorEnv([lambda: TextGenerationEnv(task, render_mode=None)] * n, autoreset_mode=mode)
            long = random_actions(20 * arguments.response_tokens, n, chance)
            short = long[: 2 * arguments.response_tokens]
            found = medians(
                {"ours": lambda e=ours, a=long: rate(e, a), "sync": lambda e=theirs, a=short: rate(e, a)},
                arguments.repetitions,
            )
            ratio = found["ours"] / found["sync"]
            table.add_row(label, mode.value, f"{found['ours']:,.0f}", f"{found['sync']:,.0f}", f"{ratio:.1f}")
    console.print(table)


def by_number(arguments: Arguments, console: Console) -> None:
    """Nanoseconds per environment and step, from few environments to many."""
    task = make_task(arguments)
    table = Table(title="Cost of one step of one environment, episodes ending by a stop, 1 token in 32")
    for column in ("N", "ns per environment and step", "relative to N = 16", "bytes per environment"):
        table.add_column(column, justify="right")
    sizes = (16, 64, 256, 1024, 4096)
    measurements = {}
    for n in sizes:
        envs = TextGenerationVectorEnv(n, task, render_mode=None)
        actions = random_actions(max(60, 40_000 // n), n, 1 / 32)
        measurements[str(n)] = lambda e=envs, a=actions: 1e9 / rate(e, a)
    found = medians(measurements, arguments.repetitions)
    for n in sizes:
        size = memory(task, n) / n
        table.add_row(str(n), f"{found[str(n)]:,.0f}", f"{found[str(n)] / found['16']:.2f}", f"{size:,.0f}")
    console.print(table)


def memory(task: TextTask, num_envs: int) -> int:
    """Bytes that N environments hold in mid-episode, the last observation included."""
    actions = random_actions(task.mdp.max_response_tokens // 2, num_envs, 0.0)
    gc.collect()
    tracemalloc.start()
    envs = TextGenerationVectorEnv(num_envs, task, render_mode=None)
    kept = [envs.reset(seed=0)]
    for row in actions:
        kept[0] = envs.step(row)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size


def with_model(arguments: Arguments, console: Console) -> None:
    """SmolLM2 as policy and reference: a late step against an early one, acting against generating."""
    import torch

    from textenv.agents import LanguageModelPolicy, attach

    torch.set_num_threads(1)
    budget = max(arguments.response_tokens, 52)
    envs = gym.make_vec(
        "RLHF-v0",
        num_envs=arguments.model_envs,
        max_response_tokens=budget,
        kl_coef=0.05,
        stop=[],
        scorer=no_score,
        render_mode=None,
    )
    policy = LanguageModelPolicy.from_pretrained("smollm2-135m", lora_rank=16)
    attach(policy, envs)
    repetitions = max(3, arguments.repetitions // 2)
    by_token(policy, envs, budget, repetitions, console)
    against_generating(policy, envs, repetitions, console)


def by_token(policy: Any, envs: Any, budget: int, repetitions: int, console: Console) -> None:
    """Time of a step at response tokens 4 and 48, with the policy's own pass and without."""
    generator = np.random.default_rng(0)
    times: dict[int, list[tuple[float, float]]] = {}
    for _ in range(repetitions):
        observations, _ = envs.reset(seed=0)
        for t in range(budget - 1):
            start = time.perf_counter()
            actions = going_on(policy, policy.act(observations, generator=generator))
            chosen = time.perf_counter()
            observations, *_ = envs.step(actions)
            end = time.perf_counter()
            times.setdefault(t, []).append((end - chosen, end - start))
    leash = next(layer.leash for layer in _layers(envs) if isinstance(layer, KLPenalty))
    table = Table(title=f"KL wrapper on SmolLM2-135M, N = {envs.num_envs}, one thread")
    for column in ("time of", "t = 4", "t = 48", "ratio", "cache per environment"):
        table.add_column(column, justify="left" if column == "time of" else "right")
    for place, label in enumerate(("envs.step", "policy.act and envs.step")):
        early, late = (
            statistics.median(pair[place] for t in range(around - 1, around + 2) for pair in times[t])
            for around in (4, 48)
        )
        figures = (f"{early * 1e3:.0f} ms", f"{late * 1e3:.0f} ms", f"{late / early:.2f}")
        table.add_row(label, *figures, _megabytes(leash.nbytes / envs.num_envs))
    console.print(table)


def against_generating(policy: Any, envs: Any, repetitions: int, console: Console, tokens: int = 32) -> None:
    """Stepping the bare environment with `policy.act`, against the engine that decodes whole responses."""
    from textenv.agents.types import Sampling

    base, engine = envs.unwrapped, policy.engine()
    base.reset(seed=0)
    prompts = [prompt.ids for prompt in base.prompts_now()]

    def acting() -> float:
        policy.stepper().clear()
        generator = np.random.default_rng(0)
        start = time.perf_counter()
        observations, _ = base.reset(seed=0)
        for _ in range(tokens):
            observations, *_ = base.step(going_on(policy, policy.act(observations, generator=generator)))
        return base.num_envs * tokens / (time.perf_counter() - start)

    def generating() -> float:
        start = time.perf_counter()
        engine.generate(prompts, Sampling(max_tokens=tokens, stop_ids=()))
        return base.num_envs * tokens / (time.perf_counter() - start)

    found = medians({"act": acting, "generate": generating}, repetitions)
    table = Table(title=f"Writing {tokens} tokens with SmolLM2-135M, N = {base.num_envs}, one thread, tokens/s")
    for column in ("policy.act, stepping", "HFEngine.generate", "time, act over generate"):
        table.add_column(column, justify="right")
    table.add_row(f"{found['act']:.0f}", f"{found['generate']:.0f}", f"{found['generate'] / found['act']:.2f}")
    console.print(table)


def going_on(policy: Any, actions: Any) -> Any:
    """The actions, with another token in the place of a stop: nobody ends early."""
    return np.where(np.isin(actions, policy.tokenizer.stop_ids), 253, actions)


def _layers(envs: Any) -> Any:
    from textenv.layers import layers

    return layers(envs)


def _megabytes(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def main(arguments: Arguments) -> None:
    console = Console()
    against_sync(arguments, console)
    by_number(arguments, console)
    if arguments.model:
        with_model(arguments, console)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
