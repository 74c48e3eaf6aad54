"""The port at which ranks are to meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from framework.system import ports
from framework.system.ports import free_port
from tests.ports import free_ports


def given_from(folder: Path, text: str) -> Path:
    path = folder / "ip_local_port_range"
    path.write_text(text)
    return path


def test_it_is_none_that_the_kernel_gives_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ports, "_GIVEN", given_from(tmp_path, "32768\t60999\n"))
    found = {free_port() for _ in range(20)}
    assert len(found) > 1, "two that start at the same moment do not take the same"
    assert min(found) > 60_999
    assert max(found) < 65_535, "agents take the next one as well"


def test_one_that_is_taken_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = free_ports(2)
    monkeypatch.setattr(ports, "_GIVEN", given_from(tmp_path, f"1024 {taken - 1}"))
    monkeypatch.setattr(ports, "_LARGEST", taken + 2)
    monkeypatch.setattr(ports, "_ENOUGH", 2)
    monkeypatch.setattr(ports, "_TRIES", 2)
    with socket.create_server(("127.0.0.1", taken)):
        assert {free_port() for _ in range(20)} == {taken + 1}


@pytest.mark.parametrize("text", ["1024 65535", "9000 65500", "", "a b", None])
def test_the_kernel_chooses_where_its_range_is_almost_all_or_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    monkeypatch.setattr(
        ports, "_GIVEN", given_from(tmp_path, text) if text is not None else tmp_path / "nowhere"
    )
    port = free_port()
    assert 0 < port < 65_536
    with socket.create_server(("", port)):
        pass
