"""A key-value cache whose rows grow and start again on their own, for any attention model of transformers.

The slot of a token is its position, so a row is refilled by writing over it: what an earlier text left in slots beyond
the row's last token is masked, never cleared. Knows nothing of texts or steps; see `textenv.lm.stepping`.

Legend: N rows of the cache, R rows of a pass, Q new tokens of each, S slots, K slots that a pass looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from textenv.lm.model import LanguageModel

LAYER_TYPES = {"full_attention", "sliding_attention"}
ATTENTION = ("sdpa", "eager")
"""Implementations that read a ready-made (R, 1, Q, K) mask."""


@dataclass(frozen=True)
class Place:
    """Where a pass writes, the same in all layers.

    Attributes:
        rows: (R,) rows that take part, or None for all of them in their order.
        slots: (R, Q) of the new tokens.
        width: K, one more than the largest slot.
    """

    rows: Tensor | None
    slots: Tensor
    width: int

    @property
    def index(self) -> Tensor:
        """(R, 1), the rows to write to."""
        rows = torch.arange(len(self.slots), device=self.slots.device) if self.rows is None else self.rows
        return rows[:, None]


class RowCacheLayer(CacheLayerMixin):
    """The keys and values (N, S, heads, head_dim) of one layer, in memory that is allocated once.

    Args:
        num_rows: N.
        num_slots: S.
    """

    place: Place
    index: Tensor

    def __init__(self, num_rows: int, num_slots: int) -> None:
        super().__init__()
        self._shape = (num_rows, num_slots)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate, once the first pass has shown the number of heads and the precision."""
        self.keys, self.values = self._like(key_states), self._like(value_states)
        self.is_initialized = True

    def _like(self, states: Tensor) -> Tensor:
        kind = states.device.type
        # Attention multiplies in autocast's precision, so nothing is lost by storing it.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        # Zeros, because a masked slot is still multiplied, by 0, and memory as it comes may hold NaN.
        with torch.inference_mode(False):
            return torch.zeros(*self._shape, states.shape[1], states.shape[3], dtype=dtype, device=states.device)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (R, heads, Q, head_dim) at their slots.

        Returns:
            The first K slots of the rows of this pass, twice (R, heads, K, head_dim).
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, memory: Tensor, states: Tensor) -> Tensor:
        memory.index_put_((self.index, self.place.slots), states.transpose(1, 2).to(memory.dtype))
        seen = memory[:, : self.place.width]
        return (seen if self.place.rows is None else seen[self.place.rows]).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Part of transformers' interface, which masks and position ids of our own leave unused."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `get_seq_length`."""
        return query_length, 0

    def get_max_length(self) -> int:
        """S."""
        return self._shape[1]


class RowCache(Cache):
    """The layers of a model. A pass of transformers with ``past_key_values=cache`` writes where `place_at` said.

    Args:
        num_layers: of the model.
        num_rows: N.
        num_slots: S.
    """

    def __init__(self, num_layers: int, num_rows: int, num_slots: int) -> None:
        self.row_layers = [RowCacheLayer(num_rows, num_slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    def place_at(self, place: Place) -> None:
        """Set where the next pass writes."""
        index = place.index
        for layer in self.row_layers:
            layer.place, layer.index = place, index

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values; 0 before the first pass."""
        tensors = [t for layer in self.row_layers for t in (layer.keys, layer.values) if t is not None]
        return sum(tensor.nbytes for tensor in tensors)


def layer_types(config: Any) -> list[str]:
    """What kind of attention each layer has, ``"full_attention"``, ``"sliding_attention"`` or something else."""
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    return list(types)


def attention_masks(config: Any, place: Place) -> Tensor | dict[str, Tensor]:
    """Which slots each new token sees: those up to its own, and in sliding layers only the last `sliding_window`.

    Args:
        config: of the model.
        place: where the new tokens are.

    Returns:
        A mask (R, 1, Q, K), or one per kind of layer where the model mixes them: boolean, or for attention written
        out in torch ("eager") the numbers to be added to the scores.
    """
    distance = place.slots[:, None, :, None] - torch.arange(place.width, device=place.slots.device)  # (R, 1, Q, K)
    masks = {}
    for kind in set(layer_types(config)):
        seen = distance >= 0
        if kind == "sliding_attention":
            seen &= distance < config.sliding_window
        if config._attn_implementation == "eager":
            masks[kind] = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)
        else:
            masks[kind] = seen
    return masks if len(masks) > 1 else masks.popitem()[1]


@contextlib.contextmanager
def plain_attention(device: str) -> Iterator[None]:
    """Inside the block a CPU's attention is plain matrix products, one call for all heads.

    torch's fused kernel multiplies head by head, and a single query against more than 64 keys then takes 60 times as
    long in the "medium" float32 products of `textenv.lm.precision`.
    """
    with sdpa_kernel(SDPBackend.MATH) if device == "cpu" else contextlib.nullcontext():
        yield


def why_not_cached(lm: LanguageModel) -> str | None:
    """Say why a model cannot keep its past in a `RowCache`, or None where it can.

    What its configuration does not tell is tried: two short rows of unlike length, whole and in two parts.
    """
    config = lm.model.config.get_text_config()
    if getattr(lm.model, "_is_stateful", False):
        return "it is a recurrent state, which cannot be taken back to an earlier token"
    if config._attn_implementation not in ATTENTION:
        return f"its attention is {config._attn_implementation!r}, and only {ATTENTION} take a mask of ours"
    return unknown_layers(config) or failed_trial(lambda: _trial(lm), lm.dtype, "its full pass")


def unknown_layers(config: Any) -> str | None:
    """Say which kinds of layers a model has that we know nothing of; None where there are none."""
    unknown = set(layer_types(config)) - LAYER_TYPES
    return (
        f"it has layers of the kinds {sorted(unknown)}, and only {sorted(LAYER_TYPES)} are known" if unknown else None
    )


def failed_trial(trial: Callable[[], float], dtype: str, expected: str) -> str | None:
    """Say how a trial went wrong, or None where it did not.

    Args:
        trial: gives its error relative to the largest hidden state.
        dtype: of the arithmetic, by which errors are judged.
        expected: what it is compared with, in words.
    """
    try:
        error = trial()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as cause:
        return f"a trial failed ({type(cause).__name__}: {cause})"
    tolerance = 0.1 if dtype == "bfloat16" else 1e-3
    return None if error < tolerance else f"a trial missed {expected} by {error:.2g} of the hidden states' size"


@torch.no_grad()
def _trial(lm: LanguageModel) -> float:
    """Largest difference between whole rows and the same rows in two parts, relative to the largest hidden state."""
    rows = torch.tensor([[0, 0, 1, 2], [3 % lm.vocab_size, 2, 1, 0]], device=lm.device)
    real = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], device=lm.device)
    whole = lm.hidden_states(rows, real)[:, -1].float()
    cache = RowCache(lm.num_layers, 2, 4)
    for ids, slots in (([[0, 1, 1], [3, 2, 1]], [[0, 1, 1], [0, 1, 2]]), ([[2], [0]], [[2], [3]])):
        place = Place(None, torch.tensor(slots, device=lm.device), slots[1][-1] + 1)
        parts = lm.extend(torch.tensor(ids, device=lm.device) % lm.vocab_size, cache, place)[:, -1].float()
    return float((parts - whole).abs().max() / whole.abs().max())
