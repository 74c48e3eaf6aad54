"""Scripts of users, as processes: how they end when an error is not caught."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launched import job_environment

REFUSED = "nowhere.yaml: there is no such file; check the path [config-not-found]\n"
ATEXIT = "import atexit, framework\natexit.register(print, 'exit handlers ran')\n"
LOAD = "framework.load_config('nowhere.yaml')\n"
OWN_HOOK = (
    "import sys\nsys.excepthook = lambda kind, error, trace: print('my own hook:', kind.__name__)\n"
)


def script(
    folder: Path, text: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, *options, "mine.py"],
        cwd=folder,
        env=job_environment(**environment),
        input="",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_refusal_is_one_line_and_its_exit_code(tmp_path: Path) -> None:
    done = script(tmp_path, ATEXIT + LOAD)
    assert (done.returncode, done.stdout, done.stderr) == (78, "exit handlers ran\n", REFUSED)


@pytest.mark.parametrize(
    ("text", "options", "environment", "stated"),
    [
        (ATEXIT + LOAD, (), {"DSF_TRACEBACK": "1"}, "Traceback"),
        (ATEXIT + LOAD, ("-i",), {}, "Traceback"),
        (ATEXIT + OWN_HOOK + LOAD, (), {}, "my own hook: ConfigError"),
        (
            ATEXIT + "try:\n    " + LOAD + "except framework.ConfigError:\n    1 / 0\n",
            (),
            {},
            "ZeroDivisionError",
        ),
    ],
    ids=["switch", "interactive", "own-hook", "another-error"],
)
def test_it_stays_out_of_the_way(
    tmp_path: Path, text: str, options: tuple[str, ...], environment: dict[str, str], stated: str
) -> None:
    done = script(tmp_path, text, *options, **environment)
    assert stated in done.stdout + done.stderr
    assert "exit handlers ran" in done.stdout
    assert done.returncode == (0 if options else 1), done.stderr


@pytest.mark.slow
def test_torchs_hook_around_the_scripts_own_changes_nothing(tmp_path: Path) -> None:
    group = (
        "import torch.distributed\n"
        "from framework.system.exits import end_in_one_line\n"
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        "end_in_one_line()\n"
    )
    done = script(tmp_path, ATEXIT + OWN_HOOK + group + LOAD)
    assert done.stdout == "my own hook: ConfigError\nexit handlers ran\n", done.stderr
    assert done.returncode == 1


def test_exit_handlers_run_where_all_ranks_have_stopped_well(tmp_path: Path) -> None:
    stop = (
        "from framework.errors import RunStopped\n"
        "from framework.system.exits import end_in_one_line\n"
        "end_in_one_line()\n"
        "raise RunStopped('stopped after step 3')\n"
    )
    done = script(tmp_path, ATEXIT + stop)
    assert (done.returncode, done.stdout, done.stderr) == (
        75,
        "exit handlers ran\n",
        "stopped after step 3\n",
    )


def test_it_is_never_installed_under_pytest() -> None:
    from framework.system.exits import end_in_one_line

    before = sys.excepthook
    end_in_one_line()
    assert sys.excepthook is before


@pytest.mark.slow
def test_the_other_ranks_of_a_host_end_with_the_same_code_and_are_silent(tmp_path: Path) -> None:
    """A launcher ends all ranks when the first one ends: the others leave the first line to the
    rank that reports.
    """
    started = time.monotonic()
    done = script(tmp_path, ATEXIT + LOAD, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (78, "exit handlers ran\n", "")
    assert time.monotonic() - started > 2


@pytest.mark.slow
def test_fit_refuses_in_one_line(tmp_path: Path) -> None:
    done = script(tmp_path, ATEXIT + "framework.fit({'zero': {'stage': 7}})\n")
    line = "zero.stage = 7: too large; write 3 or less [wrong-value]\n"
    assert (done.returncode, done.stdout, done.stderr) == (78, "exit handlers ran\n", line)


@pytest.mark.slow
def test_with_a_process_group_exit_handlers_are_left_out(tmp_path: Path) -> None:
    """Exit handlers would wait for ranks that are gone. The group is a real one, of this process
    alone; torch puts a hook around ours.
    """
    group = (
        "import torch.distributed\n"
        "from framework.errors import PeerLostError\n"
        "from framework.system.exits import end_in_one_line\n"
        "end_in_one_line()\n"
        "store = torch.distributed.HashStore()\n"
        "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "end_in_one_line()\n"
        "print('not yet flushed', end='')\n"
        "raise PeerLostError('rank 1 is gone [peer-lost]')\n"
    )
    done = script(tmp_path, ATEXIT + group)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1:]) == (
        76,
        "not yet flushed",
        ["rank 1 is gone [peer-lost]"],
    )
