"""Large values that are made once per host: one rank makes it, the host's others and all workers
map its memory.

The value is in anonymous memory, and a small file in the temporary folder has the address of that
memory. Neither needs a process group. When a rank dies, the kernel takes back its lock and its
memory: no rank waits for it, or takes the value of an earlier start. A rank that finds no value
makes it itself.
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
from framework.system.limits import ranks_on_host

# Variables that identify one start of a host's ranks: torchrun's, DeepSpeed's, and this launcher's.
_START: Final = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "DSF_AGENT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
_ALIGNED_BYTES: Final = 8
_num_requests: Counter[str] = Counter()  # by subject


class HostValue:
    """A picklable value in anonymous memory; its numpy arrays are read-only views of the memory.

    The memory: the number of parts, the size of each part (8 bytes each), and the parts, each
    filled up to a multiple of 8 bytes. The first part is the pickle, the others are its buffers.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory of a descriptor, which is closed together with this object."""
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
        parts = [memoryview(body)]
        parts += [buffer.raw() for buffer in buffers]
        descriptor = os.memfd_create(f"dsf-{secrets.token_hex(8)}")
        with open(descriptor, "wb", closefd=False) as stream:
            sizes = [part.nbytes for part in parts]
            stream.write(array("q", [len(parts), *sizes]))
            for part in parts:
                stream.write(part)
                stream.write(bytes(-part.nbytes % _ALIGNED_BYTES))
        return HostValue(descriptor)

    def __reduce__(self) -> tuple[Callable[..., HostValue], tuple[Any]]:
        """Pickle the memory for a worker that is being started, and else the value."""
        if get_spawning_popen() is None:
            return HostValue.of, (self.value,)
        return _in_worker, (DupFd(self._descriptor),)

    @property
    def address(self) -> bytes:
        """Path of the memory for other processes of this user, and its name.

        It is valid while this process holds the memory.
        """
        link = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        return f"{link} {_name(link)}".encode()

    @staticmethod
    def at(address: bytes) -> HostValue | None:
        """Map the memory that another process holds; None if it does not any more."""
        with suppress(OSError, ValueError):
            link, name = address.decode().split()
            if _name(Path(link)) == name:  # else another process has that process id by now
                return HostValue(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
        return None


def _name(link: Path) -> str:
    return str(link.readlink()).split()[0]  # "/memfd:dsf-... (deleted)"


def _in_worker(duplicate: Any) -> HostValue:
    return HostValue(duplicate.detach())


def made_once_on_host(subject: str, make: Callable[[], object]) -> HostValue:
    """Make a value, or wait for the one that another rank of this host makes in the same start.

    A process that requests a subject again gets a value that was made again.

    Args:
        subject: name of the value among those that ranks make.
        make: returns a picklable value, the same on each of the host's ranks; if it raises an
            error, all ranks raise it.
    """
    num_ranks = ranks_on_host()
    if num_ranks > 1:
        file = _locked(subject)
    else:
        file = None
    if file is None:
        return HostValue.of(make())
    failure = None
    with file:
        # the address of the value's memory, and the number of ranks that have it
        address, _, num_taken = file.read().partition(b"\n")
        shared = HostValue.at(address)
        if shared is None:
            num_taken = b"0"
            try:
                shared = HostValue.of(make())
            except Exception as error:
                failure = error
                shared = HostValue.of(error)
        with suppress(OSError, ValueError):  # if the disk is full, the others make it themselves
            file.truncate(0)
            file.write(b"%s\n%d" % (shared.address, int(num_taken) + 1))
            if int(num_taken) + 1 == num_ranks:
                Path(file.name).unlink()
    if failure is not None:
        raise failure
    if isinstance(shared.value, Exception):
        if not isinstance(shared.value, FrameworkError):
            make()  # raises the error here, so that its traceback has the place in the code
        raise shared.value
    return shared


def _locked(subject: str) -> IO[bytes] | None:
    """Open the file with the address of a value, and wait until no other rank has its lock.

    Returns:
        None if there can be no such file.
    """
    _num_requests[subject] += 1
    start: list[str | None] = [socket.gethostname()]
    start += [os.environ.get(name) for name in _START]
    identity = repr((start, subject, _num_requests[subject]))
    digest = sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
    with ExitStack() as closing, suppress(OSError):
        path = Path(tempfile.gettempdir(), f"dsf-{os.getuid()}-{digest[:32]}")
        file = closing.enter_context(open(path, "a+b", buffering=0, opener=_open_private))
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            # the kernel releases it when its holder ends, even by a signal
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            closing.pop_all()
            return file
    return None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
