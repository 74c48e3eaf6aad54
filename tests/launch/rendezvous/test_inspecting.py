"""Agents of `doctor -H` meet on this machine, and find out what is between them."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from framework.doctor.node.findings import Check
from framework.doctor.node.start import EMPTY_LOOK
from framework.launch.rendezvous import inspecting
from framework.launch.rendezvous.inspecting import inspect
from framework.launch.rendezvous.session import Session
from tests.launch.rendezvous.ends import TOKEN, hello, run, session
from tests.ports import free_ports

pytestmark = pytest.mark.timing
NAMES = ("a", "b", "c")


def inspected(rank: int, port: int) -> Session:
    stated = hello(rank, nnodes=len(NAMES)) | {"look": dict(EMPTY_LOOK)}
    return session(
        rank, nnodes=len(NAMES), port=port, token=TOKEN, stated=stated, deadline_seconds=8.0
    )


def checks_of(ranks: list[int], port: int, marks: list[str]) -> list[list[Check]]:
    async def meet() -> list[list[Check]]:
        return await asyncio.gather(
            *(inspect(inspected(rank, port), NAMES, marks) for rank in ranks)
        )

    return run(meet())


def left(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / f".preflight-{'0' * 16}-{len(list(folder.iterdir()))}"
    path.touch()
    return str(path)


def test_all_call_each_other_and_see_one_folder(tmp_path: Path) -> None:
    marks = [left(tmp_path / "runs") for _ in NAMES]
    first, second, third = checks_of([0, 1, 2], free_ports(2), marks)
    assert [(check.name, list(check.problems)) for check in first] == [
        ("clocks", []),
        ("network", []),
        ("run folder", []),
    ]
    assert first[1].facts == {"connections": 9}
    assert first[2].outcome == f"{tmp_path / 'runs'} is seen by all"
    assert (second, third) == ([], [])


@pytest.mark.slow
def test_a_node_that_is_missing_hides_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspecting, "MEET_SECONDS", 3.0)
    monkeypatch.setattr(inspecting, "_SEE_SECONDS", 0.1)
    marks = [left(tmp_path / "runs"), str(tmp_path / "not" / ".preflight-x"), ""]
    first, _ = checks_of([0, 2], free_ports(2), marks)
    clocks, network, folder = first
    assert (clocks.status, network.problems) == ("ok", [])
    assert network.facts == {"connections": 4}
    (problem,) = folder.problems
    assert (problem.kind, problem.file) == ("run-folder-not-shared", "node b")


@pytest.mark.slow
def test_a_mark_that_comes_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspecting, "_SEE_SECONDS", 30.0)
    marks = [left(tmp_path / "runs") for _ in NAMES]
    late = Path(marks[1])
    late.unlink()
    threading.Timer(1.0, late.touch).start()
    first, *_ = checks_of([0, 1, 2], free_ports(2), marks)
    assert list(first[2].problems) == []


@pytest.mark.slow
def test_a_port_of_the_ranks_that_is_taken_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "MEET_SECONDS", 3.0)
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port)):
        first, _ = checks_of([0, 1], port, [])
    assert [(each.kind, each.value, each.file) for each in first[1].problems] == [
        ("port-not-usable", port, "node a")
    ]


@pytest.mark.slow
def test_a_node_that_does_not_reach_node_0_reports_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_ports(2)
    (checks,) = checks_of([1], port, [])
    (problem,) = checks[0].problems
    assert (problem.kind, problem.file) == ("port-not-reached", "node b")
    assert problem.key == f"127.0.0.1:{port + 1}"
