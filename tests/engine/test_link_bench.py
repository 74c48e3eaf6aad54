"""The bandwidth measurement: each pair once, no rank in two at a time; files of any size."""

from __future__ import annotations

import io
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports torch


@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_once_and_no_rank_twice_at_a_time(count: int) -> None:
    from framework.engine.link_bench import rounds

    played = list(rounds(count))
    assert sorted(pair for together in played for pair in together) == sorted(
        combinations(range(count), 2)
    )
    for together in played:
        assert len({one for pair in together for one in pair}) == 2 * len(together)


@pytest.mark.parametrize("num_mib", [1, 4, 6])
def test_all_bytes_that_are_counted_are_written(
    num_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from framework.engine import link_bench

    written: list[int] = []
    real_open = Path.open

    def counting_open(path: Path, mode: str, **options: Any) -> Any:
        file = real_open(path, mode, **options)
        if mode != "wb":
            return file
        assert isinstance(file, io.BufferedWriter)
        real_write = file.write

        class Counting:
            def __enter__(self) -> Counting:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, data: Any) -> int:
                written.append(len(data))
                return real_write(data)

        return Counting()

    monkeypatch.setattr(Path, "open", counting_open)
    assert link_bench._write_and_read(tmp_path, num_mib << 20)["write"] > 0
    assert sum(written) == num_mib << 20
