"""Include and exclude: what DeepSpeed's own parser chooses, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.hosts.hostfile import choose_hosts

CASES = [
    {},
    {"include": "a"},
    {"include": "a@c"},
    {"include": "c@a"},
    {"include": "a:0,2"},
    {"include": "b:3@a:1"},
    {"include": "a:2,0@a:1"},
    {"exclude": "b"},
    {"exclude": "a@b"},
    {"exclude": "a:0@b:1@c:3"},
    {"exclude": "b:0,1,2,3"},
    {"num_nodes": 2},
    {"num_gpus": 2},
    {"num_nodes": 1, "num_gpus": 3},
]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=4\nc slots=4\n")
    return str(path)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_as_chosen(hostfile: str, options: dict[str, object]) -> None:
    chosen = choose_hosts(hostfile, **options)  # type: ignore[arg-type]
    expected = {
        "{}": "a0123 b0123 c0123",
        "include a": "a0123",
        "include a@c": "a0123 c0123",
        "include c@a": "a0123 c0123",
        "include a:0,2": "a02",
        "include b:3@a:1": "a1 b3",
        "include a:2,0@a:1": "a012",
        "exclude b": "a0123 c0123",
        "exclude a@b": "c0123",
        "exclude a:0@b:1@c:3": "a123 b023 c012",
        "exclude b:0,1,2,3": "a0123 c0123",
        "num_nodes 2": "a0123 b0123",
        "num_gpus 2": "a01 b01 c01",
        "num_nodes 1 num_gpus 3": "a012",
    }
    key = " ".join(f"{name} {value}" for name, value in options.items()) or "{}"
    assert (
        " ".join(item.host.name + "".join(map(str, item.devices)) for item in chosen)
        == expected[key]
    )
    assert [item.is_first for item in chosen] == [
        item.devices == tuple(range(len(item.devices))) for item in chosen
    ]


@pytest.mark.slow
def test_deepspeed_chooses_the_same(hostfile: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    for options in CASES:
        asked = options.get("include", ""), options.get("exclude", "")
        pool = runner.parse_inclusion_exclusion(runner.fetch_hostfile(hostfile), *asked)
        theirs = runner.apply_num_nodes_and_gpus(
            pool, options.get("num_nodes", -1), options.get("num_gpus", -1)
        )
        ours = {item.host.name: list(item.devices) for item in choose_hosts(hostfile, **options)}  # type: ignore[arg-type]
        assert ours == dict(theirs), options


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"include": "x"}, "--include = x: the hostfile has no such host; it has a, b, c"),
        ({"include": "a:4"}, "--include = a:4: a has devices 0 to 3"),
        ({"exclude": "a:"}, "--exclude = a:: it is not HOST"),
        ({"include": "a:0@b"}, "a 1, b 4"),
        ({"exclude": "a@b@c"}, "no device is left"),
        ({"num_nodes": 4}, "has 3 hosts"),
        ({"num_gpus": 5}, "a has slots=4"),
    ],
)
def test_what_is_refused(hostfile: str, options: dict[str, object], reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_hosts(hostfile, **options)  # type: ignore[arg-type]
    assert reported in str(caught.value).replace('"', "")


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("fd00::1", "fd00::1/0123"),
        ("[fd00::1]@worker", "fd00::1/0123 worker/0123"),
        ("fd00::1:0,2", "fd00::1/02"),
        ("[fd00::1]:2@me@b:1", "fd00::1/2 me@b/1"),
        ("me@b", "me@b/0123"),
        ("me@fd00::12:3", "me@fd00::12/3"),
        ("fd00::1:3@fd00::1:1", "fd00::1/13"),
    ],
)
def test_names_with_colons_and_users(tmp_path: Path, include: str, expected: str) -> None:
    (tmp_path / "hosts").write_text(
        "".join(f"{name} slots=4\n" for name in ("[fd00::1]", "worker", "me@b", "me@[fd00::12]"))
    )
    chosen = choose_hosts(str(tmp_path / "hosts"), include=include)
    assert (
        " ".join(f"{item.host.name}/{''.join(map(str, item.devices))}" for item in chosen)
        == expected
    )


def test_a_thousand_hosts_are_not_listed(tmp_path: Path) -> None:
    slots = dict.fromkeys(range(1000), 2) | {990: 3}
    (tmp_path / "hosts").write_text(
        "".join(f"worker-{number} slots={count}\n" for number, count in slots.items())
    )
    for options in ({"include": "x"}, {"include": "fd00::9"}, {"num_gpus": 4}, {}):
        with pytest.raises(ConfigError) as caught:
            choose_hosts(str(tmp_path / "hosts"), **options)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250 + len(str(tmp_path))
    assert "slots = worker-0 2, worker-990 3: " in str(caught.value)
