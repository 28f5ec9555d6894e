"""One PPO iteration against TRL's, on the same work: speed by phase, peak memory, and how near the machine's limit.

16 prompts of 16 tokens, 32 response tokens each (nothing ends a response early), 4 epochs, KL coefficient 0.05. TRL
1.12 (`trl.experimental.ppo`) holds four networks, two of which train. Ours does the same (a), or trains adapters on one
trunk that policy, reference, value and reward share, in float32 (b) and bf16 (c). Every measurement is a process of
its own whose first iteration does not count; rounds of all contenders repeat, and medians are shown.

    python benchmarks/ppo_step.py                                # SmolLM2-135M, both minibatch settings
    python benchmarks/ppo_step.py --model tiny                   # a random Llama of 15.5 million weights
    python benchmarks/ppo_step.py --update-only                  # forward and backward alone, and where the time goes
    python benchmarks/ppo_step.py --contenders ours-a ours-b     # without TRL, which needs its environment

TRL's environment is made in --trl-venv when it is missing: some minutes once. Run nothing beside it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress
from support import tables, update_cases
from support.contenders import CONTENDERS
from support.flops import Shape
from support.process import cores, measure
from support.trl_venv import trl_python

ContenderName = Literal[*CONTENDERS]
CaseName = Literal[*update_cases.CASES]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the benchmark."""

    model: Literal["smollm2", "tiny"] = "smollm2"
    """SmolLM2-135M, or a random Llama with hidden size 256, 4 layers and SmolLM2's tokenizer."""
    minibatches: tuple[int, ...] = (1, 4)
    """Optimiser steps per epoch; a table each."""
    contenders: tuple[ContenderName, ...] = ()
    """Who is measured; none named: all, those with vLLM where it is installed."""
    repetitions: int = 3
    """Rounds; in each every contender is measured once."""
    iterations: int = 2
    """Iterations measured per process, after one that is not."""
    prompts: int = 16
    """Prompts of a batch."""
    prompt_tokens: int = 16
    """P."""
    response_tokens: int = 32
    """T."""
    epochs: int = 4
    """Passes over each batch."""
    update_only: bool = False
    """Measure forward and backward of a batch against plain transformers and PyTorch instead."""
    cases: tuple[CaseName, ...] = tuple(update_cases.CASES)
    """What that measures."""
    threads: int = dataclasses.field(default_factory=cores)
    """Of every process."""
    ceiling_size: int = 4096
    """Rows and columns of the matrices whose product is the ceiling."""
    trl_venv: Path = Path(".venv-trl")
    """TRL's virtual environment."""
    pip_args: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """One more argument for pip when it makes that environment; may be repeated."""
    seed: int = 0
    """Of prompts, sampling and minibatches."""
    json: Path | None = None
    """Where to write every measurement."""


def chosen(arguments: Arguments) -> list[str]:
    """Names of the contenders to measure."""
    vllm = importlib.util.find_spec("vllm") is not None
    return list(arguments.contenders) or [name for name in CONTENDERS if vllm or not name.endswith("-vllm")]


def shared_job(arguments: Arguments, scratch: Path) -> dict[str, Any]:
    """The work, as every side is told it."""
    from support.work import classifier_folder, film_prompts, model_folder

    model = model_folder(arguments.model, scratch)
    return {
        "model": model,
        "config": json.loads((Path(model) / "config.json").read_text()),
        "classifier": None if arguments.update_only else classifier_folder(model, scratch),
        "prompts": film_prompts(model, 4 * arguments.prompts, arguments.prompt_tokens),
        "batch_size": arguments.prompts,
        "prompt_tokens": arguments.prompt_tokens,
        "response_tokens": arguments.response_tokens,
        "epochs": arguments.epochs,
        "iterations": arguments.iterations,
        "kl_coef": 0.05,
        "seed": arguments.seed,
        "threads": arguments.threads,
    }


Plan = list[tuple[str, str, dict[str, Any], str]]
"""Measurements of one round: key in the results, module, job, interpreter."""


def step_plan(arguments: Arguments, job: dict[str, Any]) -> Plan:
    """All contenders with all minibatch settings."""
    names = chosen(arguments)
    trl = ""
    if any(name.startswith("trl") for name in names):
        trl = trl_python(arguments.trl_venv, arguments.pip_args)
    return [
        (
            f"{name}/{minibatches}",
            CONTENDERS[name].module,
            job | CONTENDERS[name].options | {"num_minibatches": minibatches},
            trl if name.startswith("trl") else sys.executable,
        )
        for minibatches in arguments.minibatches
        for name in names
    ]


def update_plan(arguments: Arguments, job: dict[str, Any]) -> Plan:
    """Ours and plain PyTorch, all weights and adapters, each arithmetic."""
    return [
        (name, "support.update_side", job | dataclasses.asdict(update_cases.CASES[name]), sys.executable)
        for name in arguments.cases
    ]


def measured(arguments: Arguments, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rounds of the plan, the ceiling first in each, as they are measured."""
    ceiling = {"threads": arguments.threads, "size": arguments.ceiling_size, "repetitions": 5}
    plan = [("ceiling", "support.ceilings", ceiling, sys.executable), *plan]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=arguments.repetitions * len(plan))
        for repetition in range(arguments.repetitions):
            for key, module, job, python in plan:
                progress.update(bar, description=f"round {repetition + 1} of {arguments.repetitions}: {key}")
                yield key, measure(module, job | {"first_round": repetition == 0}, python)
                progress.advance(bar)


def report(arguments: Arguments, job: dict[str, Any], results: tables.Results) -> None:
    """Print the tables and write the file."""
    console = Console(width=max(Console().width, 130))
    ceilings = tables.ceilings(results["ceiling"])
    found = {key: rounds for key, rounds in results.items() if key != "ceiling"}
    shape = Shape.of_llama(job["config"], CONTENDERS["ours-b"].options["lora_rank"])
    to_rows, show = tables.step_rows, tables.print_steps
    if arguments.update_only:
        to_rows, show = tables.update_rows, tables.print_update
    rows = to_rows(found, ceilings, shape, job)
    console.print(tables.ceiling_line(ceilings))
    show(console, rows, is_target_model=arguments.model == "smollm2")
    if arguments.json is None:
        return
    written = {
        "arguments": dataclasses.asdict(arguments),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "parameters": dataclasses.asdict(shape),
        "ceilings_gflops": ceilings,
        "rows": rows,
        "measurements": results,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(written, indent=2, default=str) + "\n")


def main(arguments: Arguments) -> None:
    """Measure all rounds; what was measured is shown even where a later process fails or Ctrl-C comes."""
    results: tables.Results = {}
    with tempfile.TemporaryDirectory(prefix="ppo-step-") as folder:
        job = shared_job(arguments, Path(folder))
        plan = (update_plan if arguments.update_only else step_plan)(arguments, job)
        try:
            for key, result in measured(arguments, plan):
                results.setdefault(key, []).append(result)
        finally:
            if len(results) > 1:  # more than the ceiling
                report(arguments, job, results)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
