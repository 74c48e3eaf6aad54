"""A process that a launcher started ends with it, and with the agent above it; others are not
watched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from framework.errors import ConfigError
from framework.system.parent_watch import identity, watch_parent
from tests.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timing]

GONE_SECONDS = 45.0  # less than a rank sleeps
_RANK = """
import os, sys, time
from framework.system.parent_watch import watch_parent
watch_parent(os.environ, is_stopping=lambda: "stopping" in sys.argv, is_over=lambda: "over" in sys.argv, stopping_seconds=float(os.environ.get("STOPPING_SECONDS", "600")))
print(os.getpid(), flush=True)
time.sleep(60)
"""  # noqa: E501
_LAUNCHER = "import subprocess, sys; sys.exit(subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait())"


def start_rank(*words: str, **environment: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a launcher, and the rank under it, which watches."""
    launcher = start_launcher(*words, **environment)
    assert launcher.stdout is not None
    return launcher, psutil.Process(int(launcher.stdout.readline()))


def start_launcher(*words: str, **environment: str) -> subprocess.Popen[str]:
    dropped = ("LOCAL_RANK", "DSF_AGENT")
    env = (
        {name: value for name, value in os.environ.items() if name not in dropped}
        | {"PYTHONPATH": str(ROOT)}
        | environment
    )
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def test_a_rank_with_a_killed_launcher_reports_it_and_ends() -> None:
    launcher, rank = start_rank(LOCAL_RANK="1", RANK="1")
    launcher.kill()
    rank.wait(GONE_SECONDS)
    assert launcher.stderr is not None
    stated = launcher.stderr.read()
    assert (
        stated
        == f"rank 1: the launcher (process {launcher.pid}) is gone, and this rank ends with it [launcher-lost]\n"
    )
    launcher.communicate()


def test_a_rank_that_is_stopping_gets_some_seconds_and_one_that_has_saved_does_not_need_them() -> (
    None
):
    launcher, rank = start_rank("stopping", LOCAL_RANK="0", STOPPING_SECONDS="3")
    saved, other = start_rank("stopping", "over", LOCAL_RANK="0")
    saved.kill()
    other.wait(GONE_SECONDS)
    began = time.monotonic()
    launcher.kill()
    rank.wait(GONE_SECONDS)
    assert time.monotonic() - began >= 3.0
    launcher.communicate()
    saved.communicate()


def test_no_parent_is_watched_without_a_launcher() -> None:
    launcher, rank = start_rank()
    launcher.kill()
    time.sleep(1.5)
    assert rank.is_running()
    rank.kill()
    launcher.communicate()


def test_the_agent_is_watched_above_a_launcher_that_lives() -> None:
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    launcher, rank = start_rank(LOCAL_RANK="0", DSF_AGENT=identity(agent.pid))
    time.sleep(1.0)
    assert rank.is_running()
    agent.send_signal(signal.SIGKILL)  # and not waited for: a zombie is no agent
    _, stated = launcher.communicate(timeout=GONE_SECONDS)
    agent.wait(60)
    assert f"rank 0: the agent (process {agent.pid}) is gone" in stated
    assert launcher.returncode == 76


def test_another_process_with_the_same_number_is_another() -> None:
    pid, _, started = identity(os.getpid()).partition(":")
    launcher = start_launcher(LOCAL_RANK="0", DSF_AGENT=f"{pid}:{int(started) - 1}")
    launcher.communicate(timeout=GONE_SECONDS)
    assert launcher.returncode == 76


def test_a_free_number_has_no_process() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        identity(ended.pid)


@pytest.mark.parametrize("text", ["12", "a:1", "1:b", "0:1", ":", "1:2:3", "-1:5"])
def test_an_agent_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"DSF_AGENT = .* \[agent-not-named\]"):
        watch_parent({"DSF_AGENT": text}, is_stopping=bool, is_over=bool)
