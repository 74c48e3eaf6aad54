"""The device and the process group: facts of the machine, the start from a launcher's environment,
and the end.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import io
import itertools
import logging
import os
import platform
import socket
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store

from framework.engine.extensions import (
    announcing_compilers,
    refusing_what_does_not_compile,
    use_own_cache,
)
from framework.engine.group_store import INIT_METHOD, check_environment
from framework.engine.workarounds.group_limits import limiting_groups
from framework.engine.workarounds.shared_buffers import (
    refuse_small_memory,
    remove_dead_buffers,
    remove_own_buffers,
)
from framework.errors import (
    ConfigError,
    FrameworkError,
    StorageError,
    counted,
    explaining,
    in_one_line,
)
from framework.system import file_writer
from framework.system.command_parser import LOG_LEVEL
from framework.system.files import make_own_folder
from framework.system.kept_file import KeptFile
from framework.system.log import write_to
from framework.system.waiting import waiting

# Rank 0 mostly holds the store: if it ended at once, other ranks could not find out that it reports
# a failure.
_OTHERS_KNOW_SECONDS: Final = 2.0
# Purpose -> number of the next of its connections to the store.
_numbers_of: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_LOOK_SECONDS: Final = 0.05
_ERRORS_IN_CPP: Final = 2  # c10/util/logging_is_not_google_glog.h
# torch warns that a barrier takes the current device, where no group was bound to one: it is the
# right one.
_OF_BARRIERS: Final = r"barrier\(\): using the device under current context"
_MOST_LOG_BYTES: Final = 1 << 20  # of a rank's log, while storage does not take it
_PACKAGES: Final = (
    "dsf-trainer",
    "torch",
    "torchvision",
    "deepspeed",
    "pydantic",
    "numpy",
    "tensorboard",
)


def device_name() -> str:
    """Return the name of DeepSpeed's accelerator on this machine: ``cuda``, ``cpu``, ``npu``..."""
    return str(get_accelerator()._name)


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device(get_accelerator().current_device_name())


@cache
def describe_environment() -> dict[str, Any]:
    """Return this rank's versions, device and host, without environment variables, which may hold
    secrets.
    """
    accelerator = get_accelerator()
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    device_memory_bytes = None
    if accelerator._name == "cuda":
        gpu = torch.cuda.get_device_properties("cuda")
        device_type = gpu.name
        device_memory_bytes = gpu.total_memory
    else:
        device_type = _processor_name()
    return {
        "versions": versions,
        "accelerator": accelerator._name,
        "device": device_type,
        "device_memory_bytes": device_memory_bytes,
        "devices_on_host": accelerator.device_count(),
        "cuda": torch.version.cuda,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "command": sys.argv,
    }


def _processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def check_device(dtype: str, backend: str | None = None) -> None:
    """Refuse a precision that this machine's devices cannot compute in, or a backend that does not
    drive them.

    Raises:
        ConfigError: kind ``precision-unsupported`` or ``backend-unsupported``.
    """
    needed = {"nccl": "cuda", "hccl": "npu"}.get(backend or "")
    if needed is not None and device_name() != needed:
        raise ConfigError.of(
            "backend-unsupported",
            f"it drives {needed} devices and this machine's are {device_name()}",
            "leave it out",
            "run.backend",
            backend,
        )
    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype in supported and not supported[dtype]():
        raise ConfigError.of(
            "precision-unsupported",
            f"DeepSpeed's {device_name()} accelerator on this machine cannot train in it",
            "use fp32 or autocast",
            "precision.dtype",
            dtype,
        )


def take_device_of_rank(environment: Mapping[str, str]) -> None:
    """Make this rank's device the current one: by default it is the host's first one. Do nothing on
    processors, or if LOCAL_RANK is no number.

    Raises:
        ConfigError: kind ``more-ranks-than-devices``, reported by the first rank for which this
            host shows no device: the others of its host would wait for it in NCCL.
    """
    if device_name() == "cpu":  # to count CPUs, DeepSpeed starts another program
        return
    local_rank = environment.get("LOCAL_RANK", "0")
    num_devices = get_accelerator().device_count()
    if not local_rank.isdecimal():
        return
    if int(local_rank) < num_devices:
        get_accelerator().set_device(int(local_rank))
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = counted(num_devices, "device")
    if visible is not None:
        devices += f" (CUDA_VISIBLE_DEVICES={visible})"
    error = ConfigError.of(
        "more-ranks-than-devices",
        f"this process sees {devices}, and the first one's number is 0",
        "start no more ranks on a host than it has devices, or show every rank all of them",
        "LOCAL_RANK",
        int(local_rank),
    )
    error.is_of_one_rank = int(local_rank) == num_devices
    raise error


@contextmanager
def process_group(backend: str | None) -> Iterator[None]:
    """Join the process group for the time of the block; a group that exists already is used and
    left as it is.

    Either way this rank's device is its current one: NCCL would otherwise meet every rank of a host
    on device 0.

    After an error the group is not destroyed: that would wait for ranks that may be gone. The
    process is about to end.

    Raises:
        ConfigError: the environment does not name the place where ranks meet.
        PeerLostError: they did not meet there.
        TrainingError: NCCL refuses to connect them.
    """
    warnings.filterwarnings("ignore", message=_OF_BARRIERS)
    if torch.distributed.is_initialized():
        _use_own_device()
        with limiting_groups(), announcing_compilers():
            yield
        return
    if "RANK" not in os.environ:  # no launcher started this process: it is rank 0 of 1
        from framework.system.ports import free_port

        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(single, MASTER_PORT=str(free_port()))
    check_environment(os.environ)
    use_own_cache()
    quiet_cpp_stacks(os.environ)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        remove_dead_buffers()
    if device_name() == "cpu":
        refuse_small_memory(os.environ)
    others = f"the other ranks ({os.environ['WORLD_SIZE']} in all) at {os.environ['MASTER_ADDR']}"
    with (
        explaining(_explain_not_met),
        refusing_what_does_not_compile(),
        redirect_stdout(io.StringIO()),  # DeepSpeed prints that its ops were built, on every rank
        announcing_compilers(),
        waiting(others, limit_seconds=default_pg_timeout.total_seconds()),
    ):
        deepspeed.init_distributed(
            dist_backend=backend or get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            init_method=INIT_METHOD,
        )
    _use_own_device()
    with limiting_groups(), announcing_compilers():
        yield
    gc.collect()  # engines are cyclic: what is left of them must go before the group that they use
    barrier()
    # not torch's function: DeepSpeed keeps groups that it has made
    deepspeed.comm.destroy_process_group()
    # DeepSpeed's handle on the group: with it the group would seem to be still there
    deepspeed.comm.comm.cdb = None
    remove_own_buffers(os.environ)


def _explain_not_met(error: Exception) -> FrameworkError | None:
    """Return the error of ranks that did not meet; None for other errors."""
    from framework.engine.process_group_errors import explain_not_met

    return explain_not_met(error)


def quiet_cpp_stacks(environment: Mapping[str, str]) -> None:
    """Keep torch's warnings from C++ off the terminal. When another rank or the store has gone,
    each has a stack, and one line of the framework explains it. Errors stay, and
    `TORCH_CPP_LOG_LEVEL` decides if it is set.
    """
    if "TORCH_CPP_LOG_LEVEL" in environment:
        return
    with suppress(OSError, ValueError):  # a torch without that flag
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        level.value = max(level.value, _ERRORS_IN_CPP)


def rank() -> int:
    """Return this process's rank."""
    return torch.distributed.get_rank()


def barrier() -> None:
    """Wait for all ranks."""
    torch.distributed.barrier()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks. Collective."""
    values: list[Any] = [None for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(values, value)
    return values


def gather_in(group: Any, value: Any) -> list[Any]:
    """Return the value of every rank of a group, in the order of its ranks. Collective."""
    values: list[Any] = [None for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def from_rank0(value: Any) -> Any:
    """Return the value that rank 0 passed, or raise it if it is an exception, on every rank.
    Collective.
    """
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def refuse_different_ranks(fingerprint: Mapping[str, Any]) -> None:
    """Compare values that must be the same on every rank: hashes first, and the values themselves
    if their hashes differ. Collective.

    Raises:
        ConfigError: on all ranks, naming what differs and the first rank on which it does.
    """
    values = dict(fingerprint)
    digest = hashlib.sha256(repr(values).encode("utf-8", "surrogatepass")).digest()
    if len(set(gather(digest))) == 1:
        return
    all_values = gather(values)
    first = all_values[0]
    for number, other in enumerate(all_values[1:], start=1):
        for name in sorted(first.keys() | other.keys()):
            if other.get(name) != first.get(name):
                raise ConfigError.of(
                    "ranks-differ",
                    f"rank {number} has this, rank 0 has {first.get(name)}",
                    "give every rank the same config and the same data",
                    name,
                    other.get(name),
                )


def own_store(purpose: str) -> Store | None:
    """Return a connection of its own to the store of the process group, with keys of its own: the
    group's connection may be kept by a thread that waits for a peer. None for MPI, which has no
    store. All ranks make the connections of a purpose in one order.
    """
    store: Store | None = torch.distributed.distributed_c10d._get_default_store()
    if store is None:
        return None
    return PrefixStore(f"{purpose}/{next(_numbers_of[purpose])}", store).clone()


def claims_error_report(text: str, *, wait_seconds: float = 3.0) -> bool:
    """Return whether this rank is to report a failure that others may have met too, with the same
    `text`: rank 0 always, or the first rank to claim it if rank 0 does not within `wait_seconds`.

    It blocks for some seconds: the ranks that do not report outlive the one that does. It is no
    collective: ranks that have not failed need not take part.
    """
    if not torch.distributed.is_initialized():
        return True
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"dsf-told-{hashlib.sha256(text.encode()).hexdigest()}"
    is_reported = False
    try:
        if rank() == 0:
            store.set(key, "told")
            others = torch.distributed.get_world_size() - 1
            # the store goes with this rank: it stays until the others know
            _wait_until(lambda: store.add(f"{key}-known", 0) >= others, _OTHERS_KNOW_SECONDS)
            return True
        # no `store.wait`: torch writes pages about one that times out
        is_reported = _wait_until(lambda: store.check([key]), wait_seconds)
        store.add(f"{key}-known", 1)
        is_first = False
        if not is_reported:
            name = str(rank())
            claimed_by = store.compare_set(f"{key}-claimed-by", "", name).decode()
            is_first = bool(claimed_by == name)
        if not is_first:
            # A launcher that sees this rank end stops the rank that reports before it has done so.
            time.sleep(_OTHERS_KNOW_SECONDS + 1.0)
        return is_first
    except RuntimeError:
        # Rank 0 has gone, and the store with it. Unless it was seen to report this failure, every
        # rank reports: twice is better than never.
        return not is_reported


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition, and return whether it held within the seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def open_rank_log(log_file: Path) -> None:
    """Open this rank's log for the framework's messages and DeepSpeed's, of which the terminal
    keeps the errors alone.

    The environment variable DSF_LOG_LEVEL is the least level in the file.

    Raises:
        StorageError: kind ``log-not-opened``.
    """
    try:
        # on hosts that do not share the run folder with rank 0
        log_file.parent.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(log_file.parent)
        handler = _LogFile(log_file)
    except OSError as error:
        raise StorageError(
            f"{log_file}: this log cannot be written: {error.strerror or error} [log-not-opened]",
            is_of_one_rank=True,
        ) from error
    logger = logging.getLogger("DeepSpeed")
    for earlier in list(logger.handlers):
        if isinstance(earlier, logging.FileHandler):
            logger.removeHandler(earlier)
            earlier.close()
        else:
            earlier.setLevel(logging.ERROR)
    write_to(handler)
    file_writer.start()
    logger.addHandler(handler)
    levels = {"debug": logging.DEBUG, "warning": logging.WARNING, "error": logging.ERROR}
    level = levels.get(os.environ.get(LOG_LEVEL, ""), logging.INFO)
    handler.setLevel(level)
    # The file's handler filters by itself; DeepSpeed's own logger is at INFO, or lower.
    logger.setLevel(min(level, logging.INFO))


class _LogFile(logging.FileHandler):
    """A log file for which lines wait while the disk is full, with one warning; `logging` itself
    would print a traceback for each line.

    Lines are formatted here and written by the writing thread, without buffers: a forked process
    would share their locks.
    """

    def __init__(self, path: Path) -> None:
        self._kept = KeptFile(
            path, name=str(path), kind="log-not-written", most_bytes=_MOST_LOG_BYTES
        )
        super().__init__(path, encoding="utf-8")

    def _open(self) -> Any:
        return self._kept.file

    def handle(self, record: logging.LogRecord) -> bool:
        """Format a record and hand it to the writing thread, without the handler's lock: that
        thread would wait for the lock when it warns.
        """
        if not self.filter(record):
            return False
        try:
            line = f"{self.format(record)}\n".encode(errors="replace")
        except Exception as error:
            reason = in_one_line(error, longest=300)
            line = f"a message that cannot be formatted: {reason}\n".encode()
        file_writer.hand_over(partial(self._write, line))
        return True

    def flush(self) -> None:
        """Try again to write the lines that wait."""
        self._kept.flush()

    def close(self) -> None:
        """Close the file, after the lines that were handed over are written."""
        file_writer.settle()
        self._kept.close()
        self.stream = None
        super().close()

    def _write(self, line: bytes) -> None:
        self._kept.append(line)


def _use_own_device() -> None:
    if "LOCAL_RANK" in os.environ:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
