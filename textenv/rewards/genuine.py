"""Genuine answers to probe a scorer with: how people went on from the packaged openings. Texts only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from textenv.rewards.ratings import load_openings, load_ratings, split_ratings


class Answers(NamedTuple):
    """n prompts and a genuine answer to each."""

    prompts: list[str]
    responses: list[str]


def review_answers(count: int | None = None, rng: np.random.Generator | None = None) -> Answers:
    """Held-out film-review sentences, each split after its fourth word into an opening and how its author went on.

    No reward model of textenv has been trained on them. The openings are those of `load_openings`.

    Args:
        count: how many, drawn without replacement; None: all, in the order of the openings.
        rng: draws them; None: ``np.random.default_rng(0)``.

    Raises:
        ValueError: `count` is below 1 or more than there are.
    """
    openings = load_openings()
    _, held_out = split_ratings(load_ratings())
    words = len(openings[0].split())
    rest: dict[str, str] = {}
    for sentence in held_out:
        pieces = sentence.text.split()
        rest.setdefault(" ".join(pieces[:words]), " " + " ".join(pieces[words:]))
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 1 <= count <= len(openings):
            raise ValueError(f"`count` should be an integer between 1 and {len(openings)}, got {count!r}.")
        rng = np.random.default_rng(0) if rng is None else rng
        openings = [openings[place] for place in rng.choice(len(openings), count, replace=False)]
    return Answers(openings, [rest[opening] for opening in openings])
