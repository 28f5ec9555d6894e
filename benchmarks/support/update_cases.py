"""What `--update-only` compares. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from support.flops import Layout


@dataclass(frozen=True)
class Case:
    """One row: whose forward and backward, on which weights, in which arithmetic.

    Attributes:
        label: what it is called.
        ours: our policy's `evaluate` and PPO's losses; else plain transformers and PyTorch.
        layout: all weights train, or adapters of rank `lora_rank` alone.
        dtype: ``"float32"`` or ``"bfloat16"``: autocast on float32 weights that train for ours, plain all in bfloat16.
        matmul: torch's float32 matrix products for plain; ours sets its own.
        lora_rank: of the adapters.
    """

    label: str
    ours: bool
    layout: Layout
    dtype: Literal["float32", "bfloat16"]
    matmul: Literal["highest", "medium"] = "highest"
    lora_rank: int = 16

    @property
    def ceiling(self) -> str:
        """Arithmetic whose ceiling it is held against."""
        return "bf16" if self.dtype == "bfloat16" else "float32"


CASES = {
    "ours-full-float32": Case("ours", True, "separate", "float32"),
    "plain-full-float32": Case("plain, as it comes", False, "separate", "float32"),
    "plain-full-medium": Case('plain, "medium"', False, "separate", "float32", "medium"),
    "ours-full-bf16": Case("ours", True, "separate", "bfloat16"),
    "plain-full-bf16": Case("plain, all weights bf16", False, "separate", "bfloat16"),
    "ours-adapters-float32": Case("ours", True, "adapters", "float32"),
    "plain-adapters-float32": Case("plain, as it comes", False, "adapters", "float32"),
    "plain-adapters-medium": Case('plain, "medium"', False, "adapters", "float32", "medium"),
    "ours-adapters-bf16": Case("ours", True, "adapters", "bfloat16"),
    "plain-adapters-bf16": Case("plain, trunk bf16", False, "adapters", "bfloat16"),
}
