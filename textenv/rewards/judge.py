"""Asking a language model behind an OpenAI-compatible endpoint, and reading choices from what it says.

Knows nothing of scores or comparisons: `judge_scores` and `judge_comparisons` do.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from textenv.http_json import FIRST_PAUSE, JSONServer, RequestError
from textenv.scoring import ScorerError

TOP_LOGPROBS = 20
"""Of the likeliest tokens that are asked for; the most that OpenAI's own endpoint gives."""

REFUSES_LOGPROBS = (400, 404, 422, 501)
"""Answers of an endpoint that does not know the option."""

MIN_MASS = 0.1
"""Probability that a judge must give to its choices together. One that gives less was about to say something else."""

UNREADABLE = ("raise", "drop")


@dataclass(frozen=True)
class Reply:
    """What a judge said.

    Attributes:
        text: all of it.
        tokens: the text's tokens, where the endpoint gives log-probabilities; else empty.
        top_logprobs: for each token, the log-probabilities of the likeliest ones there, nats.
    """

    text: str
    tokens: tuple[str, ...] = ()
    top_logprobs: tuple[Mapping[str, float], ...] = ()


class Judge:
    """A language model to ask, through any server that speaks OpenAI's chat or text completions.

    Args:
        url: the base, such as ``"http://127.0.0.1:8000/v1"``.
        model: its name there.
        chat: True asks ``/chat/completions``; False asks ``/completions``, for models without a chat template.
        system: a system message; None: there is none. It goes before the text of a completion.
        temperature: of the first time that something is asked.
        retry_temperature: of further times, after a reply that could not be read: at temperature 0 the same would come.
        max_tokens: of a reply.
        seed: of the first time; each further one adds 1.
        logprobs: whether to ask for log-probabilities; None: where the endpoint takes the option.
        concurrency: requests at a time.
        timeout: seconds that one request may take.
        attempts: requests sent at most, see `JSONServer`.
        first_pause: seconds before the second attempt, see `JSONServer`.
        key_variable: the environment variable that holds the key, such as ``"OPENAI_API_KEY"``; None: no key.
        options: more of the request's body, such as ``{"top_p": 0.9}``; an option of None is left out of it.

    Raises:
        ValueError: an option that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        chat: bool = True,
        system: str | None = None,
        temperature: float = 0.0,
        retry_temperature: float = 0.7,
        max_tokens: int = 16,
        seed: int = 0,
        logprobs: bool | None = None,
        concurrency: int = 8,
        timeout: float = 60.0,
        attempts: int = 5,
        first_pause: float = FIRST_PAUSE,
        key_variable: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if concurrency < 1 or max_tokens < 1 or not (temperature >= 0 and retry_temperature >= 0):
            raise ValueError(
                f"`concurrency` and `max_tokens` should be at least 1 and the temperatures at least 0, got "
                f"{concurrency}, {max_tokens}, {temperature} and {retry_temperature}."
            )
        self.server = JSONServer(
            url, timeout=timeout, attempts=attempts, first_pause=first_pause, key_variable=key_variable
        )
        self.model, self.chat, self.system, self.max_tokens = model, chat, system, max_tokens
        self.temperature, self.retry_temperature, self.seed = temperature, retry_temperature, seed
        self.logprobs, self.concurrency, self.options = logprobs, concurrency, dict(options or {})

    def ask(self, text: str, attempt: int = 0) -> Reply:
        """One question.

        Args:
            text: what is asked.
            attempt: how often its reply could not be read so far.

        Raises:
            ScorerError: the endpoint did not answer after all attempts, or not as OpenAI's does.
        """
        with_logprobs = self.logprobs is not False
        try:
            return self._post(text, attempt, with_logprobs)
        except RequestError as error:
            if self.logprobs is not None or error.status not in REFUSES_LOGPROBS:
                raise self._failed(error, text) from error
        try:
            reply = self._post(text, attempt, False)
        except RequestError as error:  # it was not the log-probabilities
            raise self._failed(error, text) from error
        self.logprobs = False
        return reply

    def _post(self, text: str, attempt: int, with_logprobs: bool) -> Reply:
        body = {
            "model": self.model,
            "temperature": max(self.temperature, self.retry_temperature) if attempt else self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed + attempt,
            **self._asked(text),
            **(self._logprobs_option() if with_logprobs else {}),
            **self.options,
        }
        path = "/chat/completions" if self.chat else "/completions"
        answer = self.server.post({name: value for name, value in body.items() if value is not None}, path)
        try:
            return _reply(answer["choices"][0])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            cause = f"answered {path} with no choice as OpenAI's endpoints do: {str(answer)[:200]!r}"
            raise RequestError(self.server.url, 1, 200, cause) from error

    def _asked(self, text: str) -> dict[str, Any]:
        if not self.chat:
            return {"prompt": text if self.system is None else f"{self.system}\n\n{text}"}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, {"role": "user", "content": text}]}

    def _logprobs_option(self) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if self.chat else {"logprobs": TOP_LOGPROBS}

    def _failed(self, error: RequestError, text: str) -> ScorerError:
        hint = " Its URL should end as OpenAI's does, in /v1." if error.status == 404 else ""
        return ScorerError(
            f"The judge {self.model!r}: {error}{hint} Nothing of this batch was judged. It was asked {text[:200]!r}.",
            whole_batch=True,
        )


def _reply(choice: Mapping[str, Any]) -> Reply:
    """A choice of either endpoint."""
    logprobs = choice.get("logprobs") or {}
    if "message" in choice:
        text, content = choice["message"]["content"] or "", logprobs.get("content") or []
        tokens = tuple(str(place["token"]) for place in content)
        tops: Iterable[Any] = (
            {str(top["token"]): float(top["logprob"]) for top in place.get("top_logprobs") or []} for place in content
        )
    else:
        text, tokens = choice["text"], tuple(map(str, logprobs.get("tokens") or []))
        tops = (
            {str(t): float(value) for t, value in (top or {}).items()} for top in logprobs.get("top_logprobs") or []
        )
    if not isinstance(text, str):
        raise TypeError("a reply should be a text")
    return Reply(text, tokens, tuple(tops))


def choice_probabilities(reply: Reply, choices: Sequence[str], lead: str = "") -> dict[str, float] | None:
    """Probability of each of some one-token choices, where the judge made its choice; None without log-probabilities.

    Read at the first token that is a choice, if what stands before it is no more than `lead`, else at the first token
    of all: there a choice may have been likely, and not been sampled. White space around a token does not count. A
    choice that is not among the likeliest tokens has probability 0.

    >>> reply = Reply(" B", (" B",), ({" B": -0.5, "B": -2.0, "A": -1.5},))
    >>> {choice: round(p, 4) for choice, p in choice_probabilities(reply, ["A", "B"]).items()}
    {'A': 0.2231, 'B': 0.7419}

    Args:
        reply: what the judge said.
        choices: texts of one token each.
        lead: a regular expression, of what may come before a choice.
    """
    if not reply.top_logprobs:
        return None
    places = [place for place, token in enumerate(reply.tokens) if token.strip() in choices][:1]
    led = bool(places) and re.fullmatch(lead, "".join(reply.tokens[: places[0]]), re.IGNORECASE) is not None
    top = reply.top_logprobs[places[0] if led and places[0] < len(reply.top_logprobs) else 0]
    found = dict.fromkeys(choices, 0.0)
    for token, logprob in top.items():
        if token.strip() in found:
            found[token.strip()] += math.exp(logprob)
    return found


def fields_of(template: str, needed: Sequence[str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The fields of a template that come from the prompts' context.

    Args:
        template: a text with fields in braces, as `str.format` fills them.
        needed: fields that it must have.
        known: others that are filled in.

    Raises:
        ValueError: it lacks one, or has braces that are no field.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"A judge's template should be such as str.format fills, got {template!r}: {error}."
        ) from error
    lacking = [name for name in needed if name not in names]
    if lacking or not all(name.isidentifier() for name in names):
        raise ValueError(
            f"A judge's template should have the fields {', '.join(f'{{{name}}}' for name in needed)}, and others only "
            f"for columns of context; got {sorted(set(names))}. The judge would not see what it judges. Write a brace "
            "that is no field twice: {{ and }}."
        )
    return tuple(dict.fromkeys(name for name in names if name not in (*needed, *known)))
