"""Headless Chromium, driven over its debugging pipe (NUL-separated JSON on descriptors 3 and 4)
without a package.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_TIMEOUT_SECONDS = 60.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Tab:
    """One page. `events` holds what it reported: messages of its console, requests, exceptions."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer, self._number = send, receive, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file at a width in pixels, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise what it becomes."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def happened(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of some events since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._receive], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, "Chromium does not answer"
            content = os.read(self._receive, 1 << 20)
            assert content, "Chromium has ended"
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start Chromium with its files in a folder; ends it with all its processes."""
    assert PROGRAM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The numbers are fixed; a shell moves what may stand there already.
    script = f'exec 7<&{to_read} 8>&{from_write} 3<&7 4>&8 7<&- 8>&-; exec "$@"'
    command = [
        "bash",
        "-c",
        script,
        "bash",
        PROGRAM,
        *_OPTIONS,
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"HOME": str(folder)},
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Tab(to_write, from_read)
    finally:
        os.close(to_write)
        os.close(from_read)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
