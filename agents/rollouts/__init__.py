"""Engines that write responses, behind one protocol.

- `HFEngine`: a language model through transformers, with a key-value cache.
- `StepwiseEngine`: any policy, one token at a time without a cache.
- `VLLMEngine`: a language model through vLLM, in the process that trains; vLLM is imported when one is made.
- `VLLMServerEngine`: the same through vLLM servers over HTTP; `serve` starts some on this machine.
"""

from textenv.agents.rollouts.base import Engine, StepwiseEngine, engine_for
from textenv.agents.rollouts.hf import HFEngine
from textenv.agents.rollouts.vllm import VLLMEngine
from textenv.agents.rollouts.vllm_server import VLLMServerEngine
from textenv.agents.rollouts.vllm_server_process import serve, server_command, server_environment, write_server_folder

__all__ = [
    "Engine",
    "HFEngine",
    "StepwiseEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "engine_for",
    "serve",
    "server_command",
    "server_environment",
    "write_server_folder",
]
