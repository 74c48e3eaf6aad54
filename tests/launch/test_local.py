"""`launch`: what it checks, which command it prints, and that nothing starts before the checks have
passed.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, UsageError
from framework.hosts import rank_environment
from framework.hosts.cores import Binding
from framework.hosts.devices import LocalDevices
from framework.hosts.hostfile import bare, is_loopback_name
from framework.hosts.rank_environment import added_environment
from framework.hosts.topology import HostTopology
from framework.launch import deepspeed_command as plain
from framework.launch import local
from framework.launch.deepspeed_command import (
    as_shell_line,
    local_command,
    usable_port,
)
from framework.launch.local import check
from framework.launch.options import LaunchOptions, parse
from framework.launch.supervision import JobEnd
from framework.load_run import LoadedRun
from tests.places import ROOT

pytestmark = pytest.mark.timing

CPU = LocalDevices("cpu", 0)
FOUR_GPUS = LocalDevices("cuda", 4)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("batch: {global_size: 32}\n")
    return str(path)


def ranks(options: LaunchOptions, devices: LocalDevices) -> int:
    return int(check(options, devices)[1].value)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


# -------------------------------------------------------------------------- what has to be compiled


def test_a_missing_compiler_is_refused_before_any_rank_starts(
    config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(local, "run_node", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(ConfigError) as caught:
        local.launch([config, "--num_gpus", "2"])
    (line,) = str(caught.value).splitlines()
    assert line.startswith("no-such-compiler: it is not here, and needed for deepspeed_shm_comm")
    assert line.endswith("[op-not-loadable]")
    assert "install g++" in line


def test_what_will_be_compiled_is_announced(
    config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compilation takes long enough to be taken for a hang."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(local, "run_node", lambda *_, **__: JobEnd(0))
    stated = "compiling DeepSpeed's deepspeed_shm_comm: half a minute or more each, once on this machine\n"
    assert local.launch([config, "--num_gpus", "2"]) == 0
    assert stated in capsys.readouterr().err
    compiled = tmp_path / "cache/deepspeed_shm_comm/deepspeed_shm_comm.so"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert local.launch([config, "--num_gpus", "2"]) == 0
    assert "compiling" not in capsys.readouterr().err


# --------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a.yaml"], LaunchOptions("a.yaml")),
        (["--config", "a.yaml", "x=1"], LaunchOptions("a.yaml", ("x=1",))),
        (
            ["a.yaml", "x=1", "--num_gpus", "2", "y.z='a b'"],
            LaunchOptions("a.yaml", ("x=1", "y.z='a b'"), 2),
        ),
        (
            ["--num-gpus=3", "a.yaml", "--master-port", "29500", "--dry-run"],
            LaunchOptions("a.yaml", (), 3, 29500, True),
        ),
        (
            ["a.yaml", "--deepspeed_config", "ds.json", "x=1"],
            LaunchOptions("a.yaml", ("x=1",), deepspeed_config="ds.json"),
        ),
        (
            ["a.yaml", "-H", "h", "--master_addr", "[fd00::1]"],
            LaunchOptions("a.yaml", hostfile="h", master_addr="fd00::1"),
        ),
        (
            ["a.yaml", "--master_port", "1", "--dry_run", "lr=-1"],
            LaunchOptions("a.yaml", ("lr=-1",), None, 1, True),
        ),
    ],
)
def test_options_and_settings_in_any_order(argv: list[str], expected: LaunchOptions) -> None:
    assert parse(argv) == expected


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "name a run config"),
        (["x=1"], "x=1 is a setting"),
        (["a.yaml", "--num_gpus", "0"], "0 is not a number of ranks"),
        (["a.yaml", "--num_gpus", "-1"], "-1 is not a number of ranks"),
        (["a.yaml", "--num_gpus", "two"], "two is not a number of ranks"),
        (["a.yaml", "--master_port", "70000"], "70000 is not a port"),
        (["a.yaml", "--num", "2"], "unrecognized arguments: --num"),
        (["a.yaml", "--include", "a:0"], "--include goes with a hostfile"),
        (["a.yaml", "-H", "h", "--include", "a", "--exclude", "b"], "exclude each other"),
        (["a.yaml", "-H", "h", "--include", "a", "--num_gpus", "1"], "do not go with"),
        (["a.yaml", "-H", "h", "--fit_batch"], "leave -H and --num_gpus out"),
        (["a.yaml", "--verbose"], "--verbose goes with a hostfile"),
        (["a.yaml", "--export", "A"], "--export goes with a hostfile"),
        (["a.yaml", "--token_file", "nowhere"], "--token_file goes with a hostfile"),
        (
            ["a.yaml", "--no-preflight", "--wait-seconds", "1800"],
            "--wait_seconds, --no_preflight go with a hostfile",
        ),
        (
            ["a.yaml", "-H", "h", "--ssh_args", "-v"],
            r"--ssh_args: expected .* write --ssh_args=-\.\.\.",
        ),
        (["a.yaml", "-H", "h", "--export", "A=b"], "A=b is not the name of a variable"),
        (["a.yaml", "-H", "h", "--master_addr", "[fd00::x]"], "is not a name or address of a host"),
        (
            ["a.yaml", "-H", "h", "--master_addr", "worker-0:29500"],
            "is not a name or address of a host",
        ),
        (["a.yaml", "--grace_seconds", "-1"], "expected one argument|not a number of seconds"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(argv: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse(argv)


def test_every_option_of_hosts_is_taken_with_them_and_stands_together_in_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--include",
        "a:0",
        "--num_nodes",
        "2",
        "--ssh_args=-p 1",
        "--remote_python",
        "p",
        "--remote_folder",
        "f",
        "--export",
        "A",
        "--export",
        "B",
        "--verbose",
        "--master_addr",
        "b",
        "--control_port",
        "7",
        "--wait_seconds",
        "0",
        "--no_preflight",
        "--token_file",
        "t",
    ]
    given = {
        "num_nodes": 2,
        "ssh_args": "-p 1",
        "remote_python": "p",
        "remote_folder": "f",
        "exports": ["A", "B"],
        "verbose": True,
        "master_addr": "b",
        "control_port": 7,
        "wait_seconds": 0.0,
        "no_preflight": True,
        "token_file": "t",
    }
    assert parse(["a.yaml", "-H", "h", *words[2:]]) == LaunchOptions(
        "a.yaml", hostfile="h", **given
    )  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        parse(["--help"])
    of_hosts = capsys.readouterr().out.partition("with -H, on the hosts of a hostfile:")[2]
    assert all(
        f"\n  {word.partition('=')[0]}" in of_hosts for word in words if word.startswith("--")
    )


# --------------------------------------------------------------------------------------- the checks


def test_default_is_every_gpu_or_two_ranks_on_cpu(config: str) -> None:
    assert ranks(LaunchOptions(config), FOUR_GPUS) == 4
    assert ranks(LaunchOptions(config), CPU) == 2
    assert ranks(LaunchOptions(config, num_gpus=1), FOUR_GPUS) == 1


@pytest.mark.parametrize(("count", "taken"), [(1, 1), (6, 6), (7, 6), (8, 8), (9, 8), (16, 15)])
def test_the_quickstart_fits_any_number_of_devices(count: int, taken: int) -> None:
    options = LaunchOptions(str(ROOT / "ds_configs/quickstart.yaml"), fit_batch=True)
    _, stated = check(options, LocalDevices("cuda", count))
    assert int(stated.value) == taken
    assert (
        f"of {count} cuda devices here: the most that divide batch.global_size" == stated.source
    ) == (taken < count)


def test_a_batch_that_fits_no_device_is_refused_with_the_reason(config: str) -> None:
    with pytest.raises(ConfigError, match="batch-not-divisible"):
        check(
            LaunchOptions(config, ("batch.global_size=32", "batch.micro_size=3"), fit_batch=True),
            FOUR_GPUS,
        )


def test_a_planned_world_size_is_the_default(config: str) -> None:
    assert ranks(LaunchOptions(config, ("run.world_size=1",)), CPU) == 1
    with pytest.raises(ConfigError, match="world-size-differs"):
        check(LaunchOptions(config, ("run.world_size=1",), num_gpus=2), CPU)


def test_more_ranks_than_gpus_are_refused(config: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"command line: --num_gpus = 8: this machine has 4 cuda .*\[too-few-devices\]",
    ):
        check(LaunchOptions(config, num_gpus=8), FOUR_GPUS)
    with pytest.raises(
        ConfigError, match=r"command line: run.world_size = 8: .*\[too-few-devices\]"
    ):
        check(LaunchOptions(config, ("run.world_size=8",)), FOUR_GPUS)


def test_uncounted_devices_need_a_number(config: str) -> None:
    with pytest.raises(UsageError, match="give --num_gpus N"):
        check(LaunchOptions(config), LocalDevices("xpu", 0))
    assert ranks(LaunchOptions(config, num_gpus=2), LocalDevices("xpu", 0)) == 2


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (("batch.global_size=3", "batch.micro_size=2"), "batch"),
        (("nonsense.key=1",), "unknown"),
        (("zero.stage=7",), "zero"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_starts(
    config: str, overrides: tuple[str, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=kind):
        local.launch([config, *overrides, "--num_gpus", "2"])


def test_ports(listening: int) -> None:
    assert 1024 < usable_port(None) < 65536
    free = usable_port(None)
    assert usable_port(free) == free
    with pytest.raises(
        ConfigError, match=rf"--master_port = {listening}: .*in use.*\[port-not-usable\]"
    ):
        usable_port(listening)


# -------------------------------------------------------------------------------------- the command


def test_the_plain_command() -> None:
    command = local_command(
        ["--config", "a b.yaml", "x='1 2'"], num_ranks=2, port=29501, script=Path("train.py")
    )
    expected = [
        "--num_gpus",
        "2",
        "--master_port",
        "29501",
        "train.py",
        "--config",
        "a b.yaml",
        "x='1 2'",
    ]
    assert command[-len(expected) :] == expected
    assert Path(command[0]).name.startswith(("deepspeed", "python"))


def test_a_deepspeed_json_goes_on_to_train_py() -> None:
    job = LoadedRun("a", ("x=1",), RunConfig(), Source(), deepspeed_config="ds.json")
    command = local_command(job.arguments, num_ranks=2, port=1, script=Path("train.py"))
    assert command[-6:] == ["train.py", "--config", "a", "--deepspeed_config", "ds.json", "x=1"]


def test_a_deepspeed_json_is_judged_before_anything_starts(config: str, tmp_path: Path) -> None:
    for values, kind in (
        ('{"train_batch_size": 33}', "deepspeed-config-clash"),
        ("{", "config-syntax"),
    ):
        (tmp_path / "ds.json").write_text(values)
        with pytest.raises(ConfigError, match=kind):
            check(LaunchOptions(config, deepspeed_config=str(tmp_path / "ds.json")), CPU)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 2}}')
    assert ranks(LaunchOptions(config, deepspeed_config=str(tmp_path / "ds.json")), CPU) == 2


def test_visible_devices_are_named() -> None:
    command = local_command(
        ["--config", "a"], num_ranks=2, port=1, script=Path("train.py"), chosen=(7, 3, 5)
    )
    assert "--num_gpus" not in command
    assert command[command.index("--include") + 1] == "localhost:3,5"


def test_a_hostfile_of_the_machine_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("elsewhere slots=8\n")
    monkeypatch.setattr(plain, "_DEFAULT_HOSTFILE", hostfile)
    command = local_command(["--config", "a"], num_ranks=2, port=1, script=Path("train.py"))
    assert command[command.index("--hostfile") + 1] == os.devnull


def test_variables_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_environment, "usable_cores", lambda: 5)
    here = {"PATH": str(Path(sys.executable).parent)}
    assert added_environment(here, device="cpu", num_ranks=2) == {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "2",
    }
    assert added_environment(here, device="cpu", num_ranks=9)["OMP_NUM_THREADS"] == "1"
    assert (
        added_environment(
            here | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "3"}, device="cpu", num_ranks=2
        )
        == {}
    )
    of_gpus = {"OMP_NUM_THREADS": "2", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert added_environment(here, device="cuda", num_ranks=2) == of_gpus
    bound = added_environment(here, device="cuda", num_ranks=2, threads=4)
    assert bound["OMP_NUM_THREADS"] == "4"
    own = {"OMP_NUM_THREADS": "3", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert added_environment(here | own, device="cuda", num_ranks=2) == {}


def test_an_environment_that_is_not_activated_gets_its_programs() -> None:
    added = added_environment({"PATH": "/usr/bin"}, device="cuda", num_ranks=1)
    assert added["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_the_printed_line_is_what_a_shell_reads() -> None:
    command = [
        "/opt/x/deepspeed",
        "train.py",
        "--config",
        "a b.yaml",
        "data.args={root: 'it''s'}",
        "$HOME",
    ]
    line = as_shell_line(command, {"PATH": "/opt/my env:/usr/bin", "OMP_NUM_THREADS": "1"})
    assert line.startswith("PATH='/opt/my env':$PATH OMP_NUM_THREADS=1 ")
    assert shlex.split(line)[2:] == command


def test_dry_run_prints_a_command_and_starts_nothing(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "find_devices", lambda environment: CPU)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert local.launch([config, "--dry_run", "--master_port", "29512"]) == 0
    *values, line = capsys.readouterr().out.splitlines()
    assert values == [
        "launch: slots       2 (default on CPU)",
        "launch: master_port 29512 (--master_port)",
        "launch: world size  2 = 1 node x 2 ranks",
    ]
    assert line.startswith("launch: plain command: ")
    assert "--num_gpus 2 --master_port 29512" in line
    assert line.endswith(f"train.py --config {config}")


def test_ranks_are_bound_as_asked(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--bind_cores` reaches the node that starts the ranks, with threads by the cores of a rank."""
    given: list[tuple[Binding, str]] = []
    asked: list[object] = []

    def bind_ranks(*words: object) -> Binding:
        asked.append(words)
        return Binding((frozenset({0}), frozenset({1, 2})), "a line")

    def run_node(*_: object, binding: Binding, environment: Mapping[str, str], **__: object) -> Any:
        given.append((binding, environment["OMP_NUM_THREADS"]))
        return JobEnd(0)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "find_devices", lambda environment: CPU)
    monkeypatch.setattr(local, "bind_ranks", bind_ranks)
    monkeypatch.setattr(local, "run_node", run_node)
    monkeypatch.setattr(local, "_look_at_ops", lambda *_: None)
    assert local.launch([config, "--bind_cores", "on"]) == 0
    assert asked == [("on", CPU, 2)]
    assert given == [(Binding((frozenset({0}), frozenset({1, 2}))), "1")]


@pytest.mark.parametrize(
    ("words", "devices", "reported"),
    [
        (["--num_gpus", "2"], FOUR_GPUS, "slots       2 (--num_gpus)"),
        (["--nproc_per_node", "2"], FOUR_GPUS, "slots       2 (--nproc_per_node)"),
        (["run.world_size=1"], FOUR_GPUS, "slots       1 (run.world_size)"),
        ([], FOUR_GPUS, "slots       4 (cuda devices here)"),
        (
            [],
            LocalDevices("cuda", 2, (3, 1)),
            "slots       2 (cuda devices here, of those that are visible)",
        ),
        ([], FOUR_GPUS, "(a free one)"),
    ],
)
def test_every_value_has_its_source(
    config: str,
    words: list[str],
    devices: LocalDevices,
    reported: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "find_devices", lambda environment: devices)
    assert local.launch([config, "--dry_run", *words]) == 0
    assert reported in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "[::1]", socket.gethostname(), socket.gethostname().upper()]
)
def test_a_hostfile_of_this_machine_alone_needs_no_ssh(
    name: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The slots and the choice among them are the hostfile's; nothing else is other than without
    it.
    """
    given: list[tuple[HostTopology, LocalDevices]] = []
    monkeypatch.setattr(
        local,
        "run_node",
        lambda topology, _, *, devices, **__: given.append((topology, devices)) or JobEnd(0),
    )
    monkeypatch.setattr(local, "require_deepspeed", lambda: None)
    monkeypatch.setattr(local, "find_devices", lambda _: FOUR_GPUS)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setenv("NNODES", "2")  # for this machine alone
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{name} slots=4\n")
    assert local.launch([config, "-H", str(hosts)]) == 0
    stated = capsys.readouterr().out
    assert (
        f"launch: nnodes      1 ({hosts}: this machine, without ssh)\nlaunch: slots       4 ({hosts})\n"
        in stated
    )
    assert "(a free one)" in stated
    hosts.write_text(f"{name} slots=4\nworker-1 slots=4\n")
    which = f"{name}:1,3"
    if not is_loopback_name(bare(name)):
        assert local.launch([config, "-H", str(hosts), "--include", which]) == 0
        assert "launch: slots       2 (--include)" in capsys.readouterr().out
        assert given[1][1] == LocalDevices("cuda", 2, (1, 3))
    assert (given[0][0].world_size, given[0][0].master_addr, given[0][1]) == (
        4,
        "127.0.0.1",
        FOUR_GPUS,
    )


def test_devices_that_are_named_are_the_machines(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "find_devices", lambda _: LocalDevices("cuda", 2, (4, 5)))
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=2\n")
    words = [config, "-H", str(tmp_path / "hosts"), "--dry_run"]
    assert local.launch([*words, "--master_addr", "10.0.0.5"]) == 0
    stated = capsys.readouterr().out
    assert "--include localhost:4,5" in stated
    assert "--master_addr 10.0.0.5" in stated
    assert local.launch([*words, "--include", f"{socket.gethostname()}:0,1"]) == 0
    assert "--include localhost:0,1" in capsys.readouterr().out


def test_what_every_host_would_refuse_is_refused_without_ssh(config: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = [config, "-H", str(tmp_path / "hosts"), "--dry_run"]
    with pytest.raises(ConfigError, match="nowhere"):
        local.launch([*words, "--token_file", str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match="DSF_NOT_SET_ANYWHERE"):
        local.launch([*words, "--export", "DSF_NOT_SET_ANYWHERE"])


@pytest.mark.parametrize(
    "words",
    [["--ssh_args", "-p 2222"], ["--remote_python", "/opt/python"], ["--remote_folder", "/x"]],
)
def test_an_explicit_way_to_a_host_is_taken(
    words: list[str], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """localhost may be the near end of a tunnel, and another Python is another process to start."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert local.launch([config, "-H", str(tmp_path / "hosts"), "--dry_run", *words]) == 0
    assert "agent on localhost: ssh " in capsys.readouterr().out


@pytest.mark.slow
def test_a_missing_config_ends_with_78(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "framework", "launch", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 78
    assert "[config-not-found]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_rank_has_the_token(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node has no other to prove its identity to, and ranks have no use for the secret of a
    job.
    """
    given: list[Mapping[str, str]] = []

    def run_node(*_: object, environment: Mapping[str, str], **__: object) -> JobEnd:
        given.append(environment)
        return JobEnd(0)

    monkeypatch.setenv("DSF_TOKEN", "s3cret")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(local, "run_node", run_node)
    monkeypatch.setattr(local, "require_deepspeed", lambda: None)
    assert local.launch([config]) == 0
    assert "DS_ACCELERATOR" in given[0]
    assert "DSF_TOKEN" not in given[0]
