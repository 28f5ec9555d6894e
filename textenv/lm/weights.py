"""Noticing that a model's weights have changed since something was computed with them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Fingerprint:
    """What a model's weights look like now, cheap enough to be compared at every step.

    Three things are compared for each parameter: where its memory is (``parameter.data = ...``, and
    ``load_state_dict(assign=True)``), torch's count of in-place operations (``load_state_dict``, optimisers), and the
    element in its middle, because torch's fused optimisers and everything written through ``parameter.data`` or a numpy
    view leave that count as it is. Not seen: modules exchanged or added after this was made, and silent writes that
    miss the middle of every tensor.

    Args:
        model: a torch module.
    """

    def __init__(self, model: Any) -> None:
        self._homes = [module._parameters for module in model.modules() if module._parameters]
        self._marks = self._read_marks()
        self._probes = [tuple(probes) for probes in _middles(self._parameters())]
        self._values = [torch.stack(probes) for probes in self._probes]

    def changed(self) -> bool:
        """Whether the weights are no longer those of the time it was made."""
        if self._read_marks() != self._marks:
            return True
        return any(not torch.equal(torch.stack(p), v) for p, v in zip(self._probes, self._values, strict=True))

    def _parameters(self) -> list[Tensor]:
        return [parameter for home in self._homes for parameter in home.values() if parameter is not None]

    def _read_marks(self) -> list[tuple[int, int]]:
        """Address and count of in-place operations, which tensors made in inference mode do not keep."""
        return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._parameters()]


def _middles(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Views of one element per tensor, by device and precision."""
    groups = defaultdict(list)
    for parameter in parameters:
        if parameter.numel():
            element = parameter.detach()[tuple(size // 2 for size in parameter.shape)]
            groups[parameter.device, parameter.dtype].append(element)
    return list(groups.values())
