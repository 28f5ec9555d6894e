"""Demonstrations from the packaged ratings: how people went on who wrote film reviews that others rated highly."""

from __future__ import annotations

from collections.abc import Sequence

from textenv.prompts import Demonstration
from textenv.rewards.ratings import RatedSentence, load_ratings, opening_of, split_ratings

HIGHLY_RATED = 1.0
"""The least mean rating of a sentence worth imitating, of -4 to 4: one in four has it."""


def review_demonstrations(
    sentences: Sequence[RatedSentence], min_rating: float = HIGHLY_RATED, words: int = 4
) -> list[Demonstration]:
    """Split review sentences into an opening, the prompt, and the rest of the sentence, the response.

    Left out are sentences rated lower, and those whose opening makes no clean prompt (see `make_openings`: fewer than
    twice the words, or quotes, brackets and sentence ends in the opening). A response keeps the space that it begins
    with, and ends as the sentence does: with a full stop as a rule, in which ``RLHF-v0`` ends film reviews as well.

    Args:
        sentences: those of one side of `split_ratings`.
        min_rating: the least mean rating.
        words: of an opening.

    Raises:
        ValueError: no sentence is left.

    Example:
        >>> review_demonstrations([RatedSentence(6, "The film provides some great insight into minds.", (3, 4))])
        [Demonstration(prompt='The film provides some', response=' great insight into minds.', ended=True, ...)]
    """
    found = []
    for sentence in sentences:
        text = " ".join(sentence.text.split())
        opening = opening_of(text, words)
        if opening is not None and sentence.mean >= min_rating:
            found.append(Demonstration(opening, text[len(opening) :], place=f"sentence {sentence.id}"))
    if not found:
        raise ValueError(
            f"At least one sentence should be rated {min_rating} or higher and begin with {words} plain words of at "
            f"least {2 * words}, got none of {len(sentences)}. Lower min_rating or words."
        )
    return found


def load_review_demonstrations(min_rating: float = HIGHLY_RATED) -> tuple[list[Demonstration], list[Demonstration]]:
    """The packaged demonstrations: to train on, and held out, on either side of `split_ratings`.

    The prompts of ``RLHF-v0`` are openings of held-out sentences that begin no training sentence: what a policy is
    asked to continue there is in none of the demonstrations that it trains on.

    Args:
        min_rating: see `review_demonstrations`.
    """
    train, held_out = split_ratings(load_ratings())
    return review_demonstrations(train, min_rating), review_demonstrations(held_out, min_rating)
