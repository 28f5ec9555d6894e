"""What people said: rated film-review sentences, comparisons drawn from them, prompts cut from them.

Numpy and the standard library only. Knows nothing of models or tokens.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ASSETS = "textenv.assets"
RATINGS_FILE = "movie_review_ratings.csv.gz"
OPENINGS_FILE = "review_openings.txt"

HELD_OUT = 2_105
"""Sentences that no reward model trains on: about a fifth."""


@dataclass(frozen=True)
class RatedSentence:
    """One sentence and what each of its raters thought of it.

    Attributes:
        id: its number in the source.
        text: the sentence.
        ratings: one whole number per person, from -4 (extremely negative) to 4 (extremely positive).
    """

    id: int
    text: str
    ratings: tuple[int, ...]

    @property
    def mean(self) -> float:
        """The mean rating, a far less noisy judgement than any single one."""
        return sum(self.ratings) / len(self.ratings)


def load_ratings() -> list[RatedSentence]:
    """The packaged ratings: 10,605 sentences, 15 to 29 people each.

    Source: C.J. Hutto & E. Gilbert (2014), "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social
    Media Text", ICWSM-14; MIT licence.
    """
    packed = resources.files(ASSETS).joinpath(RATINGS_FILE).read_bytes()
    lines = io.StringIO(gzip.decompress(packed).decode("utf-8"), newline="")
    return [
        RatedSentence(int(row["id"]), row["text"], tuple(int(r) for r in row["ratings"].split()))
        for row in csv.DictReader(lines)
    ]


def split_ratings(
    sentences: Sequence[RatedSentence], held_out: int = HELD_OUT
) -> tuple[list[RatedSentence], list[RatedSentence]]:
    """Divide sentences into (train, held out), always the same way.

    A hash of the words decides, not a generator: the split survives a new order of the file and a new numpy, and a
    sentence that occurs twice has both copies on the same side.

    Args:
        sentences: any rated sentences.
        held_out: about how many to hold out (copies of one sentence stay together).

    Raises:
        ValueError: `held_out` would leave one side empty.
    """
    if not 0 < held_out < len(sentences):
        raise ValueError(
            f"`held_out` should be between 1 and {len(sentences) - 1} for {len(sentences)} sentences, got {held_out}. "
            "Both sides need sentences, one to train on and one to measure."
        )
    hashes = [hash_of_words(sentence.text) for sentence in sentences]
    limit = sorted(hashes)[held_out]
    train = [s for s, h in zip(sentences, hashes, strict=True) if h >= limit]
    return train, [s for s, h in zip(sentences, hashes, strict=True) if h < limit]


def hash_of_words(text: str) -> bytes:
    """Eight bytes that follow from a text's words alone, not from case, spaces or punctuation."""
    words = " ".join(re.findall(r"\w+", text.lower()))
    return hashlib.blake2b(words.encode(), digest_size=8).digest()


class Comparisons(NamedTuple):
    """n human comparisons; row k says that one person rated `chosen[k]` above `rejected[k]`.

    Attributes:
        chosen: (n,) indices of sentences.
        rejected: (n,) indices of sentences.
        chosen_rating: (n,) the single rating that the chosen one got.
        rejected_rating: (n,) the single rating that the rejected one got, lower.
    """

    chosen: NDArray[np.int64]
    rejected: NDArray[np.int64]
    chosen_rating: NDArray[np.int64]
    rejected_rating: NDArray[np.int64]


def draw_comparisons(sentences: Sequence[RatedSentence], n: int, rng: np.random.Generator) -> Comparisons:
    """Draw noisy comparisons, as people give them: two sentences, one rating of each, ties skipped.

    Single ratings are used, not means, because that is what a comparison by a person is: sentences that differ little
    are ordered wrongly nearly half of the time, and the Bradley-Terry model reads the size of a difference from that.

    Args:
        sentences: the sentences to draw from, all equally likely.
        n: how many comparisons.
        rng: the only source of randomness.

    Raises:
        ValueError: all ratings are equal, so that every comparison would be a tie.
    """
    if len({rating for s in sentences for rating in s.ratings}) < 2 or len(sentences) < 2:
        raise ValueError(
            f"`sentences` should be at least two with different ratings, got {len(sentences)} that no comparison "
            "could order."
        )
    counts = np.array([len(s.ratings) for s in sentences])  # (S,)
    table = np.zeros((len(sentences), counts.max()), np.int64)  # (S, most raters)
    for row, sentence in enumerate(sentences):
        table[row, : len(sentence.ratings)] = sentence.ratings
    parts: list[NDArray[np.int64]] = []
    while sum(part.shape[1] for part in parts) < max(n, 1):
        parts.append(_decided(*_draw_pairs(table, counts, 2 * n + 8, rng)))
    return Comparisons(*np.concatenate(parts, axis=1)[:, :n])


def _draw_pairs(
    table: NDArray[np.int64], counts: NDArray[np.int64], n: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (2, n) of sentences and one rating (2, n) of each, ties and sentences against themselves included."""
    pairs = rng.integers(len(counts), size=(2, n))
    raters = (rng.random((2, n)) * counts[pairs]).astype(np.int64)
    return pairs, table[pairs, raters]


def _decided(pairs: NDArray[np.int64], ratings: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of `Comparisons` (4, m): of those pairs whose ratings differ, the higher-rated sentence first."""
    keep = (pairs[0] != pairs[1]) & (ratings[0] != ratings[1])
    pairs, ratings = pairs[:, keep], ratings[:, keep]
    order = np.argsort(-ratings, axis=0)  # (2, m)
    return np.concatenate([np.take_along_axis(pairs, order, 0), np.take_along_axis(ratings, order, 0)])


PLAIN_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*|\d+")


def load_openings() -> list[str]:
    """The packaged prompts: how 1,000-odd held-out reviews begin, one opening of four words each."""
    return resources.files(ASSETS).joinpath(OPENINGS_FILE).read_text(encoding="ascii").splitlines()


def make_openings(train: Sequence[RatedSentence], held_out: Sequence[RatedSentence], words: int = 4) -> list[str]:
    """Prompts to continue: the first words of held-out reviews at least twice as long, where plain and neutral.

    Left out are openings with quotes, brackets or sentence ends in them (they would be left hanging), openings that
    also begin a training sentence, and openings that already judge: a word in them stands, in the training sentences,
    for a mean rating of more than one point either way.

    Args:
        train: the sentences that reward models train on.
        held_out: the sentences to cut openings from.
        words: how many words.

    Returns:
        Unique openings in the order of `held_out`.
    """
    trained = {" ".join(s.text.split()[:words]) for s in train}
    valences = word_valences(train)
    openings = dict.fromkeys(opening_of(s.text, words) for s in held_out)  # unique, in order
    return [
        opening
        for opening in openings
        if opening is not None
        and opening not in trained
        and all(abs(valences.get(word, 0.0)) <= 1 for word in _lower_words(opening))
    ]


def opening_of(text: str, words: int) -> str | None:
    """The first words of a text, or None where they make no clean prompt."""
    first = text.split()[:words]
    if len(text.split()) < 2 * words or not first[0][0].isupper():
        return None
    without_commas = [word.removesuffix(",") for word in first[:-1]] + first[-1:]  # a prompt ends in a word
    return " ".join(first) if all(map(PLAIN_WORD.fullmatch, without_commas)) else None


def word_valences(sentences: Iterable[RatedSentence], prior: int = 5) -> dict[str, float]:
    """The mean rating of the sentences that hold a word, for each word, as if `prior` more of them had been rated 0."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for sentence in sentences:
        for word in _lower_words(sentence.text):
            total[word] += sentence.mean
            count[word] += 1
    return {word: total[word] / (count[word] + prior) for word in total}


def _lower_words(text: str) -> set[str]:
    return set(re.findall(r"[a-z']+", text.lower()))
