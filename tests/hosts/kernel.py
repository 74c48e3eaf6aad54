"""The few system calls that Python 3.10 lacks."""

from __future__ import annotations

import ctypes
import os

NEW_MOUNTS, NEW_UTS, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x20000000, 0x40000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DETACH, _DIE_WITH_PARENT, _NO_NEW_RIGHTS, _PIVOT_ROOT = 2, 1, 38, {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """This process (its next child, for PIDs) gets namespaces of its own."""
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
    """mount(2)."""
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    _check(
        _libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {source} at {target}"
    )


def pivot_root(new: str) -> None:
    """Make `new`, a mount, the root of this mount namespace, and let go of the old one."""
    os.chdir(new)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """The name of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends; an exec keeps that."""
    _check(_libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0), "prctl")


def gain_nothing() -> None:
    """No program that this process starts gets more rights than it has, as
    `allowPrivilegeEscalation: false` says.
    """
    _check(_libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0), "prctl")
