"""Comparisons made rather than read: from single raters' scores, and from two responses that any scorer judges."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.rewards.preferences import Preference, SampledIds
from textenv.rewards.ratings import RatedSentence, draw_comparisons
from textenv.scoring import call_scorer

TIES = ("drop", "random")


def preferences_from_ratings(
    sentences: Sequence[RatedSentence],
    n: int,
    rng: np.random.Generator,
    *,
    opening_words: int = 0,
    margin: bool = False,
) -> list[Preference]:
    """Draw n comparisons as single raters make them, see `draw_comparisons`; pairs of equal texts are drawn again.

    Split the sentences before, not the comparisons after: ``split_ratings``.

    Args:
        sentences: the sentences to draw from.
        n: how many comparisons.
        rng: the only source of randomness.
        opening_words: 0: whole sentences are compared, with an empty prompt, as the packaged reward model learned.
            Above 0: sentences that begin with the same words are, and these are the prompt, as when a policy continues
            a review; groups of sentences are drawn in proportion to the pairs that they hold.
        margin: keep the difference of the two ratings as margin.

    Raises:
        ValueError: n below 0, or no two sentences that a comparison could order.
    """
    if n < 0 or opening_words < 0:
        raise ValueError(f"`n` and `opening_words` should be at least 0, got {n} and {opening_words}.")
    groups: defaultdict[str, list[RatedSentence]] = defaultdict(list)
    for sentence in sentences:
        opening = _opening(sentence.text, opening_words)
        if sentence.text[len(opening) :].strip():
            groups[opening].append(sentence)
    usable = {opening: group for opening, group in groups.items() if _can_be_ordered(group)}
    if not usable:
        raise ValueError(
            f"`sentences` should hold two different ones with different ratings"
            f"{f' that begin with the same {opening_words} words' if opening_words else ''}, got {len(sentences)} "
            "sentences of which no two can be compared. Bring more, or compare fewer words."
        )
    pairs = np.array([len(group) * (len(group) - 1) for group in usable.values()])
    counts = rng.multinomial(n, pairs / pairs.sum()) if len(usable) > 1 else np.array([n])
    drawn = [
        preference
        for (opening, group), count in zip(usable.items(), counts.tolist(), strict=True)
        for preference in _drawn(group, opening, count, margin, rng)
    ]
    order = rng.permutation(n) if len(usable) > 1 else range(n)
    return [drawn[place] for place in order]


def _opening(text: str, words: int) -> str:
    """The first words of a text as they stand in it."""
    end = 0
    for word in text.split()[:words]:
        end = text.index(word, end) + len(word)
    return text[:end]


def _can_be_ordered(group: Sequence[RatedSentence]) -> bool:
    """Whether a comparison of two different texts can come out of a group: then some pair of ratings differs."""
    return len({s.text for s in group}) > 1 and len({rating for s in group for rating in s.ratings}) > 1


def _drawn(
    group: Sequence[RatedSentence], opening: str, n: int, margin: bool, rng: np.random.Generator
) -> list[Preference]:
    found: list[Preference] = []
    while len(found) < n:
        for chosen, rejected, high, low in zip(*draw_comparisons(group, n - len(found), rng), strict=True):
            better, worse = (group[place].text[len(opening) :] for place in (chosen, rejected))
            if better != worse:  # the same sentence can be in the data twice
                found.append(Preference(opening, better, worse, float(high - low) if margin else None))
    return found


@dataclass(frozen=True)
class LabelledPairs:
    """Pairs of responses and what became of them: ``pairs == len(preferences) + equal + empty + dropped_ties``.

    Attributes:
        preferences: the comparisons, in the order of the pairs.
        rows: (n,) the pair that each comes from.
        pairs: how many there were.
        equal: pairs of equal responses, left out.
        empty: pairs of which one response says nothing, left out.
        ties: pairs of different responses with equal scores, without noise.
        dropped_ties: those of them that were left out; the others were decided by chance.
        agreement: share of the comparisons that prefer the higher score (a tie counts one half); nan without any.
    """

    preferences: list[Preference]
    rows: NDArray[np.int64]
    pairs: int
    equal: int
    empty: int
    ties: int
    dropped_ties: int
    agreement: float

    def with_ids(
        self,
        prompts: Sequence[Sequence[int]],
        texts_a: Sequence[str],
        ids_a: Sequence[Sequence[int] | NDArray[Any]],
        ids_b: Sequence[Sequence[int] | NDArray[Any]],
    ) -> LabelledPairs:
        """The same comparisons with the ids that were sampled, see `Preference.ids`.

        Args:
            prompts: ids of the prompts of all pairs.
            texts_a: the texts that were labelled as first responses.
            ids_a: their ids.
            ids_b: ids of the second responses.
        """
        preferences = []
        for preference, row in zip(self.preferences, self.rows.tolist(), strict=True):
            pair = tuple(map(int, ids_a[row])), tuple(map(int, ids_b[row]))
            chosen, rejected = pair if preference.chosen == texts_a[row] else pair[::-1]  # equal texts were left out
            ids = SampledIds(tuple(map(int, prompts[row])), chosen, rejected)
            preferences.append(replace(preference, ids=ids))
        return replace(self, preferences=preferences)


def label_pairs(
    prompts: Sequence[str],
    responses_a: Sequence[str],
    responses_b: Sequence[str],
    scorer: Callable[..., Any],
    rng: np.random.Generator,
    *,
    noise: float = 0.0,
    ties: str = "drop",
    margin: bool = False,
    context: Mapping[str, Sequence[Any]] | None = None,
) -> LabelledPairs:
    """Let a scorer say which of two responses is preferred.

    With ``noise`` 0 the higher score wins. Above, somebody who errs is asked: a is preferred with probability
    ``sigmoid((score_a - score_b) / noise)``, the model of Bradley & Terry (1952) with `noise` as its temperature, so
    that a reward model trained on enough of the comparisons finds ``score / noise`` up to a constant. A pair's label
    depends on its own scores, its place and `rng` alone.

    Args:
        prompts: n texts.
        responses_a: n texts.
        responses_b: n texts.
        scorer: ``scorer(prompts, responses, **context) -> scores``, called once.
        rng: decides where chance does; one number per pair is drawn.
        noise: in units of the score, at least 0.
        ties: without noise, what becomes of equal scores: ``"drop"``, or ``"random"`` for a fair coin.
        margin: keep the difference of the scores as margin.
        context: n values per column for the scorer, see `textenv.scoring.Scorer`.

    Raises:
        ValueError: different numbers of texts, a noise that is negative or not finite, or a margin with noise: by how
            much an erring judge prefers the worse response is not defined.
        ScorerError: see `textenv.scoring.call_scorer`.

    >>> rng = np.random.default_rng(0)
    >>> label_pairs(["Hi"], [" you"], [" there"], lambda _, answers: [len(a) for a in answers], rng).preferences
    [Preference(prompt='Hi', chosen=' there', rejected=' you', margin=None)]
    """
    count = len(prompts)
    check_labelling(noise, ties, margin)
    if not count == len(responses_a) == len(responses_b):
        raise ValueError(
            f"Each prompt should have a response from either side, got {count} prompts, {len(responses_a)} and "
            f"{len(responses_b)} responses. They would be compared across prompts."
        )
    chances = rng.random(count)  # (n,)
    equal = np.array([a == b for a, b in zip(responses_a, responses_b, strict=True)], np.bool_)
    said = [bool(a.strip()) and bool(b.strip()) for a, b in zip(responses_a, responses_b, strict=True)]
    empty = ~np.array(said, np.bool_) & ~equal
    rows = np.flatnonzero(~equal & ~empty)
    gaps = _gaps(scorer, prompts, responses_a, responses_b, rows, context or {})  # (m,)
    tied = (gaps == 0) if noise == 0 else np.zeros(len(rows), np.bool_)
    kept = ~tied if ties == "drop" else np.ones(len(rows), np.bool_)
    prefers_a = np.where(tied, chances[rows] < 0.5, gaps > 0) if noise == 0 else chances[rows] < _sigmoid(gaps / noise)
    preferences = []
    for row, first, gap in zip(rows[kept], prefers_a[kept], gaps[kept], strict=True):
        better, worse = (responses_a[row], responses_b[row]) if first else (responses_b[row], responses_a[row])
        preferences.append(Preference(prompts[row], better, worse, abs(float(gap)) if margin else None))
    agrees = np.where(gaps == 0, 0.5, prefers_a == (gaps > 0))[kept]
    return LabelledPairs(
        preferences,
        rows[kept],
        pairs=count,
        equal=int(equal.sum()),
        empty=int(empty.sum()),
        ties=int(tied.sum()),
        dropped_ties=int((~kept).sum()),
        agreement=float(agrees.mean()) if len(agrees) else math.nan,
    )


def check_labelling(noise: float, ties: str, margin: bool) -> None:
    """Refuse options of `label_pairs` that make no sense, before anything is written or scored.

    Raises:
        ValueError: see `label_pairs`.
    """
    if not 0 <= noise < math.inf:
        raise ValueError(f"`noise` should be a finite number of at least 0, got {noise!r}. Use 0 for none.")
    if ties not in TIES:
        raise ValueError(f"`ties` should be one of {TIES}, got {ties!r}. Choose one of them.")
    if margin and noise > 0:
        raise ValueError(
            f"`margin` should be left out with noise, got noise={noise}: where the worse response wins by chance, the "
            "difference of the scores would be a margin below 0. Label without noise, or without margins."
        )


def _gaps(
    scorer: Callable[..., Any],
    prompts: Sequence[str],
    responses_a: Sequence[str],
    responses_b: Sequence[str],
    rows: NDArray[np.int64],
    context: Mapping[str, Sequence[Any]],
) -> NDArray[np.float64]:
    """Score of a minus score of b (m,) at some rows, from one call."""
    if not len(rows):
        return np.zeros(0)
    asked = [prompts[row] for row in rows] * 2
    answers = [responses[row] for responses in (responses_a, responses_b) for row in rows]
    columns = {name: [values[row] for row in rows] * 2 for name, values in context.items()}
    scores = call_scorer(scorer, asked, answers, context=columns)
    return np.asarray(scores[: len(rows)] - scores[len(rows) :])


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))
