"""What a configuration costs before it starts: memory by part, compute by phase.

>>> estimate("smollm2-135m", batch=16, response_tokens=32).peak  # doctest: +SKIP
'forward and backward'

From the command line, for any model by its name, folder or hub id: ``python -m textenv.agents.cost smollm2-135m
--lora-rank None --batch 16``. How the figures are derived: `cost_memory`, `cost_compute`, docs/cost.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from textenv.agents import cost_compute, cost_memory
from textenv.agents.cost_setup import EngineKind, LogprobsFrom, RewardKind, Setup
from textenv.agents.cost_shape import shape_named
from textenv.agents.value_models import ValueKind

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """An estimate.

    Attributes:
        setup: of what.
        resident: bytes that are there all the time, by part.
        moments: bytes that each moment of an iteration adds, by moment and part.
        flops: operations per response token, by phase.
        avoided: bytes that whole logits (B, L, V) and their gradient would take, had they been made.
    """

    setup: Setup
    resident: dict[str, int]
    moments: dict[str, dict[str, int]]
    flops: dict[str, float]
    avoided: int

    @classmethod
    def of(cls, setup: Setup) -> Cost:
        """The estimate for a setup."""
        return cls(
            setup,
            cost_memory.resident(setup),
            cost_memory.moments(setup),
            cost_compute.flops(setup),
            cost_memory.whole_logits(setup),
        )

    @property
    def peak(self) -> str:
        """The moment that takes the most memory."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.resident.values()) + sum(self.moments[self.peak].values())

    @property
    def flops_per_token(self) -> float:
        """Operations per response token, all phases."""
        return sum(self.flops.values())

    def line(self) -> str:
        """Memory and compute in a sentence."""
        return (
            f"This run needs about {self.total / GIB:.2g} GiB at its peak ({self.peak}) and "
            f"{_amount(self.flops_per_token)}FLOP per response token."
        )

    def rows(self) -> list[tuple[str, str]]:
        """The table: labels and amounts, a blank label between its parts."""
        setup = self.setup
        rows = [
            (f"{setup.shape.name}, weights", _amount(setup.shape.total)),
            ("that train", _amount(setup.trained)),
            ("", ""),
        ]
        rows += [(part, _gib(size)) for part, size in self.resident.items() if size]
        for moment, parts in self.moments.items():
            rows += [("", ""), (f"+ {moment}", _gib(sum(parts.values())))]
            rows += [(f"    {part}", _gib(size)) for part, size in parts.items()]
        rows += [
            ("", ""),
            (f"peak, in {self.peak}", _gib(self.total)),
            ("(B, L, V) logits, not made", _gib(self.avoided)),
        ]
        rows += [("", ""), ("FLOP per response token", _amount(self.flops_per_token))]
        return rows + [(f"    {phase}", _amount(count)) for phase, count in self.flops.items()]

    def __str__(self) -> str:
        return "\n".join(f"{label:<42}{amount:>12}".rstrip() for label, amount in self.rows())

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for row in self.rows():
            table.add_row(*row)
        return table


def estimate(
    model: str | Path,
    *,
    lora_rank: int | None = 16,
    value: ValueKind = "trunk",
    reward: RewardKind = "shared",
    engine: EngineKind = "hf",
    dtype: str = "float32",
    device: str = "cpu",
    batch: int = 64,
    prompt_tokens: int = 16,
    response_tokens: int = 24,
    epochs: int = 4,
    num_minibatches: int = 1,
    micro_batch_tokens: int | None = None,
    logprobs_from: LogprobsFrom = "trainer",
    checkpointing: bool = False,
    kv_cache_gib: float = 1.0,
) -> Cost:
    """Memory and compute of PPO on a language model, from its configuration alone.

    Args:
        model: an embedded name, a folder, or a Hugging Face hub id.
        lora_rank: of the adapters; None trains all weights and keeps a frozen copy as the reference.
        value: where values come from, see `LanguageModelPolicy.from_pretrained`.
        reward: ``"shared"``, a head on the reference's trunk; ``"separate"``, a model of the policy's size beside it;
            ``"none"``, a function that takes nothing.
        engine: who writes: ``"hf"``, the policy's own weights; ``"vllm"``, a second copy of them in this process;
            ``"server"``, another process, which is not counted.
        dtype: ``"float32"`` or ``"bfloat16"`` arithmetic.
        device: ``"cpu"``, or ``"cuda"`` for the memory of the card alone.
        batch: episodes per iteration.
        prompt_tokens: P; all prompts are taken to be that long.
        response_tokens: T; all responses are taken to be that long.
        epochs: E, passes over each batch.
        num_minibatches: optimiser steps per pass.
        micro_batch_tokens: tokens that go through the policy at once; None: what `PPO` takes.
        logprobs_from: ``"trainer"`` or ``"engine"``, whose log-probabilities are kept.
        checkpointing: whether activations are computed again in the backward pass.
        kv_cache_gib: of vLLM's key-value cache.

    Raises:
        ValueError: no such model, or a value that `Setup` refuses.
    """
    return Cost.of(
        Setup(
            shape=shape_named(model),
            lora_rank=lora_rank,
            value=value,
            reward=reward,
            engine=engine,
            dtype=dtype,
            device=device,
            batch=batch,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            epochs=epochs,
            num_minibatches=num_minibatches,
            micro_batch_tokens=micro_batch_tokens,
            logprobs_from=logprobs_from,
            checkpointing=checkpointing,
            kv_cache_gib=kv_cache_gib,
        )
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.3f} GiB"


def _amount(count: float) -> str:
    """A large number in thousands, millions, ...: ``135 M``."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {letter}"
    return f"{count:.3g}"


def main() -> None:
    """Print the table of a model."""
    from textenv.optional import require

    require("tyro", "demo", "The command line")
    import tyro
    from rich.console import Console

    Console().print(tyro.cli(estimate, config=(tyro.conf.PositionalRequiredArgs,)))


if __name__ == "__main__":
    main()
