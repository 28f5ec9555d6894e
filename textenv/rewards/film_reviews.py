"""What is packaged for film reviews: a reward model with its own trunk, and a head that shares the reference's pass."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from textenv.lm.lazy import LazyLanguageModel
from textenv.lm.loading import load_causal_lm, load_tokenizer, portable_name
from textenv.lm.merged import merged_weights
from textenv.rewards.network_files import FILM_REVIEWS, load_adapters, read_adapters
from textenv.rewards.reward_model import DEFAULT_HEAD, RewardModel

HEAD_WEIGHT = "classifier.score.weight"


class AdaptedTrunk(LazyLanguageModel):
    """A trunk with the adapters of a reward network merged in: loaded at its first use, no slower than a plain one.

    Args:
        path: what `save_adapters` wrote.
        name: of the model below the adapters.
        **options: those of `LazyLanguageModel`.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.path, self.below = os.fspath(path), self.source
        packaged = Path(path).parent == Path(str(resources.files("textenv.assets")))
        adapters = Path(path).name if packaged else self.path  # what is packaged is the same on every machine
        self.source = f"{portable_name(self.below)} with {adapters}"

    def load_module(self) -> Any:
        """The causal model with merged weights; its output head is the plain model's, and is never asked."""
        network, _ = load_adapters(self.path)
        model = load_causal_lm(self.below)
        model.base_model.load_state_dict(dict(merged_weights(network.classifier.base_model)))
        return model.to(self.device_name, getattr(torch, self.dtype))


def film_review_reward(device: str = "cpu", dtype: str = "float32") -> RewardModel:
    """The default reward model: how much people would like a film, as far as a sentence of its review tells.

    Adapters and a head on SmolLM2-135M that learned from comparisons of single raters alone
    (``python -m textenv.rewards.train_reviews``). On sentences that nothing was trained on it orders 86% of pairs as
    the human means do and correlates 0.89 with them; one rater against the rest stands at 89% and 0.89. It costs a pass
    of its own; `film_review_head` does not, and knows less.

    Its scores are log-odds: between two reviews with scores a and b, one person prefers the first with probability
    sigmoid(a - b). The weights are loaded at the first call.

    Args:
        device: a torch device.
        dtype: ``"float32"`` or ``"bfloat16"``.
    """
    with resources.as_file(resources.files("textenv.assets").joinpath(FILM_REVIEWS)) as path:
        return adapted_reward(path, device=device, dtype=dtype)


def adapted_reward(path: str | os.PathLike[str], *, device: str = "cpu", dtype: str = "float32") -> RewardModel:
    """The scorer that a trained `RewardNetwork` is, read from the file of `save_adapters`: frozen, merged, and lazy.

    Args:
        path: the file.
        device: a torch device.
        dtype: of weights and arithmetic, ``"float32"`` or ``"bfloat16"``.

    Raises:
        ValueError: there is no such file, or its trunk cannot be found.
    """
    tensors, settings, offset, known = read_adapters(path)
    tokenizer = load_tokenizer(settings["model"])
    trunk = AdaptedTrunk(path, settings["model"], device=device, dtype=dtype, named_size=tokenizer.named_size)
    weight = tensors[HEAD_WEIGHT].double().squeeze(0).numpy()
    return RewardModel(trunk, tokenizer, weight, offset, metadata=known)


def film_review_head(device: str = "cpu", dtype: str = "float32") -> RewardModel:
    """A head alone, on SmolLM2-135M as it comes: it shares the pass that gives the reference's log-probabilities.

    So it costs nothing where that model is the reference, and knows less than `film_review_reward`: 79% of held-out
    pairs, correlation 0.77. Scores are log-odds; the mean over the training reviews is 0.

    Args:
        device: a torch device.
        dtype: ``"float32"`` or ``"bfloat16"``.
    """
    with resources.as_file(resources.files("textenv.assets").joinpath(DEFAULT_HEAD)) as path:
        return RewardModel.load(Path(path), device=device, dtype=dtype)
