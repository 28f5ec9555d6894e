"""Tasks of the package reasoning-gym: generated questions as prompts, its own checkers as the scorer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.optional import require
from textenv.prompts import PromptRecord
from textenv.rewards.batches import check_pairs, context_column
from textenv.scorer_columns import signature_of
from textenv.scoring import ScorerError

COLUMN = "reasoning_entry"
"""The column of context that holds each question's entry, which its checker wants to see."""


class ReasoningTasks:
    """Questions of one reasoning-gym dataset, and their checker. A scorer.

    ::

        tasks = ReasoningTasks("chain_sum", size=500, seed=0, max_terms=3)
        envs = gym.make_vec("RLHF-v0", num_envs=16, prompts=tasks.prompts, scorer=tasks)

    The score is the dataset's own, mostly between 0 and 1; many datasets give part of it for an answer that only
    contains the right one, or that has the right form, which a policy can find out. The same name, size and seed give
    the same questions, as long as the version of reasoning-gym is the same.

    Args:
        name: of a dataset, such as ``"chain_sum"`` or ``"leg_counting"``; ``"composite"`` mixes several.
        size: how many questions.
        seed: of the generator.
        prompt: makes a prompt from a question: a text, or chat messages, such as ``lambda question: [{"role": "user",
            "content": question}]``. None: the question itself.
        answer_tag: what counts as the answer is what stands in the last ``<answer>...</answer>``, nothing where there
            is none; None: the whole response without white space at its ends.
        **config: options of the dataset.

    Attributes:
        prompts: one `PromptRecord` per question, with its entry as context.
        dataset: the reasoning-gym dataset.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such dataset, it refuses its options, or `size` is not at least 1.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int = 500,
        seed: int = 0,
        prompt: Callable[[str], Any] | None = None,
        answer_tag: str | None = None,
        **config: Any,
    ) -> None:
        if size < 1:
            raise ValueError(f"`size` should be at least 1, got {size}. An episode starts from a question.")
        self.name, self.answer_tag = name, answer_tag
        self.dataset = _create(name, size=size, seed=seed, **config)
        # By index: iterating over a dataset adds random identifiers, and two runs would differ in their context.
        entries = [self.dataset[row] for row in range(size)]
        ask = prompt or (lambda question: question)
        self.prompts = [
            PromptRecord(ask(entry["question"]), {COLUMN: entry}, place=f"{name} question {row}")
            for row, entry in enumerate(entries)
        ]
        self.__signature__ = signature_of([COLUMN])

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Check finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: ``reasoning_entry``, B entries of the dataset; others are ignored.

        Returns:
            scores (B,), float64.

        Raises:
            ScorerError: there are no entries, or the checker raised or gave no finite number; the sample is shown.
        """
        check_pairs(prompts, responses)
        entries = context_column(context, COLUMN, len(responses), f"The checker of reasoning-gym's {self.name!r}")
        rows = zip(prompts, responses, entries, strict=True)
        return np.array([self._score(*row) for row in rows], dtype=np.float64)

    def answer_of(self, response: str) -> str | None:
        """What of a response the checker sees; None where there is no answer.

        Args:
            response: a finished one.
        """
        if self.answer_tag is None:
            return response.strip()
        tag = re.escape(self.answer_tag)
        last = response.rpartition(f"<{self.answer_tag}>")[2]
        found = re.match(rf"(.*?)</{tag}>", last, re.DOTALL) if f"<{self.answer_tag}>" in response else None
        return found[1].strip() if found else None

    def _score(self, prompt: str, response: str, entry: Any) -> float:
        sample = f"prompt {prompt!r}, response {response!r}"
        try:
            score = float(self.dataset.score_answer(answer=self.answer_of(response), entry=entry))
        except Exception as error:
            raise ScorerError(
                f"The checker of reasoning-gym's {self.name!r} raised {type(error).__name__}: {error}, for {sample}. "
                'Report it to reasoning-gym, and pass scorer_errors="drop" to leave such samples out and count them.'
            ) from error
        if not math.isfinite(score):
            raise ScorerError(f"The checker of reasoning-gym's {self.name!r} gave {score}, for {sample}.")
        return score


def _create(name: str, **config: Any) -> Any:
    require("reasoning_gym", "reasoning", "ReasoningTasks")
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **config)
    except Exception as error:  # ValueError for names; assertions and TypeErrors for options
        raise ValueError(
            f"reasoning-gym could not make a dataset {name!r} with {config}: {type(error).__name__}: {error}. Its "
            "names are the keys of reasoning_gym.factory.DATASETS; its options the fields of its configuration."
        ) from error
