"""Becomes a host and ends with it: python init.py, with the host's description as one line of JSON
on stdin.

    the test --starts--> this process, outside --forks--> PID 1 of the host

After the first line stdin is a life line: when it closes, because the test closes it or has ended,
the host dies at once. PID 1 only waits for its children, or is a program of its own (the container
of a pod).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.hosts import kernel  # noqa: E402

_OWN = {"proc", "tmp", "run", "sys", "dev"}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
_STREAMS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}


def main() -> None:
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_UTS | kernel.NEW_PID | kernel.NEW_NET)
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(writing)
        _be_first(reading)
    os.close(reading)
    print(first, flush=True)  # the network card is put into its namespace now
    spec = sys.stdin.readline()
    os.write(writing, spec.encode())
    os.close(writing)
    # Not a thread for each: after unshare the kernel refuses new ones.
    ended = os.pidfd_open(first)
    if ended not in select.select([0, ended], [], [])[0]:
        os.kill(first, signal.SIGKILL)
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _be_first(order: int) -> None:
    """Be PID 1 of the host. Never returns."""
    try:
        kernel.die_with_parent()
        spec = json.loads(os.fdopen(order).readline() or "null")
        if spec is None:
            os._exit(0)
        log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND)  # outside of the host's root folder
        _furnish(spec)
        uid = spec.get("uid")
        if uid is not None:
            os.setgroups([uid])
            os.setgid(uid)
            os.setuid(uid)  # the capabilities go with it
            kernel.die_with_parent()  # again: a change of user takes it back
            kernel.gain_nothing()
        answer = os.dup(1)
        os.set_inheritable(answer, False)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        os.write(answer, b"ready\n")
        if spec["command"]:
            os.chdir(spec["cwd"])
            os.execvpe(spec["command"][0], spec["command"], spec["environment"])
        os.close(answer)
        _reap()
    except BaseException as error:
        os.write(1, f"error: {error!r}\n".encode())
        os._exit(125)


def _reap() -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


def _furnish(spec: dict[str, Any]) -> None:
    """Give the host its name, its root folder, and its own files."""
    kernel.set_hostname(spec["name"])
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    new = Path(spec["root"])
    kernel.mount("tmpfs", str(new), "tmpfs", options="mode=755")
    _share_system(new, without=_OWN.union(spec["closed"]))
    for folder, options in (
        ("tmp", "mode=1777"),
        ("run", "mode=755"),
        ("dev/shm", f"mode=1777,size={spec['shm_bytes']}"),
    ):
        (new / folder).mkdir(exist_ok=True)
        kernel.mount("tmpfs", str(new / folder), "tmpfs", options=options)
    mounts = spec["mounts"]
    for path in spec["visible"]:
        _mount(new, mounts.get(path, {"bind": path}), path)
    for path, mount in mounts.items():
        _mount(new, mount, path)
    for path, source in spec["files"].items():
        target = new / path.lstrip("/")
        if path.startswith("/dev/"):
            target.touch()
        if target.exists():
            kernel.mount(source, str(target), flags=kernel.BIND)
    kernel.pivot_root(str(new))


def _share_system(new: Path, *, without: set[str]) -> None:
    """Show the host what all hosts share: programs, libraries, the Python environment."""
    for entry in Path("/").iterdir():
        target = new / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            target.mkdir()
            if entry.name not in without:
                kernel.mount(str(entry), str(target), flags=kernel.BIND | kernel.RECURSIVE)
    kernel.mount("proc", str(new / "proc"), "proc")
    kernel.mount("sysfs", str(new / "sys"), "sysfs")
    kernel.mount("tmpfs", str(new / "dev"), "tmpfs", options="mode=755")
    for name in _DEVICES:
        target = new / "dev" / name
        if name == "pts":
            target.mkdir()
        else:
            target.touch()
        kernel.mount(f"/dev/{name}", str(target), flags=kernel.BIND)
    for name, place in _STREAMS.items():
        (new / "dev" / name).symlink_to(place)


def _mount(new: Path, mount: dict[str, Any], path: str) -> None:
    target = new / path.lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    if "bind" in mount:
        kernel.mount(mount["bind"], str(target), flags=kernel.BIND)
    else:
        options = f"mode=1777,size={mount['tmpfs_bytes']}"
        kernel.mount("tmpfs", str(target), "tmpfs", options=options)
    if mount.get("read_only"):
        kernel.mount("none", str(target), flags=kernel.BIND | kernel.REMOUNT | kernel.READ_ONLY)


if __name__ == "__main__":
    main()
