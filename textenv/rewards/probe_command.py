"""``python -m textenv.rewards.probes [MODEL]``: a reward model's blind spots, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from textenv.optional import require
from textenv.prompts import load_prompts
from textenv.rewards.genuine import Answers, review_answers
from textenv.rewards.probe_report import ProbeReport
from textenv.rewards.probes import ANSWERS, probe

DEFAULT = "default"


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe a reward model and show the table, and the most rewarded example of each variant that it prefers."""
    options = _parse(arguments)
    require("rich", "train", "The command line")
    from rich.console import Console

    rng = np.random.default_rng(options.seed)
    scorer = load_scorer(options)
    answers = read_answers(options.data, options.answers, rng)
    name = "the default reward model" if options.model == DEFAULT else options.model
    report = probe(scorer, *answers, rng=rng, name=name, progress=True)
    console = Console()
    console.print(report.table())
    for line in example_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        report.save_json(options.json)
    if options.png is not None:
        report.plot(options.png)


def load_scorer(options: argparse.Namespace) -> Any:
    """The default reward model, a head that `RewardModel.save` wrote, or a sequence-classification checkpoint.

    Raises:
        ValueError: there is nothing there, or an option does not go with it.
    """
    from textenv.rewards.reward_model import RewardModel
    from textenv.rewards.sequence_classification import SequenceClassificationReward

    where = {"device": options.device, "dtype": options.dtype}
    head = Path(options.model).suffix == ".safetensors"
    if options.model != DEFAULT and not head:
        label: int | str | None = options.label
        if isinstance(label, str) and label.isdigit():
            label = int(label)
        return SequenceClassificationReward(options.model, label=label, max_length=options.max_length, **where)
    for flag, value in (("--label", options.label), ("--max-length", options.max_length)):
        if value is not None:
            raise ValueError(f"{flag} is for sequence classifiers, got {value} for {options.model!r}. Leave it out.")
    return RewardModel.load(options.model, **where) if head else RewardModel.default(**where)


def read_answers(path: Path | None, count: int | None, rng: np.random.Generator) -> Answers:
    """Genuine answers from a file with the columns ``prompt`` and ``response``, or the packaged film reviews.

    Args:
        path: what `load_prompts` reads: JSON lines, CSV, a dataset; None: the film reviews.
        count: how many to draw; None: `ANSWERS` of the film reviews, all of a file.
        rng: draws them.

    Raises:
        ValueError: see `load_prompts`; more answers are asked for than there are.
    """
    if path is None:
        return review_answers(ANSWERS if count is None else count, rng)
    rows = load_prompts(path, context=["response"])
    if count is not None:
        if not 1 <= count <= len(rows):
            raise ValueError(f"--answers should be between 1 and {len(rows)}, the rows of {path}, got {count}.")
        rows = [rows[place] for place in rng.choice(len(rows), count, replace=False)]
    wrong = [row for row in rows if not (isinstance(row.prompt, str) and isinstance(row.context["response"], str))]
    if wrong:
        raise ValueError(
            f"{path}: {wrong[0].place} should have texts as prompt and response. Apply the chat template first."
        )
    return Answers([row.prompt for row in rows], [row.context["response"] for row in rows])


def example_lines(report: ProbeReport) -> list[str]:
    """For each variant that the scorer prefers, the pair in which it gains most."""
    lines = []
    for variant in report.variants:
        if variant.verdict == "preferred" and variant.example is not None:
            example = variant.example
            lines += [
                f"{variant.name}, the pair with the largest gain:",
                f"  {example.genuine_score:+.2f}  {_short(example.prompt)} |{_short(example.genuine)}",
                f"  {example.variant_score:+.2f}  {_short(example.prompt)} |{_short(example.variant)}",
            ]
    return lines


def _short(text: str, limit: int = 200) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else text[:limit] + " ..."


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m textenv.rewards.probes",
        description="Probe a reward model: genuine answers against degenerate variants of themselves.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT,
        help="a sequence-classification folder or hub id, a head in a .safetensors file, or %(default)s",
    )
    parser.add_argument("--data", type=Path, help="genuine answers: JSON lines or CSV with prompt and response")
    parser.add_argument("--answers", type=int, help=f"how many to draw (a file: all; film reviews: {ANSWERS})")
    parser.add_argument("--label", help="which class of a classifier with several is the score, by number or name")
    parser.add_argument("--max-length", type=int, help="tokens; longer texts are cut at their start by classifiers")
    parser.add_argument("--seed", type=int, default=0, help="of answers and variants (%(default)s)")
    parser.add_argument("--device", default="cpu", help="a torch device (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--png", type=Path, help="draw the report there")
    return parser.parse_args(arguments)
