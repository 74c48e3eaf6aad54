"""A process without its parent ends: when the parent ends, and if it had ended before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.places import ROOT

pytestmark = pytest.mark.timing

CHILD = """
import sys, time
from framework.system.parent_watch import die_with
die_with(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_child_is_killed_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        first = parent.stdout.readline()
        began = time.monotonic()
        os.kill(parent.pid, signal.SIGKILL)
        assert first == "up\n"
        assert parent.stdout.read() == ""  # ends when no process holds the other end any more
        assert time.monotonic() - began < 30, "the child has ended by itself"


def test_a_parent_that_has_gone_is_not_waited_for() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, "1"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=False,
        timeout=50,
    )
    assert (ended.returncode, ended.stdout) == (1, b"")
