"""The gated MLP of Llama and its kin without two of the four tensors that autograd would keep for it.

Of down(silu(gate) * up), with an adapter on `down`, torch keeps gate, silu(gate), up and their product for the backward
pass, more than half of all activations. Here gate and up are kept, and the rest is computed again: two cheap products.

Legend: M tokens, I the width of the MLP.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from textenv.lm.fused_adapters import FusedLinear, fused_backward, fused_forward

SILU = ("SiLU", "SiLUActivation")
"""Names of the activation, in torch and in transformers."""


class _GatedDown(torch.autograd.Function):
    """y = W x + b + s B A x with x = silu(gate) * up, and its gradients in gate, up, A and B."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        out, low, factors = fused_forward(nn.functional.silu(gate) * up, weight, bias, a, b, scaling)
        ctx.save_for_backward(gate, up, low, *factors)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, low, *factors = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            active = nn.functional.silu(gate)
            grad_x, grad_a, grad_b = fused_backward(grad, active * up, low, factors, ctx.scaling)
            grad_up = grad_x * active
            grad_gate = _slope(grad_x, up, gate)
        return grad_gate, grad_up, None, None, grad_a, grad_b, None


def _slope(grad_x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    """The gradient in gate of x = silu(gate) * up.

    A second derivative, TRPO's curvature, reads `grad_x` again and wants operations that have one. What the forward
    pass kept are constants to it, which is exact where the first derivative is 0, as that of KL(pi || pi) is.
    """
    if not torch.is_grad_enabled():
        slope: Tensor = torch.ops.aten.silu_backward(grad_x.mul_(up), gate)
        return slope
    sigma = torch.sigmoid(gate)
    return grad_x * up * sigma * (1 + gate * (1 - sigma))


def _forward(mlp: Any, x: Tensor) -> Tensor:
    """The MLP's output (..., H)."""
    layer: FusedLinear = mlp.down_proj
    if not layer.is_plain_now:
        plain: Tensor = super(type(mlp), mlp).forward(x)
        return plain
    out: Tensor = _GatedDown.apply(mlp.gate_proj(x), mlp.up_proj(x), *layer.parts())
    return out


@functools.cache
def _slim(kind: Any) -> type[nn.Module]:
    """The class of an MLP with the forward pass above."""
    return type(f"Slim{kind.__name__}", (kind,), {"forward": _forward, "__reduce_ex__": _reduce})


def _reduce(mlp: Any, _protocol: int) -> tuple[Any, ...]:
    """How an MLP is copied and pickled: its class has no name that could be looked up, but the one below it has."""
    return _empty, (type(mlp).__bases__[0],), mlp.__dict__


def _empty(kind: Any) -> Any:
    """An MLP without its parts."""
    cls: Any = _slim(kind)
    return cls.__new__(cls)


def slim_mlps(model: nn.Module) -> None:
    """Make every gated MLP with a silu and a `FusedLinear` at its end keep less, in place; state names stay."""
    for module in model.modules():
        parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        activation = type(getattr(module, "act_fn", None)).__name__
        if type(parts[2]) is FusedLinear and None not in parts and activation in SILU:
            kind: Any = type(module)
            module.__class__ = _slim(kind)
