"""Every call of a save by DeepSpeed itself goes wrong once: real_save_faults.py FOLDER STAGE
FAULT... Prints what each came to.

One rank in one process, which goes on after each fault: an end is an exception that nothing
catches, after which no call that changes a file system works any more, as in
`tests.checkpoint.test_every_fault`.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine
import pytest
import torch

from framework.checkpoint.checkpointer import Checkpointer
from framework.config.load import config_from_values
from framework.engine.distributed import open_rank_log, process_group
from framework.setup.assemble import assemble_engine
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import prepare
from tests.checkpoint.test_every_fault import (
    CONFIG,
    LAYOUT,
    OPTIONS,
    Ended,
    Faults,
    faults,
    fresh_start,
)

CONFIG_HERE = {
    "model": {"kind": "mlp", "hidden_sizes": [4]},
    "batch": {"global_size": 8},
    "monitors": {"tensorboard": False},
    "training": {"max_steps": 1},
}


def main() -> None:
    folder, stage, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    folder.mkdir()
    torch.set_num_threads(1)
    with process_group(None), pytest.MonkeyPatch.context() as patch:
        prepared = prepare(config_from_values({**CONFIG_HERE, "zero": {"stage": stage}}))
        open_rank_log(folder / "log.txt")
        engine = assemble_engine(prepared)
        engine.train_step(make_train_loader(prepared.plan, prepared.parts.splits, rank=0).stream())
        saver = Saver(engine, patch)
        for step in (10, 20):
            assert saver.checkpointer(folder / "prepared").save(step)
        count, log = saver.count(folder)
        outcomes = {
            kind: [saver.run(folder, number, kind) for number in range(count)] for kind in kinds
        }
        engine.close()
    print(json.dumps({"calls": log, "outcomes": outcomes}))


class Saver:
    """Saves step 30 of an engine, once for every call that it makes."""

    def __init__(self, engine: Any, patch: pytest.MonkeyPatch) -> None:
        self._engine, self._patch = engine, patch

    def checkpointer(self, folder: Path) -> Checkpointer:
        folder.mkdir(exist_ok=True)
        return Checkpointer(
            self._engine,
            folder,
            replace(OPTIONS, description={"layout": LAYOUT, "config": CONFIG}),
        )

    def count(self, folder: Path) -> tuple[int, list[str]]:
        run = shutil.copytree(folder / "prepared", folder / "counted")
        with faults(self._patch) as found:
            self._count_copies(found)
            assert self.checkpointer(run).save(30)
        assert fresh_start(run) == 30
        return found.count, found.log

    def run(self, folder: Path, number: int, kind: str) -> tuple[bool, int]:
        """Whether it was reported as written, and which step a new start finds."""
        run = shutil.copytree(folder / "prepared", folder / f"{kind}-{number}")
        written = False
        with faults(self._patch, at=number, fault=kind) as found:
            self._count_copies(found)
            try:
                written = self.checkpointer(run).save(30)
            except BaseException as error:
                # torch's writer, whose stream has ended, fails in words of its own while it closes.
                if not found.is_over or not isinstance(error, (Ended, RuntimeError)):
                    raise
        assert found.count > number, "the fault was met"
        reached = fresh_start(run)
        shutil.rmtree(run)
        return written, reached

    def _count_copies(self, found: Faults) -> None:
        """DeepSpeed copies its script beside the checkpoint; undone with the rest, by the next
        fault's own.
        """
        self._patch.setattr(
            deepspeed.runtime.engine, "copyfile", found.wrap("copyfile", shutil.copyfile)
        )


if __name__ == "__main__":
    main()
