"""The machine's matrix-multiplication ceiling: what a large product reaches, in each arithmetic.

"Float32 as it comes" and "medium" are two libraries behind the same product. On processors without matrix units both
are float32; with AMX, "medium" may round its factors to bfloat16.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from support.process import run

ARITHMETIC = {"float32": ("highest", torch.float32), "medium": ("medium", torch.float32), "bf16": ("highest", None)}


def main(job: dict[str, Any]) -> dict[str, Any]:
    """GFLOP/s of products of two `job["size"]` squared matrices, `job["repetitions"]` of each kind after one."""
    torch.set_num_threads(job["threads"])
    size = job["size"]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator) for _ in range(2))
    rates: dict[str, list[float]] = {}
    for name, (matmul, dtype) in ARITHMETIC.items():
        torch.set_float32_matmul_precision(matmul)
        a, b = (x.to(dtype or torch.bfloat16) for x in (left, right))
        out = a @ b
        for _ in range(job["repetitions"]):
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            rates.setdefault(name, []).append(2 * size**3 / (time.perf_counter() - start) / 1e9)
    return {"gflops": rates}


if __name__ == "__main__":
    run(main)
