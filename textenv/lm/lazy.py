"""`LazyLanguageModel`: a frozen model by its name, loaded at its first use and shared by all who name the same one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from textenv.lm.loading import check_placement, load_causal_lm, resolve
from textenv.lm.model import LanguageModel, check_temperature
from textenv.packed_masks import PackedMasks

if TYPE_CHECKING:
    from textenv.lm.stepping import Stepper

_loaded: weakref.WeakValueDictionary[tuple[str, str, str], Any] = weakref.WeakValueDictionary()


class LazyLanguageModel:
    """A frozen `LanguageModel` that is loaded at its first use, and shared by all who name the same one.

    Environments hold this: one whose agent brings its own reference never loads a second copy. Pickling and deep copies
    carry the name, not the weights.

    Args:
        name: see `textenv.lm.loading.resolve`.
        device: a torch device.
        dtype: arithmetic and weights, ``"float32"`` or ``"bfloat16"``.
        named_size: ids that the tokenizer names.
        temperature: of the distribution.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        device: str = "cpu",
        dtype: str = "float32",
        *,
        named_size: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        check_placement(device, dtype)
        check_temperature(temperature)
        self.source = resolve(name)
        self.device_name, self.dtype = device, dtype
        self.named_size, self.temperature = named_size, temperature
        self._model: LanguageModel | None = None

    def load(self) -> LanguageModel:
        """The model, from memory where somebody already holds it."""
        if self._model is None:
            key = (self.source, self.device_name, self.dtype)
            module = _loaded.get(key)
            if module is None:
                module = _loaded[key] = self.load_module()
            self._model = LanguageModel(
                module,
                source=self.source,
                named_size=self.named_size,
                temperature=self.temperature,
                dtype=self.dtype,
            )
        return self._model

    def load_module(self) -> Any:
        """The transformers model, read from its files."""
        return load_causal_lm(self.source, self.device_name, self.dtype)

    def stepper(self) -> Stepper:
        """See `LanguageModel.stepper`; the model is loaded by the stepper's first call."""
        from textenv.lm.stepping import Stepper

        return Stepper(self)

    def __call__(self, observations: Mapping[str, np.ndarray], actions: np.ndarray) -> np.ndarray:
        """See `LanguageModel.__call__`."""
        return self.load()(observations, actions)

    def next_logprobs(self, observations: Mapping[str, np.ndarray]) -> np.ndarray:
        """See `LanguageModel.next_logprobs`."""
        return self.load().next_logprobs(observations)

    def response_logprobs(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        response_tokens: int,
        action_masks: PackedMasks | None = None,
    ) -> np.ndarray:
        """See `LanguageModel.response_logprobs`."""
        return self.load().response_logprobs(input_ids, attention_mask, response_tokens, action_masks)

    def response_distributions(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, response_tokens: int
    ) -> np.ndarray:
        """See `LanguageModel.response_distributions`."""
        return self.load().response_distributions(input_ids, attention_mask, response_tokens)

    def states_at(self, input_ids: np.ndarray, attention_mask: np.ndarray, columns: np.ndarray) -> Tensor:
        """See `LanguageModel.states_at`."""
        return self.load().states_at(input_ids, attention_mask, columns)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {**self.__dict__, "_model": None}
