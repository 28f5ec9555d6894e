"""What vLLM's CPU servers lack: taking over new weights where the output head shares them with the embeddings.

It runs inside the server, see `server_command`: ``--worker-extension-cls``.
"""

from __future__ import annotations

from typing import Any

from textenv.agents.rollouts.vllm_loading import repack_tied_heads


class TiedHeads:
    """Mixed into vLLM's workers; its methods can be called through ``/collective_rpc``."""

    reload_weights: Any
    get_model: Any

    def reload_tied_weights(self, weights_path: str) -> None:
        """Read a checkpoint folder, and let a tied output head compute with what was read."""
        self.reload_weights(weights_path=weights_path)
        repack_tied_heads(self.get_model())


EXTENSION = f"{TiedHeads.__module__}.{TiedHeads.__qualname__}"
"""The name by which vLLM finds it."""
