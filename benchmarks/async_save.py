"""What a checkpoint costs the training loop, written at once and in the background: python -m
benchmarks.async_save

One CPU process, a real DeepSpeed engine at ZeRO stage 1, a state of about 1 GB. In every round,
interleaved: a plain sequential write of the same bytes (8 MiB blocks, then fsync), a save with
`checkpoint.mode: sync`, and one with `async`. Told are the seconds for which the loop stands still,
the writer's bandwidth from the moment the loop goes on to the moment the checkpoint is published
(hashed, flushed, manifest and renames included; the checkpoint before is deleted after that), and
the ratios round by round. The first save in the background also pays for memory that is touched for
the first time; it is told apart. A minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, load_average, machine, spread, write
from framework.checkpoint.async_checkpointer import AsyncCheckpointer
from framework.checkpoint.checkpointer import Checkpointer, Retention, SaveOptions
from framework.checkpoint.manifest import list_checkpoints
from framework.config.load import config_from_values
from framework.engine import random_state
from framework.engine.distributed import gather, process_group
from framework.engine.plain_engine import PlainEngine, build_engine
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import prepare

BLOCK = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--hidden",
        type=int,
        default=5600,
        help="width of the model; the state grows with its square",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="on the disk to be measured"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "async_save.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "load_at_start": load_average()}
    with process_group(None), tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results |= _measure(Path(folder), rounds=arguments.rounds, hidden=arguments.hidden)
    results["load_at_end"] = load_average()
    write(results, arguments.out)
    for name in ("blocked_share_of_sync", "bandwidth_share_of_plain_write"):
        print(f"{name}: {results[name]}")


def _engine(hidden: int) -> tuple[PlainEngine, dict[str, Any], Callable[[], None]]:
    """Return an engine that has taken a step, the description for its checkpoints, and a function
    that takes another step.
    """
    values = {
        "run": {"name": "async_save"},
        "model": {"kind": "mlp", "hidden_sizes": [hidden, hidden, hidden]},
        "zero": {"stage": 1},
        "batch": {"global_size": 16},
        "training": {"max_steps": 10_000},
        "monitors": {"progress": "off"},
    }
    prepared = prepare(config_from_values(values))
    random_state.seed_everything(0)
    engine = build_engine(
        prepared.plan,
        ds_config=prepared.ds_config,
        model=prepared.parts.build_model(),
        task=prepared.parts.task,
    )
    batches = make_train_loader(prepared.plan, prepared.parts.splits, rank=0).stream(0)

    def train() -> None:
        engine.train_step(batches).read()

    train()
    return engine, prepared.description(), train


def _measure(folder: Path, *, rounds: int, hidden: int) -> dict[str, Any]:
    engine, description, train = _engine(hidden)
    options = SaveOptions(
        Retention(1),
        is_main=True,
        gather=gather,
        position=lambda step: {},
        description=description,
    )
    at_once = Checkpointer(engine, folder / "sync", options)
    behind = AsyncCheckpointer(engine, folder / "async", options, rank=0, world_size=1)
    steps = itertools.count(1)
    first_blocked, _ = _save_behind(behind, folder / "async", next(steps))
    times: dict[str, list[float]] = {
        "plain_write": [],
        "sync": [],
        "async_blocked": [],
        "async_written": [],
    }
    for _ in range(rounds):
        train()  # so that no save writes the bytes of the one before
        times["sync"].append(_seconds(lambda: at_once.save(next(steps))))
        files = _files(folder / "sync")
        times["plain_write"].append(_seconds(partial(_write_plainly, folder / "plain", files)))
        num_bytes = sum(map(len, files))
        del files
        for path in (folder / "plain").iterdir():
            path.unlink()
        blocked, written = _save_behind(behind, folder / "async", next(steps))
        times["async_blocked"].append(blocked)
        times["async_written"].append(written)
    behind.close()
    return _reported(times, num_bytes=num_bytes, first_blocked=first_blocked)


def _save_behind(checkpointer: AsyncCheckpointer, folder: Path, step: int) -> tuple[float, float]:
    """Return the seconds for which the loop stands still, and the seconds from then on until the
    checkpoint is published.
    """
    blocked = _seconds(lambda: checkpointer.save(step))
    written = _seconds(lambda: _await_text(folder / "latest", f"global_step{step}"))
    checkpointer.finish()
    return blocked, written


def _await_text(path: Path, text: str) -> None:
    while not path.exists() or path.read_text(encoding="utf-8") != text:
        time.sleep(0.002)


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    assert work() is not False, "a save has failed"
    return time.perf_counter() - began


def _files(checkpoints: Path) -> list[bytes]:
    newest = list_checkpoints(checkpoints)[-1]
    return [(newest.path / name).read_bytes() for name in newest.manifest["files"]]


def _write_plainly(path: Path, files: list[bytes]) -> None:
    path.mkdir(exist_ok=True)
    for number, content in enumerate(files):
        descriptor = os.open(path / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        for start in range(0, len(content), BLOCK):
            assert os.write(descriptor, memoryview(content)[start : start + BLOCK]) > 0
        os.fsync(descriptor)
        os.close(descriptor)


def _reported(
    times: dict[str, list[float]], *, num_bytes: int, first_blocked: float
) -> dict[str, Any]:
    blocked = []
    bandwidth = []
    for blocked_seconds, sync_seconds in zip(times["async_blocked"], times["sync"], strict=True):
        blocked.append(blocked_seconds / sync_seconds)
    for plain_seconds, seconds in zip(times["plain_write"], times["async_written"], strict=True):
        bandwidth.append(plain_seconds / seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    blocked_at_medians = medians["async_blocked"] / medians["sync"]
    bandwidth_at_medians = medians["plain_write"] / medians["async_written"]
    return {
        "state_bytes": num_bytes,
        "rounds": len(blocked),
        "seconds": {name: spread(seconds) for name, seconds in times.items()},
        "first_async_blocked_seconds": round(first_blocked, 4),
        "megabytes_per_second": {
            name: round(num_bytes / 1e6 / medians[name])
            for name in ("plain_write", "sync", "async_written")
        },
        "blocked_share_of_sync": spread(blocked),
        "blocked_share_of_sync_at_medians": round(blocked_at_medians, 4),
        "bandwidth_share_of_plain_write": spread(bandwidth),
        "bandwidth_share_of_plain_write_at_medians": round(bandwidth_at_medians, 4),
        "targets": {"blocked_share_of_sync": 0.15, "bandwidth_share_of_plain_write": 0.8},
    }


if __name__ == "__main__":
    main()
