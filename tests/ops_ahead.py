"""Compiles the ops that many tests need, one after the other and at low priority, while fast tests
run: python -m tests.ops_ahead.

On a fresh machine that is minutes of a processor's time, for which slow tests would otherwise wait.
Told to end, it ends after the op at hand: torch's lock of an op whose compilation was broken off
would stay, and whoever needs it next would wait for ever.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

from tests.launched import ROOT, job_environment

# What tests/dslint/rules asks of DeepSpeed on a processor; every start of it needs the first, and
# many the second.
BUILDERS = ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder")


def start() -> subprocess.Popen[bytes] | None:
    """Start compiling in the background; None where nothing can be compiled."""
    if platform.system() != "Linux" or any(
        find_spec(name) is None for name in ("torch", "deepspeed", "ninja")
    ):
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ops_ahead"],
        cwd=ROOT,
        env=job_environment(MAX_JOBS="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Compile what is not there."""
    is_told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: is_told_to_end.append(number))
    os.nice(10)
    load_ops(until=lambda: bool(is_told_to_end))


def load_ops(*, until: Callable[[], bool] = lambda: False) -> None:
    """Compile those that are not there, and load all, or as many as come before `until` holds."""
    from deepspeed.accelerator import get_accelerator

    from framework.engine.extensions import quoting_torchs_library, use_own_cache

    use_own_cache()
    for builder in BUILDERS:
        if until():
            break
        try:
            with quoting_torchs_library():
                get_accelerator().create_op_builder(builder).load()
        except Exception as error:  # whoever needs the op will say what is wrong
            print(f"{builder}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
