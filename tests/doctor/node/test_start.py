"""Report of a node before a start, and the comparison of all reports on node 0."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from framework.config.load import config_from_values
from framework.doctor.node.start import Look, differences, look_before_start
from framework.errors import Problem
from framework.launch.rendezvous.handshake import disagreements, node_facts
from framework.launch.rendezvous.messages import Hello
from framework.plan.cluster import Cluster

CLUSTER = Cluster(num_hosts=2, devices_per_host=1, device="cpu")
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def looks(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Return the reports of two nodes, as their HELLOs bring them to node 0."""
    config = config_from_values({"run": {"name": "r", "output_dir": str(tmp_path)}})
    with ExitStack() as stack:
        reported = [
            stack.enter_context(
                look_before_start(config, CLUSTER, ENVIRONMENT, rank=rank, warn=lambda _: None)
            )
            for rank in (0, 1)
        ]
        assert len(list(tmp_path.iterdir())) == 2
        yield json.loads(json.dumps({"0 (a)": reported[0], "1 (b)": reported[1]}))
    assert not list(tmp_path.iterdir()), "marks go with their block"


def test_equal_nodes(looks: dict[str, Any]) -> None:
    for look in looks.values():
        Look.model_validate(look)
    assert differences(looks, seen=set()) == []


def test_other_code_and_a_folder_that_is_not_shared(looks: dict[str, Any]) -> None:
    looks["1 (b)"] |= {
        "code": {"my_nets": "other"},
        "mark": "/nowhere/.preflight-0123456789abcdef-1",
    }
    found = [(each.kind, each.file) for each in differences(looks, seen=set())]
    assert found == [("code-differs", "node 1 (b)"), ("run-folder-not-shared", "node 1 (b)")]


@pytest.mark.parametrize("path", ["/etc/passwd", "relative/.preflight-0123456789abcdef-1", "\0"])
def test_a_node_cannot_read_any_file(looks: dict[str, Any], path: str) -> None:
    looks["1 (b)"]["mark"] = path
    assert [each.kind for each in differences(looks, seen=set())] == ["run-folder-not-shared"]


def test_what_the_hello_holds_is_reported_once(looks: dict[str, Any]) -> None:
    looks["1 (b)"] |= {"config": "other", "slots": 9, "code": {"framework": "other"}}
    assert differences(looks, seen=set()) == []


def test_a_hello_and_a_look_hash_alike(looks: dict[str, Any], tmp_path: Path) -> None:
    """A difference has one number, with a preflight and without."""
    facts = node_facts(config_from_values({"run": {"name": "r", "output_dir": str(tmp_path)}}))
    look = looks["0 (a)"]
    assert (facts["config"], facts["code"]) == (look["config"], look["code"]["framework"])
    assert {name: facts[name] for name in ("torch", "deepspeed")} == {
        name: look["versions"].get(name, "not installed") for name in ("torch", "deepspeed")
    }


def test_a_run_that_never_saves_needs_no_shared_folder(tmp_path: Path) -> None:
    config = config_from_values(
        {"run": {"output_dir": str(tmp_path)}, "checkpoint": {"at_end": False}}
    )
    with look_before_start(config, CLUSTER, ENVIRONMENT, rank=0, warn=lambda _: None) as reported:
        assert reported["mark"] == ""
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"versions": []},
        {"versions": {"torch": 2}},
        {"gpus": [["a"]]},
        {"mark": None},
        {"refused": [["kind"]]},
        {"refused": [[1, 2, 3]]},
        {"slots": "2"},
        {"slots": True},
        {"device": "x" * 9999},
        {"code": {str(number): "" for number in range(300)}},
    ],
)
def test_what_has_another_shape_is_not_compared(
    looks: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        Look.model_validate(looks["1 (b)"] | change)
    with pytest.raises(ValidationError):
        Look.model_validate([])


def test_a_node_that_is_not_fit_reports_all_reasons_to_all_nodes(
    tmp_path: Path, looks: dict[str, Any]
) -> None:
    """A folder that cannot be written to may be repaired while a platform tries again: training
    ends with 74 for that, not 78.
    """
    config = config_from_values(
        {"run": {"output_dir": "/proc/runs"}, "checkpoint": {"init_weights": "/no/such.pt"}}
    )
    warned: list[Problem] = []
    with look_before_start(
        config, CLUSTER, ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "^lo"}, rank=1, warn=warned.append
    ) as reported:
        Look.model_validate(json.loads(json.dumps(reported)))
    severities = {each.kind: each.severity for each in warned}
    assert severities["run-folder-unwritable"] == "warning"
    assert severities["input-not-found"] == severities["interface-unknown"] == "error"
    looks["1 (b)"] = reported
    found = {each.kind: each for each in differences(looks, seen=set())}
    assert found.keys() == {"input-not-found", "interface-unknown"}
    assert str(found["interface-unknown"]).startswith(
        "node 1 (b): GLOO_SOCKET_IFNAME = ^lo: gloo wants"
    )


def test_warnings_that_do_not_prevent_a_start_are_reported(tmp_path: Path) -> None:
    config = config_from_values({"run": {"output_dir": str(tmp_path)}})
    warned: list[Problem] = []
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "4096"}
    with look_before_start(config, CLUSTER, environment, rank=0, warn=warned.append):
        pass
    assert [problem.kind for problem in warned if problem.kind == "too-many-threads"]


def hello(rank: int, look: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    stated = {
        "protocol": 2,
        "job": "",
        "spares": 0,
        "node_rank": rank,
        "nnodes": 2,
        "slots": 1,
        "master_port": 29500,
        "host": "ab"[rank],
        "machine": "",
        "hosts": "",
        "clock": 0.0,
        "facts": {},
    }
    return stated | changes | ({} if look is None else {"look": look})


def test_node_0_refuses_by_the_reports(looks: dict[str, Any]) -> None:
    first, second = looks.values()
    assert disagreements([hello(0, first), hello(1, second)], seen=set()) == []
    second["code"]["my_nets"] = "other"
    second["versions"]["numpy"] = "0.1"  # a warning, which stops no node
    found = disagreements([hello(0, first), hello(1, second)], seen=set())
    assert {(each.kind, each.file, each.key, each.severity) for each in found} == {
        ("code-differs", "node 1 (b)", "my_nets", "error"),
        ("versions-differ", "node 1 (b)", "numpy", "warning"),
    }
    assert disagreements([hello(0, first), hello(1, None)], seen=set()) == [], (
        "a node that was told not to look is not compared"
    )


def test_a_hello_with_another_look_is_a_strangers(looks: dict[str, Any]) -> None:
    (first, _) = looks.values()
    Hello.model_validate(hello(0, first))
    Hello.model_validate(hello(0, None))
    with pytest.raises(ValidationError):
        Hello.model_validate(hello(0, {"versions": 3}))


def test_a_folder_is_listed_once_however_many_nodes(
    looks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark that was seen is not looked for again: node 0 compares again and again while nodes
    come.
    """
    first, second = looks.values()
    listed: list[Path] = []
    marks = [str(tmp_path / f".preflight-{node:016x}-{node}") for node in range(50)]
    many = {"0 (a)": first} | {
        f"{node} (n)": second | {"mark": path} for node, path in enumerate(marks, 1)
    }
    really = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        listed.append(self)
        return really(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    seen: set[str] = set()
    assert {each.kind for each in differences(many, seen=seen)} == {"run-folder-not-shared"}
    assert listed == [tmp_path]
    for path in marks:
        Path(path).touch()
    assert differences(many, seen=seen) == []
    for path in marks:
        Path(path).unlink()
    assert differences(many, seen=seen) == []
    assert listed == [tmp_path]


def test_another_patch_of_python_is_a_warning(looks: dict[str, Any]) -> None:
    first, second = looks.values()
    first["versions"]["python"], second["versions"]["python"] = "3.11.7", "3.11.9"
    (problem,) = disagreements([hello(0, first), hello(1, second)], seen=set())
    assert (problem.key, problem.severity) == ("python", "warning")
    assert node_facts(config_from_values({}))["python"] == ".".join(map(str, sys.version_info[:2]))
