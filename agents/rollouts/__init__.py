"""Engines that write responses, behind one protocol.

- `HFEngine`: a language model through transformers, with a key-value cache.
- `StepwiseEngine`: any policy, one token at a time without a cache.
"""

from textenv.agents.rollouts.base import Engine, StepwiseEngine, engine_for
from textenv.agents.rollouts.hf import HFEngine

__all__ = ["Engine", "HFEngine", "StepwiseEngine", "engine_for"]
