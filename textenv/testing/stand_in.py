"""Log-probabilities by formula, so that layers which charge for leaving a reference have something to charge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.layers import attach_policy, layers

CLASSES = 97
"""Tokens fall into so many classes, so that a large vocabulary costs no more than a small one."""


@dataclass(frozen=True)
class StandIn:
    """A distribution over V tokens that depends on every token of the prefix and on its place. No model.

    Attributes:
        vocab_size: V.
        salt: another salt, another distribution.
    """

    vocab_size: int
    salt: int

    def next_logprobs(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Log-distributions (N, V) after each prefix."""
        return self._of_classes(observations)[:, np.arange(self.vocab_size) % CLASSES]

    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        """Log-probabilities (N,) of the actions."""
        chosen = np.asarray(actions, dtype=np.int64)
        return self._of_classes(observations)[np.arange(len(chosen)), chosen % CLASSES]

    def _of_classes(self, observations: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Log-probabilities (N, CLASSES) of one token of each class; those of a class are equally likely."""
        ids, real = np.asarray(observations["input_ids"]), np.asarray(observations["attention_mask"])
        places = np.arange(1, ids.shape[1] + 1)
        prefix = ((ids.astype(np.int64) + 1) * (real == 1) * places).sum(axis=1) % 9973  # (N,)
        classes = np.arange(CLASSES)
        logits = np.sin(prefix[:, None] * (1.0 + self.salt) + classes * (0.7 + 0.3 * self.salt))  # (N, CLASSES)
        sizes = np.bincount(np.arange(self.vocab_size) % CLASSES, minlength=CLASSES)
        normalised: NDArray[np.float64] = logits - np.log((sizes * np.exp(logits)).sum(axis=1, keepdims=True))
        return normalised

    def response_distributions(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float32]:
        """Log-distributions (B, T, V) from which each response token is drawn."""
        columns = np.arange(input_ids.shape[1])
        seen = [columns < input_ids.shape[1] - response_tokens + token for token in range(response_tokens)]
        prefixes = [{"input_ids": input_ids, "attention_mask": np.where(s, attention_mask, 0)} for s in seen]
        return np.stack([self.next_logprobs(prefix) for prefix in prefixes], axis=1).astype(np.float32)


def attach_stand_ins(env: Any, vocab_size: int) -> None:
    """Give every layer that wants a policy and has none the stand-ins; a layer's own reference stays.

    Args:
        env: a stack, single or vector, that belongs to the checks.
        vocab_size: V.
    """
    leashes = [vars(layer)["leash"] for layer in layers(env) if "leash" in vars(layer)]
    if any(leash.policy_logprobs is None for leash in leashes):
        attach_policy(env, StandIn(vocab_size, 1), StandIn(vocab_size, 2))
