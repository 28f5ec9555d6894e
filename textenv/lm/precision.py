"""Arithmetic precision as a scope: entered around a pass, left as it was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def precision(device: str, dtype: str) -> Iterator[None]:
    """Run matrix products in `dtype` inside the block, and restore the process's settings after it.

    ``"float32"`` asks torch for its "medium" float32 products. On processors without matrix units (AVX-512) that is a
    faster library with full float32 accuracy, 1.3 to 1.9 times as fast; on processors with AMX and on GPUs torch may
    round the factors to bfloat16 or TF32. ``"bfloat16"`` is autocast: weights that train stay in float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def fast_dtype(device: str = "cpu") -> str:
    """``"bfloat16"`` where the device multiplies it natively, else ``"float32"``: elsewhere bfloat16 is emulated."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"
