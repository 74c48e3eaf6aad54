"""Large values that are made once per host: one rank makes it, the host's others and all workers
map its memory.

It lies in anonymous memory, and a small file in the temporary folder says in which. Both need no
process group. With a rank that dies the kernel takes back its lock and its memory: nobody waits for
it, or takes what an earlier start left. Whoever finds nothing makes the value itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import secrets
import socket
import stat
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, Final

from framework.errors import FrameworkError

# Of one start of the ranks of a host: torchrun's and DeepSpeed's variables, and this launcher's.
_START: Final = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "DSF_AGENT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
_ALIGNED_BYTES: Final = 8
_asked: Counter[str] = Counter()


class HostValue:
    """A picklable value in anonymous memory; numpy arrays in it are read-only views of that
    memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        num_parts = memory[:_ALIGNED_BYTES].cast("q")[0]
        start = _ALIGNED_BYTES * (1 + num_parts)
        parts = []
        for size in memory[_ALIGNED_BYTES:start].cast("q"):
            parts.append(memory[start : start + size])
            start += size + -size % _ALIGNED_BYTES
        self.value: Any = pickle.loads(parts[0], buffers=parts[1:])

    @staticmethod
    def of(value: object) -> HostValue:
        """Copy a value into new memory."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        descriptor = os.memfd_create(f"dsf-{secrets.token_hex(8)}")
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(array("q", [len(parts), *(part.nbytes for part in parts)]))
            for part in parts:
                stream.write(part)
                stream.write(bytes(-part.nbytes % _ALIGNED_BYTES))
        return HostValue(descriptor)

    def __reduce__(self) -> tuple[Callable[..., HostValue], tuple[Any]]:
        """For a worker that is being started: the memory; for anything else: the value."""
        if get_spawning_popen() is None:
            return HostValue.of, (self.value,)
        return _in_worker, (DupFd(self._descriptor),)

    @property
    def address(self) -> bytes:
        """Where other processes of this user find the memory, and its name, while this process
        holds it.
        """
        link = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        return f"{link} {_name(link)}".encode()

    @staticmethod
    def at(address: bytes) -> HostValue | None:
        """Map what another process holds; None where it does not any more."""
        with suppress(OSError, ValueError):
            link, name = address.decode().split()
            if _name(Path(link)) == name:  # else somebody else has that process number by now
                return HostValue(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
        return None


def _name(link: Path) -> str:
    return str(link.readlink()).split()[0]  # "/memfd:dsf-... (deleted)"


def _in_worker(duplicate: Any) -> HostValue:
    return HostValue(duplicate.detach())


def made_once_on_host(subject: str, make: Callable[[], object]) -> HostValue:
    """Make a value, or take the one that another rank of this host makes or has made in the same
    start of the ranks.

    A process that asks for a subject again gets a value that was made again.

    Args:
        subject: tells apart the values that ranks make.
        make: returns a picklable value, the same on each of the host's ranks; where it raises, all
            of them do.
    """
    num_ranks = _num_ranks()
    if num_ranks > 1:
        file = _locked(subject)
    else:
        file = None
    if file is None:
        return HostValue.of(make())
    failed = None
    with file:
        address, _, num_taken = file.read().partition(b"\n")
        found = HostValue.at(address)
        if found is None:
            num_taken = b"0"
            try:
                found = HostValue.of(make())
            except Exception as error:
                failed = error
                found = HostValue.of(error)
        with suppress(OSError, ValueError):  # where the disk is full, the others make it themselves
            file.truncate(0)
            file.write(b"%s\n%d" % (found.address, int(num_taken) + 1))
            if int(num_taken) + 1 == num_ranks:
                Path(file.name).unlink()
    if failed is not None:
        raise failed
    if isinstance(found.value, Exception):
        if not isinstance(found.value, FrameworkError):
            make()  # to meet it here: the place in the code is told with it
        raise found.value
    return found


def _locked(subject: str) -> IO[bytes] | None:
    """The file that says where the value is, when no other rank has it; None where there can be no
    such file.
    """
    _asked[subject] += 1
    start = [socket.gethostname(), *map(os.environ.get, _START)]
    digest = sha256(
        repr((start, subject, _asked[subject])).encode("utf-8", "surrogatepass")
    ).hexdigest()
    with ExitStack() as closing, suppress(OSError):
        path = Path(tempfile.gettempdir(), f"dsf-{os.getuid()}-{digest[:32]}")
        file = closing.enter_context(open(path, "a+b", buffering=0, opener=_open_private))
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
            # the kernel gives it back when its holder ends, however that ends
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            closing.pop_all()
            return file
    return None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _num_ranks() -> int:
    """Ranks on this host, as torchrun or DeepSpeed's launcher says; they were checked when the run
    was planned.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
