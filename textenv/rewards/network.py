"""`RewardNetwork`: a causal trunk and one linear head that can be trained. Knows no loss and no comparison.

The network is a transformers sequence classifier with one label, so that it loads from such a checkpoint and saves as
one. Scores are read at the last real token of a text, which its length decides and never the padding id. Dropout is
never on: a score is a function of the weights alone.

Legend: B texts, K reading points in each, L tokens, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from textenv.lm.adapters import add_lora
from textenv.lm.layers import switch_layers
from textenv.lm.loading import check_placement, resolve
from textenv.lm.precision import precision
from textenv.lm.token_blocks import block_sizes
from textenv.lm.trunk import HeadlessModel
from textenv.rewards.batches import check_pairs
from textenv.rewards.network_start import scoring_model
from textenv.rewards.reward_model import RewardModel, pad_left
from textenv.rewards.sequence_classification import encode_text, load_config_and_tokenizer

Trained = Literal["head", "lora", "all"]
TRAINED: tuple[str, ...] = get_args(Trained)
TOKENS_PER_PASS = {"cpu": 2048, "cuda": 16384}
"""Tokens that go through the trunk together."""


class RewardNetwork(nn.Module):
    """A score that can be trained; make it with `from_pretrained`. Its method `score` is a scorer.

    Args:
        classifier: a transformers sequence classifier with one label, whose head is one linear layer, ``score``.
        tokenizer: of `load_config_and_tokenizer`.
        settings: the arguments of `from_pretrained`, for checkpoints.
        template: makes the text from (prompt, response), such as a chat template; None joins the two.

    Attributes:
        offset: a constant in every score. Comparisons say nothing about it; `centre` sets it.
        truncated: how many texts were cut to `max_length` so far.
    """

    def __init__(
        self,
        classifier: Any,
        tokenizer: Any,
        settings: dict[str, Any],
        template: Callable[[str, str], str] | None = None,
    ) -> None:
        super().__init__()
        self.classifier, self.tokenizer, self.settings, self.template = classifier, tokenizer, settings, template
        self.offset, self.truncated = 0.0, 0
        self._reader = HeadlessModel(classifier.base_model, settings["dtype"])
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        train: Trained = "lora",
        lora_rank: int = 16,
        lora_alpha: int | None = None,
        max_length: int | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        checkpointing: bool = False,
        seed: int = 0,
        template: Callable[[str, str], str] | None = None,
    ) -> RewardNetwork:
        """Load a causal language model under a new head that scores 0, or a classifier with the head that it has.

        Args:
            model: ``"smollm2-135m"`` (embedded), a folder, or a Hugging Face hub id.
            train: ``"head"`` alone; ``"lora"``, adapters on every linear layer and the head; ``"all"`` weights.
            lora_rank: of the adapters.
            lora_alpha: they are scaled by alpha / rank; None: twice the rank.
            max_length: longer texts lose tokens at their start; None refuses texts beyond the model's limit.
            device: ``"cpu"`` or ``"cuda"``.
            dtype: arithmetic, ``"float32"`` or ``"bfloat16"`` (autocast). Weights are float32 either way.
            checkpointing: compute layers again in the backward pass instead of keeping their activations.
            seed: of the adapters' start; the process's random state is left alone.
            template: see the class.

        Raises:
            ValueError: unknown model, dtype or `train`, a size below 1, or a classifier that is no linear head with one
                label on a causal trunk.
        """
        check_placement(device, dtype)
        _check_choices(train, lora_rank, lora_alpha, max_length)
        alpha = lora_alpha or 2 * lora_rank
        _, tokenizer = load_config_and_tokenizer(resolve(model))
        classifier = scoring_model(model, device)
        offset = 0.0
        if classifier.score.bias is not None:  # comparisons leave it as it is
            offset, classifier.score.bias = float(classifier.score.bias.detach()), None
        if train == "lora":
            add_lora(classifier.base_model, lora_rank, alpha, seed)
        elif train == "all":
            classifier.requires_grad_(True)
        classifier.score.requires_grad_(True)
        switch_layers(classifier.base_model, checkpointing, False)
        settings = {
            "model": os.fspath(model),
            "train": train,
            "lora_rank": lora_rank,
            "lora_alpha": alpha,
            "max_length": max_length,
            "device": device,
            "dtype": dtype,
            "checkpointing": checkpointing,
            "seed": seed,
        }
        network = cls(classifier, tokenizer, settings, template)
        network.offset = offset
        return network

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self._reader.device

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.classifier.score.in_features)

    def train(self, mode: bool = True) -> RewardNetwork:  # noqa: ARG002 - torch's signature
        """Stay in evaluation mode: dropout would make the score of a text a matter of chance."""
        return super().train(False)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The precision of every pass, forward and backward."""
        return precision(self.device.type, self.settings["dtype"])

    def encode(self, prompt: str, response: str, row: str = "A text") -> list[int]:
        """Token ids of a prompt and its response, with the classifier's own special tokens.

        Raises:
            ValueError: there is no token, or there are more than the model can read; `row` names the text.
        """
        text = self.template(prompt, response) if self.template else prompt + response
        config, limit = self.classifier.config, self.settings["max_length"]
        ids, was_cut = encode_text(text, self.tokenizer, config, limit, row, self.settings["model"])
        self.truncated += was_cut
        return ids

    def states(self, rows: Sequence[Sequence[int]], points: ArrayLike | None = None) -> Tensor:
        """Hidden states (B, K, H) of rows of ids after so many tokens (B, K); None: at their ends, K = 1.

        The trunk is causal, so the state after some tokens is that of a text that ends there.
        """
        lengths = np.array([len(row) for row in rows])
        ends = lengths[:, None] if points is None else np.asarray(points)  # (B, K)
        input_ids, attention_mask = (torch.as_tensor(x, device=self.device) for x in pad_left(rows, 0))
        hidden = self._reader.hidden_states(input_ids, attention_mask)  # (B, L, H)
        columns = torch.as_tensor(hidden.shape[1] - lengths[:, None] + ends - 1, device=self.device)
        return hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))

    def read(self, states: Tensor) -> Tensor:
        """Scores (...), float32, of hidden states (..., H)."""
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.float(), self.classifier.score.weight).squeeze(-1) + self.offset

    def forward(self, rows: Sequence[Sequence[int]], points: ArrayLike | None = None) -> Tensor:
        """Scores (B, K); see `states`."""
        return self.read(self.states(rows, points))

    @torch.no_grad()
    def score_rows(
        self, rows: Sequence[Sequence[int]], points: NDArray[np.int64] | None = None, progress: str | None = None
    ) -> NDArray[np.float64]:
        """Scores (B, K) without gradients, rows of like length together.

        Args:
            rows: B lists of ids.
            points: (B, K), see `states`.
            progress: what the bar says; None for no bar.
        """
        scores = np.zeros((len(rows), 1 if points is None else points.shape[1]))
        for block, states in self.blocks_of_states(rows, points, progress):
            scores[block] = self.read(states).double().cpu().numpy()
        return scores

    @torch.no_grad()
    def blocks_of_states(
        self, rows: Sequence[Sequence[int]], points: NDArray[np.int64] | None = None, progress: str | None = None
    ) -> Any:
        """Yield (row numbers, their hidden states) for all rows, from short to long, a budget of tokens at a time."""
        from textenv.optional import progress_bar

        lengths = [len(row) for row in rows]
        order = np.argsort(lengths, kind="stable")
        sizes = block_sizes([lengths[i] for i in order], TOKENS_PER_PASS.get(self.device.type, 16384))
        with progress_bar(progress or "", len(sizes), progress is not None) as advance:
            for block in np.split(order, np.cumsum(sizes)[:-1]) if sizes else []:
                with torch.no_grad(), self.arithmetic():
                    states = self.states([rows[i] for i in block], None if points is None else points[block])
                yield block, states
                advance()

    def score(self, prompts: Sequence[str], responses: Sequence[str], **_context: Any) -> NDArray[np.float64]:
        """Score finished responses, in float64 (B,); what an environment takes as its scorer.

        Raises:
            ValueError: the numbers of prompts and responses differ, a text has no tokens, or one is too long.
        """
        check_pairs(prompts, responses)
        rows = [self.encode(p, r, f"Row {i}") for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]
        return self.score_rows(rows)[:, 0]

    def centre(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Give these texts a mean score of 0, such as samples of the reference, by a constant in every score."""
        self.offset -= float(self.score(prompts, responses).mean())

    @torch.no_grad()
    def start_from(self, head: RewardModel) -> None:
        """Take over a head that was trained on the frozen trunk (Kumar et al. 2022, arXiv:2202.10054: the features
        move less from there than from a random head).

        Raises:
            ValueError: it was trained on another trunk.
        """  # noqa: D205
        if head.source != resolve(self.settings["model"]) or len(head.weight) != self.hidden_size:
            raise ValueError(
                f"`head` should be one of {self.settings['model']!r}, whose hidden states it reads, got one of "
                f"{head.source!r} with {len(head.weight)} weights."
            )
        self.classifier.score.weight.copy_(torch.as_tensor(head.weight)[None])
        self.offset = head.bias

    def trained_state(self) -> dict[str, nn.Parameter]:
        """The weights that train, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def _check_choices(train: Any, lora_rank: Any, lora_alpha: Any, max_length: Any) -> None:
    if train not in TRAINED:
        raise ValueError(f"`train` should be one of {TRAINED}, got {train!r}.")
    for name, given in (("lora_rank", lora_rank), ("lora_alpha", lora_alpha), ("max_length", max_length)):
        none = given is None and name != "lora_rank"
        if not none and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise ValueError(f"`{name}` should be an integer of at least 1, got {given!r}.")
