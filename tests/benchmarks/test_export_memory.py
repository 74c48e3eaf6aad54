"""Exporting a model costs far less memory than the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.export_memory import measure, write_checkpoint

NUM_BYTES = 384 << 20


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_peak_is_a_small_part_of_the_model(stage: int, tmp_path: Path) -> None:
    """Measured beside it: with mapped files counted it is about once the model, which is what is read of them."""
    found = measure(write_checkpoint(tmp_path, stage=stage, num_bytes=NUM_BYTES), tmp_path / "out")
    assert found["exported_bytes"] > NUM_BYTES
    assert found["peak_bytes_without_mapped_files"] < 0.5 * NUM_BYTES, found
    assert found["peak_bytes"] < 1.5 * NUM_BYTES, found
