"""Strangers at the ports of a job: they neither end it nor delay it, and nothing of theirs reaches
a terminal raw.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from framework.config.run_config import RunConfig
from framework.doctor.node.links import Echo
from framework.doctor.node.links import call as call_echo
from framework.errors import ConfigError
from framework.launch.node import read_token
from framework.launch.rendezvous.channel import Channel, ConnectionLost, proof
from framework.launch.rendezvous.coordinator import SPARE_CONNECTIONS
from framework.launch.supervision import Restarts
from tests.launch.rendezvous.ends import TOKEN, call, coordinating, hello, introduce, read, run
from tests.launch.rendezvous.members import Members, ended
from tests.places import ROOT
from tests.ports import free_ports


async def strange(port: int) -> Channel:
    """Connect from an address without a node."""
    _, channel = await asyncio.get_running_loop().create_connection(
        Channel, "127.0.0.1", port, local_addr=("127.0.0.2", 0)
    )
    return channel


@pytest.mark.timing
def test_who_holds_every_place_keeps_no_node_out() -> None:
    """A stranger opens two hundred connections again as soon as they are closed."""

    async def case() -> None:
        async with coordinating(3, token=TOKEN) as (lead, port, beginning):
            begun = time.monotonic()

            async def hold() -> None:
                while True:
                    try:
                        channel = await strange(port)
                        while True:
                            await channel.receive()
                    except (ConnectionLost, OSError):
                        await asyncio.sleep(0)

            holding = [asyncio.ensure_future(hold()) for _ in range(3 * SPARE_CONNECTIONS)]
            await asyncio.sleep(0.5)
            assert len(lead._clients._unknown) >= SPARE_CONNECTIONS  # every place is taken
            nodes = [await call(port), await call(port)]
            for rank, channel in enumerate(nodes, 1):
                await introduce(channel, hello(rank, nnodes=3), token=TOKEN)
            await asyncio.gather(*(read(channel, "go") for channel in nodes))
            await beginning
            assert time.monotonic() - begun < 30  # they hold every place for ever
            for task in holding:
                task.cancel()
            for channel in nodes:
                channel.close()

    run(case())


@pytest.mark.parametrize(
    "forged",
    [
        {"proof": ""},
        {
            "proof": proof(
                "another token of sixteen bytes", role="node", nonces=("a", "n"), content={}
            )
        },
        {"proof": None},
        {"hello": {}},
        {"hello": {"node_rank": 10**9}},
        {"hello": []},
        {"nonce": 1},
    ],
    ids=str,
)
def test_a_hello_without_the_token_ends_nothing(
    forged: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One well-formed HELLO with a rank that is taken ended a job for good."""

    async def case() -> None:
        async with coordinating(2, token=TOKEN) as (_, port, beginning):
            stranger, node = await call(port), await call(port)
            await read(stranger, "challenge")
            stranger.send("hello", **{"hello": hello(0), "nonce": "n", "proof": "0" * 64} | forged)
            for kind in ("stop", "kill", "failure"):
                stranger.send(kind, why="because", code=1)
            with pytest.raises(ConnectionLost):
                await read(stranger, "go")
            await introduce(node, hello(1), token=TOKEN)
            await read(node, "go")
            assert not (await beginning).peers.failures
            node.close()

    run(case())
    assert "turned away" in capsys.readouterr().err


@pytest.mark.parametrize("knows_token", [False, True])
def test_a_running_job_takes_no_second_node_of_a_rank(tmp_path: Path, knows_token: bool) -> None:
    """The listener of a job that starts again by itself stays open."""
    config = RunConfig.model_validate(
        {"run": {"output_dir": str(tmp_path)}, "supervision": {"max_restarts": 3}}
    )

    async def case() -> None:
        async with coordinating(2, token=TOKEN, restarts=Restarts(config)) as (_, port, beginning):
            node = await call(port)
            await introduce(node, hello(1), token=TOKEN)
            await read(node, "go")
            start = await beginning
            other = await call(port)
            nonces = ((await read(other, "challenge"))["nonce"], "n")
            stated = hello(1)
            token = TOKEN if knows_token else ""
            other.send(
                "hello",
                hello=stated,
                nonce="n",
                proof=proof(token, role="node", nonces=nonces, content=stated),
            )
            await read(other, "later" if knows_token else "nogo")
            other.send("stop", why="because")
            node.send("beat")
            await read(node, "beat")
            assert (start.peers.stop, start.peers.failures) == ("", [])
            node.close()

    run(case())


@pytest.mark.parametrize(
    "host", ["x\n\x1b[2Jlaunch: finished", "\u202egpj.exe", "", "a b", "x" * 300]
)
def test_the_name_of_a_host_is_one_that_a_host_can_have(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def case() -> None:
        async with coordinating(2) as (_, port, _beginning):
            stranger = await call(port)
            await read(stranger, "challenge")
            stranger.send("hello", hello=hello(1, host=host), nonce="n", proof="")
            with pytest.raises(ConnectionLost):
                await read(stranger, "welcome")

    run(case())
    stated = capsys.readouterr().err
    assert "does not speak this protocol" in stated
    assert "\x1b" not in stated


def test_silent_callers_take_no_threads_of_an_echo_and_block_no_node() -> None:
    echo = Echo(0, address="127.0.0.1")
    before = threading.active_count()
    callers = [socket.create_connection(("127.0.0.1", echo.port)) for _ in range(600)]
    try:
        assert threading.active_count() == before
        assert call_echo("127.0.0.1", echo.port, token="x" * 16, seconds=2).reason == ""
    finally:
        for caller in callers:
            caller.close()
        echo.close()


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("token", ["", TOKEN])
def test_what_answers_in_the_place_of_node_0_starts_nothing(members: Members, token: str) -> None:
    """The node 0 of an agent is a stranger: every GO that holds a setting, a variable or another
    address is refused.
    """
    words = ["model={target: 'os:system', args: {command: 'touch x'}}"]
    forged = [
        {"words": words},
        {"resumes": words},
        {"environment": {"A": "b"}},
        {"port": 22},
        {"nodes": [1]},
    ]
    sent: list[dict[str, Any]] = []

    async def answer(channel: Channel) -> None:
        with suppress(ConnectionLost):
            channel.send("challenge", nonce="x", token=bool(token))
            nonces = ("x", (await read(channel, "hello"))["nonce"])
            channel.send("welcome", proof=proof(token, role="lead", nonces=nonces, content={}))
            channel.sign(token, is_lead=True, nonces=nonces)
            if len(sent) == len(forged):
                channel.send("stop", why="enough")
                return
            sent.append(forged[len(sent)])
            go = {"epoch": 1, "port": members.port, "resumes": False, "nodes": [0, 1], "state": {}}
            channel.send("go", **go | sent[-1])
            await channel.receive()

    async def case() -> tuple[int, str]:
        tasks = set()
        loop = asyncio.get_running_loop()
        await loop.create_server(
            lambda: Channel(lambda channel: tasks.add(asyncio.ensure_future(answer(channel)))),
            "127.0.0.1",
            members.port + 1,
        )
        agent = members.start(1, terms={"token": token})
        return await asyncio.to_thread(ended, agent)

    code, stated = run(case())
    assert (code, len(sent)) == (75, len(forged)), stated
    assert "node 0: enough" in stated
    assert not [*members.folder.iterdir()]  # no rank has run


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.slow
def test_neither_ranks_nor_ps_see_the_token(tmp_path: Path) -> None:
    """`ps` shows the arguments and variables that a process was started with, even if it deletes
    them afterwards.
    """
    pytest.importorskip("deepspeed")
    words = [
        "launch",
        "node",
        str(ROOT / "ds_configs/quickstart.yaml"),
        "--nnodes",
        "2",
        "--node_rank",
        "1",
        "--master_addr",
        "127.0.0.1",
    ]
    words += ["--master_port", str(free_ports(2)), "--num_gpus", "1"]
    environment = {
        **os.environ,
        "DSF_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "framework", *words],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("waiting for node 0" in line for line in process.stderr)
        shown = [
            Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline")
        ]
        assert b"PYTHONPATH" in shown[0]
        assert not any(TOKEN.encode() in each for each in shown)
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.parametrize("way", ["file", "environment"])
def test_a_token_that_could_be_guessed_is_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("short\n")
    monkeypatch.setenv("DSF_TOKEN", "short")
    with pytest.raises(ConfigError, match=r"fewer than 16 bytes.*\[token-too-short\]"):
        read_token(str(tmp_path / "token") if way == "file" else None)
    assert "DSF_TOKEN" not in os.environ
