"""Scores that can be checked: exact match, regular expressions, numbers. Each is a scorer that gives 1 or 0.

The right answer comes from a column of the prompts' context (``context_columns=["answer"]`` of ``RLHF-v0``), and an
environment whose prompts lack that column is refused when it is made. A right answer that is missing or cannot be
read is an error, not a 0: it would punish every response to that prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.rewards.answers import Normalize, as_number, numbers_in
from textenv.rewards.batches import check_pairs, context_column
from textenv.scorer_columns import signature_of
from textenv.scoring import ScorerError

WHERE = ("first", "last", "any", "whole")
"""Which match of a pattern, or which number of a response, counts as its answer; ``"any"``: one of them must be right;
``"whole"``: the response has to be nothing else."""


class _Check:
    """A scorer that judges each response by a right answer, or by itself where there is no column of them."""

    def __init__(self, column: str | None) -> None:
        self.column = column
        self.__signature__ = signature_of([] if column is None else [column])

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Check finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: the column of right answers, B values; others are ignored.

        Returns:
            scores (B,), 1 where the response is right and 0 where it is not.

        Raises:
            ScorerError: the column is missing, or an answer in it cannot be read; prompt and response are shown.
        """
        check_pairs(prompts, responses)
        answers = self._answers(context, len(responses))
        scores = np.zeros(len(responses))
        for row, (response, answer) in enumerate(zip(responses, answers, strict=True)):
            try:
                scores[row] = self._is_right(response, answer)
            except _UnreadableError as error:
                raise ScorerError(
                    f"{type(self).__name__}: the column {self.column!r} should hold {error}, got {answer!r} for prompt "
                    f"{prompts[row]!r}, response {response!r}. Every response to that prompt would count as wrong. "
                    "Mend the answer, or leave the prompt out."
                ) from error
        return scores

    def _answers(self, context: Mapping[str, Any], count: int) -> Sequence[Any]:
        if self.column is None:
            return [None] * count
        return context_column(context, self.column, count, type(self).__name__)

    def _is_right(self, response: str, answer: Any) -> bool:
        raise NotImplementedError


class _UnreadableError(Exception):
    """A right answer that is none; its text says what was expected."""


class ExactMatch(_Check):
    """1 where the response is the right answer, whatever `normalize` says does not count left aside. A scorer.

    >>> ExactMatch()(["1+1="], [" 2 "], answer=["2"])
    array([1.])

    Args:
        column: of right answers: a text or a number each, or a list of those that are right.
        normalize: applied to both; see `Normalize`.
        extract: what of a response is compared, such as ``lambda response: response.splitlines()[-1]``; None where it
            gives no answer, which is wrong.

    Raises:
        ScorerError: from a call, see `ExactMatch.__call__`.
    """

    def __init__(
        self,
        column: str = "answer",
        *,
        normalize: Callable[[str], str] | None = None,
        extract: Callable[[str], str | None] | None = None,
    ) -> None:
        super().__init__(column)
        self.normalize, self.extract = normalize or Normalize(), extract

    def _is_right(self, response: str, answer: Any) -> bool:
        given = response if self.extract is None else self.extract(response)
        return given is not None and self.normalize(given) in {self.normalize(text) for text in _texts(answer)}


class RegexMatch(_Check):
    r"""1 where a pattern is found in the response, and says the right answer where there is a column of them. A scorer.

    The part that is compared is the pattern's group 1, or the whole match of a pattern without groups. The last match
    counts by default, since an answer comes after its reasoning; a response without a match is wrong.

    >>> RegexMatch(r"#### (-?\d+)", "answer")(["1+1="], ["1 and 1 is #### 2"], answer=["2"])
    array([1.])

    Patterns are searched by Python's `re`, which can take exponential time over nested repetitions such as ``(a+)+$``:
    a policy may find a response that stops the run. Keep patterns simple.

    Args:
        pattern: a regular expression, or a compiled one with its flags.
        column: of right answers, see `ExactMatch`; None: that there is a match is enough.
        which: which match counts, one of `WHERE`.
        normalize: applied to both sides, see `Normalize`.

    Raises:
        ValueError: a pattern that does not compile, that has several groups beside a column, or an unknown `which`.
    """

    def __init__(
        self,
        pattern: str | re.Pattern[str],
        column: str | None = None,
        *,
        which: str = "last",
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__(column)
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`pattern` should be a regular expression, got {pattern!r}: {error}.") from error
        if column is not None and self.pattern.groups > 1:
            raise ValueError(
                f"`pattern` should have at most one group beside a column of answers, got {self.pattern.groups} in "
                f"{self.pattern.pattern!r}. It would not be known which of them to compare. "
                "Write the others as (?:...)."
            )
        self.which, self.normalize = _known(which), normalize or Normalize()

    def _is_right(self, response: str, answer: Any) -> bool:
        whole = self.pattern.fullmatch(response.strip()) if self.which == "whole" else None
        matches = ([whole] if whole else []) if self.which == "whole" else list(self.pattern.finditer(response))
        if self.column is None or not matches:
            return bool(matches)
        group = 1 if self.pattern.groups else 0
        right = {self.normalize(text) for text in _texts(answer)}
        return any(self.normalize(match[group] or "") in right for match in _chosen(matches, self.which))


class NumericMatch(_Check):
    """1 where the response's number equals the right one. A scorer.

    Numbers are compared exactly, as fractions: ``0.10``, ``1/10`` and ``1e-1`` are equal, ``1,200`` is 1200. Units and
    signs of currency or percent around a number do not count.

    >>> NumericMatch()(["6*7="], ["6*7 is 42.0."], answer=["The result is 42"])
    array([1.])

    Args:
        column: of right answers: a number, or a text, whose last number it is (as in GSM8K's).
        which: which number of the response counts, one of `WHERE`.
        rel_tol: how far off it may be, in units of the right number.
        abs_tol: how far off it may be; the larger of the two allowances counts.

    Raises:
        ValueError: an unknown `which`, or an allowance that is no finite number of at least 0.
    """

    def __init__(
        self, column: str = "answer", *, which: str = "last", rel_tol: float = 0.0, abs_tol: float = 0.0
    ) -> None:
        super().__init__(column)
        if not (0 <= rel_tol < np.inf and 0 <= abs_tol < np.inf):
            raise ValueError(
                f"`rel_tol` and `abs_tol` should be finite and at least 0, got {rel_tol} and {abs_tol}. Every answer, "
                "or none, would be right."
            )
        self.which = _known(which)
        self.rel_tol, self.abs_tol = rel_tol, abs_tol

    def _is_right(self, response: str, answer: Any) -> bool:
        right = as_number(answer)
        if right is None:
            written = numbers_in(answer) if isinstance(answer, str) else []
            if not written:
                raise _UnreadableError("a finite number, or a text with one")
            right = written[-1]
        if self.which == "whole":
            number = as_number(response)
            given: Sequence[Any] = [] if number is None else [number]
        else:
            given = _chosen(numbers_in(response), self.which)
        allowance = max(abs(right) * Fraction(self.rel_tol), Fraction(self.abs_tol))
        return any(abs(number - right) <= allowance for number in given)


def _texts(answer: Any) -> list[str]:
    """The right answers of one prompt as texts."""
    several = answer if isinstance(answer, list | tuple) else [answer]
    texts = [str(one) for one in several if isinstance(one, str | int | float | np.generic) and not _is_nan(one)]
    if len(texts) != len(several) or not texts:
        raise _UnreadableError("a text, a number, or a list of them")
    return texts


def _is_nan(value: Any) -> bool:
    return bool(value != value)


def _chosen(found: Sequence[Any], which: str) -> Sequence[Any]:
    """One of several, all of them, or none where there are none."""
    return found[:1] if which == "first" else found[-1:] if which == "last" else found


def _known(which: str) -> str:
    if which not in WHERE:
        raise ValueError(f"`which` should be one of {WHERE}, got {which!r}. Choose one of them.")
    return which
