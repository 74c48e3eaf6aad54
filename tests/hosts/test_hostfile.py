"""Hostfiles: what is accepted means the same to DeepSpeed, and everything else is refused with its
line.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError
from framework.hosts.hostfile import Host, cluster_of, read_hostfile
from framework.plan.cluster import Cluster
from tests.places import ROOT

EXAMPLES = ROOT / "hostfiles"


def kinds(error: ConfigError) -> list[tuple[int, str]]:
    return [(problem.line, problem.kind) for problem in error.problems]


def refused(path: Path) -> list[tuple[int, str]]:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    return kinds(caught.value)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "hosts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_reads_names_slots_comments_and_blank_lines(tmp_path: Path) -> None:
    lines = "# two\n\nworker-0 slots=8\r\n  user@10.0.0.2\t slots=4  # smaller\nme@[fd00::1] slots=1\nfd00::2 slots=1"
    path = write(tmp_path, lines)
    hosts = (
        Host("worker-0", 8),
        Host("user@10.0.0.2", 4),
        Host("me@fd00::1", 1),
        Host("fd00::2", 1),
    )
    assert read_hostfile(path) == hosts


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_shipped_examples_read(name: str) -> None:
    assert cluster_of(read_hostfile(EXAMPLES / name)).world_size >= 1


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("worker", "hostfile-malformed"),
        ("worker slots = 2", "hostfile-malformed"),
        ("worker slots=2x", "hostfile-malformed"),
        ("worker slots=-1", "hostfile-malformed"),
        ("worker slots=2 max_slots=4", "hostfile-malformed"),
        ("worker Slots=2", "hostfile-malformed"),
        ("worker slots=", "hostfile-malformed"),
        ("worker slots=" + "9" * 5000, "hostfile-malformed"),
        ("slots=2", "hostfile-malformed"),
        ("worker:2", "hostfile-malformed"),
        ("worker slots=0", "hostfile-zero-slots"),
        ("worker slots=1025", "hostfile-many-slots"),
        ("localhost slots=2", "hostfile-loopback"),
        ("me@127.0.1.1 slots=2", "hostfile-loopback"),
        ("-oProxyCommand=x slots=2", "hostfile-bad-name"),
        ("wörker slots=2", "hostfile-bad-name"),
        ("a;reboot slots=2", "hostfile-bad-name"),
        ("[worker] slots=2", "hostfile-bad-name"),
        ("[fd00::x] slots=2", "hostfile-bad-name"),
        ("fe80::1%eth0 slots=2", "hostfile-bad-name"),
        ("worker:8 slots=2", "hostfile-bad-name"),
        ("-o@worker slots=2", "hostfile-bad-name"),
        ("@worker slots=2", "hostfile-bad-name"),
        ("[::1] slots=2", "hostfile-loopback"),
    ],
)
def test_refuses_a_line(tmp_path: Path, line: str, kind: str) -> None:
    assert refused(write(tmp_path, f"good slots=1\n{line}\n")) == [(2, kind)]


def test_an_address_with_and_without_brackets_is_one_host(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "[fd00::1] slots=1\nfd00::1 slots=1\n")) == [
        (2, "hostfile-duplicate-host")
    ]


@pytest.mark.parametrize(
    "other",
    ["root@n1", "N1", "n1.", "root@N1.", "n1.cluster.local", "me@n1.cluster.local"],
)
def test_one_host_under_two_spellings_is_refused(tmp_path: Path, other: str) -> None:
    """The devices of the host would be taken twice."""
    for lines in (("n1", other), (other, "n1")):
        path = write(tmp_path, "n0 slots=2\n" + "".join(f"{name} slots=2\n" for name in lines))
        ((line, kind),) = refused(path)
        assert kind == "hostfile-duplicate-host"
        assert line in (2, 3)


@pytest.mark.parametrize(
    "lines",
    [
        ("fd00::1", "[fd00:0:0::1]"),
        ("10.0.0.2", "root@10.0.0.2"),
        ("10.0.0.2", "::ffff:10.0.0.2"),
        ("FD00::A", "fd00::a"),
    ],
)
def test_one_address_under_two_spellings_is_refused(tmp_path: Path, lines: tuple[str, str]) -> None:
    path = write(tmp_path, "".join(f"{name} slots=2\n" for name in lines))
    assert refused(path) == [(2, "hostfile-duplicate-host")]


@pytest.mark.parametrize(
    "names",
    [
        ("n1", "n2"),
        ("n1.a", "n1.b"),
        ("10.0.0.1", "10.0.1.1"),
        ("n1", "n10.a"),
        ("me@n1", "me@n2"),
        ("10", "10.0.0.1"),
    ],
)
def test_hosts_with_names_alike_are_two(tmp_path: Path, names: tuple[str, str]) -> None:
    assert len(read_hostfile(write(tmp_path, "".join(f"{name} slots=2\n" for name in names)))) == 2


def test_names_all_problems_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=1\nb\nc slots=0\na slots=1\n")
    assert refused(path) == [
        (2, "hostfile-malformed"),
        (3, "hostfile-zero-slots"),
        (4, "hostfile-duplicate-host"),
    ]


def test_a_problem_is_one_line_with_place_value_reason_and_fix(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots = 2\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert str(caught.value) == (
        f"{path}:1: line = a slots = 2: there is a space around =; "
        "write one `NAME slots=COUNT` per line, for example worker-0 slots=8 [hostfile-malformed]"
    )


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "hostfile-empty"),
        (b"# nothing\n\n", "hostfile-empty"),
        (b"\xef\xbb\xbfa slots=1\n", "hostfile-bom"),
        ("a slots=1\n".encode("utf-16"), "hostfile-bom"),
        (b"\x7fELF\x02\x00\x00", "hostfile-malformed"),
        (b"a slots=1\n\xff\n", "hostfile-malformed"),
        (b"#" * ((1 << 20) + 1), "hostfile-malformed"),
    ],
)
def test_refuses_a_file(tmp_path: Path, content: bytes, kind: str) -> None:
    assert refused(write(tmp_path, content)) == [(0, kind)]


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path) == [(0, "hostfile-not-a-file")]
    assert refused(tmp_path / "pipe") == [(0, "hostfile-not-a-file")]
    assert refused(tmp_path / "none") == [(0, "hostfile-not-found")]
    assert refused(Path("a" * 5000)) == [(0, "hostfile-unreadable")]


def test_hosts_make_a_cluster() -> None:
    assert cluster_of([Host("a", 4), Host("b", 4)]) == Cluster(num_hosts=2, devices_per_host=4)


def test_uneven_slots_make_none() -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_of([Host("a", 4), Host("b", 2)], path="hosts")
    assert "hosts: slots = a 4, b 2: " in str(caught.value)
    assert "give every host slots=2 [hostfile-mixed-slots]" in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_reads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        assert all(host.slots > 0 for host in read_hostfile(path))


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(
            ["a slots=1", "b slots=02", " c\tslots=3 # x", "#", "", "user@d  slots=4\r"]
        ),
        max_size=8,
    )
)
def test_what_is_accepted_means_the_same_to_deepspeed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    path = tmp_path_factory.getbasetemp() / "same"
    path.write_bytes("\n".join(lines).encode())
    try:
        hosts = read_hostfile(path)
    except ConfigError:
        return
    assert list(runner.fetch_hostfile(str(path)).items()) == [
        (host.name, host.slots) for host in hosts
    ]
