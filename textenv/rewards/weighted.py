"""Several scorers as one: a weighted sum that remembers what each part of it said."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.rewards.batches import check_pairs
from textenv.scorer_columns import required_columns, signature_of, taken_columns
from textenv.scoring import SCORER_ERRORS, ScorerError, call_scorer

REMEMBERED = 1 << 16
"""Samples whose parts are kept, the latest; an iteration of training has far fewer."""


class WeightedReward:
    """The weighted sum of several scorers. A scorer.

    ``WeightedReward({"right": (1.0, NumericMatch()), "brief": (0.1, brevity)})``

    Each part sees texts, so parts with different tokenizers, chat templates or machines go together. It is given those
    columns of the context that it takes; one that it requires must be among the prompts' columns when an environment
    is made. What every part said is in the info of an episode's end, ``info["score/right"]``, unweighted, and in the
    lines of `RecordResponses`. Parts are called one after the other, each once per batch.

    >>> length = lambda prompts, responses: [len(response) for response in responses]
    >>> scorer = WeightedReward({"a": (2.0, length), "b": (-1.0, lambda p, r: [1.0] * len(r))})
    >>> scorer(["x", "x"], ["", "four"])
    array([-1.,  7.])
    >>> scorer.score_parts(["x"], ["four"])
    {'a': array([4.]), 'b': array([1.])}

    Args:
        parts: by name, a weight and a scorer.
        scorer_errors: what a part's None, NaN, inf or exception for a sample leads to: ``"raise"``, an error that names
            the part; ``"drop"``, a score of NaN, for environments with ``scorer_errors="drop"`` to leave it out.

    Raises:
        ValueError: no parts, a weight that is not finite or is 0, a name that is no text, an unknown `scorer_errors`.
        TypeError: a part that is no pair of a weight and a scorer.
    """

    def __init__(self, parts: Mapping[str, tuple[float, Callable[..., Any]]], *, scorer_errors: str = "raise") -> None:
        if not isinstance(parts, Mapping) or not parts:
            raise ValueError(f'`parts` should be {{"name": (weight, scorer), ...}}, at least one, got {parts!r}.')
        if scorer_errors not in SCORER_ERRORS:
            raise ValueError(f"`scorer_errors` should be one of {SCORER_ERRORS}, got {scorer_errors!r}.")
        for name, part in parts.items():
            _check_part(name, part)
        self.weights = {name: float(weight) for name, (weight, _) in parts.items()}
        self.scorers = {name: scorer for name, (_, scorer) in parts.items()}
        self.scorer_errors = scorer_errors
        self.__signature__ = signature_of(c for scorer in self.scorers.values() for c in required_columns(scorer))
        self._known: OrderedDict[tuple[str, str], _Remembered] = OrderedDict()

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Score finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: B values per column.

        Returns:
            scores (B,), float64: the sum over parts of weight times score, NaN where a part's was dropped.

        Raises:
            ScorerError: a part failed, see `textenv.scoring.call_scorer`; it is named.
        """
        check_pairs(prompts, responses)
        scores = self._ask(prompts, responses, context, self.scorer_errors)
        columns = list(zip(*scores.values(), strict=True))
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            self._known[prompt, response] = _Remembered(_row_of(context, row), columns[row])
            self._known.move_to_end((prompt, response))
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        total = np.zeros(len(responses))
        for name in scores:  # in the parts' order, so that the sum does not depend on the size of the batch
            total += self.weights[name] * scores[name]
        return total

    def score_parts(
        self, prompts: Sequence[str], responses: Sequence[str], **context: Any
    ) -> dict[str, NDArray[np.float64]]:
        """What each part says of responses, unweighted: remembered where they were just scored, else asked for.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: B values per column.

        Returns:
            By name, scores (B,), NaN where a part has none for a sample.

        Raises:
            ScorerError: a part failed for all samples, such as a server that does not answer.
        """
        check_pairs(prompts, responses)
        table = np.full((len(responses), len(self.weights)), np.nan)  # (B, parts)
        unknown = []
        for row, sample in enumerate(zip(prompts, responses, strict=True)):
            remembered = self._known.get(sample)
            if remembered is not None and remembered.matches(_row_of(context, row)):
                table[row] = remembered.scores
            else:
                unknown.append(row)
        if unknown:
            asked, judged = [prompts[row] for row in unknown], [responses[row] for row in unknown]
            columns = {column: [values[row] for row in unknown] for column, values in context.items()}
            table[unknown] = np.stack(list(self._ask(asked, judged, columns, "drop").values()), axis=1)
        return {name: table[:, place].copy() for place, name in enumerate(self.weights)}

    def _ask(
        self, prompts: Sequence[str], responses: Sequence[str], context: Mapping[str, Any], on_error: str
    ) -> dict[str, NDArray[np.float64]]:
        scores = {}
        for name, scorer in self.scorers.items():
            taken = {column: context[column] for column in taken_columns(scorer, context)}
            try:
                scores[name] = call_scorer(scorer, prompts, responses, on_error, taken)
            except ScorerError as error:
                raise ScorerError(
                    f"The part {name!r} of a WeightedReward: {error}", whole_batch=error.whole_batch
                ) from error
        return scores

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is remembered."""
        return {**self.__dict__, "_known": OrderedDict()}


class _Remembered:
    """A sample's context, held so that it can be told by identity, and what the parts said."""

    def __init__(self, context: dict[str, Any], scores: tuple[float, ...]) -> None:
        self.context, self.scores = context, scores

    def matches(self, context: dict[str, Any]) -> bool:
        return self.context.keys() == context.keys() and all(value is context[c] for c, value in self.context.items())


def _row_of(context: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {column: values[row] for column, values in context.items()}


def _check_part(name: Any, part: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"The names of `parts` should be texts, which infos and records carry, got {name!r}.")
    if not isinstance(part, tuple | list) or len(part) != 2 or not callable(part[1]):
        raise TypeError(
            f"`parts[{name!r}]` should be a pair (weight, scorer), got {part!r}. Write {{{name!r}: (1.0, scorer)}}."
        )
    weight = part[0]
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not math.isfinite(weight):
        raise ValueError(
            f"The weight of `parts[{name!r}]` should be a finite number, got {weight!r}. It would turn every "
            "score into NaN or infinity."
        )
    if weight == 0:
        raise ValueError(
            f"The weight of `parts[{name!r}]` should not be 0: its scorer would be called and paid for, and change "
            "nothing. Leave the part out; to watch a scorer without training on it, call it on recorded responses."
        )
