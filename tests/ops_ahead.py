"""Compiles the ops that many tests need, one after the other, while fast tests run: python -m
tests.ops_ahead. Its priority is that of the tests, since some wait for it.

On a fresh machine that is minutes of a processor's time, for which slow tests would otherwise wait;
`tests/compiler/c++` makes it three fifths, and takes what another environment of the user has
compiled. After SIGTERM it ends with the op at hand: if a compilation is broken off, torch's lock of
the op stays, and the next process that needs the op waits for ever.
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

# The ops that tests/deepspeed_lint/rules needs of DeepSpeed on a processor; every start of DeepSpeed needs
# the first, and many the second.
BUILDERS = ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder")


def start() -> subprocess.Popen[bytes] | None:
    """Start compiling in the background. Returns None if nothing can be compiled here."""
    if platform.system() != "Linux":
        return None
    if any(find_spec(name) is None for name in ("torch", "deepspeed", "ninja")):
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ops_ahead"],
        cwd=ROOT,
        env=job_environment(
            MAX_JOBS="1", PATH=os.pathsep.join((str(ROOT / "tests/compiler"), os.environ["PATH"]))
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Compile the ops that are missing."""
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    load_ops(until=lambda: bool(stop_signals))


def load_ops(*, until: Callable[[], bool] = lambda: False) -> None:
    """Load all ops, compiling those that are missing, or as many as come before `until` holds."""
    from deepspeed.accelerator import get_accelerator

    from framework.engine.extensions import quoting_torchs_library, use_own_cache

    use_own_cache()
    for builder in BUILDERS:
        if until():
            break
        try:
            with quoting_torchs_library():
                get_accelerator().create_op_builder(builder).load()
        except Exception as error:  # a test that needs the op will fail with the reason
            print(f"{builder}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
