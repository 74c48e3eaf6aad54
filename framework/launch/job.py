"""Checks and output that all starts of a run share."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem, StorageError, UsageError, counted
from framework.hosts.devices import LocalDevices
from framework.hosts.topology import HostTopology
from framework.load_run import LoadedRun
from framework.system.files import refuse_foreign, replace_text
from framework.system.output import write


def print_line(text: str) -> None:
    """Print a line of the launcher, on stderr."""
    write(sys.stderr, f"launch: {text}\n")


def write_termination_log(text: str) -> None:
    """Write the last line to the file of DSF_TERMINATION_LOG, or to that of Kubernetes if there."""
    variable = os.environ.get("DSF_TERMINATION_LOG")
    path = Path(variable or "/dev/termination-log")
    if variable or path.exists():
        with suppress(OSError):
            path.write_text(text[:4000] + "\n", encoding="utf-8", errors="backslashreplace")


def show_settings(topology: HostTopology, plain: str, *further: str) -> None:
    """Print every value of the topology with its source, the plain command, and further lines."""
    for name in ("nnodes", "node_rank", "slots", "master_addr", "master_port"):
        if name in topology.sources:
            value = getattr(topology, name)
            if name == "master_port" and not value:
                value = "free"
            write(sys.stdout, f"launch: {name:<12}{value} ({topology.sources[name]})\n")
    size = (
        f"{topology.world_size} = {counted(topology.nnodes, 'node')} x "
        f"{counted(topology.slots, 'rank')}"
    )
    for line in (f"{'world size':<12}{size}", f"plain command: {plain}", *further):
        write(sys.stdout, f"launch: {line}\n")


def refuse_too_few(
    job: LoadedRun, devices: LocalDevices, *, num_ranks: int, source: str, where: str = ""
) -> None:
    """Raise a ConfigError for more ranks than devices: the surplus would die with "invalid device
    ordinal".

    Devices of a kind that is not counted are not compared.

    Args:
        source: of `num_ranks`: an option, a key of the run config, a variable.
        where: for the fix, such as `` on every node``.
    """
    if not devices.count or num_ranks <= devices.count:
        return
    reason = f"this machine has {devices.count} {devices.kind} devices for it"
    fix = f"at most {devices.count}{where}, or DS_ACCELERATOR=cpu to try it on processors"
    if source.startswith("-"):
        file = "command line"
    else:
        file = ""
    problem = Problem("too-few-devices", reason, fix, key=source, value=num_ranks, file=file)
    if source.startswith("run."):
        problem = job.source.locate(problem)
    raise ConfigError(problem)


def refuse_named_checkpoint(config: RunConfig, *, place: str, once: str) -> None:
    """Raise a UsageError if `checkpoint.resume` names a checkpoint: each start of a job that starts
    again would go back to it.

    Args:
        config: of the run.
        place: command and option for the message, such as ``launch slurm --requeue``.
        once: how to have one start alone, such as ``without --requeue``.
    """
    if config.checkpoint.resume not in ("auto", "never"):
        raise UsageError(
            f"{place}: checkpoint.resume = {config.checkpoint.resume}: a job that starts again "
            f"would go back there each time; start once {once}, then go on with "
            "checkpoint.resume=auto"
        )


def hand_out(text: str, *, to: str | None, mark: bytes) -> None:
    """Print a manifest or a script, or write it to a file.

    Args:
        text: of the manifest or script.
        to: path of the file; None: print.
        mark: a file that is replaced has to contain it.

    Raises:
        StorageError: it cannot be written, or is a file of another origin.
    """
    if to is None:
        print(text, end="")
        return
    try:
        path = Path(to)
        if path.is_char_device() or path.is_fifo():  # /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            refuse_foreign(path, marks=[mark])
            replace_text(path, text)
    except OSError as error:
        raise StorageError(f"{to}: cannot be written ({error.strerror}) [not-written]") from None
