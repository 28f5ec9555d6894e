"""The alignment tax: what training costs on texts that have nothing to do with the task.

Askell et al. 2021 (arXiv:2112.00861) and Ouyang et al. 2022 (arXiv:2203.02155, section 4.2) call by this name what an
aligned model loses elsewhere. Here it is the rise of the language-model loss on held-out texts, in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from textenv.estimates import Estimate, ratio_estimate
from textenv.prompts import Tokenizer, encode_prompt

ROWS = 16
"""Texts per pass."""


class TaxedLoss(NamedTuple):
    """Language-model losses on held-out texts, nats per token."""

    tax: Estimate
    """The policy's loss minus the reference's; above 0 where training has cost something."""
    policy: Estimate
    reference: Estimate


def alignment_tax(
    policy: Any,
    reference: Any,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    max_tokens: int = 256,
    confidence: float = 0.95,
) -> TaxedLoss:
    """Mean negative log-probability per token of the policy, of the reference, and their difference.

    The first token of a text is given, the others are predicted. Both models are asked at the temperature they have.

    Args:
        policy: has ``response_logprobs(input_ids, attention_mask, response_tokens)``.
        reference: the same.
        texts: of at least two tokens each.
        tokenizer: of both models.
        vocab_size: V.
        max_tokens: a longer text is read up to here.
        confidence: of the intervals, over texts.

    Raises:
        ValueError: no text, or one of a single token.
        TypeError: a model cannot give log-probabilities of whole texts.
    """
    for name, model in (("policy", policy), ("reference", reference)):
        if not hasattr(model, "response_logprobs"):
            raise TypeError(
                f"The alignment tax needs a {name} with `response_logprobs`, got {type(model).__name__}. Pass a policy "
                "of textenv.agents and environments whose task has a reference, or leave `texts` out."
            )
    if isinstance(texts, str) or len(texts) == 0:
        raise ValueError(f"`texts` should be a list with at least one text, got {texts!r}. Leave it out for no tax.")
    rows = [encode_prompt(t, tokenizer, vocab_size, f"texts[{i}]").ids[:max_tokens] for i, t in enumerate(texts)]
    for index, row in enumerate(rows):
        if len(row) < 2:
            raise ValueError(
                f"texts[{index}] should have at least two tokens, got {texts[index]!r}: the first is given, so there "
                "is nothing to predict. Leave it out."
            )
    tokens = np.array([len(row) - 1 for row in rows])
    ours, theirs = losses(policy, rows), losses(reference, rows)
    return TaxedLoss(*(ratio_estimate(nats, tokens, confidence) for nats in (ours - theirs, ours, theirs)))


def losses(model: Any, rows: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Negative log-probability (n,) of each row after its first token, nats; rows of like length share a pass."""
    nats = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), ROWS):
        block = order[start : start + ROWS]
        width = max(len(rows[i]) for i in block)
        input_ids = np.zeros((len(block), width), dtype=np.int32)
        attention_mask = np.zeros((len(block), width), dtype=np.int8)
        for place, i in enumerate(block):
            input_ids[place, : len(rows[i])] = rows[i]
            attention_mask[place, : len(rows[i])] = 1
        logprobs = np.asarray(model.response_logprobs(input_ids, attention_mask, width - 1), dtype=np.float64)
        nats[block] = -np.where(attention_mask[:, 1:] == 1, logprobs, 0.0).sum(1)
    return nats
