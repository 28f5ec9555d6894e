"""`TextVectorWrapper`: what the vector wrappers of this room are made from."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode, VectorWrapper


class TextVectorWrapper(VectorWrapper):  # without [...]: before Gymnasium 1.4 it is no generic class
    """Gymnasium's `VectorWrapper`, which also says how rows are reset, as the environments inside it do.

    Libraries read ``autoreset_mode`` from what they are given (TorchRL does), and ids give wrapped environments.
    """

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """What happens to a row after its end; ``metadata["autoreset_mode"]``."""
        mode: AutoresetMode = self.env.metadata["autoreset_mode"]
        return mode
