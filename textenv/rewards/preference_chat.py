r"""Conversations that are compared: "\n\nHuman: ... \n\nAssistant: ..." transcripts, and lists of messages.

Both become lists of messages ``{"role": ..., "content": ...}``, which are split where the two conversations part, and
written as text again by a rendering that the caller chooses. Knows no files and no rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from textenv.prompts.files import RowError

Messages = list[dict[str, Any]]

Rendering = Callable[[Messages, Messages], tuple[str, str]]
"""From the messages of a prompt and those of a response to the text of each; joined, they are the conversation."""

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
NAMES = {role: name for name, role in SPEAKERS.items()}
MARK = re.compile(r"^(Human|Assistant):", re.MULTILINE)
LATER_TURNS = ("refuse", "keep")

NO_TURNS, MISSING, EMPTY_TURN = "no turns", "missing turn", "empty turn"
NO_ANSWER, EMPTY, EQUAL = "ends without an answer", "empty response", "equal responses"
APART, LATER, UNRENDERED = "different prompts", "later turns", "cannot be rendered"


def is_transcript(text: str) -> bool:
    """Whether a text begins as a transcript does, with the name of a speaker."""
    return MARK.match(text.lstrip()) is not None


def parse_transcript(text: str, name: str) -> Messages:
    r"""The turns of a transcript, ``user`` and ``assistant``, spaces and line breaks around each left out.

    A turn begins with ``Human:`` or ``Assistant:`` at the beginning of a line behind a line with nothing on it; the
    words elsewhere are part of what is said. Carriage returns become line feeds. Source of the format: Bai et al. 2022
    (arXiv:2204.05862), the hh-rlhf data.

    Raises:
        RowError: it does not begin with a speaker. `name` says which transcript it is.

    >>> parse_transcript("\n\nHuman: Is 'Human: hi' a turn?\n\nAssistant: No.", "row 0")
    [{'role': 'user', 'content': "Is 'Human: hi' a turn?"}, {'role': 'assistant', 'content': 'No.'}]
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    marks = [mark for mark in MARK.finditer(text) if _behind_a_blank_line(text, mark.start())]
    if not marks or marks[0].start() > 0:
        raise RowError(
            f"{name} should begin with 'Human:', got {text[:80]!r}. Who says this is not known. Give plain texts "
            "with format='implicit' or 'whole', or mend the row.",
            NO_TURNS,
        )
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        {"role": SPEAKERS[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _behind_a_blank_line(text: str, start: int) -> bool:
    """Whether the line before the one that starts there has nothing on it, or there is none."""
    return start == 0 or not text[text.rfind("\n", 0, start - 1) + 1 : start - 1].strip()


def check_turns(messages: Messages, name: str, alternate: bool) -> None:
    """Refuse a conversation that does not end with an answer; of transcripts also turns that are missing or empty.

    Args:
        messages: at least one.
        name: whose they are.
        alternate: the human begins, and the two take turns.

    Raises:
        RowError: see above.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        raise RowError(
            f"{name} should end with a turn of the assistant, got one of {_who(last)} at the end: "
            f"{last['content'][:80]!r}. There is no response to compare. Leave the row out.",
            NO_ANSWER,
        )
    if not last["content"].strip():
        raise RowError(f"{name} should end with an answer, got an empty one. Leave the row out.", EMPTY)
    for place, message in enumerate(messages if alternate else ()):
        if message["role"] != ("user", "assistant")[place % 2]:
            raise RowError(
                f"{name} should have turns of human and assistant one after the other, the human's first, got turn "
                f"{place + 1} from {_who(message)}: {message['content'][:80]!r}. A turn is missing, or a text has "
                f"'{NAMES[message['role']]}:' behind a blank line. Mend the row, or leave it out.",
                MISSING,
            )
        if not message["content"]:
            raise RowError(
                f"{name} should have something said in every turn, got nothing in turn {place + 1} ({_who(message)}). "
                "Mend the row, or leave it out.",
                EMPTY_TURN,
            )


def _who(message: Mapping[str, Any]) -> str:
    return f"the {NAMES.get(message['role'], message['role']).lower()}"


def split_conversations(
    chosen: Messages, rejected: Messages, name: str, later_turns: str = "refuse"
) -> tuple[Messages, Messages, Messages]:
    """What both begin with, up to the last turn of the assistant where they still agree, and how each goes on from it.

    Args:
        chosen: the preferred conversation.
        rejected: the other.
        name: of the row.
        later_turns: ``"refuse"`` conversations that go on after that turn of the assistant, or ``"keep"`` everything
            from there as the response, what others say in it included.

    Returns:
        The messages of the prompt, of the chosen and of the rejected response.

    Raises:
        RowError: they are equal, do not begin with the same prompt, or go on after one turn (unless kept).
    """
    if chosen == rejected:
        raise RowError(
            f"{name} should compare two responses, got twice the same conversation. Leave the row out.", EQUAL
        )
    shorter = min(len(chosen), len(rejected))
    common = next((place for place in range(shorter) if chosen[place] != rejected[place]), shorter)
    answers = [
        place
        for place in range(min(common + 1, shorter))
        if chosen[place]["role"] == rejected[place]["role"] == "assistant"
    ]
    if not answers or answers[-1] == 0:
        raise RowError(
            f"{name} should compare two responses to one prompt, got conversations that begin with "
            f"{chosen[0]['content'][:60]!r} and {rejected[0]['content'][:60]!r} and have no turn of the assistant "
            "after the same words. Leave the row out.",
            APART,
        )
    split = answers[-1]
    longest = max(len(chosen), len(rejected)) - split
    if longest > 1 and later_turns == "refuse":
        raise RowError(
            f"{name} should compare two answers, got conversations that part at turn {split + 1} and go on to turns "
            f"{len(chosen)} and {len(rejected)}. What others say later is no part of a response. Leave the row out, or "
            "compare all that follows with later_turns='keep'.",
            LATER,
        )
    return chosen[:split], chosen[split:], rejected[split:]


def transcript_text(prompt: Messages, response: Messages) -> tuple[str, str]:
    r"""Messages as the text of a transcript: a `Rendering` that needs no tokenizer.

    The prompt ends with ``"\n\nAssistant:"``, the response begins with a space, as tokenizers want words to begin.

    Raises:
        ValueError: a role that transcripts do not have.

    >>> transcript_text([{"role": "user", "content": "1+1?"}], [{"role": "assistant", "content": "2"}])
    ('\n\nHuman: 1+1?\n\nAssistant:', ' 2')
    """
    turns = []
    for message in [*prompt, *response]:
        if message["role"] not in NAMES:
            raise ValueError(
                f"transcripts know the roles {', '.join(map(repr, NAMES))}, got {message['role']!r}. Render with "
                "ChatTemplate(tokenizer), or join that message with the user's first."
            )
        turns.append(f"\n\n{NAMES[message['role']]}: {message['content']}")
    opened = f"\n\n{NAMES['assistant']}:"
    return "".join(turns[: len(prompt)]) + opened, "".join(turns[len(prompt) :]).removeprefix(opened)


class ChatTokenizer(Protocol):
    """What `ChatTemplate` needs of a tokenizer; `textenv.lm.TextTokenizer` has it."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """Text and ids of messages to answer."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], open_turn: bool = True) -> str:
        """What the template makes of messages."""
        ...


class ChatTemplate:
    """Messages as a model's chat template writes them: a `Rendering`.

    The prompt is the text that environments with this model show scorers for the same messages: the template's, the
    assistant's turn opened, less a BOS that the tokenizer adds by itself, so that ``encode(prompt + response)`` has one
    BOS and never two. The response ends where the answer does: the mark that ends a turn is a special token, which
    decoded responses do not show, and a reward model must be trained on what it will be asked to score.

    Args:
        tokenizer: with a chat template.
        end_of_turn: leave what the template writes behind an answer.
    """

    _ANSWER = "@the answer@"

    def __init__(self, tokenizer: ChatTokenizer, end_of_turn: bool = False) -> None:
        self.tokenizer = tokenizer
        self.end_of_turn = end_of_turn

    def __call__(self, prompt: Messages, response: Messages) -> tuple[str, str]:
        """The texts of prompt and response.

        Raises:
            ValueError: the tokenizer has no template, it refuses the messages, or it writes an answer in another way
                than it opens the turn for one.
        """
        opened = self.tokenizer.render_chat(prompt)
        whole = self.tokenizer.render_chat([*prompt, *response], open_turn=False)
        marked = [*prompt, *response[:-1], {**response[-1], "content": self._ANSWER}]
        _, found, tail = self.tokenizer.render_chat(marked, open_turn=False).rpartition(self._ANSWER)
        if not whole.startswith(opened) or not found or not whole.endswith(tail):
            raise ValueError(
                f"the chat template should write an answer behind the turn that it opens, {opened[-60:]!r}, got "
                f"{whole[-120:]!r}. What a policy writes there would not look like what the reward model learned from. "
                "Take a template without such marks, or render the messages yourself: render=function."
            )
        end = len(whole) if self.end_of_turn else len(whole) - len(tail)
        return self.tokenizer.encode_chat(prompt)[0], whole[len(opened) : end]
