"""Enumerable languages: a vocabulary, a horizon and a stop token small enough to know every response.

A toy language is a reference (next-token logits that depend on the position only) and a score for whole responses.
`textenv.oracle` computes the best policy for it; this module knows numpy and nothing else: no environment, no agent.

Legend: B responses in a batch, N environments, T response tokens at most (the horizon), V vocabulary, L = 1 + T columns
of an observation (a toy prompt is one token). Log-probabilities are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from textenv.toy_checks import (
    FloatArray,
    IntArray,
    Response,
    as_id,
    as_logits,
    as_response,
    as_token_scores,
    as_unfinished_score,
    read_only,
)
from textenv.toy_reference import ToyReference
from textenv.toy_text import ToyTokenizer

__all__ = ["PAD", "Response", "ToyLanguage", "ToyReference", "ToyTokenizer", "standard_toy", "sum_over_tokens"]

PAD = -1
"""Fills padded response arrays (B, T) to the right of the last token; not a token id."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyLanguage:
    """A language whose every response can be listed, with its reference policy and its score.

    A response is a tuple of 1 to T ids that ends at the first `stop_id` (which belongs to it: stopping was a choice)
    or, without one, at T tokens. Give the score either as parts, `token_scores` and `unfinished_score`, or as
    `score_fn`. Parts make the score additive; the optimum then takes T small sums instead of a list of all responses.

    Arrays are copied and read-only. Equality compares contents; `score_fn` compares by `==` and pickles by name, so a
    language whose score is a module-level function can be compared, pickled and sent to another process.

    Example:
        >>> language = standard_toy()
        >>> language.score([(3,) * 8, (3,) * 7 + (0,), (5, 0)]).tolist()
        [3.0, 3.5, -0.5]
    """

    reference_logits: FloatArray
    """(T, V) logits of the reference at each position, finite or -inf (forbidden), not all -inf in one row."""
    stop_id: int
    """The token that ends a response, in 0 to V - 1."""
    token_scores: FloatArray | None = None
    """(T, V), or (V,) for the same at every position: what each token adds to the score. Stored as (T, V)."""
    unfinished_score: float = 0.0
    """Added when a response reaches T tokens without the stop token; only together with `token_scores`."""
    score_fn: Callable[[Sequence[Response]], npt.ArrayLike] | None = None
    """Any other score: B responses (tuples of ids, stop token included) -> (B,) finite numbers."""

    def __post_init__(self) -> None:
        """Copy, check and freeze the fields."""
        logits = as_logits(self.reference_logits)
        horizon, vocab_size = logits.shape
        stop_id = as_id(self.stop_id, vocab_size, "`stop_id`")
        if (self.token_scores is None) == (self.score_fn is None):
            got = "neither" if self.score_fn is None else "both"
            raise ValueError(
                f"A toy language should have `token_scores` or `score_fn`, got {got}. The score of a response would be "
                "undefined or ambiguous. Give exactly one of the two."
            )
        token_scores = None
        if self.token_scores is not None:
            token_scores = as_token_scores(self.token_scores, horizon, vocab_size)
        unfinished_score = as_unfinished_score(self.unfinished_score, self.score_fn is not None)
        object.__setattr__(self, "reference_logits", logits)
        object.__setattr__(self, "stop_id", stop_id)
        object.__setattr__(self, "token_scores", token_scores)
        object.__setattr__(self, "unfinished_score", unfinished_score)

    @property
    def horizon(self) -> int:
        """T, the largest number of tokens in a response."""
        return int(self.reference_logits.shape[0])

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens, the stop token included."""
        return int(self.reference_logits.shape[1])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop set of a toy episode: `(stop_id,)`."""
        return (self.stop_id,)

    @property
    def additive(self) -> bool:
        """Whether the score is a sum over tokens (plus `unfinished_score`)."""
        return self.token_scores is not None

    @cached_property
    def reference_logprobs(self) -> FloatArray:
        """(T, V) log-probabilities of the reference, -inf where a token is forbidden; read-only."""
        with np.errstate(over="ignore"):  # finite logits 1e308 apart: the smaller one is forbidden, not an error
            shifted = self.reference_logits - self.reference_logits.max(axis=1, keepdims=True)
        return read_only(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

    @property
    def reference(self) -> ToyReference:
        """The reference policy as one object, ready to hand to a KL wrapper."""
        return ToyReference(self)

    def score(self, responses: Sequence[Sequence[int]]) -> FloatArray:
        """Score finished responses.

        Args:
            responses: B sequences of 1 to T ids, the stop token included where it was chosen; ragged, without padding.

        Returns:
            (B,) scores.

        Raises:
            ValueError: A response is empty, too long or unfinished (no stop token and fewer than T tokens), has an id
                outside the vocabulary or after the stop token; or `score_fn` did not return (B,) finite numbers.
        """
        limits = {"horizon": self.horizon, "vocab_size": self.vocab_size, "stop_id": self.stop_id}
        checked = [as_response(response, **limits) for response in responses]
        padded = np.full((len(checked), self.horizon), PAD, dtype=np.int64)  # (B, T)
        for row, response in enumerate(checked):
            padded[row, : len(response)] = response
        return self.score_padded(padded)

    def score_padded(self, responses: IntArray) -> FloatArray:
        """Score finished responses given as one array; the ids are trusted, use `score` for data from outside.

        Args:
            responses: (B, T) ids, -1 to the right of the last token.

        Returns:
            (B,) scores.
        """
        if self.token_scores is not None:
            unfinished: npt.NDArray[np.bool_] = ~(responses == self.stop_id).any(axis=1)  # (B,)
            return sum_over_tokens(self.token_scores, responses) + self.unfinished_score * unfinished
        assert self.score_fn is not None  # exactly one of the two, by construction
        lengths = (responses != PAD).sum(axis=1)
        ragged = [tuple(row[:n]) for row, n in zip(responses.tolist(), lengths.tolist(), strict=True)]
        scores = np.array(self.score_fn(ragged), dtype=np.float64)
        if scores.shape != (len(ragged),):
            raise ValueError(
                f"`score_fn` should return one number per response, shape ({len(ragged)},), got shape {scores.shape}. "
                "Scores would land on the wrong responses. Return a list or array in the order of the responses."
            )
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise ValueError(
                f"`score_fn` should return finite scores, got {scores[row]} for the response {ragged[row]}. Every "
                "expected score would be infinite or NaN. Forbid tokens with -inf in `reference_logits` instead."
            )
        return scores

    def scorer(self, prompts: Sequence[str], responses: Sequence[str], **_context: object) -> FloatArray:
        """Score decoded responses: the environment's scorer contract, on the text of `ToyTokenizer`, stop token too.

        Args:
            prompts: B texts, which the score does not depend on.
            responses: B texts of finished responses, for example `" 3 3 0"`.

        Returns:
            (B,) scores.

        Raises:
            ValueError: Not one prompt per response; a text that does not parse; see also `score`.
        """
        if len(prompts) != len(responses):
            raise ValueError(
                f"`prompts` and `responses` should be equally long, got {len(prompts)} and {len(responses)}. Scores "
                "would land on the wrong episodes. Pass one prompt per response."
            )
        return self.score([ToyTokenizer().encode(text) for text in responses])

    def ref_logprobs(self, observations: Mapping[str, npt.ArrayLike], actions: npt.ArrayLike) -> FloatArray:
        """(N,) log-probabilities of the next tokens under the reference; see `ToyReference`."""
        return self.reference(observations, actions)

    def response_logprobs(
        self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike, response_tokens: int
    ) -> FloatArray:
        """(B, response_tokens) log-probabilities of whole responses under the reference; see `ToyReference`."""
        return self.reference.response_logprobs(input_ids, attention_mask, response_tokens)

    def __eq__(self, other: object) -> bool:
        """Compare contents; two `score_fn` are equal where `==` says so."""
        if not isinstance(other, ToyLanguage):
            return NotImplemented
        same_score = (self.unfinished_score, self.score_fn) == (other.unfinished_score, other.score_fn)
        return (
            self.stop_id == other.stop_id
            and same_score
            and np.array_equal(self.reference_logits, other.reference_logits)
            and _equal_or_none(self.token_scores, other.token_scores)
        )

    def __hash__(self) -> int:
        """Hash what is cheap; equal languages hash alike."""
        return hash((self.reference_logits.shape, self.stop_id, self.unfinished_score))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy through the constructor: numpy forgets the read-only flag of arrays."""
        return _rebuild, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})


def standard_toy() -> ToyLanguage:
    """Build the standard toy: 6 tokens, token 0 stops, at most 8 tokens, a uniform reference.

    Each token 3 scores +0.5, each token 5 scores -0.5, never stopping costs 1: eight 3s score 3.0, seven 3s and a stop
    score 3.5, the best there is.
    """
    return ToyLanguage(
        reference_logits=np.zeros((8, 6)),
        stop_id=0,
        token_scores=np.array([0.0, 0.0, 0.0, 0.5, 0.0, -0.5]),
        unfinished_score=-1.0,
    )


def sum_over_tokens(table: FloatArray, responses: IntArray) -> FloatArray:
    """Add up a positional table (T, V) along responses (B, T) padded with -1; returns (B,)."""
    total = np.zeros(responses.shape[0])
    for position in range(responses.shape[1]):  # column by column: B can be millions
        tokens = responses[:, position]
        total += np.where(tokens == PAD, 0.0, table[position][tokens])
    return total


def _equal_or_none(left: FloatArray | None, right: FloatArray | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)


def _rebuild(cls: type[ToyLanguage], arguments: dict[str, Any]) -> ToyLanguage:
    return cls(**arguments)
