"""A Python function that judges one response at a time, as a scorer whose errors name function and sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.rewards.batches import check_pairs
from textenv.scorer_columns import required_columns, signature_of, taken_columns
from textenv.scoring import ScorerError


class PythonCheck:
    """Scores by ``function(prompt, response, **context) -> number or bool``, one sample a call. A scorer.

    The function is given those columns of the prompts' context that it has arguments for, one value each; an
    environment whose prompts lack one that it requires is refused when it is made. It runs in this process with all
    its rights: do not let it execute what a policy wrote.

    >>> PythonCheck(lambda prompt, response, limit: len(response) <= limit)(["a"], ["four"], limit=[3])
    array([0.])

    Args:
        function: judges one sample.
        name: what errors call it; None for its own name.

    Raises:
        TypeError: `function` cannot be called.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        if not callable(function):
            raise TypeError(
                f"`function` should be one, function(prompt, response) -> number or bool, got "
                f"{type(function).__name__}."
            )
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.__signature__ = signature_of(required_columns(function))

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Score finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: B values per column.

        Returns:
            scores (B,), float64.

        Raises:
            ScorerError: the function raised, or returned what is no finite number; function, prompt, response and
                context are shown.
        """
        check_pairs(prompts, responses)
        columns = taken_columns(self.function, context)
        scores = np.zeros(len(responses))
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            given = {column: context[column][row] for column in columns}
            sample = f"prompt {prompt!r}, response {response!r}" + "".join(f", {c} {v!r}" for c, v in given.items())
            try:
                returned = self.function(prompt, response, **given)
            except Exception as error:
                raise ScorerError(
                    f"The check {self.name} raised {type(error).__name__}: {error}, for {sample}. Return 0 for a "
                    "response that cannot be judged, or mend the function."
                ) from error
            scores[row] = self._number(returned, sample)
        return scores

    def _number(self, returned: Any, sample: str) -> float:
        try:
            number = math.nan if isinstance(returned, str) else float(returned)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ScorerError(
                f"The check {self.name} should return one finite number, or True or False, got {returned!r} for "
                f"{sample}. Trained on, it would turn every weight of the policy into NaN. Mend the function."
            )
        return number
