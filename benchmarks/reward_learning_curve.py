"""How good a reward model gets with more comparisons: held-out accuracy against their number, on the film ratings.

    python benchmarks/reward_learning_curve.py                          # a linear head, about three minutes
    python benchmarks/reward_learning_curve.py --train lora --sizes 1000 4000 --epochs 1

Each comparison is one person's rating of one sentence against another person's of another. Sentences, and hence texts
of comparisons, are either trained on or measured on. The ceiling is the accuracy of the mean of all ratings on the same
held-out comparisons: single people disagree with it, and with each other.

Writes learning_curve.png and learning_curve.json to the output folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from textenv.estimates import Estimate
from textenv.lm.precision import fast_dtype
from textenv.rewards import (
    Preference,
    PreferenceData,
    RatedSentence,
    RewardNetwork,
    RewardTrainer,
    RewardTrainingConfig,
    accuracy_estimate,
    draw_comparisons,
    learning_curve,
    load_ratings,
    split_ratings,
)
from textenv.rewards.learning_curves import CurvePoint
from textenv.rewards.plots import plot_learning_curve


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the benchmark."""

    output: Path = Path("runs/reward-learning-curve")
    """Folder to write to."""
    sizes: tuple[int, ...] = (100, 300, 1000, 3000, 10000, 30000)
    """Comparisons to train on."""
    repeats: int = 2
    """Fits per size, on other comparisons."""
    train: Literal["head", "lora", "all"] = "head"
    """What trains; adapters take minutes for every thousand comparisons."""
    sentences: int = 2000
    """Training sentences that comparisons are drawn from."""
    held_out_sentences: int = 800
    """Sentences that are measured on."""
    held_out_comparisons: int = 4000
    """Comparisons of them."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    weight_decay: float = 0.1
    """Of AdamW; small sizes overfit a head of 577 weights without it."""
    epochs: int = 3
    """Passes over the comparisons of each fit."""
    batch_size: int = 32
    """Comparisons per step."""
    seed: int = 0
    """Of comparisons, subsets and fits."""


def some_of(sentences: Sequence[RatedSentence], count: int, seed: int) -> list[RatedSentence]:
    """So many sentences at random: the file is sorted by what they say."""
    return [sentences[i] for i in np.random.default_rng(seed).permutation(len(sentences))[:count]]


def preferences(sentences: Sequence[RatedSentence], n: int, seed: int) -> list[Preference]:
    """Single people's comparisons of whole sentences."""
    drawn = draw_comparisons(sentences, 2 * n, np.random.default_rng(seed))
    texts = [s.text for s in sentences]
    pairs = [(texts[a], texts[b]) for a, b in zip(drawn.chosen, drawn.rejected, strict=True)]
    return [Preference("", a, b) for a, b in pairs if a != b][:n]


def ceiling(sentences: Sequence[RatedSentence], held_out: Sequence[Preference]) -> Estimate:
    """Accuracy of the mean of all ratings on single people's comparisons."""
    mean = {s.text: s.mean for s in sentences}
    return accuracy_estimate([mean[p.chosen] for p in held_out], [mean[p.rejected] for p in held_out])


class Fitter:
    """Trains a network per subset. A frozen trunk reads each text once for all fits."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.trunk = None
        if arguments.train == "head":
            self.trunk = RewardNetwork.from_pretrained(train="head", dtype=fast_dtype(), seed=arguments.seed)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, train: list[Preference], seed: int) -> Callable[..., Any]:
        """A reward model as a scorer."""
        a = self.arguments
        network = self.trunk or RewardNetwork.from_pretrained(train=a.train, dtype=fast_dtype(), seed=seed)
        if self.trunk is not None:
            torch.nn.init.zeros_(network.classifier.score.weight)
        data = PreferenceData(train, network.encode, batch_size=a.batch_size, seed=seed)
        config = RewardTrainingConfig(learning_rate=a.learning_rate, weight_decay=a.weight_decay, epochs=a.epochs)
        trainer = RewardTrainer(network, data, config)
        if self.trunk is not None:
            trainer.use_states(self.states(data.rows))
        trainer.train(progress=False)
        return (
            network.score if self.trunk is None else self.head_scorer(network.classifier.score.weight.detach().clone())
        )

    def states(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Hidden states (S, 1, H) at the ends of rows, each row read once."""
        assert self.trunk is not None
        new = [list(row) for row in dict.fromkeys(map(tuple, rows)) if row not in self.known]
        for block, found in self.trunk.blocks_of_states(new):
            for place, state in zip(block, found.float(), strict=True):
                self.known[tuple(new[place])] = state
        return torch.stack([self.known[tuple(row)] for row in rows])

    def head_scorer(self, weight: torch.Tensor) -> Callable[..., Any]:
        """Scores of one head on the trunk that all share."""
        trunk = self.trunk
        assert trunk is not None

        def score(prompts: Sequence[str], responses: Sequence[str], **_context: Any) -> np.ndarray:
            rows = [trunk.encode(p, r) for p, r in zip(prompts, responses, strict=True)]
            return (self.states(rows)[:, 0] @ weight[0]).double().numpy()

        return score


def show(console: Console, points: Sequence[CurvePoint], highest: Estimate) -> None:
    """The table."""
    table = Table("comparisons", "fit", "held-out accuracy", "log loss, nats", "calibration error")
    for p in sorted(points, key=lambda point: (point.comparisons, point.repeat)):
        table.add_row(
            str(p.comparisons), str(p.repeat), str(p.accuracy), f"{p.log_loss:.3f}", f"{p.calibration_error:.3f}"
        )
    console.print(table)
    console.print(f"Ceiling, the mean of all ratings on the same comparisons: {highest}")


def main(arguments: Arguments) -> list[CurvePoint]:
    """Fit, measure, draw; what was measured is shown even where Ctrl-C comes."""
    sides = zip(split_ratings(load_ratings()), (arguments.sentences, arguments.held_out_sentences), strict=True)
    train, held_out = (some_of(side, count, arguments.seed) for side, count in sides)
    measured_on = preferences(held_out, arguments.held_out_comparisons, arguments.seed + 1)
    learned_from = preferences(train, max(arguments.sizes), arguments.seed)
    curve = learning_curve(
        learned_from,
        measured_on,
        arguments.sizes,
        Fitter(arguments),
        repeats=arguments.repeats,
        seed=arguments.seed,
    )
    points: list[CurvePoint] = []
    highest = ceiling(held_out, measured_on)
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        for point in track(curve, total=arguments.repeats * len(arguments.sizes), description="Fitting"):
            points.append(point)
    finally:
        if points:
            show(Console(width=100), points, highest)
            plot_learning_curve(points, arguments.output / "learning_curve.png", highest.value)
            written = [dataclasses.asdict(p) | {"accuracy": p.accuracy._asdict()} for p in points]
            content = {"points": written, "ceiling": highest._asdict()}
            (arguments.output / "learning_curve.json").write_text(json.dumps(content, indent=2) + "\n")
    return points


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
