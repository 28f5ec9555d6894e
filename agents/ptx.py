"""Pretraining texts beside PPO (PPO-ptx): what keeps a policy from unlearning language while it learns a score.

Ouyang et al. 2022 (arXiv:2203.02155), eq. 2, adds ``ptx_coef * E[log pi(x)]`` over pretraining texts x to the
objective. pi is the policy as everywhere else, the distribution that tokens are sampled from, with its temperature in
it; at temperature 1, the default, that is the language model's own likelihood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textenv.agents.nll import nll_losses
from textenv.agents.policy import Policy
from textenv.prompts import encode_prompt


class PretrainingTexts:
    """Token ids of pretraining texts, checked once, drawn uniformly and with replacement.

    A draw depends on nothing but the generator, so that its state is all that a checkpoint has to remember.

    Args:
        texts: texts, or lists of token ids. Texts are encoded as the beginning of a sequence: with one BOS where the
            tokenizer has one, without an EOS that is not in the text.
        tokenizer: encodes the texts.
        vocab_size: V.
        max_tokens: longer texts are cut to their first `max_tokens` tokens; `cut` counts them.

    Raises:
        ValueError: no texts, one of fewer than two tokens, ids without an embedding or a token, or texts beyond the
            model's context. The text is named.
    """

    def __init__(self, texts: Sequence[Any], tokenizer: Any, vocab_size: int, max_tokens: int) -> None:
        if isinstance(texts, str) or len(texts) == 0:
            raise ValueError(
                f"`pretraining_texts` should be a list of at least one text, got {texts!r}. The language-model loss is "
                "their average; pass a list of texts or of token id lists."
            )
        names = [f"pretraining_texts[{row}]" for row in range(len(texts))]
        encoded = [
            encode_prompt(text, tokenizer, vocab_size, name).ids for text, name in zip(texts, names, strict=True)
        ]
        for name, ids in zip(names, encoded, strict=True):
            if len(ids) < 2:
                raise ValueError(
                    f"{name} should have at least 2 tokens, got {list(ids)}: the first is given, so that nothing would "
                    "be left to predict. Leave it out, or join it with another."
                )
        self.rows = tuple(np.array(ids[:max_tokens], dtype=np.int64) for ids in encoded)
        self.cut = sum(len(ids) > max_tokens for ids in encoded)
        """Texts that were longer than `max_tokens`."""
        context, longest = getattr(tokenizer, "context_length", None), max(map(len, self.rows))
        if context is not None and longest > context:
            raise ValueError(
                f"`ptx_max_tokens` should be at most {context}, the model's context, got texts of {longest} tokens: "
                f"they have no positions beyond it. Set ptx_max_tokens={context}."
            )

    @property
    def fingerprint(self) -> str:
        """Equal for equal texts."""
        digest = hashlib.sha256()
        for ids in self.rows:
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch: input_ids and attention_mask (B, L), padded on the right to the longest of the `count` drawn."""
        chosen = [self.rows[i] for i in torch.randint(len(self.rows), (count,), generator=generator).tolist()]
        lengths = torch.tensor([len(ids) for ids in chosen])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        input_ids = torch.zeros(mask.shape, dtype=torch.int64)
        input_ids[mask] = torch.from_numpy(np.concatenate(chosen))
        return input_ids, mask.to(torch.int8)


def ptx_losses(
    policy: Policy, input_ids: Tensor, attention_mask: Tensor, micro_batch_tokens: int | None = None
) -> Iterator[Tensor]:
    """-mean log pi(x_t | x_<t) over all tokens but each text's first, in shares per micro-batch that add up to it.

    To the policy a text is a prompt of one token with the rest as its response.

    Args:
        policy: is asked for its log-probabilities, with their gradient.
        input_ids: (B, L), padded on the right.
        attention_mask: (B, L).
        micro_batch_tokens: tokens that go through the policy at once; None: all of them.

    Yields:
        Scalars in nats, whose sum is the loss. The whole batch's number of tokens is the denominator of each.

    Raises:
        FloatingPointError: a share is not finite.
    """
    return nll_losses(
        policy, input_ids, attention_mask, input_ids.shape[1] - 1, micro_batch_tokens, of="pretraining texts"
    )
