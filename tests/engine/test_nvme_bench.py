"""The sweep over DeepSpeed's settings of `aio`, with a handle whose speed is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

from framework.engine import nvme_bench
from framework.engine.nvme_bench import DEFAULTS, measure, settings

MIB = 1 << 20


class Drive:
    """Reads and writes files; a clock goes on by what a setting would take."""

    def __init__(self, *, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.seconds = 0.0
        self.sizes: list[int] = []

    def perf_counter(self) -> float:
        return self.seconds

    def make_handle(self, *values: Any) -> Handle:
        return Handle(self, dict(zip(DEFAULTS, values, strict=True)))


class Handle:
    """Stands in for DeepSpeed's `aio_handle`: best with two threads, large blocks and overlap."""

    def __init__(self, drive: Drive, aio: dict[str, Any]) -> None:
        self._drive = drive
        self._factor = 1.0
        if aio["intra_op_parallelism"] == 2:
            self._factor *= 2
        if aio["block_size"] == 8 * MIB and aio["overlap_events"] and not aio["single_submit"]:
            self._factor *= 3
        if aio["queue_depth"] == 128:
            self._factor *= 1.1

    def new_cpu_locked_tensor(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(size, dtype=like.dtype)

    def free_cpu_locked_tensor(self, buffer: torch.Tensor) -> None:
        buffer.untyped_storage().resize_(0)

    def pwrite(self, buffer: torch.Tensor, file: str, validate: bool, is_async: bool) -> int:
        assert not Path(file).exists(), "a file that is overwritten may be faster"
        Path(file).write_bytes(b"there")
        self._drive.sizes.append(buffer.numel())
        self._drive.seconds += buffer.numel() / self._drive.bytes_per_second / self._factor
        return 0

    def pread(self, buffer: torch.Tensor, file: str, validate: bool, is_async: bool) -> int:
        assert Path(file).read_bytes() == b"there"
        self._drive.seconds += buffer.numel() / self._drive.bytes_per_second / self._factor / 2
        return 0

    def wait(self) -> int:
        return 1


@pytest.mark.slow
def test_the_fastest_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(bytes_per_second=1e9)
    monkeypatch.setattr(nvme_bench.time, "perf_counter", drive.perf_counter)
    usual, best = measure(tmp_path, drive.make_handle, num_bytes=64 * MIB)
    assert usual.aio == DEFAULTS
    assert usual.write == pytest.approx(1e9)
    assert usual.read == pytest.approx(2e9)
    assert best.aio == {
        "block_size": 8 * MIB,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 2,
    }
    assert best.write == pytest.approx(6.6e9)
    assert list(tmp_path.iterdir()) == [], "what was written is removed"
    assert set(drive.sizes) == {64 * MIB}


@pytest.mark.slow
def test_less_is_written_to_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(bytes_per_second=32 * MIB)
    monkeypatch.setattr(nvme_bench.time, "perf_counter", drive.perf_counter)
    measure(tmp_path, drive.make_handle, num_bytes=128 * MIB)
    assert drive.sizes[0] == 128 * MIB
    assert set(drive.sizes[1:]) == {32 * MIB}


def test_settings_are_those_that_deepspeed_reads() -> None:
    """Every setting is read by DeepSpeed's config under its own name, and the defaults are its."""
    usual = get_aio_config({})
    assert {key: usual[key] for key in DEFAULTS} == DEFAULTS
    found = list(settings())
    assert len(found) == 64
    for aio in found:
        read = get_aio_config({"aio": dict(aio)})
        assert {key: read[key] for key in aio} == aio
        assert list(aio) == list(DEFAULTS)


def test_a_drive_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    class Broken(Handle):
        def pwrite(self, *arguments: Any) -> int:
            return -1

    drive = Drive(bytes_per_second=1e9)
    with pytest.raises(OSError, match="cannot use it"):
        measure(tmp_path, lambda *_: Broken(drive, dict(DEFAULTS)), num_bytes=MIB)
