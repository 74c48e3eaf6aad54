"""Short training runs that measure times: through the launcher, with steps alone, in a temporary
folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from framework.commands.torch_child import NoAnswerError, failure_of, run_child
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.plan.plan import Plan
from framework.report.records import RunRecords, read_run
from framework.system.parent_watch import FAILURES_VARIABLE

_NEVER: Final = {"every_epochs": None, "every_steps": None, "every_minutes": None, "at_end": False}
_NO_SINKS: Final = {"tensorboard": False, "csv": False, "report": False, "progress": "off"}
INTERRUPTED: Final = "interrupted"
NO_TIMES: Final = "its run ended without an error, and has logged too few times of steps"


def config_alone(config: RunConfig, *, steps: int, log_every: int) -> RunConfig:
    """Return the config for `steps` steps alone: no evaluation, checkpoint, sink or profile."""
    values = config.to_dict()
    values["evaluation"] |= _NEVER | {"at_start": False}
    values["checkpoint"] |= _NEVER | {"keep_best": None, "resume": "never", "mode": "sync"}
    values["training"] |= {
        "max_steps": steps,
        "max_epochs": None,
        "max_minutes": None,
        "log_every": log_every,
    }
    values["monitors"] = _NO_SINKS
    values.pop("profile", None)
    return config_from_values(values)


def run_alone(
    plan: Plan,
    *,
    steps: int,
    log_every: int,
    longest_seconds: float | None = None,
    hostfile: str | None = None,
) -> tuple[RunRecords, str]:
    """Train a plan for `steps` steps, on this machine or on the hosts of a file, and wait.

    Returns:
        the run's records, and why it failed: `INTERRUPTED` after Ctrl-C, "" if it did not.
    """
    if hostfile:
        where = ["-H", hostfile]
        base = Path.cwd()  # the hosts share it
    else:
        where = ["--num_gpus", str(plan.cluster.devices_per_host)]
        base = None
    with tempfile.TemporaryDirectory(
        prefix="dsf-timed-", dir=base, ignore_cleanup_errors=True
    ) as folder:
        config = Path(folder, "run.json")
        out = Path(folder, "timed")
        values = config_alone(plan.config, steps=steps, log_every=log_every).to_dict()
        values["run"] |= {"name": out.name, "output_dir": folder}
        config.write_text(json.dumps(values), encoding="utf-8")
        words = ["-m", "framework", "launch", str(config), *where]
        failure = _launch(words, Path(folder), longest_seconds=longest_seconds)
        try:
            return read_run(out), failure
        except ConfigError as error:
            return RunRecords(out), failure or str(error)


def _launch(words: Sequence[str], folder: Path, *, longest_seconds: float | None) -> str:
    """Run the launcher with these arguments and wait; returns why it failed, "" if it did not. The
    job records its errors in `folder`.
    """
    failures = folder / "failures.jsonl"
    environment = {**os.environ, FAILURES_VARIABLE: str(failures)}
    try:
        done = run_child(words, environment, longest_seconds=longest_seconds)
    except NoAnswerError as error:
        return str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    if done.returncode:
        return f"exit code {done.returncode}: {failure_of(done.stderr, failures)}"
    return ""
