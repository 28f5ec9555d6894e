"""JSON over HTTP with the standard library: requests that survive dropped connections, and errors that say what came.

Every request may be sent more than once, so this is for questions, such as what a score is, and not for orders.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import ipaddress
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

TRY_AGAIN = (429, 502, 503, 504)
"""Answers of a server, or of a balancer in front of it, that is busy or being replaced."""

FIRST_PAUSE = 0.25
"""Seconds before the second attempt; doubled before each further one."""

BLOCK = 1 << 16
"""Bytes that are read at a time."""

SHOWN = 600
"""Characters of an answer that a message shows."""


class RequestError(RuntimeError):
    """A server that does not answer, or answers with an error or with something that is no JSON.

    Attributes:
        url: what was asked.
        attempts: how many requests were sent.
        status: of the last answer; None where there was none.
        cause: what went wrong, as it completes "the server at ...".
    """

    def __init__(self, url: str, attempts: int, status: int | None, cause: str) -> None:
        super().__init__(f"The server at {url} {cause}, in {times(attempts)}.")
        self.url, self.attempts, self.status, self.cause = url, attempts, status, cause

    def __reduce__(self) -> tuple[Any, ...]:
        """All four arguments, so that it survives the way between processes."""
        return type(self), (self.url, self.attempts, self.status, self.cause)


class JSONServer:
    """One server and how patient to be with it. Holds no connection; threads may share it.

    Proxies are those of the environment (``HTTPS_PROXY``, ``NO_PROXY``), loopback addresses excepted. Redirections are
    errors: they would turn a POST into a GET, and carry the key elsewhere.

    Args:
        url: such as ``"http://127.0.0.1:8000"``; paths are appended to it.
        timeout: seconds that one request may take, its answer included.
        attempts: requests sent at most, where the connection fails, the timeout passes, or a busy server says so.
        first_pause: seconds before the second attempt, doubled before each further one; a busy server's
            ``Retry-After`` counts where it is longer, up to `timeout`.
        key_variable: the environment variable that holds a bearer token, read at every request, so that no key gets
            into pickles, checkpoints or messages; None: no token is sent.

    Raises:
        ValueError: an option that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        attempts: int = 5,
        first_pause: float = FIRST_PAUSE,
        key_variable: str | None = None,
    ) -> None:
        host = urllib.parse.urlsplit(url).hostname if isinstance(url, str) else None
        if host is None or not url.startswith(("http://", "https://")):
            raise ValueError(
                f"A server's URL should look like 'http://127.0.0.1:8000', scheme and port included, got {url!r}."
            )
        if not timeout > 0 or not first_pause >= 0 or attempts < 1:
            raise ValueError(
                f"`timeout` should be above 0, `first_pause` at least 0 and `attempts` at least 1, got {timeout}, "
                f"{first_pause} and {attempts}. No request could be answered."
            )
        self.url, self.timeout, self.attempts = url.rstrip("/"), timeout, attempts
        self.first_pause, self.key_variable = first_pause, key_variable
        self._local = _is_loopback(host)

    def post(self, body: Any, path: str = "") -> Any:
        """The JSON that answers a JSON body.

        Raises:
            RequestError: no such answer after all attempts, or one that is an error; or nothing was asked, since JSON
                cannot hold the body or the variable of the key is not set.
        """
        url = self.url + path
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RequestError(url, 0, None, f"was not asked: the request should be JSON, but {error}") from error
        headers = {"Content-Type": "application/json", **self._authorization()}
        for attempt in range(1, self.attempts + 1):
            pause = self.first_pause * 2 ** (attempt - 1)
            status: int | None = None
            try:
                status, content, asked_pause = self._once(urllib.request.Request(url, data, headers, method="POST"))
            except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
                cause, again = self._failure(error), True
            else:
                if status == 200:
                    return _parsed(content, url, attempt)
                cause, again = f"answered with status {status}: {_told(content)}", status in TRY_AGAIN
                pause = max(pause, min(asked_pause, self.timeout))
            if not again or attempt == self.attempts:
                raise RequestError(url, attempt, status, cause)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _once(self, request: urllib.request.Request) -> tuple[int, bytes, float]:
        """Status, body and the pause asked for."""
        deadline = time.monotonic() + self.timeout
        proxies = [urllib.request.ProxyHandler({})] if self._local else []
        opener = urllib.request.build_opener(_NoRedirection, *proxies)
        try:
            answer = opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, _read(answer, deadline), _seconds(answer.headers.get("Retry-After"))

    def _authorization(self) -> dict[str, str]:
        if self.key_variable is None:
            return {}
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            cause = (
                f"was not asked: the environment variable {self.key_variable!r} should hold its key, but is not "
                "set. Set it before the run starts, or pass key_variable=None to a server that wants no key"
            )
            raise RequestError(self.url, 0, None, cause)
        return {"Authorization": f"Bearer {key}"}

    def _failure(self, error: Exception) -> str:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return f"did not answer within {self.timeout:g} s"
        return f"could not be asked ({type(reason).__name__}: {reason})"


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any, **_options: Any) -> None:
        """None: the redirection becomes an HTTPError of its status."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(answer: Any, deadline: float) -> bytes:
    """The whole body. A socket's timeout is that of one read: a server that drips would never meet it."""
    promised = answer.headers.get("Content-Length")
    left = int(promised) if promised is not None else BLOCK
    blocks = []
    while left and (block := answer.read1(min(left, BLOCK))):
        blocks.append(block)
        left -= len(block) if promised is not None else 0
        if time.monotonic() > deadline:
            raise TimeoutError
    if promised is not None and left:
        raise http.client.IncompleteRead(b"".join(blocks), left)
    return b"".join(blocks)


def _seconds(retry_after: str | None) -> float:
    """Of a ``Retry-After`` header; its other form, a date, is not worth the trust in two clocks."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        return 0.0


def _parsed(content: bytes, url: str, attempt: int) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:  # not JSON, or not text at all
        raise RequestError(url, attempt, 200, f"answered with what is no JSON: {_shown(content)}") from error


def _told(content: bytes) -> str:
    """What an error says: the message in it, where it is JSON of a common form, else the body."""
    try:
        body = json.loads(content)
    except ValueError:
        return _shown(content)
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:SHOWN].rstrip(".") if isinstance(message, str) else _shown(content)


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def times(attempts: int) -> str:
    """A number of attempts in words.

    >>> times(1), times(3)
    ('1 attempt', '3 attempts')
    """
    return f"{attempts} attempt{'' if attempts == 1 else 's'}"


def bounded_map(
    function: Callable[[Item], Answer], items: Sequence[Item], concurrency: int, done: Callable[[], None] | None = None
) -> list[Answer]:
    """`function` of each item, in their order, by at most `concurrency` threads.

    The first failure is raised; items that were not begun by then are left alone.

    Args:
        function: may be called by several threads at a time.
        items: its arguments.
        concurrency: threads.
        done: called after each item, by any thread.
    """
    if not items:
        return []
    with concurrent.futures.ThreadPoolExecutor(max_workers=concurrency) as pool:
        futures = [pool.submit(function, item) for item in items]
        for future in futures:
            if done is not None:
                future.add_done_callback(lambda _: done())
        try:
            finished, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in finished:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
