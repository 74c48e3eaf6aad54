"""Node 0 while it waits for the others, with their ends in the hands of the test."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from framework.doctor.node.links import Echo
from framework.errors import ConfigError, PeerLostError, Problem, RunStopped
from framework.launch.rendezvous import coordinator
from framework.launch.rendezvous.channel import LARGEST_LINE_BYTES, Channel, ConnectionLost, body_of
from framework.launch.rendezvous.connections import Rejections, TurnedAway
from framework.launch.rendezvous.coordinator import _names, _reported, ahead
from framework.launch.rendezvous.handshake import disagreements, hosts_text, machine_mark
from framework.launch.rendezvous.session import Start
from tests.launch.rendezvous.ends import (
    TOKEN,
    call,
    coordinating,
    hello,
    introduce,
    looked,
    read,
    reset,
    run,
)
from tests.places import ROOT

pytestmark = pytest.mark.timing


@pytest.mark.parametrize("count", [1, 64, 400])
def test_differences_of_any_number_of_nodes_take_one_line(count: int) -> None:
    """A line above the limit would be taken for an invalid message, and the others would wait on
    for node 0.
    """
    hellos = [
        hello(
            rank,
            nnodes=count + 1,
            hosts=f"worker-{rank}",
            facts={"code": f"{rank}" * 1500, "config": f"é{rank}" * 1500},
        )
        for rank in range(count + 1)
    ]
    problems = disagreements(hellos, seen=set())
    assert len(problems) == 3 * min(count, 400)
    reported = _reported(problems)
    assert len(body_of("nogo", problems=reported)) < LARGEST_LINE_BYTES
    assert reported[0]["key"] == problems[0].key
    if len(reported) < len(problems):
        assert reported[-1]["reason"] == f"{len(problems) - len(reported) + 1} more problems"


@pytest.mark.parametrize(("nnodes", "length"), [(512, 20), (512, 255), (513, 20), (9999, 20)])
def test_go_is_one_line_however_many_nodes(nnodes: int, length: int) -> None:
    names = _names(dict.fromkeys(range(nnodes), "h" * length))
    go = {
        "epoch": 1,
        "port": 29500,
        "resumes": True,
        "nodes": [*range(nnodes)],
        "state": {"last": "é" * 1000},
    }
    assert len(body_of("go", **go, **names)) < LARGEST_LINE_BYTES - 100
    assert bool(names) == (nnodes <= 512)


@pytest.mark.parametrize(
    ("first", "second", "reported"),
    [
        ("a,b", "b,a", ("b as number 1", "a as number 1")),
        ("a,b", "a", ("nothing as number 2", "b as number 2")),
        ("a,b", "", ("none", "2 hosts")),
        ("", "a,b", ("2 hosts", "none")),
    ],
)
def test_the_first_difference_of_hostfiles_is_reported(
    first: str, second: str, reported: tuple[str, str]
) -> None:
    (problem,) = disagreements(
        [hello(0, nnodes=2, hosts=first), hello(1, nnodes=2, hosts=second)], seen=set()
    )
    assert problem.value == reported[0]
    assert problem.reason == f"node 0 (llama-train-0) has {reported[1]}"


def test_two_agents_of_one_machine_are_refused_and_two_containers_of_it_are_not() -> None:
    hellos = [
        hello(0, nnodes=3, machine="a"),
        hello(1, nnodes=3, machine="b"),
        hello(2, nnodes=3, machine="a"),
    ]
    (problem,) = disagreements(hellos, seen=set())
    assert (problem.kind, problem.file) == ("hostfile-duplicate-host", "node 2 (llama-train-2)")
    assert "node 0 (llama-train-0) is on the same machine" in problem.reason
    assert (
        disagreements([hello(number, nnodes=3, machine="") for number in range(3)], seen=set())
        == []
    )


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None, reason="no unshare here, which makes namespaces"
)
def test_a_machine_is_one_kernel_with_its_namespaces() -> None:
    """Each container has mounts of its own."""
    words = [
        sys.executable,
        "-c",
        "from framework.launch.rendezvous.handshake import machine_mark as m; print(m())",
    ]
    other = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == machine_mark() != ""
    inside = subprocess.run(
        ["unshare", "--mount", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if inside.returncode:
        pytest.skip("namespaces cannot be made here")
    assert inside.stdout.strip() not in ("", other)


def test_long_hostfiles_are_compared_to_their_end() -> None:
    names = [f"llama-train-{rank:04d}.cluster.local" for rank in range(1000)]
    first, second = hosts_text(names), hosts_text([*names[:900], "other", *names[901:]])
    (problem,) = disagreements(
        [hello(0, nnodes=2, hosts=first), hello(1, nnodes=2, hosts=second)], seen=set()
    )
    assert re.fullmatch(r"node 0 \(llama-train-0\) has 1000 hosts \([0-9a-f]{16}\)", problem.reason)
    assert re.fullmatch(r"1000 hosts \([0-9a-f]{16}\)", str(problem.value))
    (problem,) = disagreements(
        [hello(0, nnodes=2, hosts=hosts_text(names[:9])), hello(1, nnodes=2, hosts=second)],
        seen=set(),
    )
    assert problem.reason.endswith(" has 9 hosts")


@pytest.mark.parametrize(
    ("odd", "file"), [(0, "node 0 (llama-train-0)"), (7, "node 7 (llama-train-7)")]
)
def test_the_odd_one_is_named_on_one_line(odd: int, file: str) -> None:
    hellos = [hello(rank, nnodes=1000) for rank in range(1000)]
    hellos[odd]["facts"]["torch"] = "2.14"
    (problem,) = disagreements(hellos, seen=set())
    assert (problem.file, problem.key, problem.value) == (file, "torch", "2.14")
    assert problem.reason.endswith(" and 996 more have nothing")


def test_many_with_the_same_difference_are_one_line() -> None:
    hellos = [hello(rank, nnodes=9, slots=4 if rank in (2, 5, 6, 8) else 8) for rank in range(9)]
    (problem,) = disagreements(hellos, seen=set())
    assert (
        problem.file
        == "nodes 2 (llama-train-2), 5 (llama-train-5), 6 (llama-train-6), 8 (llama-train-8)"
    )


@pytest.mark.parametrize(
    ("clock", "expected"), [(100.5, 0.0), (101.0, 0.0), (99.0, 0.0), (161.0, 60.0), (39.0, -60.0)]
)
def test_what_the_way_takes_is_no_difference_of_clocks(clock: float, expected: float) -> None:
    assert ahead(clock, sent=99.0, received=101.0) == pytest.approx(expected)


# ---------------------------------------------------------------------------- over real connections


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of nodes of each comparison."""
    compared: list[int] = []

    def compare(hellos: Sequence[Mapping[str, Any]], *, seen: set[str]) -> list[Problem]:
        compared.append(len(hellos))
        return disagreements(hellos, seen=seen)

    monkeypatch.setattr(coordinator, "disagreements", compare)
    return compared


def test_many_that_come_at_once_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are compared at intervals, and when all are there: a comparison of all for each that
    comes takes minutes.
    """
    compared = counted(monkeypatch)

    async def case() -> None:
        async with coordinating(150) as (_, port, beginning):
            channels = [await call(port) for _ in range(149)]
            nodes = enumerate(channels, 1)
            await asyncio.gather(
                *(introduce(channel, hello(rank, nnodes=150)) for rank, channel in nodes)
            )
            for channel in channels:
                assert (await read(channel, "go"))["nodes"] == [*range(150)]
            assert not (await beginning).peers.failures
            for channel in channels:
                channel.close()

    run(case())
    assert len(compared) < 10


def test_a_node_that_dies_at_go_is_lost_to_all() -> None:
    """All the others hear GO first, and then who is lost."""

    async def case() -> None:
        async with coordinating(3) as (_, port, beginning):
            dying, living = await call(port), await call(port)
            await introduce(living, hello(2, nnodes=3))
            await introduce(dying, hello(1, nnodes=3))
            reset(dying)
            await read(living, "go")
            news = await read(living, "news")
            (failure,) = news["failures"]
            assert failure["what"].startswith("node 1 (llama-train-1): lost: ")
            assert (await beginning).peers.ended == {1: 76}
            living.close()

    run(case())


def test_who_refuses_lets_the_others_hang_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats lie unread in the connections of the node that refuses: closing these would take
    back a refusal that is still on its way.
    """
    monkeypatch.setattr(coordinator, "_SEE_OFF_SECONDS", 20.0)

    async def case() -> None:
        async with coordinating(2) as (_, port, beginning):
            channel = await call(port)
            await introduce(channel, hello(1, slots=4))
            channel.send("beat")
            (problem,) = (await read(channel, "nogo"))["problems"]
            assert problem["key"] == "slots"
            await asyncio.sleep(0.5)
            assert not beginning.done()
            channel.close()
            with pytest.raises(ConfigError):
                await beginning

    run(case())


@pytest.mark.slow
def test_others_hear_who_was_turned_away_and_why_node_0_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log of any node may be the one that is read."""
    monkeypatch.setattr(coordinator, "_REPORT_SECONDS", 2.0)

    async def case() -> None:
        async with coordinating(3, token=TOKEN, deadline_seconds=6.0) as (_, port, beginning):
            good, bad, without = await call(port), await call(port), await call(port)
            await introduce(good, hello(1, nnodes=3), token=TOKEN)
            await read(bad, "challenge")
            bad.send("hello", hello=hello(2, nnodes=3), nonce="n", proof="")
            assert (await read(bad, "nogo"))["problems"][0]["kind"] == "token-refused"
            await read(without, "challenge")
            without.send("refused", why="token-refused")
            expected = r"waiting for 1/3 nodes: node 2; turned away: 127\.0\.0\.1 \(token-refused\)"
            beating = asyncio.ensure_future(beat(good))
            while not re.search(expected, (await read(good, "waiting"))["text"]):
                pass  # it came before the others were turned away
            assert re.search(expected, (await read(good, "lost"))["why"])
            beating.cancel()
            good.close()
            with pytest.raises(PeerLostError, match=expected):
                await beginning

    run(case())


async def beat(channel: Channel) -> None:
    """Send heartbeats until the task is cancelled."""
    while True:
        channel.send("beat")
        await asyncio.sleep(0.5)


def test_strangers_are_logged_once_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A port scan must not fill the log of node 0."""
    rejections = Rejections()
    for _ in range(250):
        rejections.add("10.0.0.9", ConnectionLost("it does not speak this protocol"))
    rejections.add("10.0.0.9", ConnectionLost("the connection was closed"))
    rejections.add(
        "10.0.0.8", TurnedAway("it does not know the token of this job", "token-refused")
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert (
        lines[2]
        == "launch: 100 connections from 10.0.0.9 were turned away: it does not speak this protocol"
    )
    assert rejections.reported() == "; turned away: 10.0.0.8 (token-refused)"
    rejections.clear("10.0.0.8")
    assert rejections.reported() == ""


# ------------------------------------------------------------- nodes that have looked at themselves


def test_a_clock_that_is_wrong_refuses_the_start() -> None:
    async def case() -> None:
        async with coordinating(2, stated=looked(0)) as (_, port, beginning):
            channel = await call(port)
            await introduce(channel, looked(1, port=5000) | {"clock": time.time() - 3600})
            channel.send("beat")
            (problem,) = (await read(channel, "nogo"))["problems"]
            assert (problem["kind"], problem["file"]) == ("clock-differs", "node 1 (llama-train-1)")
            channel.close()
            with pytest.raises(ConfigError):
                await beginning

    run(case())


def test_warnings_between_nodes_are_logged_and_stop_no_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def case() -> None:
        echo = Echo(0, address="127.0.0.1")
        async with coordinating(2, stated=looked(0)) as (_, port, beginning):
            channel = await call(port)
            await introduce(
                channel, looked(1, port=echo.port, gpu_names=["A100"]) | {"clock": time.time() + 30}
            )
            channel.send("reached", token=(await read(channel, "reach"))["token"], failed=[])
            await read(channel, "go")
            channel.close()
            assert isinstance(await beginning, Start)
        echo.close()

    run(case())
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split()[-1] for line in warned] == ["[gpus-differ]", "[clock-differs]"]


def test_nodes_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 does not get through to node 1, and node 1 reports that it does not reach the port of
    the ranks.
    """
    monkeypatch.setattr("framework.launch.rendezvous.connectivity._AGAIN_FOR_SECONDS", 0.2)

    async def case() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # without a listener
            async with coordinating(2, stated=looked(0)) as (_, port, beginning):
                channel = await call(port)
                await introduce(channel, looked(1, port=taken.getsockname()[1]))
                order = await read(channel, "reach")
                assert len(order["targets"]) == 1  # the place where ranks meet is known there
                channel.send(
                    "reached",
                    token=order["token"],
                    failed=[[1, "127.0.0.1", "no answer within 4 s"]],
                )
                channel.send("reached", token="of another round", failed=[])
                problems = {
                    (each["kind"], each["file"], each["key"])
                    for each in (await read(channel, "nogo"))["problems"]
                }
                channel.close()
                with pytest.raises(ConfigError):
                    await beginning
        assert problems == {
            ("port-not-reached", "node 0 (llama-train-0)", "node 1 (llama-train-1)"),
            ("port-not-reached", "node 1 (llama-train-1)", f"127.0.0.1:{port - 1}"),
        }

    run(case())


@pytest.mark.parametrize("how", ["close", "stop"])
def test_a_node_that_goes_while_all_call_each_other(how: str) -> None:
    """The node may come again; a node that received a stop request reports it; no node starts."""

    async def case() -> None:
        echo = Echo(0, address="127.0.0.1")
        async with coordinating(2, stated=looked(0)) as (_, port, beginning):
            channel = await call(port)
            await introduce(channel, looked(1, port=echo.port))
            await read(channel, "reach")
            if how == "stop":
                channel.send("stop", why="SIGTERM")
            reset(channel)
            if how == "close":
                channel = await call(port)
                await introduce(channel, looked(1, port=echo.port))
                channel.send("reached", token=(await read(channel, "reach"))["token"], failed=[])
                await read(channel, "go")
                channel.close()
                assert isinstance(await beginning, Start)
            else:
                with pytest.raises(RunStopped, match="node 1"):
                    await beginning
        echo.close()

    run(case())


@pytest.mark.slow
def test_no_node_is_refused_for_a_node_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_SETTLE_SECONDS", 1.0)

    async def case() -> None:
        async with coordinating(3) as (_, port, beginning):
            other, gone = await call(port), await call(port)
            await introduce(other, hello(1, nnodes=3))
            # it differs, and may be one that is being replaced
            await introduce(gone, hello(2, nnodes=3, slots=4))
            await asyncio.sleep(0.5)
            gone.close()
            beating = asyncio.ensure_future(beat(other))
            await asyncio.sleep(1.5)
            assert not beginning.done()
            third = await call(port)
            await introduce(third, hello(2, nnodes=3))
            await read(third, "go")
            beating.cancel()
            other.close()
            third.close()

    run(case())
