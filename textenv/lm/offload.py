"""A frozen model that rests in main memory and comes to its device for a pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from textenv.lm.model import LanguageModel

HOME = "cpu"
"""Where models rest."""


@contextlib.contextmanager
def at_work(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Hold a module on `device` inside the block, and take it home after it."""
    module.to(device)
    try:
        yield
    finally:
        module.to(HOME)


def _brought(method: Callable[..., Any]) -> Any:
    """The method with the model on its device; one that another calls finds it there already."""

    @functools.wraps(method)
    def on_device(self: Offloaded, *args: Any, **kwargs: Any) -> Any:
        if self.working:
            return method(self, *args, **kwargs)
        self.working = True
        try:
            with at_work(self.model, self.device):
                return method(self, *args, **kwargs)
        finally:
            self.working = False

    return on_device


class Offloaded(LanguageModel):
    """A frozen `LanguageModel` whose weights are on its device during passes only, one move there and back for each.

    Args:
        model: on the device where its passes are to run.
        **options: those of `LanguageModel`.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._device, self.working = super().device, False
        model.to(HOME)

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return getattr(self, "_device", None) or super().device

    def stepper(self) -> Any:
        """Itself: a cache of past tokens would want the model on its device from step to step."""
        return self

    hidden_states = _brought(LanguageModel.hidden_states)
    frozen_pass = _brought(LanguageModel.frozen_pass)
    response_distributions = _brought(LanguageModel.response_distributions)
    next_logprobs = _brought(LanguageModel.next_logprobs)
    __call__ = _brought(LanguageModel.__call__)
