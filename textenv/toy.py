"""Enumerable languages: a vocabulary, a horizon and a stop token small enough to know every response.

A toy language is a reference (next-token logits that depend on the position only) and a score for whole responses.
`textenv.oracle` computes the best policy for it; this module knows numpy and nothing else: no environment, no agent.

Legend: B responses in a batch, N environments, T response tokens at most (the horizon), V vocabulary, L = 1 + T columns
of an observation (a toy prompt is one token). Log-probabilities are in nats.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.integer[Any]]
Response = tuple[int, ...]

PAD = -1
"""Fills padded response arrays (B, T) to the right of the last token; not a token id."""

_TOY_TEXT = re.compile(r"(0|[1-9][0-9]*)( (0|[1-9][0-9]*))*")


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
        logits = _read_only(self.reference_logits)
        _check_logits(logits)
        horizon, vocab_size = logits.shape
        stop_id = _as_id(self.stop_id, vocab_size, "`stop_id`")
        if (self.token_scores is None) == (self.score_fn is None):
            got = "neither" if self.score_fn is None else "both"
            raise ValueError(
                f"A toy language should have `token_scores` or `score_fn`, got {got}. The score of a response would be "
                "undefined or ambiguous. Give exactly one of the two."
            )
        token_scores = None
        if self.token_scores is not None:
            token_scores = _as_token_scores(self.token_scores, horizon, vocab_size)
        unfinished_score = float(self.unfinished_score)
        if not np.isfinite(unfinished_score):
            raise ValueError(
                f"`unfinished_score` should be a finite number, got {unfinished_score}. Every expected score would be "
                "infinite or NaN. Give a large negative number, or -inf logits to forbid tokens."
            )
        if self.score_fn is not None and unfinished_score != 0.0:
            raise ValueError(
                f"`unfinished_score` should stay 0.0 beside `score_fn`, got {unfinished_score}. It would be ignored. "
                "Add it inside `score_fn`, to responses without the stop token."
            )
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
        return _read_only(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

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
        checked = [self._check_response(response) for response in responses]
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
        """Score decoded responses: the environment's scorer contract, on the text of `ToyTokenizer`.

        The stop token is part of that text, so nothing that the score depends on is lost in it.

        Args:
            prompts: B texts, which the score does not depend on.
            responses: B texts of finished responses, for example `"3 3 0"`.

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
        """Log-probability, in nats, that the reference gives to each next token.

        The prompt of a toy episode is one token, so a state has `attention_mask.sum(1) - 1` response tokens so far. A
        full state (T of them) has no next token; its entry is 0, for steps whose action an autoreset ignores.

        Args:
            observations: `input_ids` and `attention_mask`, (N, L) each.
            actions: (N,) token ids.

        Returns:
            (N,) log-probabilities, -inf for forbidden tokens.

        Raises:
            ValueError: Wrong shapes, ids outside the vocabulary, or a number of tokens that no toy state has.
        """
        mask = np.asarray(observations["attention_mask"])  # (N, L)
        tokens = _as_tokens(actions, self.vocab_size, "`actions`")
        if mask.ndim != 2 or tokens.shape != mask.shape[:1]:
            raise ValueError(
                f"`attention_mask` should be (N, L) and `actions` (N,), got {mask.shape} and {tokens.shape}. Tokens "
                "would be read at the wrong positions. Add the leading axis: a single environment is N = 1."
            )
        positions = (mask != 0).sum(axis=1) - 1  # (N,)
        if ((positions < 0) | (positions > self.horizon)).any():
            raise ValueError(
                f"`attention_mask` should show 1 prompt token and 0 to {self.horizon} response tokens per row, got "
                f"{(positions + 1).tolist()} tokens. The reference would be read at positions it does not have. Use "
                "the one-token prompt and a budget of `horizon` response tokens."
            )
        full = positions == self.horizon
        return np.where(full, 0.0, self.reference_logprobs[np.where(full, 0, positions), tokens])

    def response_logprobs(
        self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike, response_tokens: int
    ) -> FloatArray:
        """Log-probability, in nats, that the reference gives to every response token at once.

        Args:
            input_ids: (B, L) prompts and responses; what stands where the mask is 0 does not matter.
            attention_mask: (B, L), 1 on tokens.
            response_tokens: The number of response columns, the last ones of L; at most the horizon.

        Returns:
            (B, response_tokens) log-probabilities, 0 where `attention_mask` is 0.

        Raises:
            ValueError: Wrong shapes, too many response columns, or ids outside the vocabulary.
        """
        ids, mask = np.asarray(input_ids), np.asarray(attention_mask) != 0
        if ids.ndim != 2 or ids.shape != mask.shape or not 1 <= response_tokens <= min(self.horizon, ids.shape[1]):
            raise ValueError(
                f"`input_ids` and `attention_mask` should be (B, L) with 1 to {self.horizon} response tokens among the "
                f"L columns, got {ids.shape}, {mask.shape} and response_tokens={response_tokens}. Tokens would be read "
                "at the wrong positions. Pass the arrays of a whole batch and the environment's token budget."
            )
        mask = mask[:, -response_tokens:]
        tokens = np.where(mask, ids[:, -response_tokens:], 0)
        tokens = _as_tokens(tokens, self.vocab_size, "`input_ids`")
        return np.where(mask, self.reference_logprobs[np.arange(response_tokens), tokens], 0.0)

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

    def _check_response(self, response: Sequence[int]) -> Response:
        """Return the response as a tuple of plain ints, or raise a ValueError that says what is wrong with it."""
        ids = tuple(_as_id(token, self.vocab_size, f"Every id of the response {response!r}") for token in response)
        if not 1 <= len(ids) <= self.horizon:
            raise ValueError(
                f"A response should have 1 to {self.horizon} tokens, got {len(ids)}: {ids}. The language has no such "
                "response, so its optimum says nothing about it. Set the token budget to `horizon`."
            )
        if self.stop_id in ids[:-1]:
            raise ValueError(
                f"A response should end at the first stop token ({self.stop_id}), got {ids}. Tokens after the end "
                "would be scored. Cut the response behind its first stop token."
            )
        if ids[-1] != self.stop_id and len(ids) < self.horizon:
            raise ValueError(
                f"A response should end with the stop token ({self.stop_id}) or have {self.horizon} tokens, got {ids}. "
                "It is unfinished and has no score. Score at the end of the episode, with a token budget of `horizon`."
            )
        return ids


@dataclass(frozen=True)
class ToyReference:
    """The reference policy of a toy language as one attachable object."""

    language: ToyLanguage

    def __call__(self, observations: Mapping[str, npt.ArrayLike], actions: npt.ArrayLike) -> FloatArray:
        """(N,) log-probabilities of the next tokens; see `ToyLanguage.ref_logprobs`."""
        return self.language.ref_logprobs(observations, actions)

    def response_logprobs(
        self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike, response_tokens: int
    ) -> FloatArray:
        """(B, T) log-probabilities of whole responses; see `ToyLanguage.response_logprobs`."""
        return self.language.response_logprobs(input_ids, attention_mask, response_tokens)


@dataclass(frozen=True)
class ToyTokenizer:
    """Token ids as text: decimal numbers separated by single spaces, lossless in both directions.

    Example:
        >>> ToyTokenizer().decode([3, 3, 0])
        '3 3 0'
        >>> ToyTokenizer().encode("3 3 0")
        [3, 3, 0]
    """

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Ids to text; no ids to the empty text. Nothing is stripped, the stop token included."""
        return " ".join(str(_as_id(token, None, "Every token id")) for token in ids)

    def encode(self, text: str) -> list[int]:
        """Text to ids; the empty text to no ids. Raises ValueError where `decode` could not have written the text."""
        if text and not _TOY_TEXT.fullmatch(text):
            raise ValueError(
                f"A toy text should be decimal ids separated by single spaces, such as '3 3 0', got {text!r}. Other "
                "spellings would not survive decoding. Write the ids without signs, leading zeros or extra spaces."
            )
        return [int(word) for word in text.split()]


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


def _read_only(values: npt.ArrayLike) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


def _check_logits(logits: FloatArray) -> None:
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(
            f"`reference_logits` should be (T, V) with T >= 1 positions and V >= 1 tokens, got shape {logits.shape}. "
            "Horizon and vocabulary are read from it. For the same logits at every position: np.tile(logits, (T, 1))."
        )
    if np.isnan(logits).any() or np.isposinf(logits).any():
        position, token = np.argwhere(np.isnan(logits) | np.isposinf(logits))[0].tolist()
        raise ValueError(
            f"`reference_logits` should be finite, or -inf to forbid a token, got {logits[position, token]} at "
            f"position {position}, token {token}. Every log-probability there would be NaN. Use a finite number."
        )
    if np.isneginf(logits).all(axis=1).any():
        position = int(np.flatnonzero(np.isneginf(logits).all(axis=1))[0])
        raise ValueError(
            f"`reference_logits` should leave a token possible at every position, got only -inf at {position}. "
            "The reference could not go on. Allow a token there, for example the stop token."
        )


def _as_token_scores(values: npt.ArrayLike, horizon: int, vocab_size: int) -> FloatArray:
    array = _read_only(values)
    if array.shape not in ((vocab_size,), (horizon, vocab_size)):
        raise ValueError(
            f"`token_scores` should be ({vocab_size},) or ({horizon}, {vocab_size}), like `reference_logits`, got "
            f"{array.shape}. Scores would belong to other tokens. Give one number per token, or per position and token."
        )
    if not np.isfinite(array).all():
        raise ValueError(
            f"`token_scores` should be finite, got {array[~np.isfinite(array)][0]}. Every expected score would be "
            "infinite or NaN. Forbid tokens with -inf in `reference_logits` instead."
        )
    return _read_only(np.broadcast_to(array, (horizon, vocab_size)))


def _as_id(value: object, vocab_size: int | None, name: str) -> int:
    """Return a plain int in 0 to `vocab_size` - 1 (no upper bound for None), or raise a ValueError."""
    expected = "a non-negative integer" if vocab_size is None else f"an integer in 0 to {vocab_size - 1}"
    try:
        token = operator.index(value)  # type: ignore[arg-type]  # whatever it is, the except branch names it
    except TypeError:
        token = -1
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        raise ValueError(f"{name} should be {expected}, got {value!r}. It names no token. Use ids of this vocabulary.")
    return token


def _as_tokens(values: npt.ArrayLike, vocab_size: int, name: str) -> IntArray:
    """Return an integer array whose entries are in 0 to `vocab_size` - 1, or raise a ValueError."""
    array = np.asarray(values)
    wrong = (array < 0) | (array >= vocab_size)
    if array.size and (not np.issubdtype(array.dtype, np.integer) or wrong.any()):
        got = array[wrong][0] if wrong.any() else f"dtype {array.dtype}"
        raise ValueError(
            f"{name} should be integers in 0 to {vocab_size - 1}, got {got}. They would name no token, or another one. "
            "Use ids of this vocabulary."
        )
    return array.astype(np.int64)


def _equal_or_none(left: FloatArray | None, right: FloatArray | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)


def _rebuild(cls: type[ToyLanguage], arguments: dict[str, Any]) -> ToyLanguage:
    return cls(**arguments)
