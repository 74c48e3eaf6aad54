"""`AtomicCheckpointEngine`: DeepSpeed's `CheckpointEngine` interface, by which its engines write
and read the files of a checkpoint.

Writing: every file is new, hashed as it is written and flushed to disk. A failure is kept and
raised at the end, on the rank that has it: raised at once it would leave the others waiting in
DeepSpeed's barrier. With another `open_file` the same bytes go elsewhere: into memory, for a
process that writes them later. Reading: weights only, with the few classes of DeepSpeed's own that
its files hold; any other object in them is refused, and no code of theirs is run.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.utils.serialization import config as save_options

from framework.errors import StorageError, in_one_line
from framework.system.files import FileRecord, NewFile, hash_file, sync_file
from framework.system.limits import ranks_on_host, room

if TYPE_CHECKING:
    from framework.checkpoint.save_stream import OpenFile

# Python 3.11.0 to 3.11.3 pickle the member of an enumeration as a call of `getattr`, which
# `torch.load` refuses with `weights_only`.
ZeroStageEnum.__reduce_ex__ = lambda self, protocol: (ZeroStageEnum, (self.value,))
# What DeepSpeed 0.19.8 puts into its files beside tensors and plain values.
_KNOWN: Final = [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler]
# torch locks host memory for a whole storage, rounds it up to a power of two and keeps it for ever:
# all ranks of a host lock no more than a quarter of the free memory. A larger storage is copied to
# memory that is touched for the first time, on an H200's host at 1.4 GB/s instead of 50.
_ALWAYS_PINNED: Final = 1 << 28
_PINNED_SHARE: Final = 1 / 8
_NO_MEMORY: Final = re.compile(
    r"out of memory|not enough memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE
)


Look = Callable[[Any], object]


def _ignore(content: Any) -> None:
    pass


class AtomicCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine that writes and hashes the files of one save after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "AtomicCheckpointEngine"
        self._root = Path()
        self._records: dict[str, FileRecord] = {}
        self._failure: OSError | None = None
        self._open: OpenFile = NewFile
        self._look: Look = _ignore

    def begin(self, root: Path, *, open_file: OpenFile = NewFile, look: Look | None = None) -> None:
        """Forget the last save. The files of the next one lie in `root`, and are opened with
        `open_file`; `look` is called with the content of each file that this rank writes.
        """
        self._root = root
        self._records = {}
        self._failure = None
        self._open = open_file
        self._look = look or _ignore

    def end(self) -> dict[str, FileRecord]:
        """Return the records of the files that this rank wrote, by name within the root, if
        `open_file` makes any.

        Raises:
            OSError: the first failure of the save.
        """
        if self._failure is not None:
            raise self._failure
        return self._records

    def create(self, info: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def commit(self, info: Any) -> bool:
        """Return True; the Checkpointer publishes the checkpoint when all ranks have written."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, or keep the failure."""
        self.keep_failure(lambda: Path(path).mkdir(parents=True, exist_ok=True))

    def save(self, state_dict: Any, path: str) -> None:
        """Show the content to `look`, then write one file, or keep the failure."""
        self._look(state_dict)

        def write() -> None:
            record = _write(state_dict, Path(path), self._open)
            if record is not None:
                self._records[Path(path).relative_to(self._root).as_posix()] = record

        self.keep_failure(write)

    def keep_failure(self, work: Callable[[], object]) -> None:
        """Call `work`, unless something has failed before; `end` raises its OSError."""
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error

    def add_written(self, folder: Path) -> None:
        """Flush and hash the files of a folder in the root that were written by other code."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            sync_file(path)
            self._records[path.relative_to(self._root).as_posix()] = hash_file(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Map one file; the ranks of a host share its pages. Raises as `read_or_explain`."""
        return read_or_explain(Path(path), map_location=map_location, mmap=True)


def _write(state: Any, path: Path, open_file: OpenFile) -> FileRecord | None:
    """Write one file, and return its record if the stream makes one. Raises OSError, also for want
    of memory.
    """
    stream = open_file(path)
    try:
        is_pinned = open_file is not NewFile and _may_pin(_largest_on_device(state))
        with _save_options(through_pinned_memory=is_pinned):
            # `torch.save` calls no more than `write` and `flush`.
            torch.save(state, stream)  # type: ignore[arg-type]
    except BaseException as error:
        stream.abandon()
        # When its stream has failed, torch's writer fails once more while it closes: the first
        # failure is the reason.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from error
        if isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and _is_out_of_memory(error)
        ):
            reason = f"no memory for a copy of what goes into {path.name}: {in_one_line(error)}"
            raise OSError(errno.ENOMEM, reason) from error
        raise
    return stream.close()


def _may_pin(num_bytes: int) -> bool:
    """Check whether a storage may pass through locked memory; the free memory is measured for large
    ones alone.
    """
    if num_bytes <= _ALWAYS_PINNED:
        return True
    free = room()
    if free is None:
        return False
    return num_bytes <= free.num_bytes * _PINNED_SHARE / ranks_on_host()


def _largest_on_device(value: Any) -> int:
    """Return the size in bytes of the largest storage that is to be copied from a device."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            return 0
        return value.untyped_storage().nbytes()
    if isinstance(value, Mapping):
        return max(map(_largest_on_device, value.values()), default=0)
    if isinstance(value, (list, tuple)):
        return max(map(_largest_on_device, value), default=0)
    return 0


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)) is not None


@contextlib.contextmanager
def _save_options(*, through_pinned_memory: bool) -> Iterator[None]:
    """Set torch's save options: no CRC-32, which `torch.load` does not check; and pinned memory for
    copies from a GPU, or not.
    """
    save = save_options.save
    before = save.compute_crc32, save.use_pinned_memory_for_d2h
    save.compute_crc32 = False
    save.use_pinned_memory_for_d2h = through_pinned_memory
    try:
        yield
    finally:
        save.compute_crc32, save.use_pinned_memory_for_d2h = before


def read_file(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read a file that `torch.save` wrote for DeepSpeed; with `mmap` its tensors are read when they
    are touched.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError: it cannot be read, or holds unknown objects.
    """
    try:
        with torch.serialization.safe_globals(_KNOWN):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (
        pickle.UnpicklingError
    ):  # torch's message does not name the file, and advises to trust it
        raise pickle.UnpicklingError(
            f"{path.name} holds Python objects, which could be programs, or is cut off"
        ) from None


def read_or_explain(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read a file as `read_file` does.

    Raises:
        StorageError: it cannot be read; with its name and the reason, to be put into a sentence.
    """
    try:
        return read_file(path, map_location=map_location, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise StorageError(str(error)) from error
    # A cut-off file alone raises five types of exceptions, by where it was cut.
    except Exception as error:
        raise StorageError(f"{path.name} cannot be read: {in_one_line(error)}") from error


@contextlib.contextmanager
def keeping_copies(files: AtomicCheckpointEngine) -> Iterator[None]:
    """Record the files that are copied with `shutil.copytree` within the block: DeepSpeed so copies
    the files of its NVMe swapper, past its checkpoint engine. Every rank flushes and hashes its
    own: rank 0 alone would take longer than the others wait.
    """
    copytree = shutil.copytree

    def copy(source: Any, target: Any, **options: Any) -> None:
        try:
            files.add_written(Path(copytree(source, target, **options)))
        # One error has a list of all files; the first reason is enough for a sentence.
        except shutil.Error as error:
            raise OSError(errno.EIO, str(error.args[0][0][2])) from error

    def keep(*arguments: Any, **options: Any) -> Any:
        files.keep_failure(lambda: copy(*arguments, **options))

    shutil.copytree = keep
    try:
        yield
    finally:
        shutil.copytree = copytree


def use_atomic_files(engine: deepspeed.DeepSpeedEngine) -> AtomicCheckpointEngine:
    """Make an engine write and read through an AtomicCheckpointEngine, which also keeps a failure
    to copy DeepSpeed's recovery script.
    """
    files = AtomicCheckpointEngine()
    copy = engine._copy_recovery_script
    engine.checkpoint_engine = files
    engine._copy_recovery_script = lambda save_path: files.keep_failure(lambda: copy(save_path))
    return files
