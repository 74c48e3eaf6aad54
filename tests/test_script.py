"""How train.py ends on ranks that say nothing, and where something of the installation is
missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.places import ROOT

WITHOUT = (
    "import sys; sys.modules[sys.argv.pop(1)] = None; "
    "from framework.script import exit_code; sys.exit(exit_code())"
)


def test_a_missing_package_is_one_line_and_no_reason_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batch: {global_size: 60}\n")
    command = [sys.executable, "-c", WITHOUT, "torch", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 78
    assert done.stderr == (
        f"training needs the package torch, which {sys.executable} does not have; "
        "in the checkout: ./launch.sh setup train, or pip install -e '.[train]' [package-missing]\n"
    )


# What all ranks meet, on one that leaves it to another to report it.
REFUSED = """
import time
from framework import script
from framework.errors import ConfigError, Problem
from framework.system.stopping import StopRequest

def refuse(request, arguments):
    raise ConfigError(Problem(kind="wrong-value", reason="too large", fix="write less"))

def note(request):
    really(request)
    print("ready at", time.monotonic(), flush=True)

really, StopRequest.run_has_failed, script._train = StopRequest.run_has_failed, note, refuse
script.SILENT_RANKS_WAIT_SECONDS = {seconds}
import sys
sys.argv = ["train.py", "--config", "run.yaml"]
script.main()
"""


def silent(seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", REFUSED.format(seconds=seconds)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_rank_that_is_silent_leaves_the_first_word_to_the_one_that_speaks() -> None:
    """A launcher ends all ranks when the first one ends."""
    process = silent(1.0)
    assert process.stdout is not None
    begin = float(process.stdout.readline().removeprefix("ready at "))
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 78
    assert time.monotonic() - begin >= 1.0


def test_it_ends_with_its_own_code_when_the_launcher_ends_it() -> None:
    process = silent(600.0)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready at ")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 78
