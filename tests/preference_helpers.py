"""Transcripts as the hh-rlhf data has them, good ones and odd ones, and what should become of each."""

from __future__ import annotations


def hh(*turns):
    """A transcript of turns, the human's first."""
    return "".join(f"\n\n{('Human', 'Assistant')[place % 2]}: {turn}" for place, turn in enumerate(turns))


def row(chosen, rejected):
    return {"chosen": chosen, "rejected": rejected}


PARSED = {
    "one turn": (
        row(hh("Hi", "Hello."), hh("Hi", "Go away.")),
        ("\n\nHuman: Hi\n\nAssistant:", " Hello.", " Go away."),
    ),
    "several turns": (
        row(hh("Hi", "Yes?", "Tea?", "No."), hh("Hi", "Yes?", "Tea?", "Please, and a biscuit with it.")),
        (hh("Hi", "Yes?", "Tea?") + "\n\nAssistant:", " No.", " Please, and a biscuit with it."),
    ),
    "answers that begin alike": (
        row(hh("Why?", "Because I like it."), hh("Why?", "Because I like")),
        (hh("Why?") + "\n\nAssistant:", " Because I like it.", " Because I like"),
    ),
    "carriage returns": (
        row(hh("Hi", "a\n\nb").replace("\n", "\r\n"), hh("Hi", "c").replace("\n", "\r")),
        (hh("Hi") + "\n\nAssistant:", " a\n\nb", " c"),
    ),
    "extra blank lines and spaces": (
        row("Human: Hi  \n \n\n\nAssistant:\n\nHello.\n\n", "\n\n\n\nHuman:Hi\n\t\nAssistant: No. "),
        (hh("Hi") + "\n\nAssistant:", " Hello.", " No."),
    ),
    "speakers in mid-line and behind a single line break": (
        row(
            hh("What did Human: say?\nHuman: hi\nAssistant: ho", "A"),
            hh("What did Human: say?\nHuman: hi\nAssistant: ho", "B"),
        ),
        (hh("What did Human: say?\nHuman: hi\nAssistant: ho") + "\n\nAssistant:", " A", " B"),
    ),
    "other speakers": (
        row(hh("Hi", "Human beings:\n\nHumans: no turn"), hh("Hi", "The\n\nassistant: no turn")),
        (hh("Hi") + "\n\nAssistant:", " Human beings:\n\nHumans: no turn", " The\n\nassistant: no turn"),
    ),
}

REFUSED = {
    "empty chosen answer": (row(hh("Hi", ""), hh("Hi", "No.")), "empty response"),
    "empty rejected answer": (row(hh("Hi", "Yes."), "\n\nHuman: Hi\n\nAssistant:"), "empty response"),
    "equal": (row(hh("Hi", "Yes."), hh("Hi", "Yes.")), "equal responses"),
    "equal but for spaces": (row(hh("Hi", "Yes."), hh("Hi", "Yes. \n")), "equal responses"),
    "ends with the human": (row(hh("Hi", "Yes.", "And?"), hh("Hi", "No.")), "ends without an answer"),
    "only the human": (row(hh("Hi"), hh("Hi", "No.")), "ends without an answer"),
    "the human twice": (row(hh("Hi", "Yes."), "\n\nHuman: Hi\n\nHuman: Hi?\n\nAssistant: No."), "missing turn"),
    "the assistant twice": (row(hh("Hi", "Yes.") + "\n\nAssistant: Yes!", hh("Hi", "No.")), "missing turn"),
    "the assistant first": (row("\n\nAssistant: Hi", "\n\nAssistant: Ho"), "missing turn"),
    "a human who says nothing": (row(hh("Hi", "Yes?", "", "A"), hh("Hi", "Yes?", "", "B")), "empty turn"),
    "other prompts": (row(hh("Hi", "Yes."), hh("Ho", "No.")), "different prompts"),
    "no turns": (row(hh("Hi", "Yes."), "Yes."), "no turns"),
    "words before the turns": (row("Chat:" + hh("Hi", "Yes."), hh("Hi", "No.")), "no turns"),
    "nothing": (row(hh("Hi", "Yes."), ""), "no turns"),
    "no value": (row(hh("Hi", "Yes."), None), "no value"),
    "no column": ({"chosen": hh("Hi", "Yes.")}, "no value"),
    "a number": (row(hh("Hi", "Yes."), 3), "wrong type"),
    "half a pair": (row(hh("Hi", "Yes."), hh("Hi", "\ud83d")), "half a surrogate pair"),
    "parts early": (row(hh("Hi", "Yes?", "Tea?", "No."), hh("Hi", "What?", "Tea?", "No.")), "later turns"),
    "one goes on": (row(hh("Hi", "Yes?"), hh("Hi", "Yes?", "Tea?", "No.")), "later turns"),
    "the human says something else": (row(hh("Hi", "Yes?", "A?", "a"), hh("Hi", "Yes?", "B?", "b")), "later turns"),
}

KEPT = {
    "parts early": (
        hh("Hi") + "\n\nAssistant:",
        " Yes?\n\nHuman: Tea?\n\nAssistant: No.",
        " What?\n\nHuman: Tea?\n\nAssistant: No.",
    ),
    "one goes on": (hh("Hi") + "\n\nAssistant:", " Yes?", " Yes?\n\nHuman: Tea?\n\nAssistant: No."),
    "the human says something else": (
        hh("Hi") + "\n\nAssistant:",
        " Yes?\n\nHuman: A?\n\nAssistant: a",
        " Yes?\n\nHuman: B?\n\nAssistant: b",
    ),
}
