"""Sanity tasks: six small text tasks over bytes, each of which an agent fails for one reason only.

    task          a failure says that the agent ...
    BANDIT        does not raise the probability of what was rewarded
    STOP_NOW      does not train the end-of-text action, or loses a response that is nothing else
    COPY_PROMPT   does not read the prompt's tokens, or reads them at the wrong places
    PASSWORD      does not credit tokens by the returns that followed them
    CONDITIONAL   does not know which of several prompts it answers
    LONG_WAIT     loses a reward on its way back over many tokens, or adds a value beyond the end

Each is data: prompts, a scorer, a token budget, and two numbers to measure by. `best_return` is the largest expected
return there is, `random_return` the exact expectation of a policy that draws every token uniformly. Scores read ASCII
characters only, which `ByteTokenizer` decodes to themselves whatever stands around them, so the expectations are exact
although most byte sequences are no UTF-8. `textenv.sanity_env` makes environments of them.

Legend: B responses in a batch, P prompt tokens, T response tokens at most, V vocabulary (257, or 256 without a stop).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textenv.bytes import ByteTokenizer

SOLVED = 0.98
"""A task counts as solved at this share of its best return."""

BYTES = ByteTokenizer.vocab_size - 1
V = ByteTokenizer.vocab_size


@dataclass(frozen=True, kw_only=True)
class SanityTask:
    """Prompts, a scorer and what it can give; as a callable it is the scorer of its environment.

    Example:
        >>> PASSWORD([":"] * 3, ["open", "opxn", "pen"]).tolist()
        [1.0, 0.5, 0.0]

    Attributes:
        env_id: the id of its environment.
        prompts: each drawn equally often.
        answers: a best response to each prompt, as text; "" is to stop at once.
        score: ``score(prompt, response) -> number`` for one response.
        max_response_tokens: T.
        vocab_size: V; 257 with the end-of-text id, 256 without.
        best_return: the largest expected return.
        random_return: the exact expected return of uniformly random tokens.
    """

    env_id: str
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    score: Callable[[str, str], float]
    max_response_tokens: int
    vocab_size: int = V
    best_return: float = 1.0
    random_return: float

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the end of text where the vocabulary has it; all where one token is the response."""
        return tuple(range(0 if self.max_response_tokens == 1 else ByteTokenizer.stop_id, self.vocab_size))

    @property
    def solved_return(self) -> float:
        """The return from which on the task counts as solved: within 2% of the best."""
        return SOLVED * self.best_return

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_context: Any) -> NDArray[np.float64]:
        """Score finished responses: B prompts and B texts to (B,) numbers."""
        pairs = zip(prompts, responses, strict=True)
        return np.array([self.score(prompt, response) for prompt, response in pairs], dtype=np.float64)


def starts_with_nine(_prompt: str, response: str) -> float:
    """1 for a response that starts with 9, else 0."""
    return float(response.startswith("9"))


def nothing(_prompt: str, response: str) -> float:
    """1 for the empty response, else 0."""
    return float(response == "")


def copied(prompt: str, response: str) -> float:
    """The share of the prompt's characters that the response has in the same place."""
    return sum(asked == given for asked, given in zip(prompt, response, strict=False)) / len(prompt)


def password(_prompt: str, response: str) -> float:
    """The share of ``open`` that the response starts with: what follows the first wrong character is worth nothing."""
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(SECRET, response, strict=False))
    return sum(1 for _ in right) / len(SECRET)


def number(prompt: str, response: str) -> float:
    """1 for the digit that the prompt spells and nothing else, else 0.

    Raises:
        ValueError: the prompt spells none of the four numbers.
    """
    if prompt not in NUMBERS:
        raise ValueError(
            f"The prompt should be one of {', '.join(NUMBERS)}, got {prompt!r}. No response to it is right or wrong. "
            "Start from one of these."
        )
    return float(response == NUMBERS[prompt])


SECRET = "open"
"""The password."""
NUMBERS = {"one": "1", "two": "2", "three": "3", "four": "4"}
"""The prompts of `CONDITIONAL` and the answers to them."""

BANDIT = SanityTask(
    env_id="textenv/Bandit-v0",
    prompts=("?",),
    answers=("9",),
    score=starts_with_nine,
    max_response_tokens=1,
    random_return=1 / V,
)
"""One token is the whole episode: 1 for ``9``, 0 for everything else.

Best return 1. Random return 1 / V = 1 / 257 = 0.0039. Every id ends the episode. Nothing is graded, so that there is
nothing to settle for: an agent finds the token or it does not, and a batch of 256 uniform ones holds one on average.
"""

STOP_NOW = SanityTask(
    env_id="textenv/StopNow-v0",
    prompts=(".",),
    answers=("",),
    score=nothing,
    max_response_tokens=8,
    random_return=1 / V,
)
"""The best response is empty: 1 for the end-of-text id as the first token, 0 for everything else.

Best return 1. Random return P(first token is the end) = 1 / 257 = 0.0039. A single token makes the response, so the end
must be a trained action, with a reward, a log-probability and a mask of its own.
"""

_PAIRS = tuple("".join(pair) for pair in itertools.product("abcd", repeat=2))

COPY_PROMPT = SanityTask(
    env_id="textenv/CopyPrompt-v0",
    prompts=_PAIRS,
    answers=_PAIRS,
    score=copied,
    max_response_tokens=2,
    random_return=(1 / V + (V - 1) / V**2) / 2,
)
"""The 16 pairs of the letters a to d: each letter repeated in its place is worth 1/2.

Best return 1. Random return (1/V + (V - 1)/V * 1/V) / 2 = 0.0039: the second place exists only where the first token
did not end the response. Without reading the prompt no policy gets more than 1/4.
"""

PASSWORD = SanityTask(
    env_id="textenv/Password-v0",
    prompts=(":",),
    answers=(SECRET,),
    score=password,
    max_response_tokens=4,
    random_return=sum(V**-place for place in range(1, 5)) / 4,
)
"""Write ``open``: a quarter for each right character, as long as all before it are right.

Best return 1. Random return (1/V + 1/V^2 + 1/V^3 + 1/V^4) / 4 = 0.00098, since the first j characters are right with
probability V^-j. The score comes at the end and says how many were right, not which: each token's share must be told
from the returns.
"""

CONDITIONAL = SanityTask(
    env_id="textenv/Conditional-v0",
    prompts=tuple(NUMBERS),
    answers=tuple(NUMBERS.values()),
    score=number,
    max_response_tokens=1,
    random_return=1 / V,
)
"""The word of the prompt decides which digit is right: ``one`` wants ``1``, and so on; 1 for it, 0 for all else.

Best return 1. Random return 1 / 257 = 0.0039. A policy that does not tell the prompts apart gets at most 1/4. The words
have three to five letters, so shorter prompts are padded on the left: an agent that mistreats padding shows it here.
"""

LONG_WAIT = SanityTask(
    env_id="textenv/LongWait-v0",
    prompts=("?",),
    answers=("9",),
    score=starts_with_nine,
    max_response_tokens=32,
    vocab_size=BYTES,
    random_return=1 / BYTES,
)
"""The bandit with a wait: the first token decides, 31 tokens that change nothing follow, then its reward comes.

Best return 1. Random return 1 / 256 = 0.0039. There is no end-of-text id (V = 256), so the wait cannot be cut short:
every episode ends at its budget. At a discount of 0.9 the reward reaches the first token as 0.9^31 = 4% of itself, and
a value bootstrapped beyond the end drowns it.
"""

SANITY_TASKS = {task.env_id: task for task in (BANDIT, STOP_NOW, COPY_PROMPT, PASSWORD, CONDITIONAL, LONG_WAIT)}
"""Every task by the id of its environment."""
