"""Any scorer behind HTTP, for `RemoteScorer`: a reward model in a process or on a machine of its own."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from textenv.scorer_columns import taken_columns
from textenv.scoring import ScorerError, call_scorer

PATH = "/score"
LARGEST = 1 << 28
"""Bytes of a request that are read: a batch of texts is far smaller."""

IDLE = 60.0
"""Seconds that a connection may say nothing before its thread goes home."""

logger = logging.getLogger(__name__)


class ScorerServer:
    """A running server, see `serve_scorer`. Closes at the end of a ``with`` block.

    Attributes:
        url: what `RemoteScorer` takes.
    """

    def __init__(self, scorer: Callable[..., Any], host: str, port: int, scorer_errors: str, concurrent: bool) -> None:
        self._server = _Server((host, port), _Handler)
        self._server.scorer, self._server.scorer_errors = scorer, scorer_errors
        self._server.turns = None if concurrent else threading.Lock()
        self.url = f"http://{host}:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Serve until the program is interrupted."""
        self._thread.join()

    def close(self) -> None:
        """Take no more requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ScorerServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def serve_scorer(
    scorer: Callable[..., Any],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    scorer_errors: str = "raise",
    concurrent: bool = False,
) -> ScorerServer:
    """Put a scorer behind HTTP, in threads of this process.

    ::

        with serve_scorer(RewardModel.default(), port=9000) as server:
            server.wait()

    It answers ``POST /score`` as `RemoteScorer` asks, and ``GET /health``. The scorer is given the columns of context
    that it takes. There is no password and no encryption: whoever reaches the port can ask for scores, so keep to
    loopback or a network of your own.

    Args:
        scorer: any, see `textenv.scoring.Scorer`.
        port: 0 for a free one, which `ScorerServer.url` says.
        host: address to listen on.
        scorer_errors: ``"raise"``: a sample without a finite score makes the request fail; ``"drop"``: its score is
            null.
        concurrent: whether the scorer may be called by several threads at a time; else requests wait for each other.

    Returns:
        The running server; call `close`, or use it in a ``with`` block.

    Raises:
        OSError: the address cannot be listened on.
    """
    return ScorerServer(scorer, host, port, scorer_errors, concurrent)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    scorer: Callable[..., Any]
    scorer_errors: str
    turns: threading.Lock | None

    def score(self, body: dict[str, Any]) -> list[float | None]:
        """The scores of a request that was checked."""
        columns = {c: body["context"][c] for c in taken_columns(self.scorer, body["context"])}
        arguments = (self.scorer, body["prompts"], body["responses"], self.scorer_errors, columns)
        if self.turns is None:
            scores = call_scorer(*arguments)
        else:
            with self.turns:
                scores = call_scorer(*arguments)
        return [float(score) if np.isfinite(score) else None for score in scores]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE
    server: _Server

    def do_GET(self) -> None:
        """Whether it is there."""
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(404, {"error": f"there is GET /health and POST {PATH}, not GET {self.path}"})

    def do_POST(self) -> None:
        """Scores."""
        length = self.headers.get("Content-Length", "")
        if self.path != PATH or not length.isdecimal() or int(length) > LARGEST:
            self.close_connection = True  # its body stays unread
            status, error = (404, f"there is POST {PATH}, not {self.path}") if self.path != PATH else (413, "too large")
            self._answer(status, {"error": error})
            return
        try:
            body = _checked(self.rfile.read(int(length)))
            self._answer(200, {"scores": self.server.score(body)})
        except ValueError as error:
            self._answer(400, {"error": str(error)})
        except ScorerError as error:
            logger.warning("The scorer failed: %s", error)
            self._answer(500, {"error": str(error)})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """To this module's logger instead of the error stream."""
        logger.debug(format, *arguments)


def _checked(content: bytes) -> dict[str, Any]:
    """The body of a request: B prompts, B responses, and a dict of B values per column."""
    try:
        body = json.loads(content)
    except ValueError as error:
        raise ValueError(f"the body should be JSON: {error}") from error
    body = {"context": {}, **body} if isinstance(body, dict) else {}
    texts: list[Any] = [body.get("prompts"), body.get("responses")]
    if not all(isinstance(column, list) and all(isinstance(text, str) for text in column) for column in texts):
        raise ValueError('the body should be {"prompts": [texts], "responses": [texts], "context": {...}}')
    columns = body["context"].values() if isinstance(body["context"], dict) else [None]
    if any(not isinstance(column, list) or len(column) != len(texts[0]) for column in [*columns, texts[1]]):
        raise ValueError(f"every column should be a list of {len(texts[0])} values, as many as there are prompts")
    return body
