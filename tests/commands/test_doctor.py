"""`doctor` on this machine, as a person and as a tool call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.commands import doctor as command
from framework.doctor.node.findings import Check, Node
from framework.launch import local
from framework.launch.options import parse
from tests.doctor.node.broken import QUICKSTART, doctor, findings
from tests.launched import job_environment


@pytest.mark.slow
def test_json_has_what_tools_need() -> None:
    done = doctor(QUICKSTART, "--num_gpus", "2", "--json", "zero.stage=1")
    found = json.loads(done.stdout)
    (node,) = found["nodes"]
    assert done.returncode == (0 if found["ok"] else 78)
    assert {"versions", "code", "config", "device", "slots", "clock", "addresses"} <= node[
        "facts"
    ].keys()
    assert node["facts"]["slots"] == 2
    assert {each["name"] for each in node["checks"]} >= {
        "shared memory",
        "compiled ops",
        "run folder",
    }
    assert all(
        {"id", "severity", "node", "found", "fix", "text"} <= each.keys()
        for each in found["findings"]
    )


@pytest.mark.slow
def test_what_is_wrong_with_the_config_does_not_hide_the_machine(tmp_path: Path) -> None:
    done = doctor(QUICKSTART, "--num_gpus", "7", before=["ulimit -n 200"])
    assert done.returncode == 78
    assert "[batch-not-divisible]" in done.stdout
    assert "[nofile-low]" in done.stdout
    assert "not fit to train: 2 errors" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kind"),
    [(["no/such.yaml"], "config-not-found"), (["-H", "no/such"], "hostfile-not-found")],
)
def test_files_that_are_not_there(words: list[str], kind: str) -> None:
    assert kind in findings(*words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--num_gpus", "0"],
        ["zero.stage=1"],
        ["--nonsense"],
        ["--include", "a"],
        ["-H", "x", "--include", "a", "--exclude", "b"],
        ["-H", "x", "--include", "a", "--num_nodes", "1"],
        ["-H", "x", "--master_addr", "a:1"],
        ["--master_port", "29500"],
    ],
)
def test_a_wrong_command_line(words: list[str]) -> None:
    done = doctor(*words)
    assert done.returncode == 64
    assert not done.stdout
    assert "Traceback" not in done.stderr


# As sshd does it, but here: the words behind the host are a line for the login shell.
SSH = """#!/bin/sh
[ "$1" = -G ] && exit 1
while [ "$1" != -- ]; do shift; done
shift 2
exec sh -c "$*"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "names", "slots", "visible"),
    [
        (["--include", "b:1,2"], ["b"], 2, "1,2"),
        (["--exclude", "a@b"], ["c"], 3, None),
        (["--num_nodes", "1"], ["a"], 3, None),
        (
            ["--num_nodes", "2", "--nproc-per-node", "1", "--master_addr", "127.0.0.1"],
            ["a", "b"],
            1,
            None,
        ),
    ],
)
def test_it_looks_at_the_hosts_that_a_start_would_take(
    words: list[str],
    names: list[str],
    slots: int,
    visible: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "hosts").write_text("a slots=3\nb slots=3\nc slots=3\n")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    arguments = command._parser().parse_intermixed_args(["-H", str(tmp_path / "hosts"), *words])
    asked = command._options(arguments)
    # what is there is not known here
    by_kind = {"CUDA_VISIBLE_DEVICES": visible, "ASCEND_RT_VISIBLE_DEVICES": visible}
    assert asked.own_variables == ({"b": by_kind} if visible else {})
    assert asked.addresses == (["127.0.0.1", "b"] if "--master_addr" in words else names)
    if len(names) == 1:
        report, _ = command.look(asked)
        assert [(node.name, node.facts["slots"]) for node in report.nodes] == [(names[0], slots)]


@pytest.mark.parametrize(
    ("host", "words", "here"),
    [
        ("localhost", [], True),
        ("127.0.0.1", [], True),
        ("LOCALHOST", [], True),
        ("me@localhost", [], False),
        ("worker-0", [], False),
        ("localhost", ["--ssh_args", "-p 2222"], False),
    ],
)
def test_this_machine_is_known_as_a_start_knows_it(
    host: str, words: list[str], here: bool, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(f"{host} slots=2\n")
    where = ["-H", str(tmp_path / "hosts"), *words]
    asked = command._options(command._parser().parse_intermixed_args(where))
    assert ([item.host.name for item in asked.chosen] == []) == here
    assert (local._alone_in_hostfile(parse(["a.yaml", *where])) is not None) == here


@pytest.mark.slow
def test_torch_is_not_imported(tmp_path: Path) -> None:
    look = (
        "import sys; from framework.cli import main; main(['doctor', sys.argv[1], '--num_gpus', '2']); "
        "print(*({'torch', 'deepspeed', 'numpy'} & sys.modules.keys()), 'end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, QUICKSTART],
        env=job_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1].strip() == "end"


@pytest.mark.slow
def test_the_users_own_module_is_hashed_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text("class Net: pass\n")
    words = (QUICKSTART, "--num_gpus", "1", "--json", "model={target: 'my_nets:Net'}")
    first = json.loads(doctor(*words, cwd=tmp_path).stdout)["nodes"][0]["facts"]
    (tmp_path / "my_nets.py").write_text("class Net: depth = 2\n")
    second = json.loads(doctor(*words, cwd=tmp_path).stdout)["nodes"][0]["facts"]
    assert first["code"]["framework"] == second["code"]["framework"]
    assert first["code"]["my_nets"] != second["code"]["my_nets"]
    assert first["config"] == second["config"]


def test_checks_travel_between_hosts() -> None:
    for check in Node("a", (Check("x", "y", (), {"clock": 1.5}),)).checks:
        assert Check.from_dict(json.loads(json.dumps(check.to_dict()))) == check
