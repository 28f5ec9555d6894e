"""Scores and reference log-probabilities from one frozen forward pass, where both read the same weights.

Legend: B responses, P prompt tokens, T response tokens, L = P + T, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textenv.packed_masks import PackedMasks
from textenv.rewards.reward_model import RewardModel, Trunk


class Reference(Trunk, Protocol):
    """A frozen `LanguageModel`, or anything that reads log-probabilities and hidden states in one pass as it does."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    def frozen_pass(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_tokens: int,
        read_columns: Tensor | None = None,
        action_masks: PackedMasks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (B, T), and the hidden states (B, H) at `read_columns`."""
        ...


def shares_trunk(scorer: object, reference: object) -> TypeGuard[RewardModel]:
    """Whether `score_and_logprobs` can serve both: a head on the weights that the reference has, in one precision.

    A subclass of `RewardModel` that overrides how texts are scored does not share: only its own call knows its scores.

    Args:
        scorer: any scorer.
        reference: any reference; one with a `source` may share.
    """
    return (
        isinstance(scorer, RewardModel)
        and type(scorer).__call__ is RewardModel.__call__
        and scorer.source == getattr(reference, "source", None)
        and getattr(scorer.trunk, "dtype", None) == getattr(reference, "dtype", None)
    )


def score_and_logprobs(
    scorer: RewardModel,
    reference: Reference,
    prompts: Sequence[str],
    responses: Sequence[str],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any],
    response_tokens: int,
    action_masks: PackedMasks | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Score responses and read their reference log-probabilities, in one pass over the sampled ids.

    Scores equal ``scorer(prompts, responses)``, which scores the text. Where encoding the text gives back the sampled
    ids, the state to score is in the pass already. Where it does not (a policy may split a word as no tokenizer does),
    the text itself goes through the trunk, all such rows in one more call.

    Args:
        scorer: a reward model on the reference's weights, see `shares_trunk`.
        reference: the frozen model.
        prompts: B texts.
        responses: B texts, special tokens left out.
        input_ids: (B, L), prompts padded on the left to P, responses from column P on.
        attention_mask: (B, L), 1 on the tokens of prompts and responses, the stop token included.
        response_tokens: T.
        action_masks: what was allowed, index (B, T); the reference is renormalised over it. None: everything.

    Returns:
        scores (B,) and reference log-probabilities (B, T), zero where the mask is 0; both float64.

    Raises:
        ValueError: the scorer reads other weights than the reference has.
    """
    scorer = scorer.with_trunk(reference)
    columns = text_end_columns(scorer, prompts, responses, input_ids, attention_mask, response_tokens)  # (B,)
    logprobs, states = reference.frozen_pass(
        torch.as_tensor(np.asarray(input_ids), device=reference.device),
        torch.as_tensor(np.asarray(attention_mask), device=reference.device),
        response_tokens,
        torch.as_tensor(columns.clip(0), device=reference.device),
        **({} if action_masks is None else {"action_masks": action_masks}),
    )
    assert states is not None
    scores = scorer.score_states(states)
    changed = np.flatnonzero(columns < 0)
    if len(changed):
        scores[changed] = scorer([prompts[i] for i in changed], [responses[i] for i in changed])
    return scores, logprobs.double().cpu().numpy()


def text_end_columns(
    scorer: RewardModel,
    prompts: Sequence[str],
    responses: Sequence[str],
    input_ids: NDArray[Any],
    attention_mask: NDArray[Any],
    response_tokens: int,
) -> NDArray[np.int64]:
    """Column (B,) of the last token that is part of the text, or -1 where the text's own ids are not those of the row.

    Special tokens at the end of a response, such as EOS, are no part of the text; a stop token like "." is.
    """
    columns = np.full(len(input_ids), -1)
    special = scorer.tokenizer.special_ids
    first = input_ids.shape[1] - response_tokens  # P
    for row, (ids, mask) in enumerate(zip(np.asarray(input_ids), np.asarray(attention_mask), strict=True)):
        real = np.flatnonzero(mask)
        while len(real) and real[-1] >= first and int(ids[real[-1]]) in special:
            real = real[:-1]
        if len(real) and ids[real].tolist() == scorer.encode(prompts[row], responses[row]):
            columns[row] = real[-1]
    return columns
