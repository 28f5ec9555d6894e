"""A scorer on another machine or in another process, over HTTP. Its failure is an error, never a score of 0."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.http_json import FIRST_PAUSE, JSONServer, RequestError, bounded_map, times
from textenv.rewards.batches import check_pairs, context_column
from textenv.scorer_columns import signature_of
from textenv.scoring import SCORER_ERRORS, ScorerError, check_scores


class RemoteScorer:
    """Asks a server for scores, a batch per request. A scorer.

    The request is a POST of ``{"prompts": [...], "responses": [...], "context": {"column": [...]}}``, the answer
    ``{"scores": [...]}``, one number per response in their order, null for a response that cannot be scored; with a
    status other than 200, a text that says why. `serve_scorer` makes such a server of any scorer. A request may be sent
    again, so a server should give the same score for the same sample.

    Args:
        url: where to POST, such as ``"http://10.0.0.7:9000/score"``.
        batch_size: responses per request.
        concurrency: requests at a time.
        timeout: seconds that one request may take.
        attempts: requests sent at most for a batch, where the connection fails, the timeout passes, or the status is
            429, 502, 503 or 504.
        first_pause: seconds before the second attempt, doubled before each further one.
        columns: of the prompts' context, which are sent along; None: all that there are. Their values must be such as
            JSON can hold.
        key_variable: the environment variable that holds a bearer token, see `JSONServer`.
        scorer_errors: what a null leads to: ``"raise"``, an error; ``"drop"``, a score of NaN, for environments with
            ``scorer_errors="drop"``.

    Raises:
        ValueError: an option that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 64,
        concurrency: int = 4,
        timeout: float = 60.0,
        attempts: int = 5,
        first_pause: float = FIRST_PAUSE,
        columns: Sequence[str] | None = None,
        key_variable: str | None = None,
        scorer_errors: str = "raise",
    ) -> None:
        if batch_size < 1 or concurrency < 1:
            raise ValueError(
                f"`batch_size` and `concurrency` should be at least 1, got {batch_size} and {concurrency}."
            )
        if scorer_errors not in SCORER_ERRORS:
            raise ValueError(f"`scorer_errors` should be one of {SCORER_ERRORS}, got {scorer_errors!r}.")
        if isinstance(columns, str):
            raise ValueError(f"`columns` should be a list, got {columns!r}. Write columns=[{columns!r}].")
        self.server = JSONServer(
            url, timeout=timeout, attempts=attempts, first_pause=first_pause, key_variable=key_variable
        )
        self.batch_size, self.concurrency = batch_size, concurrency
        self.columns, self.scorer_errors = columns, scorer_errors
        self.__signature__ = signature_of(columns or ())

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **context: Any) -> NDArray[np.float64]:
        """Score finished responses.

        Args:
            prompts: B texts.
            responses: B texts.
            **context: B values per column.

        Returns:
            scores (B,), float64.

        Raises:
            ScorerError: a column that is not there or that JSON cannot hold; no answer after all attempts, an answer
                that is an error, no JSON, another number of scores, or (unless dropped) no finite number. It names the
                URL, the attempts, the status and a sample.
        """
        check_pairs(prompts, responses)
        names = context if self.columns is None else self.columns
        given = {
            name: context_column(context, name, len(responses), f"The scorer at {self.server.url}") for name in names
        }
        columns = {name: [_plain(value) for value in values] for name, values in given.items()}
        starts = range(0, len(responses), self.batch_size)
        ask = functools.partial(self._batch, list(prompts), list(responses), columns)
        return np.concatenate([np.zeros(0), *bounded_map(ask, starts, self.concurrency)])

    def _batch(
        self, prompts: list[str], responses: list[str], columns: Mapping[str, list[Any]], start: int
    ) -> NDArray[np.float64]:
        rows = slice(start, start + self.batch_size)
        asked, judged = prompts[rows], responses[rows]
        body = {
            "prompts": asked,
            "responses": judged,
            "context": {column: values[rows] for column, values in columns.items()},
        }
        first = f"The first of its {len(judged)} samples is prompt {asked[0]!r}, response {judged[0]!r}."
        try:
            answer = self.server.post(body)
        except RequestError as error:
            raise self._failed(f"{error.cause}, in {times(error.attempts)}", first) from error
        return self._read(answer, asked, judged, first)

    def _read(self, answer: Any, prompts: list[str], responses: list[str], first: str) -> NDArray[np.float64]:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(responses):
            got = f"{len(scores)} scores" if isinstance(scores, list) else repr(answer)[:200]
            raise self._failed(
                f'answered with status 200 and {got}, where {{"scores": [...]}} of {len(responses)} numbers was '
                "expected. Scores would be matched to the wrong responses",
                first,
            )
        wrong = [score for score in scores if isinstance(score, bool) or not isinstance(score, int | float | None)]
        if wrong:
            raise self._failed(f"answered with status 200 and the score {wrong[0]!r}, which is no number", first)
        try:
            return check_scores(scores, prompts, responses, self.scorer_errors)
        except ScorerError as error:
            raise ScorerError(f"The scorer at {self.server.url} answered with status 200, but: {error}") from error

    def _failed(self, cause: str, first: str) -> ScorerError:
        return ScorerError(
            f"The scorer at {self.server.url} {cause}. Nothing of this batch was scored: mend or restart the server, "
            f"then go on. {first}",
            whole_batch=True,
        )


def _plain(value: Any) -> Any:
    """A value of context as JSON knows it: numpy's arrays and numbers as Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
