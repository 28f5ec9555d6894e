"""Train a reward model on comparisons: ``python -m textenv.rewards.train comparisons.jsonl --output runs/reward``.

Comparisons are JSON lines with the fields prompt, chosen, rejected and, where somebody said, margin. Interrupted, the
same command goes on where the last checkpoint was.

Writes to the output folder: checkpoint.safetensors (of the run), classifier/ (for transformers and
`SequenceClassificationReward`), history.json; with held-out comparisons also report.json, calibration.png, scores.png.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from textenv.lm.precision import fast_dtype
from textenv.optional import require
from textenv.prompts.files import read_rows
from textenv.rewards.comparison_data import PreferenceData
from textenv.rewards.network import RewardNetwork, Trained
from textenv.rewards.network_files import save_classifier
from textenv.rewards.plots import plot_calibration, plot_scores
from textenv.rewards.preference_evaluation import PreferenceEvaluation, evaluate_preferences
from textenv.rewards.preference_files import load_preferences
from textenv.rewards.training import RewardTrainer, RewardTrainingConfig


@dataclass(frozen=True)
class Arguments:
    """Settings of the run."""

    data: Path
    """Comparisons to learn from, JSON lines."""
    output: Path
    """Folder to write to, and to go on in."""
    held_out: Path | None = None
    """Comparisons to measure on, JSON lines."""
    centre: Path | None = None
    """Texts that shall have a mean score of 0, such as the reference's samples: JSON lines with prompt and response."""
    model: str = "smollm2-135m"
    """What to start from: a causal language model or a sequence classifier with one label; a name, folder or hub id."""
    train: Trained = "lora"
    """The head alone, adapters and the head, or all weights (which want a learning rate some 30 times smaller)."""
    lora_rank: int = 16
    """Of the adapters."""
    lora_alpha: int | None = None
    """Adapters are scaled by alpha / rank; None: twice the rank."""
    max_length: int | None = None
    """Longer texts lose tokens at their start; None refuses texts beyond the model's limit."""
    batch_size: int = 32
    """Comparisons per optimiser step."""
    tokens_per_pass: int = 2048
    """Tokens that go through the network together; a step is cut into as many passes as it takes."""
    epochs: int = 1
    """Passes over the comparisons."""
    learning_rate: float = 5e-4
    """Of AdamW at its highest."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises; then it falls to 0."""
    weight_decay: float = 0.0
    """Of AdamW."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong."""
    centering_coef: float = 0.0
    """Of the loss that holds scores near 0."""
    save_every: int = 50
    """Steps from one checkpoint to the next."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic; auto: bfloat16 where the processor multiplies it natively."""
    device: str = "cpu"
    """A torch device."""
    checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping their activations."""
    seed: int = 0
    """Of adapters and orders."""


def run(arguments: Arguments, progress: bool = True) -> PreferenceEvaluation | None:
    """Train, or go on training; write; measure where there is something to measure on.

    Raises:
        ValueError: a file without comparisons, with the number of the line at fault, or a bad setting.
    """
    train = load_preferences(arguments.data)
    held_out = None if arguments.held_out is None else load_preferences(arguments.held_out)
    centre = None if arguments.centre is None else _texts_to_centre(arguments.centre)
    network = _network(arguments)
    data = PreferenceData(
        train,
        network.encode,
        batch_size=arguments.batch_size,
        tokens_per_pass=arguments.tokens_per_pass,
        seed=arguments.seed,
    )
    names = {field.name for field in dataclasses.fields(RewardTrainingConfig)}
    config = RewardTrainingConfig(**{name: value for name, value in vars(arguments).items() if name in names})
    trainer = RewardTrainer(network, data, config, arguments.output / "checkpoint.safetensors")
    history = trainer.train(progress=progress)
    if centre is not None:
        network.centre(*centre)
    save_classifier(network, arguments.output / "classifier")
    _write_json(arguments.output / "history.json", [dataclasses.asdict(stats) for stats in history])
    if held_out is None:
        return None
    evaluation = evaluate_preferences(network.score, held_out)
    _write_json(arguments.output / "report.json", evaluation.summary())
    plot_calibration(evaluation.calibration, arguments.output / "calibration.png")
    plot_scores(evaluation, arguments.output / "scores.png")
    return evaluation


def _network(arguments: Arguments) -> RewardNetwork:
    return RewardNetwork.from_pretrained(
        arguments.model,
        train=arguments.train,
        lora_rank=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        max_length=arguments.max_length,
        device=arguments.device,
        dtype=fast_dtype(arguments.device) if arguments.dtype == "auto" else arguments.dtype,
        checkpointing=arguments.checkpointing,
        seed=arguments.seed,
    )


def _texts_to_centre(path: Path) -> tuple[list[str], list[str]]:
    """Prompts and responses of a file.

    Raises:
        ValueError: a row lacks one of them.
    """
    rows = read_rows(path)
    for place, row in rows:
        if not all(isinstance(row.get(field), str) for field in ("prompt", "response")):
            raise ValueError(f"{place} should have the texts prompt and response, got {str(row)[:200]}.")
    return [row["prompt"] for _, row in rows], [row["response"] for _, row in rows]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    require("tyro", "demo", "The command line")
    import tyro
    from rich.console import Console

    console = Console()
    arguments = tyro.cli(Arguments, config=(tyro.conf.PositionalRequiredArgs,), description=__doc__)
    evaluation = run(arguments)
    console.print(f"Wrote {arguments.output / 'classifier'}.")
    if evaluation is not None:
        console.print(
            f"Held-out accuracy {evaluation.accuracy}, log loss {evaluation.log_loss:.3f} nats, "
            f"calibration error {evaluation.calibration.error:.3f}."
        )


if __name__ == "__main__":
    main()
