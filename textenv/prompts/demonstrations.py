"""Demonstrations: prompts with the responses that somebody gave, as texts, ids or chat messages. Encodes nothing.

`textenv.demonstrations.DemonstrationSet` encodes them for a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from textenv.prompts.chat import is_chat
from textenv.prompts.encoding import Prompt, PromptRecord
from textenv.prompts.load import load_prompts

Turns = Literal["last", "all"]


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response worth imitating.

    Attributes:
        prompt: a text, token ids or chat messages, as prompts of an environment may be.
        response: a text that reads on where the prompt ends (a leading space belongs to it), or token ids. To a chat it
            is the assistant's turn.
        ended: whether the response ended by itself. Then it ends in a stop id, which is learned like any other token;
            a text that something cut off ends in none.
        place: where it comes from (``"train.jsonl line 3"``), for messages.

    Raises:
        ValueError: the response is empty, or neither a text nor ids.
    """

    prompt: Prompt
    response: str | Sequence[int]
    ended: bool = True
    place: str = ""

    def __post_init__(self) -> None:
        """Refuse a response without a token."""
        where = f" ({self.place})" if self.place else ""
        if self.response is None or isinstance(self.response, bytes | Mapping) or not hasattr(self.response, "__len__"):
            raise ValueError(
                f"`response`{where} should be a text or token ids, got {self.response!r}: there is nothing to imitate. "
                "Leave the demonstration out."
            )
        if len(self.response) == 0:
            raise ValueError(
                f"`response`{where} should have at least one token, got {self.response!r}: an empty answer teaches to "
                "end at once. Leave the demonstration out; where ending at once is right, pass the stop id as ids: "
                "response=[eos_id]."
            )


def load_demonstrations(
    source: Any,
    *,
    prompt: str = "prompt",
    response: str = "response",
    messages: str | None = None,
    turns: Turns = "last",
    ended: bool = True,
    split: str | None = None,
    config: str | None = None,
) -> list[Demonstration]:
    """Read demonstrations from columns of files, datasets and lists of rows.

    Args:
        source: what `load_prompts` reads: JSON lines, CSV, dataset files and folders, the hub, a list of dicts.
        prompt: the column that holds the prompts: texts, token ids or chat messages.
        response: the column that holds the responses: texts or token ids.
        messages: a column of whole chats instead, ``[{"role": "user", ...}, {"role": "assistant", ...}]``: the
            assistant's turn is the response, what comes before it the prompt.
        turns: of chats with several turns of the assistant: learn the ``"last"`` one, or ``"all"``, each as a
            demonstration of its own.
        ended: whether the responses ended by themselves, see `Demonstration`.
        split: see `load_prompts`.
        config: see `load_prompts`.

    Raises:
        ValueError: the source cannot be read, or a row has no prompt, no response, or no turn of the assistant; file
            and line are named.
        ImportError: a dataset is asked for, and `datasets` is not installed.

    Example:
        >>> load_demonstrations([{"question": "1+1=", "answer": "2"}], prompt="question", response="answer")
        [Demonstration(prompt='1+1=', response='2', ended=True, place='row 0')]
    """
    if turns not in get_args(Turns):
        raise ValueError(f"`turns` should be one of {get_args(Turns)}, got {turns!r}. Choose one of them.")
    where: dict[str, Any] = {"split": split, "config": config}
    if messages is not None:
        records = load_prompts(source, prompt=messages, **where)
        return [demonstration for record in records for demonstration in _of_chat(record, turns, ended)]
    records = load_prompts(source, prompt=prompt, context=[response], **where)
    return [Demonstration(r.prompt, r.context[response], ended, r.place) for r in records]


def _of_chat(record: PromptRecord, turns: Turns, ended: bool) -> list[Demonstration]:
    """The demonstrations that a chat holds, one for each turn of the assistant that is to be learned."""
    chat: Any = record.prompt
    if not is_chat(chat):
        raise ValueError(
            f"{record.place} should hold chat messages, a list of dicts with role and content, got {chat!r}. Columns "
            "of texts are named with prompt=... and response=...."
        )
    answers = [
        place
        for place, message in enumerate(chat)
        if isinstance(message, Mapping) and message.get("role") == "assistant" and place > 0
    ]
    if not answers or (turns == "last" and answers[-1] != len(chat) - 1):
        raise ValueError(
            f"{record.place} should end with a turn of the assistant after another's, got the roles "
            f"{[message.get('role') if isinstance(message, Mapping) else message for message in chat]}: there is no "
            "answer to learn. Leave the chat out, or cut it behind the assistant's last turn."
        )
    chosen = answers if turns == "all" else answers[-1:]
    return [Demonstration(list(chat[:place]), chat[place].get("content"), ended, record.place) for place in chosen]
