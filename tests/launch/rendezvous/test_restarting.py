"""Further starts of one job: the nodes that take part in them, and what a new node 0 learns from
the others.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.names import CHECKPOINTS, MANIFEST, tag_of
from framework.config.load import config_from_values
from framework.errors import PeerLostError, RunStopped
from framework.launch.rendezvous import coordinator
from framework.launch.rendezvous.channel import Channel, ConnectionLost
from framework.launch.rendezvous.member import Member
from framework.launch.rendezvous.session import JobOver, Start
from framework.launch.supervision import JobEnd, Restarts
from tests.launch.rendezvous.ends import (
    TOKEN,
    call,
    coordinating,
    hello,
    introduce,
    read,
    run,
    session,
)
from tests.ports import free_ports

pytestmark = pytest.mark.timing
LOST = JobEnd(76, "node 1 (b): lost: silent for 15 s")


def restarts(folder: Path, *, most: int = 5) -> Restarts:
    supervision = {"max_restarts": most, "wait_seconds": 0}
    return Restarts(
        config_from_values({"run": {"output_dir": str(folder)}, "supervision": supervision})
    )


def save(folder: Path, step: int) -> None:
    place = folder / "run" / CHECKPOINTS / tag_of(step)
    place.mkdir(parents=True)
    (place / MANIFEST).touch()


async def enter(port: int, number: int, **stated: Any) -> Channel:
    channel = await call(port)
    await introduce(channel, hello(number, **stated), token=TOKEN)
    return channel


async def leave(channel: Channel, start: Start) -> None:
    channel.close()
    while not start.peers.failures:
        await start.peers.wait(1)


def test_a_spare_takes_the_place_of_a_node_that_is_lost(tmp_path: Path) -> None:
    async def case() -> None:
        async with coordinating(2, token=TOKEN, spares=1, restarts=restarts(tmp_path)) as (
            lead,
            port,
            beginning,
        ):
            first = await enter(port, 1, spares=1)
            await asyncio.sleep(0.3)
            assert not beginning.done()  # the spare is waited for as well, for a while
            spare = await enter(port, 2, spares=1)
            go = await read(first, "go")
            assert (go["epoch"], go["nodes"], go["resumes"]) == (1, [0, 1], False)
            await read(spare, "idle")
            start = await beginning
            save(tmp_path, 10)
            await leave(first, start)
            assert (await lead.decide_restart(LOST)).is_again
            assert "start 2 of at most 6, from step 10" in (await read(spare, "again"))["why"]
            start = await lead.begin()
            go = await read(spare, "go")
            assert (go["epoch"], go["nodes"], go["resumes"]) == (2, [0, 2], True)
            assert (start.topology.nnodes, start.resumes) == (2, True)
            spare.close()

    run(case())


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False])
def test_fewer_nodes_train_where_others_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.setattr(coordinator, "ENOUGH_SECONDS", 0.5)

    async def case() -> None:
        terms = {
            "token": TOKEN,
            "restarts": restarts(tmp_path),
            "fits": lambda count: fits and count == 2,
        }
        async with coordinating(3, **terms) as (lead, port, beginning):
            first, second = await enter(port, 1, nnodes=3), await enter(port, 2, nnodes=3)
            await leave(first, await beginning)
            second.send("ended", code=76)
            assert (await lead.decide_restart(LOST)).is_again
            again = asyncio.ensure_future(lead.begin())
            await asyncio.wait({again}, timeout=30.0 if fits else 1.5)
            assert again.done() == fits
            if not fits:  # it is waited for
                first = await enter(port, 1, nnodes=3)
            start = await again
            assert start.topology.nnodes == (2 if fits else 3)
            await read(second, "again")
            assert (await read(second, "go"))["nodes"] == ([0, 2] if fits else [0, 1, 2])
            first.close()
            second.close()

    run(case())


def test_a_node_that_comes_back_otherwise_is_refused_alone(tmp_path: Path) -> None:
    async def case() -> None:
        async with coordinating(2, token=TOKEN, restarts=restarts(tmp_path)) as (
            lead,
            port,
            beginning,
        ):
            first = await enter(port, 1)
            await leave(first, await beginning)
            assert (await lead.decide_restart(LOST)).is_again
            again = asyncio.ensure_future(lead.begin())
            other = Member(
                session(
                    1,
                    port=port - 1,
                    token=TOKEN,
                    stated=hello(1, facts={"code": "z", "config": "b"}),
                )
            )
            with pytest.raises(Exception, match=r"code = z: node 0 .* has a"):
                await other.begin()
            assert not again.done()
            second = await enter(port, 1)
            await read(second, "go")
            await again
            second.close()

    run(case())


@pytest.mark.slow
def test_a_spare_that_was_not_needed_ends_as_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare waits as long as the others train, and prints one line about it."""

    async def case() -> None:
        async with coordinating(2, token=TOKEN, spares=1, restarts=restarts(tmp_path)) as (
            lead,
            port,
            beginning,
        ):
            first = await enter(port, 1, spares=1)
            spare = Member(session(2, port=port - 1, token=TOKEN, spares=1, deadline_seconds=0.1))
            waiting = asyncio.ensure_future(spare.begin())
            await read(first, "go")
            (await beginning).peers.send("ended", code=0)
            await asyncio.wait({waiting}, timeout=5.0)
            assert not waiting.done()
            ending = asyncio.ensure_future(lead.decide_restart(JobEnd(0)))
            await read(first, "done")
            first.close()
            with pytest.raises(JobOver, match="ended with 0"):
                await waiting
            await spare.close()
            assert not (await ending).is_again

    monkeypatch.setattr("framework.launch.rendezvous.member._AFTER_DEADLINE_SECONDS", 2.0)
    run(case())
    assert capsys.readouterr().err.count("is training, and this node is a spare") == 1


@pytest.mark.slow
def test_a_new_node_0_goes_on_with_what_the_others_know(tmp_path: Path) -> None:
    """It has seen neither the first start nor what was saved before it came."""
    save(tmp_path, 10)
    state = {"number": 4, "idle": 1, "last": "why", "resumes": True}

    async def case() -> None:
        async with coordinating(2, token=TOKEN, restarts=restarts(tmp_path, most=9)) as (
            lead,
            port,
            beginning,
        ):
            channel = await enter(port, 1, state=state)
            go = await read(channel, "go")
            assert (go["resumes"], go["state"]) == (True, state)
            await beginning
            assert (await lead.decide_restart(LOST)).is_again
            assert (
                "start 6 of at most 10, from its checkpoint"
                in (await read(channel, "again"))["why"]
            )
            again = asyncio.ensure_future(lead.begin())
            channel.send("ended", code=76)
            assert (await read(channel, "go"))["state"]["number"] == 5
            await again
            decision = await lead.decide_restart(LOST)
            # three starts without a checkpoint
            assert (decision.is_again, decision.code) == (False, 77)
            assert (await read(channel, "done"))["code"] == 77
            channel.close()

    run(case())


@pytest.mark.slow
def test_a_node_that_comes_back_before_it_is_missed_waits_for_its_place(tmp_path: Path) -> None:
    """Its host lost the power, and the old connection is silent, not closed."""

    async def case() -> None:
        async with coordinating(2, token=TOKEN, restarts=restarts(tmp_path)) as (
            lead,
            port,
            beginning,
        ):
            silent = await enter(port, 1)
            start = await beginning
            returned = Member(session(1, port=port - 1, token=TOKEN))
            coming = asyncio.ensure_future(returned.begin())
            await asyncio.wait({coming}, timeout=1.5)
            assert not coming.done()
            await leave(silent, start)
            assert (await lead.decide_restart(LOST)).is_again
            again = asyncio.ensure_future(lead.begin())
            assert (await coming).peers.epoch == 2
            await again
            await returned.close()

    run(case())


@pytest.mark.parametrize(
    "state",
    [
        {"number": 99},
        {"number": "4", "idle": 1, "last": "", "resumes": False},
        {"number": 4, "idle": 1, "last": "", "resumes": ["model={}"]},
        {"number": 4, "idle": 1, "last": "", "resumes": True, "words": ["model={}"]},
        {"number": -1, "idle": 1, "last": "", "resumes": True},
        {"number": 4, "idle": 1, "last": "x" * 10_000, "resumes": True},
        [],
        None,
    ],
)
def test_what_is_no_state_of_restarts_changes_nothing(tmp_path: Path, state: object) -> None:
    kept = restarts(tmp_path)
    before = kept.state
    kept.restore(state)
    assert kept.state == before


def test_a_member_calls_a_lost_node_0_again_and_sends_what_it_knows(tmp_path: Path) -> None:
    """The start is counted, and a new node 0, which takes all checkpoints for older ones, learns of
    them.
    """
    port = free_ports(2)

    async def case() -> None:
        own = session(1, port=port, token=TOKEN, restarts=restarts(tmp_path))
        job = Member(own)
        for number in range(2):
            async with coordinating(2, token=TOKEN, port=port, restarts=restarts(tmp_path)) as (
                lead,
                _,
                beginning,
            ):
                start = await job.begin()
                assert (await beginning).resumes == (number > 0)
                heard = lead._clients.present[0].hello["state"]
                assert heard.get("number", 0) == number
                if number == 0:
                    save(tmp_path, 10)
                lead._clients.present[0].channel.close()
                while not start.peers.is_cut_off:
                    await start.peers.wait(1)
                assert (await job.decide_restart(LOST)).is_again
        assert own.state["number"] == 2
        await job.close()

    run(case())


def test_a_node_0_that_is_lost_again_and_again_is_given_up(tmp_path: Path) -> None:
    async def case() -> None:
        state = {"number": 6, "idle": 1, "last": "", "resumes": False}
        async with coordinating(2, token=TOKEN, restarts=restarts(tmp_path)) as (
            _,
            port,
            beginning,
        ):
            channel = await enter(port, 1, state=state)
            assert "5 restarts used up" in (await read(channel, "lost"))["why"]
            channel.close()
            with pytest.raises(PeerLostError, match="no-restart"):
                await beginning

    run(case())


def test_fewer_nodes_are_enough_for_a_new_node_0_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "ENOUGH_SECONDS", 0.5)

    async def case() -> None:
        terms = {"token": TOKEN, "restarts": restarts(tmp_path), "fits": lambda count: count == 2}
        async with coordinating(3, **terms) as (_, port, beginning):
            state = {"number": 2, "idle": 0, "last": "", "resumes": True}
            channel = await enter(port, 2, nnodes=3, state=state)
            assert (await read(channel, "go"))["nodes"] == [0, 2]
            await beginning
            channel.close()

    run(case())


@pytest.mark.parametrize("end", [JobEnd(0), JobEnd(137), JobEnd(75)], ids=str)
def test_a_node_that_was_stopped_ends_as_its_ranks_have(end: JobEnd, tmp_path: Path) -> None:
    """The node does not end as one that never began."""
    port = free_ports(2)

    async def case() -> None:
        own = session(1, port=port, token=TOKEN, restarts=restarts(tmp_path))
        job = Member(own)
        async with coordinating(2, token=TOKEN, port=port, restarts=restarts(tmp_path)) as (
            lead,
            _,
            beginning,
        ):
            await job.begin()
            peers = (await beginning).peers
            own.requests.ask("SIGTERM")
            peers.stop = "SIGTERM at node 1"
            ending = asyncio.ensure_future(lead.decide_restart(end))
            assert not (await job.decide_restart(end)).is_again
            await job.close()
            assert not (await ending).is_again

    run(case())


def test_a_node_that_has_lost_its_launcher_is_missed_and_stops_nothing_for_good(
    tmp_path: Path,
) -> None:
    async def case() -> None:
        async with coordinating(2, token=TOKEN, restarts=restarts(tmp_path)) as (
            lead,
            port,
            beginning,
        ):
            first = await enter(port, 1)
            start = await beginning
            first.send("cut", why="the launcher is gone", epoch=1)
            while not start.peers.cut:
                await start.peers.wait(1)
            assert start.peers.any_stop == ""
            assert "launcher is gone at node 1" in (await read(first, "news"))["cut"]
            first.close()
            assert (await lead.decide_restart(JobEnd(76))).is_again

    run(case())


@pytest.mark.slow
def test_a_node_0_that_has_lost_its_launcher_leaves_silently(tmp_path: Path) -> None:
    """The others take it for lost, and go on once it is back."""

    async def case() -> None:
        async with coordinating(2, token=TOKEN, restarts=restarts(tmp_path)) as (
            lead,
            port,
            beginning,
        ):
            first = await enter(port, 1)
            start = await beginning
            reader, writer = os.pipe()
            lead._session.requests.hold(reader)
            os.close(writer)
            lead._session.requests.look()
            start.peers.send("cut", why="the launcher is gone")
            assert not (await lead.decide_restart(JobEnd(76))).is_again
            os.close(reader)
            closing = asyncio.ensure_future(lead.close())
            kinds = []
            with suppress(ConnectionLost):
                while True:
                    kinds.append((await first.receive())["type"])
            assert not {"done", "stop", "lost"} & set(kinds)
            first.close()
            await closing

    run(case())


def test_a_request_between_two_starts_is_one_for_all(tmp_path: Path) -> None:
    async def case() -> None:
        slow = Restarts(
            config_from_values(
                {"run": {"output_dir": str(tmp_path)}, "supervision": {"max_restarts": 5}}
            )
        )
        async with coordinating(2, token=TOKEN, restarts=slow) as (lead, port, beginning):
            channel = await enter(port, 1)
            await beginning
            deciding = asyncio.ensure_future(lead.decide_restart(LOST))
            await read(channel, "again")
            channel.send("stop", why="SIGTERM")
            assert "SIGTERM at node 1" in (await read(channel, "stop"))["why"]
            channel.close()
            with pytest.raises(RunStopped, match="between two starts"):
                await deciding

    run(case())


@pytest.mark.slow
def test_a_node_with_ranks_that_have_not_ended_misses_the_next_start(tmp_path: Path) -> None:
    """Its messages are still read, and it takes part once its ranks have ended."""
    port = free_ports(2)

    async def case() -> None:
        job = Member(session(1, port=port, token=TOKEN, restarts=restarts(tmp_path)))
        async with coordinating(2, token=TOKEN, port=port, restarts=restarts(tmp_path)) as (
            lead,
            _,
            beginning,
        ):
            start = await job.begin()
            await beginning
            assert (await lead.decide_restart(LOST)).is_again
            again = asyncio.ensure_future(lead.begin())
            await asyncio.wait({again}, timeout=1.0)
            assert not again.done()
            start.peers.send("ended", code=76)
            assert (await job.decide_restart(LOST)).is_again
            assert (await job.begin()).peers.epoch == (await again).peers.epoch == 2
            await job.close()

    run(case())


@pytest.mark.slow
def test_a_spare_calls_a_lost_node_0_again_however_long_it_has_waited(tmp_path: Path) -> None:
    port = free_ports(2)

    async def case() -> None:
        spare = Member(session(2, port=port, token=TOKEN, spares=1, deadline_seconds=3.0))
        terms = {"token": TOKEN, "port": port, "spares": 1}
        async with coordinating(2, **terms, restarts=restarts(tmp_path)) as (
            _,
            lead_port,
            beginning,
        ):
            waiting = asyncio.ensure_future(spare.begin())
            first = await enter(lead_port, 1, spares=1)
            await beginning
            await asyncio.sleep(4.0)
            first.close()
        assert not waiting.done()
        async with coordinating(2, **terms, restarts=restarts(tmp_path, most=9)) as (
            _,
            lead_port,
            beginning,
        ):
            state = {"number": 1, "idle": 0, "last": "", "resumes": False}
            first = await enter(lead_port, 1, spares=1, state=state)
            await read(first, "go")
            await asyncio.wait({waiting}, timeout=2.0)
            assert not waiting.done()
            waiting.cancel()
            first.close()

    run(case())
