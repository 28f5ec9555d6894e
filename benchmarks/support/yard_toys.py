"""Toy languages of growing size, and the laws that need no training: the reference, and the best of n."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from textenv.oracle import Evaluation, enumerate_responses, evaluate, evaluate_sequences, solve
from textenv.toy import PAD, ToyLanguage, standard_toy

FloatArray = npt.NDArray[np.float64]
ENUMERABLE = 1_000_000
"""Responses that are listed at most; see `enumerate_responses`."""


@dataclasses.dataclass(frozen=True)
class Toy:
    """A language at one price, with its name in tables."""

    name: str
    language: ToyLanguage
    kl_coef: float

    @property
    def optimum(self) -> float:
        """J*."""
        return solve(self.language, self.kl_coef).value

    def measure(self, logprobs: npt.ArrayLike) -> Evaluation:
        """What a table (T, V) of log-probabilities reaches, exactly."""
        return evaluate(self.language, logprobs, self.kl_coef)


def make_toy(name: str, kl_coef: float) -> Toy:
    """``"standard"``, or ``"VxT"``: V tokens of which 0 stops, at most T of them, drawn from one seed per size.

    The reference's logits have standard deviation 1, the tokens' scores 0.5, never stopping costs 1.
    """
    if name == "standard":
        return Toy(name, standard_toy(), kl_coef)
    vocab, horizon = (int(part) for part in name.split("x"))
    rng = np.random.default_rng((vocab, horizon))
    scores = rng.normal(0.0, 0.5, size=vocab)
    language = ToyLanguage(
        reference_logits=rng.normal(size=(horizon, vocab)),
        stop_id=0,
        token_scores=np.concatenate([[0.0], scores[1:]]),
        unfinished_score=-1.0,
    )
    return Toy(name, language, kl_coef)


def mean_length(language: ToyLanguage) -> float:
    """Tokens of the reference's responses on average: the sum over positions of the probability to get there."""
    going_on = 1 - np.exp(language.reference_logprobs[:, language.stop_id])
    return float(1 + np.cumprod(going_on[:-1]).sum())


def listable(language: ToyLanguage) -> bool:
    """Whether the language has few enough responses to list."""
    others = language.vocab_size - 1
    return sum(others**t for t in range(language.horizon + 1)) <= ENUMERABLE


def best_of_n(toy: Toy, n: int) -> Evaluation:
    """What the best of n samples of the reference reaches, exactly; ties are broken evenly.

    With F the reference's distribution function of the score, a response whose score is s is the best with probability
    ref(y) (F(s)^n - F(s-)^n) / (F(s) - F(s-)).
    """
    responses, lengths = enumerate_responses(toy.language, ENUMERABLE)
    levels, level = np.unique(np.round(toy.language.score_padded(responses), 9), return_inverse=True)

    def law(responses: npt.NDArray[np.int64], _lengths: npt.NDArray[np.int64]) -> FloatArray:
        ref = ref_logprobs(toy.language, responses)
        mass = np.bincount(level, np.exp(ref), minlength=len(levels))
        below = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        gain = ((below + mass) ** n - below**n) / np.where(mass > 0, mass, 1.0)
        with np.errstate(divide="ignore"):
            return ref + np.log(gain)[level]

    assert len(lengths) == len(level)
    return evaluate_sequences(toy.language, law, toy.kl_coef, limit=ENUMERABLE)


def ref_logprobs(language: ToyLanguage, responses: npt.NDArray[np.int64]) -> FloatArray:
    """(M,) log-probabilities of whole responses (M, T), -1 right of the last token, under the reference."""
    total = np.zeros(len(responses))
    for position in range(responses.shape[1]):
        tokens = responses[:, position]
        total += np.where(tokens == PAD, 0.0, language.reference_logprobs[position][tokens])
    return total
