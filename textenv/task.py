"""A text task: everything that the single and the vector environment share. Holds no episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from textenv.mdp import TokenMDP, TokenState, responses
from textenv.prompts import (
    Curriculum,
    EncodedPrompt,
    Prompt,
    PromptSet,
    Tokenizer,
    check_context,
    context_columns,
    decoder,
    encode_prompt,
)
from textenv.scorer_columns import check_takes_columns
from textenv.scoring import SCORER_ERRORS, call_scorer
from textenv.whole import whole_responses

LENGTH_LIMITS = ("truncate", "terminate")
SPLITS = ("train", "eval")
PART = "score/"
"""What the names of a score's parts begin with in infos."""


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
        scorer: ``scorer(prompts, responses, **context) -> scores (B,)``, the context being the prompts' columns.
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
        check_takes_columns(self.scorer, self.prompts.columns)

    @classmethod
    def build(
        cls,
        *,
        prompts: Sequence[Prompt] | PromptSet,
        scorer: Callable[..., Any],
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Sequence[int],
        max_response_tokens: int,
        max_prompt_tokens: int | None = None,
        pad_id: int = 0,
        weights: ArrayLike | None = None,
        curriculum: Curriculum | None = None,
        order: str = "random",
        overlong: str = "error",
        split: str | None = None,
        eval_fraction: float = 0.1,
        **options: Any,
    ) -> TextTask:
        """Encode the prompts and size the MDP by them.

        Args:
            prompts: texts, token ids, chat messages, records of `load_prompts`; or a `PromptSet` that is ready.
            scorer: see `TextTask`.
            tokenizer: see `TextTask`.
            vocab_size: V.
            stop_ids: ids that end a response.
            max_response_tokens: T.
            max_prompt_tokens: P; None for the longest prompt (of both splits).
            pad_id: fills unused columns.
            weights: see `PromptSet.encode`.
            curriculum: see `PromptSet.encode`.
            order: see `PromptSet.encode`.
            overlong: what is done about prompts over `max_prompt_tokens` (None: over what the model's context leaves
                beside T), see `PromptSet.encode`.
            split: ``"train"`` or ``"eval"``: one side of `PromptSet.split`; None: all prompts.
            eval_fraction: the share of the evaluation side.
            **options: `reference`, `length_limit`, `scorer_errors`.

        Raises:
            ValueError: prompts or options that cannot be used, or P + T beyond the model's context.
            TypeError: a scorer that does not take the prompts' context.
        """
        context_length = getattr(tokenizer, "context_length", None)
        selection = {"weights": weights, "curriculum": curriculum, "order": order, "overlong": overlong}
        limit = max_prompt_tokens
        if limit is None and overlong != "error" and context_length is not None:
            limit = context_length - max_response_tokens
        encoded = _prompt_set(prompts, tokenizer, vocab_size, limit, selection)
        mdp = TokenMDP(
            vocab_size=int(vocab_size),
            stop_ids=tuple(int(i) for i in stop_ids),
            max_prompt_tokens=encoded.longest if max_prompt_tokens is None else max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            pad_id=int(pad_id),
        )
        if context_length is not None and mdp.length > context_length:
            longest = "" if max_prompt_tokens is not None else f" (the longest prompt is {encoded.name_of_longest})"
            raise ValueError(
                f"max_prompt_tokens + max_response_tokens should fit the context of the model ({context_length} "
                f"tokens), got {mdp.max_prompt_tokens} + {mdp.max_response_tokens}{longest}. Positions beyond it were "
                'never trained. Lower max_response_tokens, or drop or cut long prompts: overlong="drop", "cut-left", '
                '"cut-right".'
            )
        if split is not None:
            if split not in SPLITS:
                raise ValueError(f"`split` should be one of {SPLITS} or None, got {split!r}. Choose one of them.")
            encoded = encoded.split(eval_fraction)[SPLITS.index(split)]
        return cls(mdp=mdp, prompts=encoded, tokenizer=tokenizer, scorer=scorer, **options)

    @property
    def named_size(self) -> int | None:
        """Ids from here on have rows in the model's embedding but no token; None where the tokenizer does not say.

        An environment takes them as actions, which leave no text; policies and references give them probability 0.
        """
        return getattr(self.tokenizer, "named_size", None)

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
        """Text, ids and context of a prompt from outside.

        Raises:
            ValueError: it is empty, over the budget, has ids outside the vocabulary, or lacks the context that the
                scorer is given. `name` says which it is.
        """
        encoded = encode_prompt(prompt, self.tokenizer, self.mdp.vocab_size, name)
        if len(encoded.ids) > self.mdp.max_prompt_tokens:
            raise ValueError(
                f"{name} should have at most {self.mdp.max_prompt_tokens} tokens, got {len(encoded.ids)}: "
                f"{encoded.text!r}. Make the environment with a larger max_prompt_tokens."
            )
        if encoded.context or self.prompts.columns:
            check_context(encoded, self.prompts.columns, name)
        return encoded

    def start(
        self, prompt: Prompt | None, rng: np.random.Generator, drawn: int = 0, row: int = 0, num_rows: int = 1
    ) -> EncodedPrompt:
        """The prompt asked for, or one drawn; see `encode` and `PromptSet.draw`."""
        return self.prompts.draw(rng, drawn, row, num_rows) if prompt is None else self.encode(prompt)

    def whole_state(
        self, prompts: Sequence[EncodedPrompt], responses: Sequence[Sequence[int] | NDArray[Any]]
    ) -> TokenState:
        """The final states (B rows) of given responses; see `whole_responses`."""
        return whole_responses(self.mdp, [prompt.ids for prompt in prompts], responses)

    def response_texts(self, state: TokenState, rows: Sequence[int] | NDArray[np.int64]) -> list[str]:
        """Texts of the responses so far."""
        return decoder(self.tokenizer)([ids.tolist() for ids in responses(self.mdp, state, rows)])

    def score(self, prompts: Sequence[EncodedPrompt], texts: Sequence[str]) -> NDArray[np.float64]:
        """Scores (B,) of responses, from one call of the scorer with the prompts' context.

        Raises:
            ScorerError: see `call_scorer`.
        """
        asked = [prompt.text for prompt in prompts]
        return call_scorer(self.scorer, asked, texts, self.scorer_errors, context_columns(prompts))

    def episode_ends(
        self,
        state: TokenState,
        prompts: Sequence[EncodedPrompt],
        rows: NDArray[np.int64],
        terminated: NDArray[np.bool_],
        scores: NDArray[np.float64] | None = None,
    ) -> dict[str, list[Any]]:
        """The end-of-episode info of some rows, scored in one call.

        Args:
            state: the rows' final state.
            prompts: (N,) what the rows started from.
            rows: the rows that ended.
            terminated: (N,) True where a stop id ended the row.
            scores: (len(rows),) where they are known already (replay); the scorer is not called then.

        Returns:
            One list per info key, an entry per row of `rows`.
        """
        ended = [prompts[row] for row in rows]
        texts = self.response_texts(state, rows)
        if scores is None:
            scores = self.score(ended, texts)
        ends: dict[str, list[Any]] = {
            "prompt": [prompt.text for prompt in ended],
            "response": texts,
            "score": [float(score) for score in scores],
            "finish_reason": ["stop" if terminated[row] else "length" for row in rows],
            "response_length": [int(state.response_lengths[row]) for row in rows],
        }
        if hasattr(self.scorer, "score_parts"):  # such as a WeightedReward, whose sum alone says little
            asked = [prompt.text for prompt in ended]
            said = self.scorer.score_parts(asked, texts, **context_columns(ended))
            ends.update({f"{PART}{name}": values.tolist() for name, values in said.items()})
        if self.scorer_errors == "drop":
            ends["dropped"] = [bool(np.isnan(score)) for score in scores]
        return ends


def _prompt_set(
    prompts: Sequence[Prompt] | PromptSet,
    tokenizer: Tokenizer,
    vocab_size: int,
    limit: int | None,
    selection: dict[str, Any],
) -> PromptSet:
    """Encoded prompts, where they are not encoded already."""
    if not isinstance(prompts, PromptSet):
        return PromptSet.encode(prompts, tokenizer, vocab_size, limit, **selection)
    told = [name for name, value in selection.items() if value is not None and str(value) not in ("random", "error")]
    if told:
        raise ValueError(
            f"`{told[0]}` should be given to PromptSet.encode, got it beside a PromptSet that is encoded already, "
            "where it would be ignored."
        )
    for prompt, name in zip(prompts.prompts, prompts.names, strict=True):
        encode_prompt(prompt, tokenizer, vocab_size, name)
    if limit is not None and prompts.longest > limit:
        raise ValueError(
            f"{prompts.name_of_longest} should have at most max_prompt_tokens={limit} tokens, got {prompts.longest}. "
            "Raise max_prompt_tokens, or give it to PromptSet.encode, which can drop or cut long prompts."
        )
    return prompts


def observation(state: TokenState) -> dict[str, NDArray[Any]]:
    """What the agent sees of N rows, in arrays of its own."""
    return {"input_ids": state.input_ids.copy(), "attention_mask": state.attention_mask.copy()}
