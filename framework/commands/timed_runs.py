"""Short training runs for their times: through the launcher, with nothing beside the steps, in a folder that goes with
them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from framework.commands.torch_child import NoAnswerError, failure_of, run_child
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.plan.plan import Plan

_NEVER: Final = {"every_epochs": None, "every_steps": None, "at_end": False}
# What a run does beside its steps, and what would make a measurement of an earlier run's.
_ALONE: Final[Mapping[str, Mapping[str, Any]]] = {
    "evaluation": _NEVER,
    "checkpoint": _NEVER | {"keep_best": None, "resume": "never", "mode": "sync"},
}
_NO_SINKS: Final = {"tensorboard": False, "csv": False, "report": False, "progress": "off"}


@dataclass(frozen=True)
class TimedRun:
    """Records of a run: points of ``metrics.jsonl``, ``environment.json``, and why it did not end well; empty where it
    did.
    """

    points: list[dict[str, Any]]
    environment: Mapping[str, Any]
    failure: str = ""
    is_interrupted: bool = False


def config_alone(config: RunConfig, *, steps: int, log_every: int) -> RunConfig:
    """The config for so many steps and nothing else: no evaluation, no checkpoint, no sink, no profile."""
    values = config.to_dict()
    for name, section in _ALONE.items():
        values[name] = values.get(name, {}) | section
    values["training"] |= {"max_steps": steps, "max_epochs": None, "log_every": log_every}
    values["monitors"] = _NO_SINKS
    values.pop("profile", None)
    return config_from_values(values)


def run_alone(
    plan: Plan, *, steps: int, log_every: int, longest_seconds: float | None = None, hostfile: str | None = None
) -> TimedRun:
    """Train a plan for so many steps on its devices and return what was logged.

    Args:
        longest_seconds: after which it is ended; left out: however long it takes.
        hostfile: of its hosts, which see the current folder; left out: this machine.
    """
    # On other hosts the folder of the run is the same only below the one in which all of them start.
    with tempfile.TemporaryDirectory(
        prefix="dsf-timed-", dir=Path.cwd() if hostfile else None, ignore_cleanup_errors=True
    ) as folder:
        config, out = Path(folder, "run.json"), Path(folder, "runs")
        values = config_alone(plan.config, steps=steps, log_every=log_every).to_dict()
        values["run"] |= {"name": "timed", "output_dir": str(out)}
        config.write_text(json.dumps(values), encoding="utf-8")
        where = ["-H", hostfile] if hostfile else ["--num_gpus", str(plan.cluster.devices_per_host)]
        command, failure, is_interrupted = ["-m", "framework", "launch", str(config), *where], "", False
        try:
            done = run_child(command, os.environ, longest_seconds=longest_seconds)
            if done.returncode:
                failure = f"exit code {done.returncode}: {failure_of(done.stderr)}"
        except NoAnswerError as error:
            failure = str(error)
        except KeyboardInterrupt:
            failure, is_interrupted = "interrupted", True
        points: list[dict[str, Any]] = []
        environment: Mapping[str, Any] = {}
        try:
            with Path(out, "timed/metrics.jsonl").open(encoding="utf-8") as lines:
                points += [json.loads(line) for line in lines if line.endswith("\n")]
            environment = json.loads(Path(out, "timed/environment.json").read_text(encoding="utf-8"))
        except OSError as error:
            failure = failure or f"{error.filename}: cannot be read ({error.strerror})"
        return TimedRun(points, environment, failure, is_interrupted)
