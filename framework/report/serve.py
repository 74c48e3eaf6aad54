"""Server of a report on this machine alone: every request reads what is new, so that a page follows
a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Final

from framework.errors import FrameworkError, UsageError
from framework.report.chart import text
from framework.system.output import write

_LOOPBACK: Final = "127.0.0.1"
# A browser that was led here under another name would let a foreign page read what is served.
_OWN_NAMES: Final = frozenset({_LOOPBACK, "localhost"})


def make_server(make_page: Callable[[], str], *, port: int) -> ThreadingHTTPServer:
    """Bind a server to the loopback device and return it; the caller runs `serve_forever`.

    Args:
        make_page: makes the page of a request; a FrameworkError that it raises becomes the page.
        port: 0 for a free one.

    Raises:
        UsageError: the port is taken, or not for this user.
    """
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        """Answers GET / with the page."""

        def do_GET(self) -> None:
            """Answer a request."""
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host not in _OWN_NAMES:
                self.send_error(403)
            elif self.path.partition("?")[0] != "/":
                self.send_error(404)
            else:
                self._answer()

        def _answer(self) -> None:
            status = 200
            try:
                with lock:  # a page of a large run takes memory: one at a time
                    content = make_page()
            except FrameworkError as error:
                status = 500
                content = f"<!doctype html><title>report</title><p>{text(error)}</p>"
            body = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing: a page that refreshes would fill the terminal."""

    try:
        return ThreadingHTTPServer((_LOOPBACK, port), Handler)
    except OSError as error:
        reason = f"report: --port {port}: it cannot be listened on ({error.strerror or error})"
        raise UsageError(f"{reason}; choose another, or leave it out for a free one") from None


def serve(make_page: Callable[[], str], *, port: int) -> None:
    """Print the address of a server of the page and answer requests; blocks until Ctrl-C, a
    KeyboardInterrupt.

    Raises:
        UsageError: see `make_server`.
    """
    with make_server(make_page, port=port) as server:
        write(
            sys.stdout,
            f"http://{_LOOPBACK}:{server.server_port}/ follows the run; Ctrl-C ends it\n",
        )
        server.serve_forever()
