"""The ssh launcher: what goes over the connection, which host's exit code is returned, and the life
line. `ssh` here is a script that runs the command on this machine; tests on hosts of their own use
the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from framework.errors import ConfigError, UsageError
from framework.hosts.hostfile import ChosenHost, Host
from framework.hosts.topology import HostTopology
from framework.launch.inspection import inspection_command
from framework.launch.local import launch
from framework.launch.options import LaunchOptions, parse_node
from framework.launch.ssh import (
    agent_command,
    ends_reported,
    job_code,
    known_addresses,
    launch_over_ssh,
    passed_on,
    refuse_one_host_twice,
    split_ssh_args,
    ssh_command,
)
from framework.launch.supervision import HOST_LOST
from tests.launch.rendezvous.members import ROOT, Members, ended, restore_signals

pytestmark = pytest.mark.timing

TOPOLOGY = HostTopology(2, 2, 0, "10.0.0.1", 29500)
# As sshd does it: the arguments are joined with spaces and handed to the login shell.
SSH = """#!/bin/sh
[ "$1" = -G ] && exit 1
while [ "$1" != -- ]; do shift; done
host=$2; shift 2
[ "$host" = unreachable ] && { echo "ssh: connect to host unreachable port 22: No route to host" >&2; exit 255; }
exec sh -c "$*"
"""
PROGRAM = """
import sys
from framework.hosts.hostfile import Host
from framework.launch.ssh import ssh_command
from framework.launch.ssh import Agents
from framework.launch.stop_requests import StopRequests
programs = zip(sys.argv[1::2], sys.argv[2::2])
commands = [(name.rpartition("@")[2], ssh_command(Host(name, 1), [sys.executable, "-uc", program], ssh_args=""))
            for name, program in programs]
with StopRequests().handling_signals() as requests:
    sys.exit(Agents(commands, {"A": "secret"}).run(requests))
"""
SUPERVISED = """
import framework.launch.ssh as ssh
from framework.config.load import config_from_values
from framework.launch.supervision import Restarts
ssh._CALL_AGAIN_SECONDS = 0.1
ssh._REACHED_SECONDS = 45.0
values = {{"run": {{"output_dir": {folder!r}}}, "supervision": {{"max_restarts": {most}}}}}
restarts = Restarts(config_from_values(values))
"""
SUPERVISED += (
    PROGRAM.replace("{", "{{")
    .replace("}", "}}")
    .replace('"secret"}})', '"secret"}}, restarts=restarts)')
)
IMPATIENT = "import framework.launch.ssh as ssh; ssh._WAIT_SECONDS = 1.0\n" + PROGRAM
SAYS = "import sys, json; print(json.loads(sys.stdin.readline())['environment']['A'] == 'secret'); sys.exit({})"
# Ends as an agent does on request, or when its life line is cut.
WAITS = """
import json, sys
sys.stdin.readline()
print("up")
line = sys.stdin.readline()
kind = json.loads(line)["type"] if line else "nothing more"
print("told", kind)
sys.exit(75 if kind == "stop" else 76)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    script = tmp_path / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def start(path: str, *words: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restore_signals,
    )


def until(process: subprocess.Popen[str], *lines: str) -> None:
    assert process.stdout is not None
    assert sorted(process.stdout.readline().strip() for _ in lines) == sorted(lines)


@pytest.mark.slow
def test_lines_bear_the_name_of_their_host_and_all_codes_are_printed(path: str) -> None:
    process = start(path, "a", SAYS.format(0), "me@b", SAYS.format(0))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["a: True", "b: True"]
    assert err.splitlines()[-1].endswith("ended with 0; the job ends with 0")


@pytest.mark.slow
def test_the_first_cause_is_the_code_of_the_job(path: str) -> None:
    process = start(path, "a", SAYS.format(137), "b", WAITS)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "b: told lost" in out


@pytest.mark.slow
def test_a_host_that_is_not_reached_ends_the_job(path: str) -> None:
    process = start(path, "unreachable", WAITS, "b", WAITS)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 76
    assert "unreachable: ssh: connect to host" in err
    assert "unreachable: ssh ended with 255; the host was not reached, or was lost" in err
    assert "b: told lost" in out


@pytest.mark.slow
def test_a_request_is_passed_on(path: str) -> None:
    process = start(path, "a", WAITS, "b", WAITS)
    until(process, "a: up", "b: up")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert sorted(out.splitlines()) == ["a: told stop", "b: told stop"]


# Notes each start, with the state that came, and ends with the code of the turn.
TURNS = """
import json, pathlib, sys
order = json.loads(sys.stdin.readline())
mark = pathlib.Path({folder!r}, {name!r})
turn = len(mark.read_text().splitlines()) if mark.exists() else 0
with mark.open("a") as file:
    file.write(json.dumps(order.get("restarts")) + chr(10))
code = {codes!r}[turn]
if code is None:
    sys.stdin.readline()
sys.exit(code)
"""


def supervised(
    path: str, folder: Path, most: int = 3, **codes: list[int | None]
) -> tuple[int, str]:
    """Run agents that end with these codes, one after the other; None: as soon as a line comes."""
    programs = []
    for name, ends in codes.items():
        programs += [name, TURNS.format(folder=str(folder), name=name, codes=ends)]
    process = start(path, *programs, program=SUPERVISED.format(folder=str(folder), most=most))
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def orders(folder: Path, name: str) -> list[dict[str, object] | None]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_lost_host_is_called_again_with_what_is_known_of_the_restarts(
    path: str, tmp_path: Path
) -> None:
    code, err = supervised(path, tmp_path, a=[HOST_LOST, HOST_LOST, 0])
    assert code == 0, err
    once = {"number": 1, "idle": 0, "last": "", "resumes": False}
    assert orders(tmp_path, "a") == [None, once, once], "one loss, until it was reached"
    assert err.count("a: ssh ended with 255; the host was not reached, or was lost") == 2


@pytest.mark.slow
def test_a_host_that_is_lost_more_often_than_the_job_may_start_again_is_given_up(
    path: str, tmp_path: Path
) -> None:
    program = SUPERVISED.replace("ssh._REACHED_SECONDS = 45.0", "ssh._REACHED_SECONDS = 0.0")
    turns = TURNS.format(folder=str(tmp_path), name="a", codes=[HOST_LOST] * 9)
    process = start(path, "a", turns, program=program.format(folder=str(tmp_path), most=2))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 76, err
    assert [state and state["number"] for state in orders(tmp_path, "a")] == [None, 1, 2]


@pytest.mark.slow
def test_the_end_of_node_0_is_that_of_the_job_although_a_host_is_lost(
    path: str, tmp_path: Path
) -> None:
    code, err = supervised(path, tmp_path, a=[0], b=[HOST_LOST, None])
    assert code == 0, err
    code, err = supervised(path, tmp_path, c=[70], d=[None], e=[HOST_LOST, None])
    assert code == 70, err


def test_a_host_that_is_refused_ends_the_wait_for_it(path: str, tmp_path: Path) -> None:
    """Another start on that host would end the same way."""
    code, err = supervised(path, tmp_path, a=[None, 76], b=[78])
    assert code == 78, err


@pytest.mark.slow
def test_what_holds_an_output_open_does_not_hold_the_launcher(path: str) -> None:
    begun = time.monotonic()
    process = start(
        path, "a", "import subprocess; subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL)"
    )
    try:
        assert process.wait(25) == 0
    finally:
        process.kill()
    assert time.monotonic() - begun < 25


@pytest.mark.slow
def test_who_insists_does_not_wait_for_an_agent_that_hangs(path: str) -> None:
    process = start(
        path,
        "a",
        "import sys; sys.stdin.readline(); print('up'); sys.stdin.read()",
        program=IMPATIENT,
    )
    until(process, "a: up")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert any("passing it on" in line for line in process.stderr)
    time.sleep(2.5)
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=25)
    finally:
        process.kill()
    assert process.returncode == 76


@pytest.mark.slow
def test_a_reader_that_is_gone_changes_no_code(path: str) -> None:
    process = start(path, "a", SAYS.format(70))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 70


@pytest.mark.slow
def test_two_users_of_one_host_are_two_nodes(path: str) -> None:
    process = start(path, "alice@h", SAYS.format(0), "bob@h", SAYS.format(70))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 70
    assert sorted(re.findall(r"h ended with \d+", err)) == ["h ended with 0", "h ended with 70"]


def test_more_hosts_than_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, config = tmp_path / "hosts", tmp_path / "run.yaml"
    hosts.write_text("".join(f"h{number} slots=1\n" for number in range(40)))
    config.write_text("batch: {global_size: 40}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(
        ConfigError, match=r"ulimit -n = 64: 40 hosts take 152 open files.*\[nofile-low\]"
    ):
        launch_over_ssh(
            LaunchOptions(str(config), hostfile=str(hosts), master_addr="h0", dry_run=True)
        )


@pytest.mark.slow
def test_a_killed_launcher_cuts_the_life_lines(path: str, tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    process = start(
        path, "a", f"import sys; print('up'); sys.stdin.read(); open({str(mark)!r}, 'w')"
    )
    until(process, "a: up")
    process.kill()
    deadline = time.monotonic() + 20
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.communicate()


@pytest.mark.slow
def test_an_agent_without_its_launcher_stops_its_ranks(members: Members) -> None:
    """The agent's end of the life line."""
    members.nnodes = 1
    process = members.start(0, terms={"life_line": 0})
    members.ready(1)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    code, stated = ended(process)
    assert code == 75
    assert "the launcher is gone at node 0" in stated
    assert "with 15 s to save" in stated


# ----------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([75, 75], 75),
        ([76, 137], 137),
        ([70, 137], 70),
        ([0, 76], 76),
        ([75, 76], 76),
        ([0, 75], 75),
        ([78, 76], 78),
    ],
)
def test_the_code_of_a_job(codes: list[int], expected: int) -> None:
    assert job_code([("x", code) for code in codes]) == expected


def test_only_listed_variables_travel() -> None:
    here = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HOME": "/x",
        "AWS_SECRET_ACCESS_KEY": "s",
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "DSF_AGENT": "1:2",
        "WANDB_API_KEY": "w",
        "LD_PRELOAD": "p",
        "LANG": "C",
        "LANGCHAIN_API_KEY": "s",
        "TZ_SECRET": "s",
        "HF_HOME_TOKEN": "s",
    }
    assert set(passed_on(here, exports=["WANDB_API_KEY"])) == {
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "DS_ACCELERATOR",
        "HF_HOME",
        "WANDB_API_KEY",
        "LANG",
    }
    with pytest.raises(UsageError, match="--export NOT_SET: not set here"):
        passed_on(here, exports=["NOT_SET"])


@pytest.mark.parametrize(
    ("ssh_config", "is_one"),
    [
        ("Host n1 alias\n  HostName 10.0.0.7\n", True),
        ("Host alias\n  HostName n1\n", True),
        ("Host n1\n  HostName 10.0.0.7\nHost alias\n  HostName 10.0.0.8\n", False),
        # two containers behind one address
        ("Host n1 alias\n  HostName gate\nHost alias\n  Port 2202\n", False),
    ],
)
@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="no ssh here, whose config says where hosts are"
)
def test_two_names_of_one_host_are_refused(ssh_config: str, is_one: bool, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(ssh_config)
    chosen = [ChosenHost(Host(name, 2), (0, 1)) for name in ("n1", "root@alias")]
    expectation = contextlib.nullcontext()
    if is_one:
        expectation = pytest.raises(
            ConfigError, match=r"host = root@alias: .* same host as n1: .*duplicate-host\]"
        )
    with expectation:
        refuse_one_host_twice(chosen, ssh_args=f"-F {tmp_path}/config", path="hosts")


def test_names_of_this_machine_s_table_are_known_without_a_server(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "127.0.1.1 me\n# 10.0.0.9 no\n10.0.0.7 N1.lan n1 # first\nfd00:0::2 n2\nbroken\n"
    )
    expected = {"n1.lan": "10.0.0.7", "n1": "10.0.0.7", "n2": "fd00::2"}
    assert known_addresses(tmp_path / "hosts") == expected


def test_nothing_of_a_command_is_read_by_a_shell() -> None:
    nasty = ("data.root='$(reboot)'", "run.name=a b;c", "x=`id`&&y")
    options = LaunchOptions(
        "my config.yaml",
        nasty,
        remote_folder="/a dir/$x",
        remote_python="/opt/py thon",
        exports=("TOKEN",),
    )
    words = agent_command(options, ChosenHost(Host("h", 2), (1, 3)), 1, TOPOLOGY)
    command = ssh_command(Host("h", 2), words, ssh_args="-p 2222 -i 'a key'")
    assert command[-3:-1] == ["--", "h"]
    assert command[:5] == ["ssh", "-p", "2222", "-i", "a key"]
    assert "BatchMode=yes" in command
    read = shlex.split(command[-1])
    assert read[:4] == ["cd", "/a dir/$x", "&&", "exec"]
    assert read[-3:] == list(nasty)
    assert read[read.index("--devices") + 1] == "1,3"
    echo = command[-1].replace("cd '/a dir/$x' && exec", "printf '%s\\n'", 1)
    echoed = subprocess.run(["sh", "-c", echo], capture_output=True, text=True, check=True)
    assert echoed.stdout.splitlines()[-3:] == list(nasty)


@pytest.mark.parametrize("seconds", [1_000_000.0, 123_456.7, 0.25])
def test_a_host_reads_its_orders(seconds: float) -> None:
    words = agent_command(
        LaunchOptions("a.yaml", ("x=1",), wait_seconds=seconds, bind_cores="off"),
        ChosenHost(Host("h", 2), (0, 1)),
        1,
        TOPOLOGY,
    )
    found = parse_node(words[words.index("node") + 1 :])
    assert (found.config, found.overrides, found.wait_seconds, found.num_gpus) == (
        "a.yaml",
        ("x=1",),
        seconds,
        2,
    )
    assert found.bind_cores == "off"


def test_options_of_the_user_win_over_ours() -> None:
    """ssh takes the first of two values; so for `launch` as for `doctor`."""
    text = "-o ConnectTimeout=120 -oServerAliveInterval=9 -v"
    starts = (
        ssh_command(Host("h", 1), ["true"], ssh_args=text),
        inspection_command(Host("h", 1), ssh_args=text),
    )
    for command in starts:
        found = re.findall(
            r"(ConnectTimeout|BatchMode|ServerAliveInterval)=(\w+)", " ".join(command)
        )
        assert (
            dict(reversed(found)).items()
            >= {"ConnectTimeout": "120", "BatchMode": "yes", "ServerAliveInterval": "9"}.items()
        )


@pytest.mark.parametrize("text", ["-o BatchMode=no", "-oBatchMode=no", "-o 'batchmode no'"])
@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_no_password_prompt(text: str, command: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{command}: --ssh_args: .*: no password can be asked for"
    ):
        split_ssh_args(text, command=command)
    assert split_ssh_args("-o BatchMode=yes -i ~/batchmode=x") == [
        "-o",
        "BatchMode=yes",
        "-i",
        "~/batchmode=x",
    ]


@pytest.mark.parametrize("word", ["BatchMode = yes", "batchmode  yes", "BatchMode= YES"])
def test_blanks_before_yes_are_no_password_prompt(word: str) -> None:
    assert split_ssh_args(f"-o '{word}'") == ["-o", word]


@pytest.mark.slow
def test_the_environment_is_not_on_the_command_line(path: str) -> None:
    look = "import sys; sys.stdin.readline(); print(('sec' + 'ret') in open('/proc/self/cmdline').read())"
    assert start(path, "a", look).communicate(timeout=60)[0] == "a: False\n"


# --------------------------------------------------------------------------------- before the start


def reported(
    capsys: pytest.CaptureFixture[str], folder: Path, lines: Sequence[str], *words: str
) -> list[str]:
    """Return the output of a dry run on these hosts."""
    (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
    data = "{kind: synthetic_images, image_size: 28, channels: 1, num_classes: 10}"
    (folder / "run.yaml").write_text(f"batch: {{global_size: 4000}}\ndata: {data}\n")
    assert launch([str(folder / "run.yaml"), "-H", str(folder / "hosts"), "--dry_run", *words]) == 0
    return [line.removeprefix("launch: ") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [],
            [
                "nnodes      2 (HOSTS)",
                "slots       4 (HOSTS)",
                "master_addr a (the first host)",
                "master_port 29500 (default)",
            ],
        ),
        (
            ["--num_nodes", "1"],
            [
                "nnodes      1 (--num_nodes)",
                "slots       4 (HOSTS)",
                "master_addr 127.0.0.1 (one host)",
                "master_port free (one that the host finds)",
            ],
        ),
        (["--num_nodes", "1", "--master_addr", "a"], ["master_addr a (--master_addr)"]),
        (["--num_gpus", "2"], ["nnodes      2 (HOSTS)", "slots       2 (--num_gpus)"]),
        (["--nproc_per_node", "2"], ["nnodes      2 (HOSTS)", "slots       2 (--nproc_per_node)"]),
        (
            ["--include", "b:1"],
            [
                "nnodes      1 (--include)",
                "slots       1 (--include)",
                "master_addr 127.0.0.1 (one host)",
            ],
        ),
        (["--exclude", "a"], ["nnodes      1 (--exclude)", "slots       4 (--exclude)"]),
        (
            ["--master_addr", "x", "--master_port", "7"],
            ["master_addr x (--master_addr)", "master_port 7 (--master_port)"],
        ),
    ],
)
def test_every_value_has_its_source(
    words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = reported(capsys, tmp_path, ["a slots=4", "b slots=4"], *words)
    assert [
        line.replace(str(tmp_path / "hosts"), "HOSTS")
        for line in stated
        if line.split()[0] in str(expected)
    ] == expected


@pytest.mark.parametrize(
    ("hosts", "words", "expected"),
    [
        (["a slots=2", "me@b slots=2"], [], "--hostfile=HOSTS --master_addr=a --master_port=29500"),
        (
            ["a slots=2", "b slots=2"],
            ["--include", "b:1"],
            "--hostfile=HOSTS --include=b:1 --force_multi --master_addr=127.0.0.1",
        ),
        (
            ["a slots=2", "b slots=2"],
            [
                "--num_nodes",
                "1",
                "--num_gpus",
                "1",
                "--ssh_args",
                "-p 22 -i x",
                "--master_port",
                "7",
            ],
            "--hostfile=HOSTS --num_nodes=1 --num_gpus=1 --force_multi --no_ssh_check --master_addr=127.0.0.1 "
            "--master_port=7",
        ),
        (
            ["[fd00::1] slots=2", "[fd00::2] slots=2"],
            [],
            "--hostfile=$hosts --master_addr=fd00::1 --master_port=29500",
        ),
        (
            ["[fd00::1] slots=2", "me@b slots=2"],
            ["--exclude", "[fd00::1]"],
            "--hostfile=$hosts --force_multi --master_addr=127.0.0.1",
        ),
    ],
)
def test_the_plain_command_for_hosts(
    hosts: list[str],
    words: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = [
        line
        for line in reported(capsys, tmp_path, hosts, *words)
        if line.startswith("plain command: ")
    ]
    before, _, command = line.removeprefix("plain command: ").rpartition(" && ")
    words_told = shlex.split(command)
    start = next(index for index, word in enumerate(words_told) if word.endswith("deepspeed"))
    assert words_told[:start] == (
        ["PDSH_SSH_ARGS_APPEND=-p 22 -i x"] if "--ssh_args" in words else []
    )
    script = next(index for index, word in enumerate(words_told) if word.endswith("train.py"))
    assert (
        " ".join(words_told[start + 1 : script]).replace(str(tmp_path / "hosts"), "HOSTS")
        == expected
    )
    assert words_told[script + 1 :] == ["--config", str(tmp_path / "run.yaml")]
    if before:
        done = subprocess.run(
            ["bash", "-c", f'{before} && cat "$hosts"'], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == (
            ["me@b slots=2"] if words else ["fd00::1 slots=2", "fd00::2 slots=2"]
        )


def test_ranks_of_one_host_meet_at_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rented machine does not reach itself at the public address that ~/.ssh/config has for it,
    nor is any port its own.
    """
    for ssh_args in ([], ["--ssh_args", "-o HostName=203.0.113.7"]):
        (agent,) = [
            line
            for line in reported(capsys, tmp_path, ["a slots=2"], *ssh_args)
            if line.startswith("agent on a: ")
        ]
        words = shlex.split(shlex.split(agent)[-1])
        found = parse_node(words[words.index("node") + 1 :])
        assert (found.nnodes, found.master_addr, found.master_port) == ("1", "127.0.0.1", None)


@pytest.mark.parametrize("words", [["--remote_folder", "/x"], ["--include", "[fd00::1]:1"]])
def test_limits_of_the_plain_command_are_printed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = reported(capsys, tmp_path, ["[fd00::1] slots=2"], *words)
    assert [
        line
        for line in stated
        if line.startswith("plain command: none; DeepSpeed's launcher has no words for")
    ]


@pytest.mark.slow
def test_a_thousand_hosts_take_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [f"worker-{number} slots=4" for number in range(1000)]
    stated = reported(capsys, tmp_path, hosts)
    assert len(stated) == 10
    assert [line.split()[:3] for line in stated[6:9]] == [
        ["agent", "on", f"worker-{number}:"] for number in range(3)
    ]
    assert stated[9] == "and 997 more agents; --verbose prints them all"
    assert len(reported(capsys, tmp_path, hosts, "--verbose")) == 1006


def test_the_ends_of_many_hosts_are_reported_together() -> None:
    ends = [("d", 137), *((f"h{number}", 76) for number in range(997)), ("a", 0), ("b", 0)]
    assert (
        ends_reported(ends)
        == "d ended with 137, h0, h1, h2 and 994 more ended with 76, a, b ended with 0"
    )
    assert ends_reported(ends[-2:]) == "a ended with 0, b ended with 0"
