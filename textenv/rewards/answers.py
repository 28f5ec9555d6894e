"""Answers in texts: what is compared of them, and the numbers they hold. Exact, and safe with any text."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

NUMBER = re.compile(
    r"(?<![\w./])(?:(?<![)\]])[-+−])?"  # a minus after a word or a bracket is that of a difference
    r"(?:\d+/[1-9]\d*(?![\d/]|\.\d)"
    r"|(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
)
"""``7, -1,234.50, .5, 3/4, 6.02e23``; digits within a word are no number of their own."""

MAX_DIGITS = 300
"""Longer numbers, and exponents of more than three digits, are none: what writes 1e999999999 would stop the run."""


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """What does not count when answers are compared. Applied to the response's part and to the right answer alike.

    Attributes:
        strip: white space at both ends.
        unicode: forms of the same character: NFKC.
        lowercase: upper and lower case.
        spaces: how much white space stands between words.
        punctuation: everything that Unicode calls punctuation, and what it leaves at the ends.
        articles: the words a, an and the, as in SQuAD's exact match (arXiv:1606.05250).
    """

    strip: bool = True
    unicode: bool = True
    lowercase: bool = False
    spaces: bool = False
    punctuation: bool = False
    articles: bool = False

    def __call__(self, text: str) -> str:
        """The text as it is compared.

        >>> Normalize(lowercase=True, spaces=True, punctuation=True)(" Forty-two,  sir! ")
        'fortytwo sir'
        """
        text = unicodedata.normalize("NFKC", text) if self.unicode else text
        text = text.casefold() if self.lowercase else text
        if self.punctuation:
            text = "".join(char for char in text if not unicodedata.category(char).startswith("P"))
        if self.articles:
            text = re.sub(r"\b(?:a|an|the)\b", " ", text, flags=re.IGNORECASE)
        text = " ".join(text.split()) if self.spaces or self.articles else text
        return text.strip() if self.strip else text


def numbers_in(text: str) -> list[Fraction]:
    """The numbers of a text, exactly, in their order; commas may group their thousands.

    >>> [str(number) for number in numbers_in("It costs $1,200.50, not 1e3; 10-3 = 7, x2 = -3/4.")]
    ['2401/2', '1000', '10', '3', '7', '-3/4']
    """
    found = (as_number(match.group()) for match in NUMBER.finditer(text))
    return [number for number in found if number is not None]


def as_number(value: Any) -> Fraction | None:
    """A number, or a text that is one, exactly: ``"0.10"`` is 1/10, and so is the float 0.1; None where it is none."""
    if isinstance(value, bool):
        return None
    text = str(value).strip()
    exponent = text.lower().partition("e")[2]
    if len(text) > MAX_DIGITS or not NUMBER.fullmatch(text) or not re.fullmatch(r"([-+]?\d{1,3})?", exponent):
        return None
    return Fraction(text.replace(",", "").replace("−", "-"))
