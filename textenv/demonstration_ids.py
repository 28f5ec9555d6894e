"""Token ids of a demonstration's response, as a policy would have written them behind the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from textenv.mdp import TokenMDP
from textenv.prompts import Demonstration, EncodedPrompt, Tokenizer, encode_prompt
from textenv.prompts.chat import check_messages, is_chat
from textenv.prompts.encoding import PromptRecord
from textenv.task import TextTask


def response_ids(
    demonstration: Demonstration, prompt: EncodedPrompt, task: TextTask, name: str, eos_id: int | None
) -> list[int]:
    """Ids of a response, a stop id at its end where it ended by itself.

    Args:
        demonstration: whose.
        prompt: its prompt, encoded.
        task: tokenizer and stop ids.
        name: what it is called in messages.
        eos_id: see `DemonstrationSet.encode`.

    Raises:
        ValueError: ids without a token, a special token spelt out in the text, or no stop id to end it with.
    """
    response, mdp = demonstration.response, task.mdp
    if not isinstance(response, str):
        ids = list(encode_prompt(response, task.tokenizer, mdp.vocab_size, f"The response of {name}").ids)
    else:
        _check_plain(response, task.tokenizer, name)
        turn = None if eos_id is not None else _turn(demonstration, response, task.tokenizer, name)
        ids = continuation(prompt, response, task.tokenizer, mdp.vocab_size, name) if turn is None else turn
    if demonstration.ended and not mdp.is_stop[ids[-1]]:
        ids = [*ids, *_end(ids, task, name, eos_id)]
    return ids


def continuation(prompt: EncodedPrompt, text: str, tokenizer: Tokenizer, vocab_size: int, name: str) -> list[int]:
    """Ids of a text behind a prompt: those that follow where prompt and text encode as one, else those of it alone.

    Together, because many tokenizers write a word behind a space otherwise than at a beginning. Where the two ends melt
    into one token (a word was split between them), the prompt stays what the environment shows.
    """
    whole = encode_prompt(prompt.text + text, tokenizer, vocab_size, name).ids
    start = len(prompt.ids)
    if whole[:start] == tuple(prompt.ids) and len(whole) > start:
        return list(whole[start:])
    ids = list(encode_prompt(text, tokenizer, vocab_size, f"The response of {name}").ids)
    bos_id = getattr(tokenizer, "bos_id", None)
    return ids[1:] if bos_id is not None and len(ids) > 1 and ids[0] == bos_id else ids


def fitted(prompt: EncodedPrompt, ids: Sequence[int], mdp: TokenMDP) -> tuple[tuple[int, ...], str | None]:
    """What an episode can hold of a response (nothing, where the prompt is too long), and what is wrong with it."""
    if len(prompt.ids) > mdp.max_prompt_tokens:
        return (), f"should have a prompt of at most {mdp.max_prompt_tokens} tokens, got {len(prompt.ids)}"
    stops = np.flatnonzero(mdp.is_stop[list(ids)])
    if len(stops) and stops[0] < min(len(ids), mdp.max_response_tokens) - 1:
        stop = int(stops[0])
        return tuple(ids[: stop + 1]), f"should end at its first stop id, got {ids[stop]} as token {stop} of {len(ids)}"
    if len(ids) > mdp.max_response_tokens:
        budget = mdp.max_response_tokens
        return tuple(ids[:budget]), f"should have a response of at most {budget} tokens, got {len(ids)} with its end"
    return tuple(ids), None


def _turn(demonstration: Demonstration, response: str, tokenizer: Any, name: str) -> list[int] | None:
    """The assistant's turn as the chat template writes it; None where the prompt is no chat, or it cannot be told."""
    asked = demonstration.prompt
    chat: Any = asked.prompt if isinstance(asked, PromptRecord) else asked
    if not is_chat(chat) or not hasattr(tokenizer, "encode_turn"):
        return None
    ids: list[int] | None = tokenizer.encode_turn(check_messages(chat, name), response)
    return ids if ids is None or demonstration.ended else ids[:-1] or None


def _check_plain(text: str, tokenizer: Any, name: str) -> None:
    """Refuse a text that spells special tokens, which an encoder takes for the tokens themselves."""
    special: set[int] = set(getattr(tokenizer, "special_ids", ())) - {getattr(tokenizer, "bos_id", None)}
    found = [i for i in tokenizer.encode(text) if i in special]
    if found:
        raise ValueError(
            f"{name} should have a response without special tokens in its text, got token {found[0]} spelt out in "
            f"{text[-80:]!r}: it would end the response there, or start a turn of somebody else's. Take it out (a stop "
            "id at the end is added by itself), or pass token ids."
        )


def _end(ids: list[int], task: TextTask, name: str, eos_id: int | None) -> tuple[int, ...]:
    """The stop id behind a response that ended by itself; nothing where the budget ends it and nothing else could."""
    mdp: TokenMDP = task.mdp
    own = getattr(task.tokenizer, "eos_id", None)
    if eos_id is not None:
        return (eos_id,)
    if own in mdp.stop_ids:
        return (own,)
    if len(mdp.stop_ids) == 1:
        return (mdp.stop_ids[0],)
    if not mdp.stop_ids and len(ids) >= mdp.max_response_tokens:
        return ()
    raise ValueError(
        f"{name} should end in one of the task's stop ids {mdp.stop_ids}, got {len(ids)} tokens without one: which of "
        "them ends a response is not known, and the policy would never learn to stop. Say so with eos_id=..., or mark "
        "what was cut off: Demonstration(prompt, response, ended=False)."
    )
