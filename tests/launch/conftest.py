"""Agents for the tests of this folder."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

psutil = pytest.importorskip("psutil", reason="agents need psutil, which comes with the train extra")

from framework.launch.rendezvous.messages import Link  # noqa: E402
from tests.launch.rendezvous.members import Members  # noqa: E402

Connect: TypeAlias = Callable[[], tuple[Link, socket.socket]]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    """Two nodes with a rank each."""
    job = Members(tmp_path)
    yield job
    job.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes links, each with its far end."""
    opened: list[socket.socket] = []

    def pair() -> tuple[Link, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        opened.extend((near, far))
        return Link(near, name="test"), far

    yield pair
    for end in opened:
        end.close()
