"""This rank's device, before the ranks meet and when they have; and which rank reports
what several of them meet.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed

from framework.engine import distributed
from framework.engine.distributed import claims_error_report, process_group, take_device_of_rank
from framework.errors import ConfigError
from tests.launched import ROOT, run_ranks


class Accelerator:
    """A host of four devices."""

    _name = "cuda"

    def __init__(self) -> None:
        self.chosen: list[int] = []

    def device_count(self) -> int:
        return 4

    def set_device(self, number: int) -> None:
        self.chosen.append(number)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    found = Accelerator()
    monkeypatch.setattr(distributed, "get_accelerator", lambda: found)
    return found


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("local_rank", "tells"), [("4", True), ("6", False)])
def test_a_rank_without_a_device_is_refused_and_reported_once_on_its_host(
    host: Accelerator, local_rank: str, tells: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        take_device_of_rank({"LOCAL_RANK": local_rank, "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert str(refused.value) == (
        f"LOCAL_RANK = {local_rank}: this process sees 4 devices (CUDA_VISIBLE_DEVICES=0,1,2,3), and the first one's "
        "number is 0; "
        "start no more ranks on a host than it has devices, or show every rank all of them [more-ranks-than-devices]"
    )
    assert refused.value.is_of_one_rank is tells


def test_ranks_with_a_device_and_ranks_that_need_none_are_taken(
    host: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_device_of_rank({"LOCAL_RANK": "3"})
    take_device_of_rank({})
    monkeypatch.setattr(host, "_name", "cpu")
    take_device_of_rank({"LOCAL_RANK": "6"})


def test_in_a_group_of_the_scripts_own_a_rank_uses_its_device(
    host: Accelerator, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first collective: NCCL would meet all ranks of the host on device 0."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with process_group(None):
        assert host.chosen == [3]
    assert torch.distributed.is_initialized()


def test_without_a_launcher_the_scripts_device_stays(
    host: Accelerator, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with process_group(None):
        assert host.chosen == []


def test_torchs_warning_of_barriers_is_not_shown(host: Accelerator, group: None) -> None:
    """Its own words, from its source: on one GPU they would be what a beginner sees first."""
    (stated,) = re.findall(
        r'"(barrier\(\): .*)"', inspect.getsource(inspect.unwrap(torch.distributed.barrier))
    )
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with process_group(None):
            warnings.warn(stated, stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert [str(one.message) for one in shown] == ["something else"]


class TestWhoTells:
    """Three ranks, each a thread with the group's store."""

    def tells(
        self, monkeypatch: pytest.MonkeyPatch, *ranks: int, wait_seconds: float = 0.3
    ) -> set[int]:
        store, own, found = torch.distributed.HashStore(), threading.local(), set[int]()
        store.set_timeout(timedelta(seconds=5))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(distributed, "rank", lambda: own.rank)

        def meet(rank: int) -> None:
            own.rank = rank
            if claims_error_report("it is torn", wait_seconds=wait_seconds):
                found.add(rank)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return found

    @pytest.mark.slow
    def test_rank_0_reports_what_all_meet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.tells(monkeypatch, 2, 1, 0, wait_seconds=30.0) == {0}

    @pytest.mark.slow
    def test_one_of_the_others_reports_what_rank_0_does_not_meet(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert len(self.tells(monkeypatch, 1, 2, 3)) == 1
        assert self.tells(monkeypatch, 3) == {3}


def test_before_the_ranks_have_met_every_one_reports() -> None:
    assert "RANK" not in os.environ
    assert claims_error_report("it is torn")


@pytest.mark.slow
def test_ranks_that_agree_send_a_hash_and_no_more(tmp_path: Path) -> None:
    run_ranks(ROOT / "tests/jobs/compare_ranks.py", str(tmp_path), num_ranks=2, cwd=tmp_path)
    for number in range(2):
        found = json.loads((tmp_path / f"{number}.json").read_text(encoding="utf-8"))
        fix = "give every rank the same config and the same data [ranks-differ]"
        assert {name: text for name, (text, _) in found.items()} == {
            "the same": "",
            "in another order": "",
            "another value": f"training samples = 1100: rank 1 has this, rank 0 has 1000; {fix}",
            "a value less": f"evaluation samples = null: rank 1 has this, rank 0 has 10; {fix}",
        }
        sent = {name: sizes for name, (_, sizes) in found.items()}
        assert [size < 100 for size in sent.pop("the same")] == [True]
        assert all(hashed < 100 and whole > 20_000 for hashed, whole in sent.values())
