"""Tiny reward networks and comparisons for them."""

from __future__ import annotations

import numpy as np
import torch

from textenv.rewards import Preference, RewardNetwork

TEXTS = ["the good", "bad", "a long and winding road of good", "the b", "goo", "no good at all", "it is", "the the the"]


def preferences(n: int = 12, seed: int = 0) -> list[Preference]:
    """Random comparisons of `TEXTS`, some with margins."""
    rng = np.random.default_rng(seed)
    pairs = [rng.choice(len(TEXTS), 2, replace=False) for _ in range(n)]
    return [Preference("x ", TEXTS[a], TEXTS[b], float(k % 3) / 2 or None) for k, (a, b) in enumerate(pairs)]


def network(model: str, train="lora", scale: float = 0.3, **options) -> RewardNetwork:
    """A network with a random head, and adapters that are not the identity: everything about it is general."""
    made = RewardNetwork.from_pretrained(model, train=train, lora_rank=2, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.trained_state().items():
            if "lora_B" in name or name.endswith("score.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return made
