"""Whatever stands at a path, `check` says so in one line, soon, in little memory, and without a
traceback.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_lint.text import document as read_text
from framework.config.load import load_config
from framework.errors import ConfigError
from tests.places import ROOT

MIB = 1 << 20
# Runs `check` and prints the largest memory that it took.
MEASURED = """
import sys
from framework.cli import main
from deepspeed_lint.text import document
document.WRITER_SECONDS = 0.05  # nobody comes to write
code = main(sys.argv[1:])
# Not ru_maxrss: it begins with the peak of the process that started this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("peak", int(peak.split()[1]) // 1024)
sys.exit(code)
"""


def bomb(depth: int) -> str:
    """Each anchor holds nine of the one before it."""
    rows = [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join(["a0: &a0 [x,x,x,x,x,x,x,x,x]", *rows])


FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a pipe": ("x.yaml", os.mkfifo, "config-unreadable"),
    "a pipe as JSON": ("x.json", os.mkfifo, "config-unreadable"),
    "a folder": ("x.json", Path.mkdir, "config-unreadable"),
    "a device without end": (
        "x.json",
        lambda path: path.symlink_to("/dev/zero"),
        "config-unreadable",
    ),
    "the null device": ("x.yaml", lambda path: path.symlink_to("/dev/null"), "config-unreadable"),
    "a dangling link": ("x.yaml", lambda path: path.symlink_to("nowhere"), "config-not-found"),
    "a loop of links": ("x.yaml", lambda path: path.symlink_to("x.yaml"), "config-unreadable"),
    "100 MB": ("x.json", lambda path: path.write_bytes(b" " * 100 * MIB), "config-too-large"),
    "100 MB with a hole": (
        "x.yaml",
        lambda path: (path.touch(), os.truncate(path, 100 * MIB)),
        "config-too-large",
    ),
    "brackets": ("x.json", lambda path: path.write_text("[" * 900_000), "config-too-deep"),
    "braces": ("x.json", lambda path: path.write_text('{"a":' * 100_000), "config-too-deep"),
    "YAML brackets": (
        "x.yaml",
        lambda path: path.write_text("a: " + "[" * 900_000),
        "config-too-deep",
    ),
    "a bomb of aliases": ("x.yaml", lambda path: path.write_text(bomb(9)), "config-too-large"),
    "a tag that runs code": (
        "x.yaml",
        lambda path: path.write_text("run: !!python/object/apply:os.abort []"),
        "config-syntax",
    ),
    "latin-1": ("x.yaml", lambda path: path.write_bytes(b"run: {name: \xe9}"), "config-not-text"),
    "UTF-16": (
        "x.json",
        lambda path: path.write_bytes('{"a": 1}'.encode("utf-16")),
        "config-not-text",
    ),
    "zero bytes": ("x.json", lambda path: path.write_bytes(b"\0" * 100), "config-not-text"),
    "many keys": (
        "x.yaml",
        lambda path: path.write_text("".join(f"k{n}: 1\n" for n in range(80_000))),
        "config-too-large",
    ),
}


@pytest.mark.slow
def test_every_file_is_one_line_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """One process for all of them: 18 problems, one line each, in the order of the files."""
    paths, kinds = [], []
    for number, (name, make, kind) in enumerate(FILES.values()):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        make(path)
        paths.append(str(path))
        kinds.append(kind)
    for option in ([], ["--fix"]):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, "check", *option, *paths],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
        lines = done.stderr.splitlines()
        assert [line.rpartition("[")[2].rstrip("]") for line in lines] == kinds
        assert [line.partition("/x.")[0].rpartition("/")[2] for line in lines] == [
            str(n) for n in range(len(FILES))
        ]
        assert done.returncode == 2
        assert int(done.stdout.split()[-1]) < 200, "MiB"


def test_a_path_with_a_zero_byte_is_no_file() -> None:
    with pytest.raises(
        ConfigError, match=r"a path holds no zero byte; check the path \[config-not-found\]"
    ):
        load_config("a\0b.yaml")


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x.yaml")
        with pytest.raises(ConfigError, match="it is a device or a socket"):
            load_config("x.yaml")


def test_the_output_of_a_command_can_be_checked() -> None:
    """bash's <(...) is a pipe."""
    content = '{"train_batch_size": 8, "gradient_cliping": 1}'
    script = f"\"{sys.executable}\" -m framework check <(sleep 0.3; echo '{content}')"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert "did you mean gradient_clipping?" in done.stderr


@pytest.mark.slow
def test_a_run_config_from_a_pipe_is_read_once() -> None:
    script = (
        f'"{sys.executable}" -m framework check <(echo \'{{"run": {{"name": "x", "sed": 1}}}}\')'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert "did you mean 'seed'?" in done.stderr


def test_a_silent_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    os.mkfifo(path)
    monkeypatch.setattr(read_text, "PIPE_SECONDS", 0.2)
    opened, done = threading.Event(), threading.Event()

    def hold_open() -> None:
        descriptor = os.open(path, os.O_RDWR)  # a writer that never writes
        opened.set()
        done.wait(30)
        os.close(descriptor)

    writer = threading.Thread(target=hold_open)
    writer.start()
    try:
        assert opened.wait(30)
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=r"a pipe that did not end within 0\.2 s"):
            load_config(path)
        assert time.monotonic() - begin < 10
    finally:
        done.set()
        writer.join()
