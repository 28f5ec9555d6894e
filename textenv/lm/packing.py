"""Passes without padding: every layer but attention sees the real tokens of a batch, one behind the other.

How: transformers hands a ready-made 4-D mask on to torch's `scaled_dot_product_attention` untouched. Ours is a tensor
that answers that call itself (`__torch_function__`) and knows where each token belongs. It travels as an argument, so
that nothing of the model is changed, and what gradient checkpointing computes again in the backward pass is the same.

Inside attention the rows are padded on the right: a real token sees no later column, so padding needs no mask at all.

Legend: B rows, L columns, M real tokens, W the tokens of the longest row, H hidden size, h heads, D their size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from textenv.lm.cache import failed_trial, layer_types, unknown_layers

if TYPE_CHECKING:
    from textenv.lm.model import LanguageModel

WRITTEN_OUT = 256
"""Longest rows whose attention is written out as matrix products on a CPU.

torch's fused kernel multiplies head by head, in blocks that suit neither short rows nor "medium" float32 products: with
9 heads of 64 it takes 3 times as long and more up to 128 tokens a row, and no longer at 512. Written out, a row keeps
h * W * W probabilities for the backward pass, which longer rows cannot afford.
"""


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a pass belong.

    Attributes:
        rows: B.
        width: W.
        slots: (M,) place of each token in (B, W) laid out flat, or None where all rows are W long: then a pass has the
            shape (B, W), else (1, M).
        groups: attention heads per head of keys and values.
    """

    rows: int
    width: int
    slots: Tensor | None
    groups: int

    def spread(self, states: Tensor) -> Tensor:
        """Tokens (1, h, M, D) as rows (B, h, W, D), zeros behind their ends."""
        if self.slots is None:
            return states
        tokens = states.squeeze(0).transpose(0, 1)  # (M, h, D)
        zeros = tokens.new_zeros(self.rows * self.width, *tokens.shape[1:])
        return zeros.index_copy(0, self.slots, tokens).view(self.rows, self.width, *tokens.shape[1:]).transpose(1, 2)

    def gather(self, states: Tensor) -> Tensor:
        """Rows (B, h, W, D) as tokens (1, h, M, D)."""
        if self.slots is None:
            return states
        return states.transpose(1, 2).flatten(0, 1).index_select(0, self.slots).transpose(0, 1).unsqueeze(0)


class RowsMask(Tensor):
    """What transformers takes for an attention mask: attention in it is causal, within rows, over the last `window`.

    Made by `rows_mask`. Whatever a model does with it but hand it to torch's attention gives a plain tensor without a
    layout, on which attention fails: see `why_not_packed`.
    """

    row_layout: Layout
    window: int | None
    bias: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer the attention call; everything else is torch's."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention_call(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def rows_mask(layout: Layout, window: int | None, device: torch.device) -> RowsMask:
    """Make the mask of the layers that look back `window` tokens, None: all."""
    mask: RowsMask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).as_subclass(RowsMask)
    mask.row_layout, mask.bias = layout, None
    mask.window = window if window is not None and window < layout.width else None
    if device.type == "cpu" and layout.width <= WRITTEN_OUT:
        unseen = ~_seen(layout.width, mask.window, device)
        mask.bias = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf).repeat(layout.groups, 1)  # (G * W, W)
    return mask


def _seen(width: int, window: int | None, device: torch.device) -> Tensor:
    """(W, W), which keys a query sees."""
    places = torch.arange(width, device=device)
    distance = places[:, None] - places
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: RowsMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: ARG001 - it always is
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention call for tokens (1, h, M, D) or rows (B, h, W, D) of the mask's layout."""
    layout, window, bias = attn_mask.row_layout, attn_mask.window, attn_mask.bias
    if bias is not None and not dropout_p:
        if not enable_gqa and layout.groups > 1:  # transformers has repeated them for each head of a group
            # Copies, so that the repeated ones are not what is kept for the backward pass.
            key, value = (states[:, :: layout.groups].contiguous() for states in (key, value))
        out = _written_out(layout.spread(query), layout.spread(key), layout.spread(value), bias, scale)
    else:
        seen = None if window is None else _seen(layout.width, window, query.device)
        out = torch.nn.functional.scaled_dot_product_attention(
            layout.spread(query),
            layout.spread(key),
            layout.spread(value),
            attn_mask=seen,
            dropout_p=dropout_p,
            is_causal=seen is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return layout.gather(out)


def _written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """Attention (B, h, W, D) as two matrix products, the heads of a group in one.

    Scores are float32 also where autocast rounds, as they are inside torch's fused kernels; it costs no time.

    Args:
        query: (B, h, W, D).
        key: (B, h / G, W, D).
        value: (B, h / G, W, D).
        bias: (G * W, W), added to the scores.
        scale: of the scores; None: 1 / sqrt(D).
    """
    grouped = query.reshape(-1, len(bias), query.shape[-1])  # (B * h / G, G * W, D)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.baddbmm(bias, grouped.float(), keys.float().mT, alpha=factor)
        probabilities = torch.softmax(scores, -1).to(values.dtype)
    return torch.bmm(probabilities, values).view(*query.shape[:-1], value.shape[-1])


def packed_states(forward: Callable[..., Any], config: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states (B, L, H) of padded rows, 0 in masked columns; only real tokens go through the model.

    Args:
        forward: a transformers model without an output head, for which `why_not_packed` knows no reason.
        config: of its text part.
        input_ids: (B, L).
        attention_mask: (B, L).
    """
    real = attention_mask.bool()
    tokens = input_ids.masked_select(real).long()  # (M,)
    positions = real.cumsum(-1) - 1
    width = int(positions.max()) + 1
    places = positions + width * torch.arange(len(real), device=real.device)[:, None]
    full = len(tokens) == len(real) * width
    heads = getattr(config, "num_attention_heads", 1)
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    layout = Layout(len(real), width, None if full else places.masked_select(real), groups)
    masks = {
        kind: rows_mask(layout, config.sliding_window if kind == "sliding_attention" else None, real.device)
        for kind in set(layer_types(config))
    }
    shape = (len(real), width) if full else (1, -1)
    output = forward(
        input_ids=tokens.view(shape),
        attention_mask=masks if len(masks) > 1 else masks.popitem()[1],
        position_ids=positions.masked_select(real).view(shape),
        use_cache=False,
    )
    states: Tensor = output.last_hidden_state.flatten(0, 1)  # (M, H)
    if len(tokens) < real.numel():
        columns = real.flatten().nonzero().squeeze(-1)
        states = states.new_zeros(real.numel(), states.shape[-1]).index_copy(0, columns, states)
    return states.view(*real.shape, -1)


def padded_states(forward: Callable[..., Any], input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The same with padding inside: for models that `packed_states` is not for. Masked columns mean nothing.

    Columns that no row uses do not go through the model.
    """
    used = attention_mask.any(0).nonzero().squeeze(-1)
    first, end = int(used[0]), int(used[-1]) + 1
    ids, real = input_ids[:, first:end].long(), attention_mask[:, first:end].long()
    position_ids = (real.cumsum(-1) - 1).clamp_min(0)
    output = forward(input_ids=ids, attention_mask=real, position_ids=position_ids, use_cache=False)
    return nn.functional.pad(output.last_hidden_state, (0, 0, first, attention_mask.shape[1] - end))


_decisions: WeakKeyDictionary[nn.Module, tuple[str, str | None]] = WeakKeyDictionary()
"""Of each model: the attention it was tried with, and why it is not packed."""


def why_not_packed(lm: LanguageModel) -> str | None:
    """Say why padding goes through a model, or None where it does not. Decided at a model's first pass.

    What its configuration does not tell is tried: rows of unlike length, packed and padded.
    """
    model = lm.model.base_model
    attention = model.config.get_text_config()._attn_implementation
    if model not in _decisions or _decisions[model][0] != attention:
        _decisions[model] = attention, _reason(lm, model)
    return _decisions[model][1]


def _reason(lm: LanguageModel, model: Any) -> str | None:
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        return "it is a recurrent state, which would go on from one row into the next"
    if config._attn_implementation != "sdpa":
        return f"its attention is {config._attn_implementation!r}, and only 'sdpa' hands our mask on to torch"
    return unknown_layers(config) or failed_trial(lambda: _trial(model, lm.dtype), lm.dtype, "the padded pass")


@torch.no_grad()
def _trial(model: Any, dtype: str) -> float:
    """Largest difference between packed and padded rows, relative to the largest hidden state."""
    lengths = torch.tensor([2, 5, 3], device=model.device)
    real = torch.arange(5, device=model.device) >= 5 - lengths[:, None]
    ids = torch.arange(15, device=model.device).view(3, 5) % model.get_input_embeddings().weight.shape[0]
    # Not as a call: what hangs on the model's calls, such as a count of its passes, is about the caller's own.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        packed = packed_states(model.forward, model.config.get_text_config(), ids, real)[real].float()
        padded = padded_states(model.forward, ids, real)[real].float()
    return float((packed - padded).abs().max() / padded.abs().max())
