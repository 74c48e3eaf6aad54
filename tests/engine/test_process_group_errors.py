"""Ranks that do not meet: torch's own errors, each from a real attempt, become one line with the
address.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from framework.engine.group_store import check_environment
from framework.engine.process_group_errors import explain_not_met
from framework.errors import ConfigError, PeerLostError, explaining
from tests.launched import run_ranks
from tests.places import ROOT
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timing]

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SOON = timedelta(seconds=0.3)


def meet(monkeypatch: pytest.MonkeyPatch, *, rank: int, host: str = "127.0.0.1", port: int) -> str:
    """What a rank of two says that goes there alone."""
    for name, value in (
        GOOD | {"RANK": str(rank), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerLostError) as reported, explaining(explain_not_met):
        TCPStore(host, port, 2, is_master=rank == 0, timeout=SOON)
    assert reported.value.exit_code == 76
    assert reported.value.is_of_one_rank
    line = str(reported.value)
    assert "\n" not in line
    assert line.startswith(f"rank {rank} of 2: ")
    return line


@pytest.fixture
def free_port() -> int:
    return free_ports(1)


def test_rank_0_waits_alone(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    line = meet(monkeypatch, rank=0, port=free_port)
    assert f"only 1 of 2 ranks came to 127.0.0.1:{free_port} within" in line
    assert line.endswith("[rendezvous-incomplete]")


def test_no_rank_0_is_there(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    line = meet(monkeypatch, rank=1, port=free_port)
    assert f"no rank 0 answers at 127.0.0.1:{free_port}" in line
    assert line.endswith("[rendezvous-unreachable]")


def test_a_name_of_no_host(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    line = meet(monkeypatch, rank=1, host="nobody.invalid", port=free_port)
    assert f"no rank 0 answers at nobody.invalid:{free_port}" in line


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        line = meet(monkeypatch, rank=0, port=port)
    assert f"port {port} on {socket.gethostname()} is in use" in line
    assert line.endswith("[rendezvous-port-in-use]")


def test_ranks_that_meet_and_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's own words, as two hosts that call themselves 127.0.0.1 get them."""
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    stated = "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
    line = r"^rank 1 of 2: .*127\.0\.0\.1:29500 cannot .*GLOO_SOCKET_IFNAME.*\[rendezvous-failed\]$"
    with pytest.raises(PeerLostError, match=line), explaining(explain_not_met):
        raise RuntimeError(stated)


def test_what_has_nothing_to_do_with_it_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^out of memory$"), explaining(explain_not_met):
        raise RuntimeError("out of memory")


def test_an_environment_that_is_whole_is_taken() -> None:
    check_environment(GOOD)
    check_environment({})  # no launcher: one process


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"RANK": "2"}, "RANK = 2"),
        ({"RANK": "x"}, "RANK = x"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: "),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: "),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR = "),
        ({"MASTER_PORT": None}, "MASTER_PORT: "),
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT = tcp"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT = 0: "),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536"),
    ],
)
def test_an_environment_in_which_ranks_cannot_meet_is_refused(
    changed: dict[str, str | None], key: str
) -> None:
    environment = {name: value for name, value in (GOOD | changed).items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        check_environment(environment)
    assert str(refused.value).startswith(key)
    assert str(refused.value).endswith("[rendezvous-environment]")
    assert len(refused.value.problems) == 1


def test_runs_of_one_script_meet_anew_each_time_and_leave_nothing(tmp_path: Path) -> None:
    """In a store as torchrun's, which outlives a group, the second or third run found the addresses
    of the first.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = ROOT / "tests/jobs/many_fits.py"
    printed = run_ranks(script, str(store.port), "3", "0", "1", "2", num_ranks=2, cwd=tmp_path)
    lines = printed.splitlines()
    losses = [float(line.split()[1]) for line in lines if line.startswith("loss ")]
    assert len(losses) == 4, printed
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert [line for line in lines if line.startswith("left ")] == ["left 0"] * 4
