"""A save may keep ranks waiting longer than anything else may: real groups, whose limit is a
second.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from framework.config.load import config_from_values
from framework.engine import base_engine
from framework.engine.collective_timeout import collective_timeout, gather_from_disks
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.setup.assemble import make_checkpointer
from framework.system.files import NewFile
from tests.launched import ROOT, run_ranks

SHORT, LONG = timedelta(seconds=77), timedelta(hours=3)


@pytest.fixture
def groups() -> Iterator[list[torch.distributed.ProcessGroup]]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=SHORT
    )
    own = torch.distributed.new_group([0], timeout=SHORT)
    patient = torch.distributed.new_group([0], timeout=LONG)
    yield [torch.distributed.group.WORLD, own, patient]
    torch.distributed.destroy_process_group()


def limits(groups: list[torch.distributed.ProcessGroup]) -> list[timedelta]:
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_all_groups_wait_longer_and_only_there(
    groups: list[torch.distributed.ProcessGroup],
) -> None:
    with collective_timeout():
        assert limits(groups) == [timedelta(hours=2), timedelta(hours=2), LONG]
    assert limits(groups) == [SHORT, SHORT, LONG]
    with pytest.raises(OSError, match="full"), collective_timeout():
        raise OSError("full")
    assert limits(groups) == [SHORT, SHORT, LONG]
    assert gather_from_disks(5) == [5]


def test_both_halves_of_a_save_are_given_the_time(
    groups: list[torch.distributed.ProcessGroup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What DeepSpeed waits for, and what the ranks exchange when they have written."""
    seen: list[list[timedelta]] = []
    monkeypatch.setattr(
        base_engine, "save_bytes", lambda *arguments, **options: seen.append(limits(groups))
    )
    monkeypatch.setattr(base_engine, "share_buffers", lambda engine: None)
    engine: Any = SimpleNamespace(
        device=SimpleNamespace(type="cpu"),
        module=torch.nn.Identity(),
        train=lambda: None,
        _copy_recovery_script=None,
        _take_model_step=None,
        optimizer=None,
        global_steps=1,
        zero_optimization_stage=lambda: 1,
    )
    plan = make_plan(
        config_from_values({"run": {"name": "x"}, "training": {"max_steps": 4}}),
        Cluster(device="cpu"),
    )
    task: Any = SimpleNamespace()
    base_engine.BaseEngine(engine, plan, task, names=dict).save(
        tmp_path, "global_step1", {}, open_file=NewFile
    )
    assert seen == [[timedelta(hours=2), timedelta(hours=2), LONG]]
    assert (
        make_checkpointer(engine, tmp_path, plan=plan, description={}, further=dict)._gather
        is gather_from_disks
    )


@pytest.mark.slow
def test_the_others_wait_for_a_rank_that_writes_long(tmp_path: Path) -> None:
    run_ranks(ROOT / "tests/jobs/slow_writer.py", num_ranks=2, cwd=tmp_path)
