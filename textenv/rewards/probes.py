"""Probing a scorer for blind spots before a policy finds them: ``python -m textenv.rewards.probes``.

A learned score is only trustworthy near the answers that it was learned from. Here genuine answers meet degenerate
variants of themselves (`textenv.rewards.variants`), which any reader would rank below them. Singhal et al. (2023,
arXiv:2310.03716) show how much of a learned reward can be length alone, hence the correlation.

Knows texts and scores, no models: any scorer of textenv can be probed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.correlation import pearson, spearman
from textenv.estimates import UNDEFINED, mean_estimate, quantile_of, share_estimate
from textenv.optional import progress_bar
from textenv.rewards.batches import check_pairs
from textenv.rewards.genuine import review_answers
from textenv.rewards.probe_report import Example, ProbeReport, VariantResult
from textenv.rewards.variants import VARIANTS, Variant
from textenv.scoring import call_scorer

ANSWERS = 100
"""Genuine answers that are probed where none are given."""


def probe(
    scorer: Callable[..., Any],
    prompts: Sequence[str] | None = None,
    responses: Sequence[str] | None = None,
    *,
    rng: np.random.Generator | None = None,
    variants: Mapping[str, Variant] = VARIANTS,
    context: Mapping[str, Sequence[Any]] | None = None,
    name: str | None = None,
    confidence: float = 0.95,
    progress: bool = False,
) -> ProbeReport:
    """Score genuine answers and degenerate variants of each, and see which the scorer prefers.

    Args:
        scorer: any, see `textenv.scoring.Scorer`.
        prompts: n texts; None, with `responses`: 100 held-out film reviews, see `review_answers`.
        responses: n genuine answers, not empty.
        rng: of variants that chance has a part in, and of the default answers; None: ``np.random.default_rng(0)``.
        variants: names and functions, see `VARIANTS`; ``VARIANTS | {"shouted": lambda p, text, rng: text.upper()}``
            adds one.
        context: n values per column for the scorer.
        name: what to call the scorer in the report; None: what it calls itself.
        confidence: of the intervals, over answers. Each variant has its own: of 20 harmless variants one looks harmful.
        progress: show a bar.

    Returns:
        The report.

    Raises:
        ValueError: prompts without responses or the other way round, numbers that differ, fewer than two answers, an
            empty answer, no variants.
        ScorerError: see `textenv.scoring.call_scorer`.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    if prompts is None and responses is None:
        prompts, responses = review_answers(ANSWERS, rng)
    prompts, responses = _check(prompts, responses, variants)
    quantile_of(confidence)
    with progress_bar("Probing ...", 1 + len(variants), progress) as advance:
        scores = call_scorer(scorer, prompts, responses, context=context)
        advance()
        results = []
        for title, change in variants.items():
            changed = [str(change(p, r, rng)) for p, r in zip(prompts, responses, strict=True)]
            results.append(_result(title, scorer, prompts, responses, changed, scores, context, confidence))
            advance()
    lengths = np.array([len(response.split()) for response in responses])
    return ProbeReport(
        scorer=name or _name_of(scorer),
        score=mean_estimate(scores, confidence),
        score_std=float(scores.std()),
        length_pearson=pearson(scores, lengths, confidence),
        length_spearman=spearman(scores, lengths, confidence),
        variants=tuple(results),
        scores=scores,
        lengths=lengths,
        confidence=confidence,
    )


def outcomes(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Outcome (n,) of each comparison: 1 where ours is higher, 0 where theirs is, one half for a tie."""
    won: NDArray[np.float64] = (np.sign(ours - theirs) + 1) / 2
    return won


def _result(
    title: str,
    scorer: Callable[..., Any],
    prompts: list[str],
    genuine: list[str],
    changed: list[str],
    scores: NDArray[np.float64],
    context: Mapping[str, Sequence[Any]] | None,
    confidence: float,
) -> VariantResult:
    """One variant against the genuine answers, those that it left as they were set aside."""
    rows = [row for row, (one, other) in enumerate(zip(genuine, changed, strict=True)) if one != other]
    if not rows:
        return VariantResult(
            name=title, compared=0, win_rate=UNDEFINED, gap=UNDEFINED, gap_in_std=float("nan"), example=None
        )
    columns = {column: [values[row] for row in rows] for column, values in (context or {}).items()}
    ours = call_scorer(scorer, [prompts[row] for row in rows], [changed[row] for row in rows], context=columns)
    theirs, deviation = scores[rows], float(scores.std())
    gaps = ours - theirs
    most = int(gaps.argmax())
    row = rows[most]
    return VariantResult(
        name=title,
        compared=len(rows),
        win_rate=share_estimate(outcomes(ours, theirs), confidence),
        gap=mean_estimate(gaps, confidence),
        gap_in_std=float(gaps.mean()) / deviation if deviation > 0 else float("nan"),
        example=Example(prompts[row], genuine[row], changed[row], float(theirs[most]), float(ours[most])),
    )


def _check(
    prompts: Sequence[str] | None, responses: Sequence[str] | None, variants: Mapping[str, Variant]
) -> tuple[list[str], list[str]]:
    """Refuse what would only fail, or say nothing, after the scorer has done its work."""
    if prompts is None or responses is None:
        given = "responses" if prompts is None else "prompts"
        raise ValueError(f"`prompts` and `responses` should come together, got only `{given}`. Pass both or neither.")
    for which, texts in (("prompts", prompts), ("responses", responses)):
        if isinstance(texts, str):
            raise ValueError(f"`{which}` should be a list of texts, got one text, {texts[:60]!r}. Write [{which}].")
    prompts, responses = list(prompts), list(responses)
    check_pairs(prompts, responses)
    if len(responses) < 2:
        raise ValueError(f"There should be at least two genuine answers, got {len(responses)}: no spread, no interval.")
    empty = [row for row, response in enumerate(responses) if not response.strip()]
    if empty:
        raise ValueError(
            f"responses[{empty[0]}] should be a genuine answer, got {responses[empty[0]]!r}: there is nothing to make "
            "worse. Leave it out, and its prompt."
        )
    if not variants:
        raise ValueError("`variants` should hold at least one variant, got none. Leave it out for the usual ones.")
    return prompts, responses


def _name_of(scorer: Any) -> str:
    """What a scorer calls itself: the source of its weights, its name, or its class."""
    from textenv.lm.loading import portable_name

    for attribute in ("source", "name", "__name__"):
        if isinstance(named := getattr(scorer, attribute, None), str):
            named = portable_name(named)
            return f"{type(scorer).__name__} {named}" if attribute != "__name__" else named
    return type(scorer).__name__


if __name__ == "__main__":
    from textenv.rewards.probe_command import main

    main()
