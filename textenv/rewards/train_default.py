"""Train the packaged reward head on the packaged human ratings: ``python -m textenv.rewards.train_default``.

One frozen pass over every sentence, comparisons from single raters of the training sentences, one linear layer fitted
with the Bradley-Terry loss, figures on sentences that nothing was trained on. Writes the head and the prompt openings.

A policy's response is often cut by its token budget, and a head that has seen whole sentences only is at a loss there:
the scores of cut sentences spread wider than those of whole ones while saying less. So a share of the loss compares
sentences that are cut at a random word. Measured with `PREFIX_WEIGHT` at 0.1 against 0: pair accuracy on whole held-out
sentences 0.786 against 0.789, on cut ones 0.68 against 0.65; standard deviation of cut scores 1.2 against 1.8.

Legend: S sentences, K reading points per sentence (its end, then `CUTS` cuts), H hidden size, n comparisons.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.lm import LanguageModel, LazyLanguageModel, TextTokenizer, load_tokenizer
from textenv.lm.precision import precision
from textenv.rewards.bradley_terry import bradley_terry_loss
from textenv.rewards.linear_head import minimise
from textenv.rewards.noise_ceiling import pair_accuracy
from textenv.rewards.ratings import (
    ASSETS,
    OPENINGS_FILE,
    RatedSentence,
    draw_comparisons,
    load_ratings,
    make_openings,
    split_ratings,
)
from textenv.rewards.reward_model import DEFAULT_HEAD, DEFAULT_TRUNK, RewardModel, pad_left

CUTS = 2
"""Cuts per sentence, each after a word drawn from the fifth on (prompts have four)."""
FIRST_CUT = 5
PREFIX_WEIGHT = 0.1
"""Share of the loss that cut sentences get."""
WEIGHT_DECAYS = (0.3, 0.1, 0.03, 0.01, 0.003)
VALIDATION = 1_000
"""Training sentences that choose the weight decay; the final fit has them back."""
BLOCK = 64
"""Sentences per pass."""


class Head(NamedTuple):
    """A linear score of raw hidden states: weight (H,) and bias."""

    weight: NDArray[np.float64]
    bias: float

    def scores(self, states: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores (...,) of hidden states (..., H)."""
        scores: NDArray[np.float64] = states @ self.weight + self.bias
        return scores


def reading_points(text: str, ids: Sequence[int], tokenizer: TextTokenizer, rng: np.random.Generator) -> list[int]:
    """How many tokens to read (K,): all of them, then the tokens up to each of `CUTS` random words.

    A short text, or one whose first words encode differently alone, is read to its end instead.
    """
    words = text.split()
    points = [len(ids)]
    for _ in range(CUTS):
        cut = tokenizer.encode(" ".join(words[: rng.integers(FIRST_CUT, max(len(words), FIRST_CUT + 1))]))
        points.append(len(cut) if list(ids[: len(cut)]) == cut else len(ids))
    return points


def sentence_states(
    trunk: LanguageModel, tokenizer: TextTokenizer, texts: Sequence[str], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Hidden states (S, K, H) at the reading points of each text, from one pass over it with a progress bar.

    The trunk is causal, so the state at a cut is that of the cut text alone.
    """
    from rich.progress import track

    rows = [tokenizer.encode(text) for text in texts]
    points = np.array([reading_points(t, ids, tokenizer, rng) for t, ids in zip(texts, rows, strict=True)])  # (S, K)
    states = np.zeros((*points.shape, trunk.hidden_size), np.float32)
    order = np.argsort(points[:, 0], kind="stable")  # neighbours in length pad little
    blocks = [order[start : start + BLOCK] for start in range(0, len(order), BLOCK)]
    with torch.no_grad(), precision(trunk.device.type, trunk.dtype):
        for block in track(blocks, description=f"Reading {len(rows):,} sentences"):
            input_ids, attention_mask = (
                torch.as_tensor(array, device=trunk.device)
                for array in pad_left([rows[i] for i in block], tokenizer.pad_id)
            )
            hidden = trunk.hidden_states(input_ids, attention_mask)  # (b, L, H)
            columns = input_ids.shape[1] - points[block, :1] + points[block] - 1  # (b, K)
            index = torch.as_tensor(columns, device=hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
            states[block] = hidden.gather(1, index).float().cpu().numpy()
    return states


def fit_head(
    states: NDArray[np.float32], sentences: Sequence[RatedSentence], n: int, weight_decay: float, seed: int
) -> Head:
    """The head that minimises the Bradley-Terry loss of n comparisons plus decay, centred on the whole sentences.

    Args:
        states: (S, K, H).
        sentences: S rated sentences.
        n: how many comparisons to draw.
        weight_decay: times half the squared norm of the weight on standardised features.
        seed: of the comparisons.
    """
    mean, scale = states[:, 0].mean(0, dtype=np.float64), states[:, 0].std(0, dtype=np.float64) + 1e-8  # (H,)
    features = torch.as_tensor((states - mean) / scale)  # (S, K, H), float64
    chosen, rejected, points = _comparisons(sentences, n, states.shape[1], seed)
    weight = minimise(lambda scores: comparison_loss(scores, chosen, rejected, points), features, weight_decay)
    raw = weight.numpy() / scale
    return Head(raw, -float(raw @ mean))  # the mean feature, hence the mean score, is at 0


def comparison_loss(scores: Tensor, chosen: Tensor, rejected: Tensor, points: Tensor) -> Tensor:
    """Bradley-Terry loss of scores (S, K): whole sentences, and with weight `PREFIX_WEIGHT` cut ones.

    Args:
        scores: (S, K).
        chosen: (n,) sentence indices.
        rejected: (n,) sentence indices.
        points: (2, n) which cut of each to compare.
    """
    whole = bradley_terry_loss(scores[chosen, 0], scores[rejected, 0])
    cut = bradley_terry_loss(scores[chosen, points[0]], scores[rejected, points[1]])
    return (1 - PREFIX_WEIGHT) * whole + PREFIX_WEIGHT * cut


def _comparisons(sentences: Sequence[RatedSentence], n: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    drawn = draw_comparisons(sentences, n, rng)
    return torch.as_tensor(drawn.chosen), torch.as_tensor(drawn.rejected), torch.as_tensor(rng.integers(1, k, (2, n)))


def choose_weight_decay(states: NDArray[np.float32], sentences: Sequence[RatedSentence], n: int, seed: int) -> float:
    """The decay whose head, fitted without a validation slice of the sentences, has the lowest loss on that slice."""
    fitted, validation = split_ratings(sentences, VALIDATION)
    row_of = {sentence.id: row for row, sentence in enumerate(sentences)}
    fitted_states = states[[row_of[s.id] for s in fitted]]
    validation_states = states[[row_of[s.id] for s in validation]]
    comparisons = _comparisons(validation, n, states.shape[1], seed + 1)
    losses = {}
    for decay in WEIGHT_DECAYS:
        head = fit_head(fitted_states, fitted, n, decay, seed)
        losses[decay] = comparison_loss(torch.as_tensor(head.scores(validation_states)), *comparisons).item()
        print(f"weight decay {decay:<6g} validation loss {losses[decay]:.4f}")
    return min(losses, key=losses.__getitem__)


def held_out_figures(head: Head, states: NDArray[np.float32], sentences: Sequence[RatedSentence]) -> dict[str, float]:
    """Pair accuracy and correlation against the human means, on whole sentences and on cut ones."""
    return score_figures(head.scores(states), sentences)


def score_figures(scores: NDArray[np.float64], sentences: Sequence[RatedSentence]) -> dict[str, float]:
    """The same of scores (S, K), read at the end and at the cuts."""
    means = np.array([s.mean for s in sentences])
    return {
        "held_out_accuracy": pair_accuracy(scores[:, 0], means),
        "held_out_correlation": float(np.corrcoef(scores[:, 0], means)[0, 1]),
        "held_out_standard_deviation": float(scores[:, 0].std()),
        "cut_accuracy": pair_accuracy(scores[:, 1], means),
        "cut_correlation": float(np.corrcoef(scores[:, 1], means)[0, 1]),
        "cut_standard_deviation": float(scores[:, 1].std()),
    }


def write_openings(folder: Path, train: Sequence[RatedSentence], held_out: Sequence[RatedSentence]) -> Path:
    """Write the packaged prompts, one a line."""
    path = folder / OPENINGS_FILE
    path.write_text("\n".join(make_openings(train, held_out)) + "\n", encoding="ascii")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    options = _parse(arguments)
    began = time.perf_counter()
    sentences = load_ratings()
    train, held_out = split_ratings(sentences)
    tokenizer = load_tokenizer(DEFAULT_TRUNK)
    trunk = LazyLanguageModel(DEFAULT_TRUNK, options.device, named_size=tokenizer.named_size).load()
    texts = [sentence.text for sentence in [*train, *held_out]]
    states = sentence_states(trunk, tokenizer, texts, np.random.default_rng(options.seed))
    train_states, held_out_states = states[: len(train)], states[len(train) :]

    decay = choose_weight_decay(train_states, train, options.comparisons, options.seed)
    head = fit_head(train_states, train, options.comparisons, decay, options.seed)
    figures = held_out_figures(head, held_out_states, held_out)
    metadata = {
        "train_sentences": str(len(train)),
        "held_out_sentences": str(len(held_out)),
        "comparisons": str(options.comparisons),
        "weight_decay": str(decay),
        **{name: f"{value:.4f}" for name, value in figures.items()},
    }
    for name, value in metadata.items():
        print(f"{name:<28} {value}")
    options.output.mkdir(parents=True, exist_ok=True)
    RewardModel(trunk, tokenizer, *head, metadata=metadata).save(options.output / DEFAULT_HEAD)
    openings = write_openings(options.output, train, held_out)
    print(f"Wrote {options.output / DEFAULT_HEAD} and {openings} in {time.perf_counter() - began:.0f} s.")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m textenv.rewards.train_default", description=__doc__.split("\n")[0])
    parser.add_argument("--comparisons", type=int, default=200_000, help="human comparisons to draw (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the comparisons and cuts (%(default)s)")
    parser.add_argument("--device", default="cpu", help="a torch device (%(default)s)")
    package = Path(str(resources.files(ASSETS)))
    parser.add_argument("--output", type=Path, default=package, help="folder to write to (the package's own assets)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
