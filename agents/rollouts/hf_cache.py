"""The key-value cache of a decoding batch: prompts are read once and handed to all their rows, rows that end make room.

Legend: N rows, n rows that still write, U prompts of a pass, Q tokens of each, K slots that a pass looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from textenv.lm.cache import Place, RowCache, RowCacheLayer


@dataclass(frozen=True)
class PromptPlace(Place):
    """Where a pass over whole prompts writes.

    Attributes:
        targets: (R,) rows of the cache.
        sources: (R,) the prompt of each, as a row of the pass.
    """

    targets: Tensor
    sources: Tensor


class BatchLayer(RowCacheLayer):
    """Keys and values (N, S, heads, head_dim), of which the first n rows are in use."""

    def _write(self, memory: Tensor, states: Tensor) -> Tensor:
        place = self.place
        if isinstance(place, PromptPlace):  # each prompt sees itself alone
            new = states.transpose(1, 2).to(memory.dtype)
            memory[place.targets, : new.shape[1]] = new[place.sources]
            return states
        memory.index_put_((self.index, place.slots), states.transpose(1, 2).to(memory.dtype))
        return memory[: len(place.slots), : place.width].transpose(1, 2)

    def move(self, to: Tensor, source: Tensor) -> None:
        """Copy rows over others."""
        for memory in (self.keys, self.values):
            assert memory is not None
            memory[to] = memory[source]


class BatchCache(RowCache):
    """A `RowCache` for a batch that is read from its beginning and shrinks.

    Args:
        num_layers: of the model.
        num_rows: N.
        num_slots: of the longest prompt with its response.
    """

    def __init__(self, num_layers: int, num_rows: int, num_slots: int) -> None:
        self.row_layers = [BatchLayer(num_rows, num_slots) for _ in range(num_layers)]
        Cache.__init__(self, layers=list(self.row_layers))

    def keep(self, rows: Tensor) -> None:
        """Let the row at each place be what the row `rows[place]` was; a row that stays costs nothing.

        Args:
            rows: (n,), `rows[place] >= place`.
        """
        to = torch.nonzero(rows != torch.arange(len(rows), device=rows.device)).squeeze(-1)
        if len(to):
            for layer in self.row_layers:
                layer.move(to, rows[to])  # type: ignore[attr-defined]
