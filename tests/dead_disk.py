"""A file system whose server no longer answers, as that of a dead network mount: a process that
looks at it sleeps in the kernel (state D), and not even SIGKILL ends it before the server answers or is gone.
"""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.hosts.kernel import mount

_INIT = 26  # the first request of the kernel (linux/fuse.h), and the only one that is answered here
_REQUEST = struct.Struct("<IIQQIIII")  # fuse_in_header
_ANSWER = struct.Struct("<IiQIIIIHHII32x")  # fuse_out_header, fuse_init_out


def why_no_dead_disk() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid():
        return "a dead file system needs root"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "a dead file system needs /dev/fuse"


@contextmanager
def dead_disk(place: Path) -> Iterator[Path]:
    """Mount one at a new folder. At the end it is gone, and what waited for it goes on, or dies if
    it was killed.
    """
    place.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    mount("dead", str(place), "fuse", options=f"fd={server},rootmode=40000,user_id=0,group_id=0")

    def serve() -> None:
        with suppress(OSError):  # ENODEV: unmounted
            while True:
                _, kind, number, *_ = _REQUEST.unpack_from(os.read(server, 1 << 18))
                if kind == _INIT:
                    os.write(
                        server, _ANSWER.pack(_ANSWER.size, 0, number, 7, 31, 0, 0, 0, 0, 1 << 16, 1)
                    )

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield place
    finally:
        revive(place)
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
        thread.join(5)
        os.close(server)


def revive(place: Path) -> None:
    """Let what waits go on, with an error."""
    # which finds the place in use
    subprocess.run(["umount", "-f", str(place)], check=False, capture_output=True)


def is_waiting(pid: int) -> bool:
    """A process waits for the answer of such a file system."""
    with suppress(FileNotFoundError):  # it has ended
        return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"
    return False
