"""Models that know whole distributions, by formula, for tests of masks and of the exact KL. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from helpers import VOCAB_SIZE
from numpy.typing import NDArray


class PrefixDistributions:
    """Log-distributions over V words that depend on every token of the prefix and its place; counts its calls."""

    def __init__(self, salt: int, vocab_size: int = VOCAB_SIZE, scale: float = 2.0) -> None:
        self.salt, self.vocab_size, self.scale = salt, vocab_size, scale
        self.calls: list[str] = []

    def next_logprobs(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        self.calls.append("next")
        return self.formula(np.asarray(observations["input_ids"]), np.asarray(observations["attention_mask"]))

    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        self.calls.append("token")
        whole = self.formula(np.asarray(observations["input_ids"]), np.asarray(observations["attention_mask"]))
        return whole[np.arange(len(whole)), np.asarray(actions)]

    def formula(self, input_ids: NDArray[Any], attention_mask: NDArray[Any]) -> NDArray[np.float64]:
        places = np.arange(1, input_ids.shape[1] + 1)
        prefix = ((input_ids.astype(np.int64) + 1) * (attention_mask != 0) * places).sum(axis=1)
        words = np.arange(1, self.vocab_size + 1)
        logits = self.scale * np.sin(prefix[:, None] * (0.7 + self.salt) + words * (1.3 + 0.1 * self.salt))
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


class WholeDistributions(PrefixDistributions):
    """The same, with whole responses in one call."""

    def response_distributions(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float64]:
        self.calls.append("whole")
        width = input_ids.shape[1]
        columns = range(width - response_tokens, width)
        return np.stack([self.formula(input_ids, attention_mask * (np.arange(width) < c)) for c in columns], axis=1)
