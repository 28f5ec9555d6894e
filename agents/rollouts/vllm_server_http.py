"""One vLLM server over HTTP: requests that survive dropped connections, and errors that name the server.

Every request may be sent again: weights are whole folders, and responses follow from their seeds.
"""

from __future__ import annotations

import time
from typing import Any

from textenv.optional import require

GENERATE = "/inference/v1/generate"
"""vLLM's endpoint for token ids in and out."""

ATTEMPTS = 5
"""A request is sent so often before its server counts as dead."""

FIRST_PAUSE = 0.25
"""Seconds before the second attempt; doubled before each further one: 3.75 s in all."""

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection. A server on the same network answers in milliseconds."""

TRY_AGAIN = (429, 502, 503, 504)
"""Answers of a server, or of a balancer in front of it, that is busy or being replaced."""


class ServerError(RuntimeError):
    """A vLLM server that does not answer, or answers with an error."""


class Server:
    """A connection pool to one server. Threads may share it.

    Args:
        url: such as ``"http://127.0.0.1:8000"``.
        timeout: seconds that an answer may take.

    Raises:
        ImportError: httpx2 is not installed.
        ValueError: `url` is not one.
    """

    def __init__(self, url: str, timeout: float) -> None:
        require("httpx2", "vllm", "VLLMServerEngine")
        import httpx2

        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(
                f"A server's URL should look like 'http://127.0.0.1:8000', scheme and port included, got {url!r}."
            )
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        # The transport itself, not a client: no proxies from the environment, no log record per request.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        self._transport = httpx2.HTTPTransport(limits=limits, trust_env=False)

    def get(self, path: str, task: str) -> Any:
        """The JSON behind a path; see `ask`."""
        return self.ask("GET", path, None, task)

    def post(self, path: str, body: Any, task: str, attempts: int = ATTEMPTS) -> Any:
        """The JSON that answers a JSON body; see `ask`."""
        return self.ask("POST", path, body, task, attempts)

    def ask(self, method: str, path: str, body: Any, task: str, attempts: int = ATTEMPTS) -> Any:
        """Send a request, again where the connection is dropped, and read the answer.

        Args:
            method: ``"GET"`` or ``"POST"``.
            path: after the server's URL.
            body: sent as JSON; None for none.
            task: what is asked for, as it completes "was asked to".
            attempts: requests sent at most.

        Raises:
            ServerError: no answer after `attempts` requests or within the timeout, or an answer that is an error.
        """
        import httpx2

        for attempt in range(1, attempts + 1):
            try:
                status, content = self._once(method, path, body)
            except httpx2.ReadTimeout as error:
                raise self._dead(task, f"did not answer within {self.timeout:g} s") from error
            except httpx2.TransportError as error:
                if attempt == attempts:
                    cause = f"could not be reached in {attempts} attempts ({type(error).__name__}: {error})"
                    raise self._dead(task, cause) from error
            else:
                if status == 200:
                    return content
                if status not in TRY_AGAIN or attempt == attempts:
                    raise self._refused(task, path, status, content)
            time.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def _once(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        import httpx2

        timeout = httpx2.Timeout(self.timeout, connect=CONNECT_TIMEOUT).as_dict()
        request = httpx2.Request(method, self.url + path, json=body, extensions={"timeout": timeout})
        response = self._transport.handle_request(request)
        try:
            response.read()
        finally:
            response.close()
        if response.status_code != 200:
            return response.status_code, response.text
        return 200, response.json() if response.content else None

    def _dead(self, task: str, cause: str) -> ServerError:
        return ServerError(
            f"The vLLM server at {self.url} was asked to {task} and {cause}. Look at its log, start it again at the "
            "same address, and call learn() again: nothing of this iteration was trained on, and the weights are sent "
            "anew. Or make an engine without this URL."
        )

    def _refused(self, task: str, path: str, status: int, content: str) -> ServerError:
        hint = ""
        if status == 404:
            hint = (
                " It has no such endpoint: it should run vLLM 0.32 or newer, with VLLM_SERVER_DEV_MODE=1 in its "
                "environment and --tokens-only on its command line, see textenv.agents.rollouts.server_command."
            )
        elif status >= 500:
            hint = (
                " Its log says why; vLLM's engine usually stops after such an error. Start it again, then call learn()."
            )
        return ServerError(
            f"The vLLM server at {self.url} was asked to {task} and answered {path} with status {status}: "
            f"{content[:600].strip()}.{hint}"
        )

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()
