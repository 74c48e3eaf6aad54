"""The few system calls that Python 3.10 lacks."""

from __future__ import annotations

import ctypes
import os

# Flags of unshare(2)
NEW_MOUNTS = 0x20000
NEW_UTS = 0x4000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
# Flags of mount(2)
READ_ONLY = 1
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18
_DETACH = 2  # of umount2(2)
# Options of prctl(2)
_DIE_WITH_PARENT = 1
_NO_NEW_RIGHTS = 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # number of the system call
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Give this process (its next child, for PIDs) namespaces of its own."""
    _check(_libc.unshare(flags), "unshare")


def join_network(namespace: str | int) -> None:
    """Enter the network namespace behind this path or file descriptor."""
    if isinstance(namespace, int):
        _check(_libc.setns(namespace, NEW_NET), "setns")
        return
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _check(_libc.setns(descriptor, NEW_NET), "setns")
    finally:
        os.close(descriptor)


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, options: str = ""
) -> None:
    """Call mount(2)."""
    filesystem = None
    if kind is not None:
        filesystem = kind.encode()
    result = _libc.mount(
        source.encode(), target.encode(), filesystem, ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {source} at {target}")


def pivot_root(new: str) -> None:
    """Make `new`, a mount, the root of this mount namespace, and unmount the old root."""
    os.chdir(new)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """Set the name of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def die_with_parent() -> None:
    """Let this process get SIGKILL when the thread that started it ends; an exec keeps that."""
    _check(_libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0), "prctl")


def gain_nothing() -> None:
    """Let no program that this process starts get more rights than it has, as with
    `allowPrivilegeEscalation: false`.
    """
    _check(_libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0), "prctl")
