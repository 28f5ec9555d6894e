"""Which columns of the prompts' context a scorer takes, read from its signature. Calls no scorer."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


def check_takes_columns(scorer: Callable[..., Any], columns: Iterable[str]) -> None:
    """Refuse a scorer that could not be called with the prompts' context, or that needs more than there is.

    Raises:
        TypeError: it takes no argument of a column's name, or requires one that is no column.
    """
    accepted = _accepted(scorer)
    if accepted is None:
        return
    columns = list(columns)
    refused = [column for column in columns if not accepted.takes(column)]
    if refused:
        raise TypeError(
            f"`scorer` should take the prompts' context as keyword arguments, scorer(prompts, responses, "
            f"{', '.join(columns)}), got {_signature(scorer)}, which does not take {refused[0]!r}. It would fail at "
            "the end of the first episode. Add the argument, or **context, or leave the column out."
        )
    lacking = [column for column in accepted.required if column not in columns]
    if lacking:
        raise TypeError(
            f"`scorer` should need nothing but prompts, responses and the prompts' context "
            f"({', '.join(map(repr, columns)) or 'there is none'}), got {_signature(scorer)}, which requires "
            f"{lacking[0]!r}. It would fail at the end of the first episode. Name that column when the prompts are "
            f"loaded (context=[{lacking[0]!r}]; of RLHF-v0: context_columns), or give the argument a default."
        )


def taken_columns(scorer: Callable[..., Any], columns: Iterable[str]) -> list[str]:
    """Those of some columns that a scorer takes, for callers that serve several scorers.

    >>> taken_columns(lambda prompts, responses, answer: [1.0], ["answer", "source"])
    ['answer']
    """
    accepted = _accepted(scorer)
    return [column for column in columns if accepted is None or accepted.takes(column)]


def required_columns(scorer: Callable[..., Any]) -> tuple[str, ...]:
    """Columns without which a scorer cannot be called.

    >>> required_columns(lambda prompts, responses, answer, weight=1.0, **context: [1.0])
    ('answer',)
    """
    accepted = _accepted(scorer)
    return () if accepted is None else accepted.required


def signature_of(columns: Iterable[str]) -> inspect.Signature:
    """``__signature__`` for an instance that knows only once it is made which columns it needs.

    Columns whose names no argument can have (``"gold answer"``) are left out; they are passed all the same.

    >>> signature_of(["answer", "gold answer"])
    <Signature (prompts, responses, *, answer, **context)>
    """
    kind = inspect.Parameter
    own = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in ("prompts", "responses")]
    rest = kind("context", kind.VAR_KEYWORD)
    taken = {parameter.name for parameter in (*own, rest)}
    named = [c for c in dict.fromkeys(columns) if c.isidentifier() and not keyword.iskeyword(c) and c not in taken]
    return inspect.Signature([*own, *(kind(column, kind.KEYWORD_ONLY) for column in named), rest])


class _Accepted(NamedTuple):
    """What a signature says of columns: `own` are the first two arguments' names, `required` have no default."""

    own: frozenset[str]
    named: frozenset[str]
    any_other: bool
    required: tuple[str, ...]

    def takes(self, column: str) -> bool:
        return column not in self.own and (self.any_other or column in self.named)


def _accepted(scorer: Callable[..., Any]) -> _Accepted | None:
    """None where a callable has no signature, as some written in C."""
    try:
        parameters = list(inspect.signature(scorer).parameters.values())
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = [*positional[2:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
    return _Accepted(
        own=frozenset(p.name for p in positional[:2] if p.kind is p.POSITIONAL_OR_KEYWORD),
        named=frozenset(p.name for p in others if p.kind is not p.POSITIONAL_ONLY),
        any_other=any(p.kind is p.VAR_KEYWORD for p in parameters),
        required=tuple(p.name for p in others if p.default is p.empty),
    )


def _signature(scorer: Callable[..., Any]) -> str:
    return f"{getattr(scorer, '__name__', type(scorer).__name__)}{inspect.signature(scorer)}"
