"""Calling a scorer so that its faults become errors one can act on. Knows nothing of tokens or environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Scorer(Protocol):
    """Judges finished responses, a batch at a time.

    The prompts' context comes as keyword arguments, a list of B values per column:
    ``scorer(prompts, responses, reference_answer=[...])``. Only columns that the prompts have are passed, and all of
    them: take ``**context`` to ignore those you do not need.

    A scorer that is made of several may have a method ``score_parts`` of the same arguments, which gives a dict of (B,)
    scores by name: they go into the infos of episodes' ends as ``"score/name"``.
    """

    def __call__(self, prompts: list[str], responses: list[str], **context: Any) -> Any:
        """One number per response: a float array, list or tensor of shape (B,)."""
        ...


class ScorerError(RuntimeError):
    """A scorer raised, or returned something that is no score. The message shows the prompt and the response.

    Attributes:
        whole_batch: True where no single sample is to blame: a wrong number of scores, a server that does not answer.
            Asking for the samples one by one would not help, and none of them is dropped.
    """

    def __init__(self, message: str, *, whole_batch: bool = False) -> None:
        super().__init__(message)
        self.whole_batch = whole_batch


SCORER_ERRORS = ("raise", "drop")


def call_scorer(
    scorer: Callable[..., Any],
    prompts: Sequence[str],
    responses: Sequence[str],
    on_error: str = "raise",
    context: Mapping[str, Sequence[Any]] | None = None,
) -> NDArray[np.float64]:
    """Score a batch in one call.

    Args:
        scorer: see `Scorer`.
        prompts: B texts.
        responses: B texts.
        on_error: ``"raise"``, or ``"drop"``: samples without a finite score come back as NaN, for the caller to leave
            out and count.
        context: B values per column, see `Scorer`.

    Returns:
        scores (B,), float64.

    Raises:
        ScorerError: the scorer raised, returned None, NaN or inf for a sample (unless dropped), or a wrong number of
            scores (always: it cannot be said which sample each score belongs to). One that the scorer itself raises
            comes through as it is, in every mode where it concerns the whole batch.
    """
    columns = {column: list(values) for column, values in (context or {}).items()}
    try:
        returned = scorer(list(prompts), list(responses), **columns)
    except Exception as error:
        if isinstance(error, ScorerError) and (error.whole_batch or on_error == "raise"):
            raise
        return _one_by_one(scorer, prompts, responses, on_error, columns, error)
    return check_scores(returned, prompts, responses, on_error)


def check_scores(
    returned: Any, prompts: Sequence[str], responses: Sequence[str], on_error: str = "raise"
) -> NDArray[np.float64]:
    """What a scorer returned as scores (B,), NaN where a sample is to be dropped; see `call_scorer`.

    Raises:
        ScorerError: a wrong number of scores, or (unless dropped) one that is not finite.
    """
    scores = _as_scores(returned, prompts, responses)
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad) and on_error == "raise":
        row = int(bad[0])
        raise ScorerError(
            f"A scorer should give one finite number per response, got {list(returned)[row]} for "
            f"{_sample(prompts, responses, row)}{_more(bad)}. Trained on, it would turn every weight of the policy "
            'into NaN. Mend the scorer, or pass scorer_errors="drop" to leave such samples out of training and count '
            "them."
        )
    scores[bad] = np.nan
    return scores


def _one_by_one(
    scorer: Callable[..., Any],
    prompts: Sequence[str],
    responses: Sequence[str],
    on_error: str,
    columns: Mapping[str, list[Any]],
    error: Exception,
) -> NDArray[np.float64]:
    """After a batch raised: find the sample that did it, or keep what can be scored without it."""
    if len(prompts) == 1:
        if on_error == "drop":
            return np.array([np.nan])
        raise ScorerError(
            f"The scorer raised {type(error).__name__}: {error}, for {_sample(prompts, responses, 0)}. Mend the "
            'scorer, or pass scorer_errors="drop" to leave such samples out of training and count them.'
        ) from error
    singles = [
        call_scorer(scorer, [prompt], [response], on_error, {name: [values[i]] for name, values in columns.items()})
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    if on_error == "drop":
        return np.concatenate(singles)
    raise ScorerError(
        f"The scorer raised {type(error).__name__}: {error}, for a batch of {len(prompts)} whose samples it scores one "
        f"by one; the first is {_sample(prompts, responses, 0)}. A scorer should take batches of any size."
    ) from error


def _as_scores(returned: Any, prompts: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
    """The returned object as (B,) float64, None read as NaN."""
    if hasattr(returned, "detach"):  # a torch tensor, on whatever device, without importing torch
        returned = returned.detach().cpu()
        returned = returned.float().numpy() if returned.dtype.is_floating_point else returned.numpy()
    try:
        scores = np.array(returned, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScorerError(
            f"A scorer should return {len(prompts)} numbers, shape ({len(prompts)},), got {type(returned).__name__} "
            f"({str(returned)[:100]!r}). Return a list, array or tensor of numbers; the first sample is "
            f"{_sample(prompts, responses, 0)}.",
            whole_batch=True,
        ) from error
    if scores.shape != (len(prompts),):
        raise ScorerError(
            f"A scorer should return {len(prompts)} scores, shape ({len(prompts)},), got {type(returned).__name__} of "
            f"shape {scores.shape}. Scores would be matched to the wrong responses. Return one per response, in their "
            f"order; the first sample is {_sample(prompts, responses, 0)}.",
            whole_batch=True,
        )
    return scores


def _sample(prompts: Sequence[str], responses: Sequence[str], row: int) -> str:
    return f"prompt {prompts[row]!r}, response {responses[row]!r}"


def _more(bad: NDArray[np.int64]) -> str:
    return f" (and {len(bad) - 1} more of the batch)" if len(bad) > 1 else ""
