"""Engines without DeepSpeed: one records the steps of a run, one writes files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from framework.checkpoint.save_stream import OpenFile
from framework.system.files import FileRecord, NewFile

BATCHES = [("batch", True)]


@dataclass
class RecordedStep:
    step: int
    engine: RecordingEngine

    def read(self) -> Mapping[str, float]:
        self.engine.events.append(f"read {self.step}")
        norms = self.engine.norms.get(self.step, {})
        return {"train/loss": self.engine.losses.get(self.step, 1.0)} | norms

    @property
    def may_be_skipped(self) -> bool:
        return self.step in self.engine.skipped


@dataclass
class RecordingEngine:
    """Takes two micro-batches per step, evaluates `BATCHES`, and records the order of both."""

    events: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, dict[str, float]] = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()
    taken: list[int] = field(default_factory=list)
    step: int = 0
    fails_at: int = -1
    before_step: Callable[[], object] = lambda: None

    def before_steps(self, call: Callable[[], object]) -> None:
        self.before_step = call

    def ahead(self, micro_batches: Iterator[Any], *, num_steps: int) -> Iterator[Any]:
        return micro_batches

    def train_step(self, micro_batches: Iterator[Any]) -> RecordedStep:
        self.taken += [next(micro_batches), next(micro_batches)]
        self.before_step()
        self.step += 1
        if self.step == self.fails_at:
            raise RuntimeError("CUDA out of memory")
        self.events.append(f"train {self.step}")
        return RecordedStep(self.step, self)

    can_try_evaluation = False
    tables: ClassVar[Mapping[str, Any]] = {}

    def trying_evaluation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluate(
        self,
        batches: Iterable[tuple[Any, bool]],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Mapping[str, float]:
        assert batches is BATCHES
        if is_stopping():
            return {}
        self.events.append(f"evaluate {self.step}")
        return {"eval/loss": self.step / 10}

    def save(self, folder: Path, tag: str, state: Mapping[str, Any]) -> None:
        raise AssertionError("the Trainer saves through its `save`")

    def load(self, folder: Path, tag: str) -> Mapping[str, Any]:
        raise AssertionError("the Trainer does not load")

    def close(self) -> None:
        raise AssertionError("who made the engine closes it")


def step_file(step: int) -> Mapping[str, bytes]:
    """Return one file with the number of the step."""
    return {"weights": str(step).encode()}


class SavingEngine:
    """Saves the files of `files(step)` in parts, as `torch.save` does.

    Attributes:
        files: the content of each file, by its name in the folder of the checkpoint.
        failure: raised while the first file is written.
        returns_records: whether a save returns records; without them the checkpointer reads the
            files again.
        entries_before: for each save the entries of its folder before it wrote there.
    """

    def __init__(
        self,
        files: Callable[[int], Mapping[str, bytes]] = step_file,
        *,
        part_bytes: int = 70_001,
        failure: BaseException | None = None,
        returns_records: bool = True,
    ) -> None:
        self.files = files
        self.failure = failure
        self.returns_records = returns_records
        self.entries_before: list[list[str]] = []
        self._part_bytes = part_bytes

    def save(
        self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile
    ) -> Mapping[str, FileRecord]:
        place = folder / tag
        place.mkdir(parents=True, exist_ok=True)
        self.entries_before.append(sorted(path.name for path in place.iterdir()))
        records = {}
        for name, content in self.files(state["step"]).items():
            path = place / name
            if path.parent != place:
                path.parent.mkdir(exist_ok=True)
            record = self._write(path, content, open_file)
            if record is not None and self.returns_records:
                records[name] = record
        return records

    def _write(self, path: Path, content: bytes, open_file: OpenFile) -> FileRecord | None:
        # An engine's arrays change after its save: the stream must have copied them.
        array = bytearray(content)
        stream = open_file(path)
        try:
            for start in range(0, len(array), self._part_bytes):
                stream.write(memoryview(array)[start : start + self._part_bytes])
            if self.failure is not None:
                raise self.failure
        except (OSError, RuntimeError):
            stream.abandon()
            raise
        record = stream.close()
        array[:] = bytes(len(array))
        return record

    def ahead(self, micro_batches: Iterator[Any], *, num_steps: int) -> Iterator[Any]: ...
    def train_step(self, micro_batches: Iterator[Any]) -> Any: ...
    def evaluate(self, batches: Iterable[tuple[Any, bool]], **options: Any) -> Any: ...
    def load(self, folder: Any, *, moved: bool) -> Any: ...
    def close(self) -> None: ...
