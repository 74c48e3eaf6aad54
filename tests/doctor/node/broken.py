"""Runs `doctor` in a process of its own, on a machine that is really broken: mounts of its own,
lower limits, fewer capabilities.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.launched import ROOT, job_environment

QUICKSTART = str(ROOT / "ds_configs" / "quickstart.yaml")


@functools.cache
def why_no_mounts() -> str:
    """Return why no process here can have mounts of its own; empty if it can."""
    try:
        done = subprocess.run([*_own_mounts(), "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no `unshare` (Debian: util-linux)"
    return "" if done.returncode == 0 else f"mounts of its own need root: {done.stderr.strip()}"


def _own_mounts() -> list[str]:
    return ["unshare", "--mount", "--propagation", "private"]


def doctor(
    *words: str | Path,
    before: Sequence[str] = (),
    mounts: Sequence[str] = (),
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command.

    Args:
        words: arguments of the command line.
        before: shell commands run before it, such as ``ulimit -n 200``.
        mounts: arguments of `mount`, run in a mount namespace of its own.
        cwd: working folder.
        environment: more variables.
    """
    script = "; ".join(["set -e", *(f"mount {each}" for each in mounts), *before, 'exec "$@"'])
    command = [sys.executable, "-m", "framework", "doctor", *map(str, words)]
    start = [*(_own_mounts() if mounts else []), "bash", "-c", script, "bash", *command]
    return subprocess.run(
        start,
        cwd=cwd,
        env=job_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def findings(*words: str | Path, **how: Any) -> dict[str, dict[str, Any]]:
    """Return the findings of `doctor`, by id; the exit code fits to them."""
    done = doctor(*words, "--json", **how)
    assert done.returncode in (0, 78), done.stderr
    found = json.loads(done.stdout)
    assert (
        (done.returncode == 0)
        == found["ok"]
        == all(each["severity"] != "error" for each in found["findings"])
    )
    return {each["id"]: each for each in found["findings"]}


def programs(folder: Path, *names: str, **scripts: str) -> str:
    """Return a PATH with these programs of this machine and no others, and with scripts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = subprocess.run(
            ["bash", "-c", f"command -v {shlex.quote(name)}"],
            capture_output=True,
            text=True,
            check=True,
            env=with_own_programs(os.environ),
        ).stdout.strip()
        (folder / name).symlink_to(found)
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return str(folder)


def with_own_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a PATH with this Python's programs, such as ninja, as `launch` gives it to ranks."""
    return dict(environment) | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    }
