"""How the update grows: seconds and memory against response length, batch and vocabulary, with growth exponents.

    python benchmarks/scaling.py                                   # SmolLM2-135M; tiny trunk for the vocabulary
    python benchmarks/scaling.py --model tiny                      # a quick look
    python benchmarks/scaling.py --sweeps vocabulary --json v.json

One size varies, the others are held. Three sweeps measure one micro-batch, forward, PPO's losses and backward through
`LanguageModelPolicy.evaluate`, with adapters on one trunk that policy and value head share. The sweep `update` measures
`PPO.optimise` as it comes, whose micro-batches have a budget of tokens. Responses are random ids of full length.

Each point is a process of its own. After a pass over one row comes one untimed, then those whose median counts.
Memory is the process's high-water mark over these less what it held before ("own"), and as it is. For the vocabulary
what is compared is the whole process's peak without the weights that have V rows, embeddings and output head; its own
memory and its exponent are shown beside it. The largest point of the default takes 12 GB. Run nothing beside it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress
from support import scaling_fits, scaling_tables
from support.process import cores, measure

Sweep = Literal["length", "batch", "update", "vocabulary"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the benchmark."""

    model: Literal["smollm2", "tiny"] = "smollm2"
    """For length and batch: SmolLM2-135M, or a random Llama with hidden size 256, 4 layers and SmolLM2's tokenizer."""
    sweeps: tuple[Sweep, ...] = ("length", "batch", "update", "vocabulary")
    """What is varied; `update` is the batch of a whole update."""
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    """T, with `held_batch` responses."""
    batches: tuple[int, ...] = (4, 16, 64, 256)
    """Responses, of `held_length` tokens."""
    vocabularies: tuple[int, ...] = (4096, 16384, 49152, 151936)
    """V of a random Llama with hidden size 64 and 2 layers, with `vocabulary_batch` responses of `held_length`."""
    held_length: int = 16
    """T where it is not varied."""
    held_batch: int = 16
    """Responses where length is varied."""
    vocabulary_batch: int = 32
    """Responses where the vocabulary is varied."""
    prompt_tokens: int = 4
    """P. Short, because a prompt's tokens cost time and are not counted per response token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic."""
    lora_rank: int = 16
    """Of the adapters."""
    repetitions: int = 3
    """Timed passes of each point; the median counts."""
    threads: int = dataclasses.field(default_factory=cores)
    """Of every process."""
    seed: int = 0
    """Of ids, advantages and random weights."""
    json: Path | None = None
    """Where to write every measurement."""


def check(arguments: Arguments) -> None:
    """Refuse sizes that nothing can be measured at, before anything is.

    Raises:
        ValueError: a size below 1, or no sweep.
    """
    for field in dataclasses.fields(arguments):
        given = getattr(arguments, field.name)
        sizes = given if isinstance(given, tuple) else (given,)
        if not sizes:
            raise ValueError(f"`{field.name}` should name at least one, got none: nothing would be measured.")
        low = next(
            (size for size in sizes if isinstance(size, int) and size < (0 if field.name == "seed" else 1)), None
        )
        if low is not None:
            raise ValueError(f"`{field.name}` should be at least 1, got {low}: there would be no pass to measure.")


def points(arguments: Arguments, model: str | None) -> list[tuple[Sweep, dict[str, Any]]]:
    """The jobs of all sweeps, small sizes first within each."""
    common = {
        "model": model,
        "vocab_size": None,
        "prompt_tokens": arguments.prompt_tokens,
        "response_tokens": arguments.held_length,
        "batch_size": arguments.held_batch,
        "dtype": arguments.dtype,
        "lora_rank": arguments.lora_rank,
        "repetitions": arguments.repetitions,
        "threads": arguments.threads,
        "seed": arguments.seed,
        "whole_update": False,
        "profile": False,
    }
    random = {"model": None, "batch_size": arguments.vocabulary_batch}
    changes: dict[Sweep, list[dict[str, Any]]] = {
        "length": [{"response_tokens": size, "profile": True} for size in sorted(arguments.lengths)],
        "batch": [{"batch_size": size} for size in sorted(arguments.batches)],
        "update": [{"batch_size": size, "whole_update": True} for size in sorted(arguments.batches)],
        "vocabulary": [random | {"vocab_size": size} for size in sorted(arguments.vocabularies)],
    }
    return [(sweep, common | change) for sweep in arguments.sweeps for change in changes[sweep]]


def measured(plan: list[tuple[Sweep, dict[str, Any]]]) -> Iterator[tuple[Sweep, scaling_fits.Row]]:
    """A row per point, as it is measured."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(plan))
        for sweep, job in plan:
            size = f"{job['batch_size']} responses of {job['response_tokens']} tokens"
            vocabulary = "" if job["vocab_size"] is None else f", {job['vocab_size']} words"
            progress.update(bar, description=f"{sweep}: {size}{vocabulary}")
            yield sweep, scaling_fits.to_row(job, measure("support.scaling_side", job))
            progress.advance(bar)


def report(arguments: Arguments, sweeps: dict[str, list[scaling_fits.Row]]) -> None:
    """Print the tables and write the file."""
    console = Console(width=max(Console().width, 130))
    fits = {sweep: scaling_fits.fits(sweep, rows) for sweep, rows in sweeps.items()}
    claims = scaling_fits.claims(sweeps)
    for sweep, rows in sweeps.items():
        scaling_tables.print_sweep(console, sweep, rows)
    console.print(scaling_tables.LEGEND)
    scaling_tables.print_fits(console, fits)
    scaling_tables.print_claims(console, claims)
    if arguments.json is None:
        return
    written = {
        "arguments": dataclasses.asdict(arguments),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "rows": sweeps,
        "fits": {sweep: [dataclasses.asdict(fit) for fit in found] for sweep, found in fits.items()},
        "claims": [dataclasses.asdict(claim) | {"holds": claim.holds} for claim in claims],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(written, indent=2, default=str) + "\n")


def main(arguments: Arguments) -> None:
    """Measure all points; what was measured is shown even where a later process fails or Ctrl-C comes."""
    check(arguments)
    sweeps: dict[str, list[scaling_fits.Row]] = {}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        model = None
        if set(arguments.sweeps) != {"vocabulary"}:
            from support.work import model_folder

            model = model_folder(arguments.model, Path(folder))
        try:
            for sweep, row in measured(points(arguments, model)):
                sweeps.setdefault(sweep, []).append(row)
        finally:
            if sweeps:
                report(arguments, sweeps)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
