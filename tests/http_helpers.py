"""A server on the loopback address that answers as it is told, faults of networks included."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

DROP, HANG, SHORT, DRIP, REDIRECT, CHUNKED = "drop", "hang", "short", "drip", "redirect", "chunked"
"""What may happen to an answer: the connection is closed without one; nothing comes; less than was promised comes; it
comes a byte at a time; it is somewhere else; it comes in chunks (a pair, with what it says)."""


class FakeServer:
    """Answers each POST with what `behaviour(number, request)` gives: JSON, (status, JSON or bytes), or a fault.

    Attributes:
        requests: what was asked, as dicts of path, body and headers, in the order of their arrival.
        most_at_once: how many were being answered at the same time.
    """

    def __init__(self, behaviour: Callable[[int, dict[str, Any]], Any]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.behaviour, self.most_at_once, self._now = behaviour, 0, 0
        self.lock, self.closing = threading.Lock(), threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads, self._server.fake = True, self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def arrived(self, request):
        with self.lock:
            self.requests.append(request)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            number = len(self.requests) - 1
        try:
            yield number
        finally:
            with self.lock:
                self._now -= 1

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = {"path": self.path, "body": body, "headers": dict(self.headers)}
        with fake.arrived(request) as number:
            answer = fake.behaviour(number, request)
            with contextlib.suppress(OSError):  # the client has given up
                self.give(fake, answer)

    def give(self, fake, answer):
        if answer == DROP:
            self.connection.shutdown(socket.SHUT_RDWR)
        elif answer == HANG:
            fake.closing.wait(20)
        elif answer == REDIRECT:
            self.head(302, 0, {"Location": "http://127.0.0.1:9/elsewhere"})
        elif answer in (SHORT, DRIP):
            self.head(200, 400)
            for _ in range(5 if answer == SHORT else 400):
                self.wfile.write(b" ")
                self.wfile.flush()
                if answer == DRIP and fake.closing.wait(0.05):
                    break
        elif isinstance(answer, tuple) and answer[0] == CHUNKED:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            data = json.dumps(answer[1]).encode()
            for start in range(0, len(data), 1000):
                block = data[start : start + 1000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
            self.wfile.write(b"0\r\n\r\n")
        else:
            status, content, *headers = answer if isinstance(answer, tuple) else (200, answer)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.head(status, len(data), *headers)
            self.wfile.write(data)

    def head(self, status, length, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format, *arguments):
        pass


def nobody() -> str:
    """A URL that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def timed(function: Callable[[], Any]) -> float:
    """Seconds that something takes."""
    start = time.monotonic()
    function()
    return time.monotonic() - start


@contextlib.contextmanager
def fake_servers() -> Iterator[Callable[[Any], FakeServer]]:
    """Makes fake servers, from a behaviour or from the one answer that they give; closes them at the end."""
    made = []

    def started(behaviour: Any) -> FakeServer:
        made.append(FakeServer(behaviour if callable(behaviour) else lambda *_: behaviour))
        return made[-1]

    yield started
    for server in made:
        server.close()
