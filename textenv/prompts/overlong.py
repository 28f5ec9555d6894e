"""Prompts that are too long: refused, dropped or cut, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textenv.prompts.encoding import EncodedPrompt, Tokenizer, shortened

OVERLONG = ("error", "drop", "cut-left", "cut-right")


class Fitted(NamedTuple):
    """Prompts that fit.

    Attributes:
        prompts: those that are left.
        rows: the place of each among the prompts given.
        cut: how many of them were cut.
    """

    prompts: list[EncodedPrompt]
    rows: list[int]
    cut: int


def fit(
    prompts: Sequence[EncodedPrompt],
    names: Sequence[str],
    tokenizer: Tokenizer,
    max_prompt_tokens: int | None,
    overlong: str,
) -> Fitted:
    """Bring prompts within a budget of tokens.

    Args:
        prompts: encoded.
        names: what to call each in a message.
        tokenizer: gives the texts of cut prompts, and their BOS.
        max_prompt_tokens: the budget; None: there is none.
        overlong: ``"error"`` refuses prompts beyond it, ``"drop"`` leaves them out, ``"cut-left"`` takes tokens away at
            their beginning (behind the BOS, if they start with one), ``"cut-right"`` at their end.

    Raises:
        ValueError: an unknown `overlong`, or one without a budget; a prompt over the budget, nothing left of one, or no
            prompt left.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"`overlong` should be one of {OVERLONG}, got {overlong!r}. Choose one of them.")
    if max_prompt_tokens is None:
        if overlong != "error":
            raise ValueError(
                f"overlong={overlong!r} needs `max_prompt_tokens`, got None: without a budget no prompt is too long. "
                "Say how many tokens a prompt may have."
            )
        return Fitted(list(prompts), list(range(len(prompts))), 0)
    fitted = Fitted([], [], 0)
    for row, prompt in enumerate(prompts):
        if len(prompt.ids) > max_prompt_tokens:
            if overlong == "error":
                raise ValueError(
                    f"{names[row]} should have at most max_prompt_tokens={max_prompt_tokens} tokens, got "
                    f"{len(prompt.ids)}: {shortened(prompt.text)!r}. Raise max_prompt_tokens, or shorten the prompt, "
                    'or say what to do with such prompts: overlong="drop", "cut-left" or "cut-right".'
                )
            if overlong == "drop":
                continue
            prompt = _cut(prompt, max_prompt_tokens, overlong, tokenizer, names[row])
            fitted = fitted._replace(cut=fitted.cut + 1)
        fitted.prompts.append(prompt)
        fitted.rows.append(row)
    if not fitted.prompts:
        raise ValueError(
            f"At least one prompt should have at most max_prompt_tokens={max_prompt_tokens} tokens, got "
            f"{len(prompts)}, all of them longer, so that all were dropped. Raise max_prompt_tokens."
        )
    return fitted


def cut_ids(ids: Sequence[int], budget: int, side: str, bos_id: int | None) -> tuple[int, ...]:
    """`budget` of more token ids; a BOS at the beginning stays.

    >>> cut_ids([0, 1, 2, 3, 4], 3, "cut-left", bos_id=0), cut_ids([0, 1, 2, 3, 4], 3, "cut-left", bos_id=None)
    ((0, 3, 4), (2, 3, 4))
    >>> cut_ids([0, 1, 2, 3, 4], 3, "cut-right", bos_id=0)
    (0, 1, 2)
    """
    kept = 1 if side == "cut-left" and bos_id is not None and ids[0] == bos_id else 0
    if side == "cut-right":
        return tuple(ids[:budget])
    return (*ids[:kept], *ids[len(ids) - budget + kept :])


def _cut(prompt: EncodedPrompt, budget: int, side: str, tokenizer: Tokenizer, name: str) -> EncodedPrompt:
    bos_id = getattr(tokenizer, "bos_id", None)
    needed = 2 if bos_id is not None and prompt.ids[0] == bos_id else 1
    if budget < needed:
        raise ValueError(
            f"max_prompt_tokens should be at least {needed} where prompts are cut, got {budget}: of {name} "
            f"nothing would be left{' but its BOS' if needed == 2 else ''}, and the policy would answer nothing."
        )
    ids = cut_ids(prompt.ids, budget, side, bos_id)
    return EncodedPrompt(tokenizer.decode(ids), ids, prompt.context)
