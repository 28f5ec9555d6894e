"""A text task: everything that the single and the vector environment share. Holds no episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from textenv.mdp import TokenMDP, TokenState, responses
from textenv.prompts import EncodedPrompt, Prompt, PromptSet, Tokenizer, decoder, encode_prompt
from textenv.scoring import SCORER_ERRORS, call_scorer

LENGTH_LIMITS = ("truncate", "terminate")


class LogprobModel(Protocol):
    """Gives log-probabilities of tokens. Whole responses at once where it can, which replay prefers."""

    def __call__(self, observations: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> NDArray[Any]:
        """Log-probability (N,) of each action after the prefix that its observation shows."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """Prompts, a scorer and the token MDP between them.

    Attributes:
        mdp: vocabulary, stop ids and budgets.
        prompts: what episodes start from.
        tokenizer: token ids to the text that the scorer reads.
        scorer: ``scorer(prompts, responses) -> scores (B,)``.
        reference: log-probabilities under the policy that training starts from; the default of `KLPenalty`.
        length_limit: ``"truncate"`` reports the end of the budget as truncation; ``"terminate"`` as termination, for
            libraries that would otherwise bootstrap a value there.
        scorer_errors: ``"raise"``, or ``"drop"`` samples without a finite score (their score is NaN, their reward 0).
    """

    mdp: TokenMDP
    prompts: PromptSet
    tokenizer: Tokenizer
    scorer: Callable[..., Any]
    reference: LogprobModel | None = None
    length_limit: str = "truncate"
    scorer_errors: str = "raise"

    def __post_init__(self) -> None:
        """Refuse options that would only fail at the end of the first episode."""
        for name, known in (("length_limit", LENGTH_LIMITS), ("scorer_errors", SCORER_ERRORS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` should be one of {known}, got {getattr(self, name)!r}. Choose one of them.")
        if not callable(self.scorer):
            raise TypeError(
                f"`scorer` should be a function scorer(prompts, responses) -> scores, got {type(self.scorer).__name__}."
            )

    @classmethod
    def build(
        cls,
        *,
        prompts: Sequence[Prompt],
        scorer: Callable[..., Any],
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Sequence[int],
        max_response_tokens: int,
        max_prompt_tokens: int | None = None,
        pad_id: int = 0,
        **options: Any,
    ) -> TextTask:
        """Encode the prompts and size the MDP by them.

        Args:
            prompts: texts or token ids.
            scorer: see `TextTask`.
            tokenizer: see `TextTask`.
            vocab_size: V.
            stop_ids: ids that end a response.
            max_response_tokens: T.
            max_prompt_tokens: P; None for the longest prompt.
            pad_id: fills unused columns.
            **options: `reference`, `length_limit`, `scorer_errors`.
        """
        encoded = PromptSet.encode(prompts, tokenizer, vocab_size, max_prompt_tokens)
        mdp = TokenMDP(
            vocab_size=int(vocab_size),
            stop_ids=tuple(int(i) for i in stop_ids),
            max_prompt_tokens=encoded.longest if max_prompt_tokens is None else max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            pad_id=int(pad_id),
        )
        return cls(mdp=mdp, prompts=encoded, tokenizer=tokenizer, scorer=scorer, **options)

    def observation_space(self) -> spaces.Dict:
        """What one row shows: ``input_ids`` and ``attention_mask``, both (L,)."""
        shape = (self.mdp.length,)
        return spaces.Dict(
            input_ids=spaces.Box(0, self.mdp.vocab_size - 1, shape, np.int32),
            attention_mask=spaces.Box(0, 1, shape, np.int8),
        )

    def action_space(self) -> spaces.Discrete:
        """The next token."""
        return spaces.Discrete(self.mdp.vocab_size)

    def encode(self, prompt: Prompt, name: str = "The prompt in `options`") -> EncodedPrompt:
        """Text and ids of a prompt from outside.

        Raises:
            ValueError: it is empty, over the budget, or has ids outside the vocabulary. `name` says which it is.
        """
        encoded = encode_prompt(prompt, self.tokenizer, self.mdp.vocab_size, name)
        if len(encoded.ids) > self.mdp.max_prompt_tokens:
            raise ValueError(
                f"{name} should have at most {self.mdp.max_prompt_tokens} tokens, got {len(encoded.ids)}: "
                f"{encoded.text!r}. Make the environment with a larger max_prompt_tokens."
            )
        return encoded

    def start(self, prompt: Prompt | None, rng: np.random.Generator) -> EncodedPrompt:
        """The prompt asked for, or one drawn; see `encode`."""
        return self.prompts.draw(rng) if prompt is None else self.encode(prompt)

    def response_texts(self, state: TokenState, rows: Sequence[int] | NDArray[np.int64]) -> list[str]:
        """Texts of the responses so far."""
        return decoder(self.tokenizer)([ids.tolist() for ids in responses(self.mdp, state, rows)])

    def episode_ends(
        self,
        state: TokenState,
        prompt_texts: Sequence[str],
        rows: NDArray[np.int64],
        terminated: NDArray[np.bool_],
        scores: NDArray[np.float64] | None = None,
    ) -> dict[str, list[Any]]:
        """The end-of-episode info of some rows, scored in one call.

        Args:
            state: the rows' final state.
            prompt_texts: (N,) texts.
            rows: the rows that ended.
            terminated: (N,) True where a stop id ended the row.
            scores: (len(rows),) where they are known already (replay); the scorer is not called then.

        Returns:
            One list per info key, an entry per row of `rows`.
        """
        prompts = [prompt_texts[row] for row in rows]
        texts = self.response_texts(state, rows)
        if scores is None:
            scores = call_scorer(self.scorer, prompts, texts, self.scorer_errors)
        ends: dict[str, list[Any]] = {
            "prompt": prompts,
            "response": texts,
            "score": [float(score) for score in scores],
            "finish_reason": ["stop" if terminated[row] else "length" for row in rows],
            "response_length": [int(state.response_lengths[row]) for row in rows],
        }
        if self.scorer_errors == "drop":
            ends["dropped"] = [bool(np.isnan(score)) for score in scores]
        return ends


def observation(state: TokenState) -> dict[str, NDArray[Any]]:
    """What the agent sees of N rows, in arrays of its own."""
    return {"input_ids": state.input_ids.copy(), "attention_mask": state.attention_mask.copy()}
