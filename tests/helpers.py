"""A small text world for tests: twelve pieces of text, functions as scorers, log-probabilities by formula. No model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv import TextTask

PIECES = ("<end>", " good", " bad", " film", "s", " films", " a", " is", " not", " very", ".", "</s>")
"""Id to text. `" film"` and `"s"` read as `" films"`, which is an id of its own: decode, then encode, changes ids."""

END, GOOD, BAD, FILM, S, FILMS, A, IS, NOT, VERY, DOT, CLOSE = range(12)
VOCAB_SIZE = len(PIECES)

PROMPTS = (" a film", " films", " very good", " a very bad film is not")
"""Prompts of 2, 1, 2 and 6 tokens."""

RESPONSE_TOKENS = 5


class PieceTokenizer:
    """The longest known piece first, as in a byte-level vocabulary; the two ends are special and leave no text."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            fits = [i for i, piece in enumerate(PIECES) if text.startswith(piece)]
            if not fits:
                raise KeyError(f"no piece for {text!r}")
            ids.append(max(fits, key=lambda i: len(PIECES[i])))
            text = text[len(PIECES[ids[-1]]) :]
        return ids

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        return "".join(PIECES[int(i)] for i in ids if i not in (END, CLOSE))


def count_good(prompts: list[str], responses: list[str]) -> NDArray[np.float64]:
    """+1 for each good, -1 for each bad, and 0.1 for each character of the prompt, so that a mix-up of rows shows."""
    return np.array([r.count("good") - r.count("bad") + 0.1 * len(p) for p, r in zip(prompts, responses, strict=True)])


class CountingScorer:
    """`count_good` (or another scorer) that remembers its calls."""

    def __init__(self, scorer: Any = count_good) -> None:
        self.scorer = scorer
        self.calls: list[tuple[list[str], list[str]]] = []

    def __call__(self, prompts: list[str], responses: list[str]) -> Any:
        self.calls.append((prompts, responses))
        return self.scorer(prompts, responses)


class PrefixLogprobs:
    """Log-probabilities in (-1, 0) that depend on every token of the prefix, its place, and the action."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.calls = 0

    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[np.float64]:
        self.calls += 1
        return self.formula(observations["input_ids"], observations["attention_mask"], actions)

    def formula(self, input_ids: NDArray[Any], attention_mask: NDArray[Any], actions: NDArray[Any]) -> Any:
        places = np.arange(1, input_ids.shape[1] + 1)
        prefix = ((input_ids.astype(np.int64) + 1) * attention_mask * places).sum(axis=1)
        mixed = prefix * (31 + self.salt) + (np.asarray(actions) + 1) * (17 + 5 * self.salt)
        return -(mixed % 97 + 1) / 99


class WholeLogprobs(PrefixLogprobs):
    """The same numbers for whole responses in one call, as a language model gives them."""

    def __init__(self, salt: int) -> None:
        super().__init__(salt)
        self.whole_calls = 0

    def response_logprobs(
        self, input_ids: NDArray[Any], attention_mask: NDArray[Any], response_tokens: int
    ) -> NDArray[np.float64]:
        self.whole_calls += 1
        first = input_ids.shape[1] - response_tokens
        columns = []
        for column in range(first, input_ids.shape[1]):
            seen = attention_mask * (np.arange(input_ids.shape[1]) < column)
            columns.append(self.formula(input_ids, seen, input_ids[:, column]))
        return np.where(attention_mask[:, first:] == 1, np.stack(columns, axis=1), 0.0)


def text_task(**changes: Any) -> TextTask:
    """A task of that world: prompts of 1 to 6 tokens, responses of at most 5, `<end>` stops."""
    options: dict[str, Any] = {
        "prompts": PROMPTS,
        "scorer": count_good,
        "tokenizer": PieceTokenizer(),
        "vocab_size": VOCAB_SIZE,
        "stop_ids": [END],
        "max_response_tokens": RESPONSE_TOKENS,
        "pad_id": CLOSE,
    }
    return TextTask.build(**(options | changes))


def write(env: Any, response: Sequence[int], **reset: Any) -> dict[str, Any]:
    """Step a response in a single environment: what each step gave, and how it ended."""
    observation, info = env.reset(**reset)
    steps: dict[str, Any] = {"observations": [observation], "rewards": [], "infos": [info], "ends": []}
    for token in response:
        observation, reward, terminated, truncated, info = env.step(token)
        steps["observations"].append(observation)
        steps["rewards"].append(reward)
        steps["ends"].append((terminated, truncated))
        steps["infos"].append(info)
    return steps | {"info": info, "observation": observation}


def random_responses(rng: np.random.Generator, count: int, stop_ids: Sequence[int] = (END,)) -> list[list[int]]:
    """Ragged responses that an episode can produce: ended by a stop id, or by the budget."""
    going_on = [token for token in range(VOCAB_SIZE) if token not in stop_ids]
    responses = []
    for length in rng.integers(1, RESPONSE_TOKENS + 1, count):
        response = rng.choice(going_on, length).tolist()
        if length < RESPONSE_TOKENS or rng.random() < 0.5:
            response[-1] = int(rng.choice(stop_ids))
        responses.append(response)
    return responses


def assert_same(left: Any, right: Any, at: str = "result") -> None:
    """Equal in type, shape, dtype and every value, at any depth; NaN equals NaN."""
    if isinstance(left, dict):
        assert isinstance(right, dict) and left.keys() == right.keys(), f"{at}: {left.keys()} and {right!r}"
        for key in left:
            assert_same(left[key], right[key], f"{at}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert type(left) is type(right) and len(left) == len(right), f"{at}: {left!r} and {right!r}"
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{at}[{place}]")
    elif isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray), f"{at}: {left!r} and {right!r}"
        assert (left.dtype, left.shape) == (right.dtype, right.shape), f"{at}: {left!r} and {right!r}"
        if left.dtype == object:
            assert_same(left.tolist(), right.tolist(), at)
        else:
            np.testing.assert_array_equal(left, right, err_msg=at)
    else:
        assert type(left) is type(right), f"{at}: {left!r} and {right!r}"
        assert left == right or (left != left and right != right), f"{at}: {left!r} and {right!r}"
