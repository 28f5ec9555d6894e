"""Who is measured, and what must come out of it. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from support.flops import Layout


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        label: what it is called there.
        module: the side that runs it.
        layout: which weights train, for counting.
        ceiling: arithmetic whose ceiling it is held against.
        options: what its side is told besides the work.
    """

    label: str
    module: str
    layout: Layout
    ceiling: Literal["float32", "bf16"]
    options: dict[str, Any]


def _trl(label: str, variant: str, ceiling: Literal["float32", "bf16"] = "float32") -> Contender:
    return Contender(label, "support.trl_side", "separate", ceiling, {"variant": variant})


def _ours(label: str, layout: Layout, dtype: str, engine: str = "hf") -> Contender:
    ceiling: Literal["float32", "bf16"] = "bf16" if dtype == "bfloat16" else "float32"
    options = {"layout": layout, "dtype": dtype, "engine": engine, "lora_rank": RANK}
    return Contender(label, "support.ours", layout, ceiling, options)


RANK = 16
"""Of our default layout's adapters."""

CONTENDERS = {
    "trl": _trl("TRL, float32 as it comes", "plain"),
    "trl-medium": _trl('TRL, float32 "medium"', "medium"),
    "trl-bf16": _trl("TRL, all weights bf16", "bf16", "bf16"),
    "ours-a": _ours("(a) four networks, float32", "separate", "float32"),
    "ours-b": _ours("(b) our default, float32", "adapters", "float32"),
    "ours-c": _ours("(c) our default, bf16", "adapters", "bfloat16"),
    "ours-b-vllm": _ours("(b) with vLLM", "adapters", "float32", "vllm"),
    "ours-c-vllm": _ours("(c) with vLLM", "adapters", "bfloat16", "vllm"),
}


@dataclass(frozen=True)
class Target:
    """`figure` of one contender over that of another should be at least, or at most, `bound`."""

    contender: str
    against: str
    figure: Literal["tokens_per_second", "peak_memory"]
    bound: float

    @property
    def is_ceiling(self) -> bool:
        """Whether less is better."""
        return self.figure == "peak_memory"

    def holds(self, ratio: float) -> bool:
        """Whether a measured ratio is as good as it should be."""
        return ratio <= self.bound if self.is_ceiling else ratio >= self.bound


TARGETS = (
    Target("ours-a", "trl", "tokens_per_second", 1.3),
    Target("ours-a", "trl-medium", "tokens_per_second", 1.05),
    Target("ours-b", "trl", "tokens_per_second", 3.5),
    Target("ours-b", "trl-medium", "tokens_per_second", 2.7),
    Target("ours-c", "trl", "tokens_per_second", 6.0),
    Target("ours-c", "trl-bf16", "tokens_per_second", 2.5),
    Target("ours-b", "trl", "peak_memory", 0.3),
)
"""Of SmolLM2 with one minibatch, 16 prompts of 16 tokens, 32 response tokens, 4 epochs, two cores."""

UPDATE_TARGETS = {"float32": 0.65, "bf16": 0.60}
"""Share of the ceiling that forward and backward of SmolLM2 reach, 16 rows of 48 tokens."""
