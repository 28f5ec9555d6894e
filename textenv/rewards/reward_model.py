"""A learned scorer: one linear head on the last hidden state of a frozen language model. Knows nothing of training.

Legend: B responses, L tokens, H hidden size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from textenv.lm.lazy import LazyLanguageModel
from textenv.lm.loading import load_tokenizer, portable_name
from textenv.lm.tokenizer import TextTokenizer
from textenv.rewards.batches import check_pairs, score_by_length

DEFAULT_TRUNK = "smollm2-135m"
DEFAULT_HEAD = "reward_head.safetensors"
BATCH_SIZE = 64
"""Texts per pass: sorted by length, blocks of this size waste little on padding."""


class Trunk(Protocol):
    """A frozen model whose hidden states can be read: `LanguageModel`, `LazyLanguageModel`, or a policy's own trunk."""

    source: str
    """Where the weights came from. Two trunks with one source are the same function."""

    def states_at(self, input_ids: NDArray[Any], attention_mask: NDArray[Any], columns: NDArray[Any]) -> Tensor:
        """Hidden states (B, H) at one column per row."""
        ...


class RewardModel:
    """Scores texts: ``weight . h(last token of prompt + response) + bias``. A scorer.

    Prompt and response are joined as text and encoded together, so a score depends on what a reader sees and not on how
    a policy split it into tokens. An empty response is scored as the prompt alone. Everything but the head is shared:
    copies made by `with_trunk` cost nothing, and pickling carries no weights of a lazy trunk.

    Args:
        trunk: gives the hidden states.
        tokenizer: the trunk's.
        weight: (H,).
        bias: one number.
        metadata: what is known of the head (trunk name, held-out figures), saved with it.
        batch_size: texts per pass.

    Raises:
        ValueError: the head is not a vector as wide as the trunk's hidden states, or not finite.
    """

    def __init__(
        self,
        trunk: Trunk,
        tokenizer: TextTokenizer,
        weight: ArrayLike,
        bias: float = 0.0,
        *,
        metadata: Mapping[str, str] | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"`batch_size` should be at least 1, got {batch_size}.")
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.weight: NDArray[np.float64] = np.array(weight, np.float64)  # (H,), a copy
        self.bias = float(bias)
        self.metadata = dict(metadata or {})
        self.batch_size = batch_size
        if self.weight.ndim != 1 or not np.isfinite(self.weight).all() or not np.isfinite(self.bias):
            raise ValueError(
                "`weight` should be a finite vector (H,) and `bias` a finite number, got shape "
                f"{self.weight.shape}{'' if np.isfinite(self.weight).all() else ' with NaN or inf in it'} and {bias}."
            )
        width = getattr(trunk, "hidden_size", None)  # a lazy trunk is not loaded to ask; `score_states` asks later
        if width is not None:
            self._check_width(width)

    @classmethod
    def default(cls, device: str = "cpu", dtype: str = "float32") -> RewardModel:
        """The packaged reward model of film reviews; see `film_review_reward`."""
        from textenv.rewards.film_reviews import film_review_reward

        return film_review_reward(device, dtype)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        trunk: Trunk | None = None,
        tokenizer: TextTokenizer | None = None,
        *,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> RewardModel:
        """Read a head that `save` wrote.

        Args:
            path: the safetensors file.
            trunk: None takes the one named in the file, lazily.
            tokenizer: None takes that of the model named in the file.
            device: for a trunk that is not given.
            dtype: for a trunk that is not given.

        Raises:
            ValueError: there is no such file, it holds no head, or its trunk cannot be found.
        """
        weight, bias, metadata = _read_head(path)
        name = metadata.get("trunk")
        if name is None and (trunk is None or tokenizer is None):
            raise ValueError(f"{path} does not name its trunk; pass `trunk` and `tokenizer`.")
        if tokenizer is None:
            tokenizer = load_tokenizer(str(name))
        if trunk is None:
            trunk = LazyLanguageModel(str(name), device, dtype, named_size=tokenizer.named_size)
        return cls(trunk, tokenizer, weight, bias, metadata=metadata)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head (not the trunk) as safetensors, with its metadata and the trunk's name.

        Raises:
            ValueError: the trunk is a model with adapters, which a name does not lead to.
        """
        from safetensors.numpy import save

        adapters = getattr(self.trunk, "path", None)
        if adapters is not None:
            raise ValueError(
                f"A head should be saved with the name of its trunk, got a trunk with adapters from {adapters}: the "
                "head would be loaded on the plain model, where it means nothing. Copy that file instead; "
                "adapted_reward reads it."
            )
        metadata = {**self.metadata, "trunk": portable_name(self.source)}
        packed = save({"weight": self.weight, "bias": np.array([self.bias])}, metadata=metadata)
        Path(path).write_bytes(with_sorted_header(packed))

    @property
    def source(self) -> str:
        """Where the trunk's weights came from."""
        return self.trunk.source

    def with_trunk(self, trunk: Trunk) -> RewardModel:
        """The same head reading another object with the same weights, such as a policy's trunk with its adapters off.

        Raises:
            ValueError: the trunk has other weights, on which the head would mean nothing.
        """
        if trunk.source != self.source:
            raise ValueError(
                f"`trunk` should have the weights of {self.source!r}, got {trunk.source!r}. A head reads the hidden "
                "states that it was trained on; on others its scores are noise. Train a head for that trunk."
            )
        return RewardModel(
            trunk, self.tokenizer, self.weight, self.bias, metadata=self.metadata, batch_size=self.batch_size
        )

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_context: Any) -> NDArray[np.float64]:
        """Score finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **_context: ignored.

        Returns:
            scores (B,), float64.

        Raises:
            ValueError: the numbers of prompts and responses differ, or prompt and response together have no token.
        """
        check_pairs(prompts, responses)
        rows = [self.encode(p, r) for p, r in zip(prompts, responses, strict=True)]
        empty = [index for index, row in enumerate(rows) if not row]
        if empty:
            raise ValueError(f"Row {empty[0]}: prompt and response are both empty, so there is no token to score.")
        return score_by_length(rows, self.batch_size, self._score_rows)

    def _score_rows(self, rows: list[list[int]]) -> NDArray[np.float64]:
        """Scores of rows that go through the trunk together, read at their last tokens."""
        input_ids, attention_mask = pad_left(rows, self.tokenizer.pad_id)
        last = np.full(len(rows), input_ids.shape[1] - 1)
        return self.score_states(self.trunk.states_at(input_ids, attention_mask, last))

    def encode(self, prompt: str, response: str) -> list[int]:
        """Token ids of a prompt and its response, joined as text."""
        return self.tokenizer.encode(prompt + response)

    def score_states(self, states: Tensor) -> NDArray[np.float64]:
        """Scores (B,), float64, of hidden states (B, H) at the last token of each text."""
        self._check_width(states.shape[-1])
        scores: NDArray[np.float64] = states.double().cpu().numpy() @ self.weight + self.bias
        return scores

    def _check_width(self, width: int) -> None:
        if len(self.weight) != width:
            raise ValueError(
                f"`weight` should be as wide as the trunk's hidden states, {width}, got {len(self.weight)}. The head "
                f"was trained on another model than {self.source!r}."
            )


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put rows of ids into one array, short ones padded on the left.

    Returns:
        input_ids (B, L) and attention_mask (B, L). The mask comes from lengths: the padding id may be a real one.
    """
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max())
    attention_mask = (np.arange(width) >= width - lengths[:, None]).astype(np.int64)
    input_ids = np.full(attention_mask.shape, pad_id)
    input_ids[attention_mask.astype(bool)] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return input_ids, attention_mask


def _read_head(path: str | os.PathLike[str]) -> tuple[NDArray[Any], float, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"`path` should be a safetensors file that RewardModel.save wrote, got {os.fspath(path)!r}.")
    try:
        with safe_open(path, "numpy") as file:
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} should hold the tensors `weight` (H,) and `bias` (1,): {error}") from error
    return weight, bias.item(), metadata


def with_sorted_header(packed: bytes) -> bytes:
    """The same safetensors file with its header in order, which safetensors leaves to chance: same head, same bytes."""
    end = 8 + int.from_bytes(packed[:8], "little")
    header = json.dumps(json.loads(packed[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the format pads with spaces, so that tensors stay aligned
    return len(header).to_bytes(8, "little") + header + packed[end:]
