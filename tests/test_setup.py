"""launch.sh, .ci/run, pyproject.toml and constraints.txt.

launch.sh runs here in a copy of the repository's few files that it reads, with stand-ins for Python
and uv that write down how they were called; nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from framework.commands.table import BUILT_IN
from framework.hosts.environment import requirements
from tests.places import ROOT

SCRIPTS = ["launch.sh", ".ci/run"]
TOOLS = [
    "bash",
    "cat",
    "chmod",
    "cp",
    "dirname",
    "env",
    "id",
    "mkdir",
    "mktemp",
    "readlink",
    "rm",
    "tail",
    "tee",
]

# Stands for any Python: real for -c and for our helper, a note in $CALLS for everything that would
# act.
_PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    "-c import sys; sys.exit(sys.version_info < (3, 10))") exit "${{STUB_TOO_OLD:-0}}" ;;
    *compile_for_processors*)
        [[ -z ${{STUB_COMPILER:-}} ]] || {{ printf 'noise\n%s\n' "$STUB_COMPILER" >&2; exit 1; }}
        printf 'call: compile for %s\\n' "$DS_ACCELERATOR" >>"$CALLS" ;;
    *find_spec*) [[ $0 == *with-torch* ]] ;;
    *environment.py\\ missing*) printf '%s' "${{STUB_MISSING:-}}" ;;
    "-m pip --version") exit 0 ;;
    "-m pip install --quiet --target "*)
        [[ -n ${{STUB_UV:-}} && $0 != */.venv/bin/* ]] || exit 1
        mkdir -p "$6/bin" && cp "$STUB_UV" "$6/bin/uv" ;;
    "-m venv --clear "*) printf 'call: python %s\\n' "$*" >>"$CALLS"; mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m "*)
        printf 'call: python -m %s\\n' "$2" >>"$CALLS"; shift 2
        for word in "$@"; do printf 'word: %s\\n' "$word"; done >>"$CALLS"
        printf 'cwd: %s\\nOMP_NUM_THREADS: %s\\nPYTHONPATH: %s\\n' "$PWD" "${{OMP_NUM_THREADS:-}}" "${{PYTHONPATH:-}}" >>"$CALLS"
        printf 'door: %s\\nshell: %s\\n' "${{DSF_DOOR:-}}" "${{DSF_SHELL_PATH:-}}" >>"$CALLS"
        [[ -z ${{STUB_SAYS:-}} ]] || printf '%s\\n' "$STUB_SAYS"
        exit "${{STUB_CODE:-0}}" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""  # noqa: E501
_UV = """#!/usr/bin/env bash
[[ $1 == --version ]] && exit 0
[[ $* == *--dry-run* ]] && exit "${STUB_NO_INDEX:-1}"
printf 'call: uv %s\\n' "$*" >>"$CALLS"
if [[ $1 == venv ]]; then mkdir -p "$5/bin" && cp "$4" "$5/bin/python"; exit; fi
if [[ -n ${STUB_FAIL:-} ]]; then echo 'no network'; exit 1; fi
printf 'Resolved 90 packages\\nDownloading torch (845.2MiB)\\n + torch==2.15.0\\n'
"""


class Machine:
    """A bare machine with a checkout."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.calls_file = (
            folder / "check out",
            folder / "bin",
            folder / "calls",
        )
        self.elsewhere = folder / "elsewhere"
        for file in [
            *SCRIPTS,
            "pyproject.toml",
            "constraints.txt",
            "framework/hosts/environment.py",
        ]:
            (self.checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.checkout / file)
        self.bin.mkdir()
        self.elsewhere.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.environment = {
            "PATH": str(self.bin),
            "CALLS": str(self.calls_file),
            "TMPDIR": str(folder),
        }

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # it may be a link to the machine's own program
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(
        self, *words: str, script: Path | None = None, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [str(script or self.checkout / "launch.sh"), *words]
        return subprocess.run(
            command,
            cwd=cwd or self.elsewhere,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self) -> str:
        """What was called since the last look."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        return text


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.program("python3", _PYTHON)
    found.program("uv", _UV)
    return found


@pytest.fixture
def torch_environment(machine: Machine) -> str:
    """An environment that has torch; give it as VIRTUAL_ENV or CONDA_PREFIX."""
    return str(machine.program("../with-torch/bin/python", _PYTHON).parents[1])


# ---------------------------------------------------------------------------------------------------- the words


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(program).exists():
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    done = subprocess.run(
        [program, *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_needs_no_environment(machine: Machine, word: str) -> None:
    done = machine.run(word)
    assert done.returncode == 0
    assert "./launch.sh train CONFIG" in done.stdout
    assert machine.calls() == ""


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["--num_gpus", "2"], ["train"], ["setup", "now"], ["setup", "text", "3"]],
)
def test_a_wrong_command_line_ends_with_64_and_one_line(machine: Machine, words: list[str]) -> None:
    done = machine.run(*words)
    assert done.returncode == 64
    assert len(done.stderr.splitlines()) == 1
    assert machine.calls() == ""


# ----------------------------------------------------------------------------------------- an active environment


@pytest.mark.parametrize(
    ("variable", "kind"), [("VIRTUAL_ENV", "virtualenv"), ("CONDA_PREFIX", "conda environment")]
)
def test_an_active_environment_with_torch_is_used_as_it_is(
    machine: Machine, torch_environment: str, variable: str, kind: str
) -> None:
    done = machine.run("setup", **{variable: torch_environment})
    assert done.returncode == 0
    checkout = str(machine.checkout).replace(" ", "\\ ")
    assert done.stderr == (
        f"environment: the active {kind} {torch_environment}, used as it is; for `dsf` in it: "
        f"pip install --no-deps -e {checkout}\n"
    )
    assert machine.calls() == ""
    assert not (machine.checkout / ".venv").exists()


def test_only_what_is_missing_is_installed_there(machine: Machine, torch_environment: str) -> None:
    done = machine.run(
        "setup", VIRTUAL_ENV=torch_environment, STUB_MISSING="rich>=13\ntensorboard>=2.19\n"
    )
    assert done.returncode == 0
    assert "installing what is missing: rich>=13 tensorboard>=2.19" in done.stderr
    calls = machine.calls().splitlines()
    assert calls[:3] == ["call: python -m pip", "word: install", "word: -c"]
    assert calls[4:6] == [
        "word: rich>=13",
        "word: tensorboard>=2.19",
    ]  # calls[3]: all that is installed, as constraints


def test_an_active_environment_without_torch_is_left_alone(machine: Machine) -> None:
    plain = machine.program("../plain/bin/python", _PYTHON).parents[1]
    done = machine.run("setup", VIRTUAL_ENV=str(plain))
    assert done.returncode == 0
    assert f"the active virtualenv {plain} has no torch and is left alone" in done.stderr
    assert (machine.checkout / ".venv/bin/python").exists()


def test_arguments_pass_through_exactly(machine: Machine, torch_environment: str) -> None:
    words = [
        "my run.yaml",
        "data.args={root: '*'}",
        'run.name="a b"',
        "",
        "$HOME",
        "--num_gpus",
        "2",
    ]
    done = machine.run("train", *words, VIRTUAL_ENV=torch_environment, STUB_CODE="75")
    assert done.returncode == 75
    assert machine.calls().splitlines() == [
        "call: python -m framework",
        "word: train",
        *[f"word: {word}" for word in words],
        f"cwd: {machine.elsewhere}",
        "OMP_NUM_THREADS: ",
        f"PYTHONPATH: {machine.checkout}",
        f"door: {str(machine.checkout).replace(' ', chr(92) + ' ')}/launch.sh",
        f"shell: {machine.bin}",
    ]


@pytest.mark.parametrize("settings", [[], ["optimizer.lr=0.1", "run.name=a b"]], ids=str)
def test_without_a_command_the_quickstart_is_trained(
    machine: Machine, torch_environment: str, settings: list[str]
) -> None:
    machine.run(*settings, cwd=machine.checkout, CONDA_PREFIX=torch_environment)
    words = "".join(
        f"word: {word}\n"
        for word in ("train", "ds_configs/quickstart.yaml", "--fit_batch", *settings)
    )
    calls = machine.calls()
    assert calls.startswith(f"call: python -m framework\n{words}cwd: {machine.checkout}\n")
    assert "door: ./launch.sh\n" in calls


def test_from_elsewhere_the_quickstart_has_whole_paths(
    machine: Machine, torch_environment: str
) -> None:
    """What the run prints at its end are commands for the folder that it was started in."""
    machine.run("optimizer.lr=0.1", CONDA_PREFIX=torch_environment)
    assert machine.calls().startswith(
        f"call: python -m framework\nword: train\nword: {machine.checkout}/ds_configs/quickstart.yaml\n"
        "word: --fit_batch\n"
        f"word: run.output_dir='{machine.checkout}/runs'\nword: optimizer.lr=0.1\ncwd: {machine.elsewhere}\n"
    )


def commands_of_the_command_line() -> list[str]:
    return [command.name for command in BUILT_IN if " " not in command.name]


@pytest.mark.parametrize("command", commands_of_the_command_line())
def test_every_command_goes_through_the_door(
    machine: Machine, torch_environment: str, command: str
) -> None:
    done = machine.run(command, "--json", "a=b c", VIRTUAL_ENV=torch_environment, STUB_CODE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert machine.calls().startswith(
        f"call: python -m framework\nword: {command}\nword: --json\nword: a=b c\n"
    )
    assert command in machine.run("help").stdout


def test_test_runs_pytest_in_the_root(machine: Machine, torch_environment: str) -> None:
    link = machine.elsewhere / "link"
    link.symlink_to(os.path.relpath(machine.checkout / "launch.sh", machine.elsewhere))
    done = machine.run(
        "test", "-k", "a or b", script=link, VIRTUAL_ENV=torch_environment, STUB_CODE="1"
    )
    assert done.returncode == 1
    calls = machine.calls()
    assert calls.startswith("call: python -m pytest\nword: -k\nword: a or b\n")
    assert f"cwd: {machine.checkout}\n" in calls


def test_a_build_machine_runs_the_same_tests(machine: Machine, torch_environment: str) -> None:
    done = machine.run(
        script=machine.checkout / ".ci/run", VIRTUAL_ENV=torch_environment, STUB_CODE="5"
    )
    assert done.returncode == 5
    assert machine.calls().startswith(f"call: python -m pytest\ncwd: {machine.checkout}\n")


# ------------------------------------------------------------------------------------------- an environment of our own


@pytest.mark.slow
def test_makes_an_environment_once(machine: Machine) -> None:
    first = machine.run("setup")
    assert first.returncode == 0
    root = machine.checkout
    assert machine.calls() == (
        f"call: uv venv --clear --python {machine.bin}/python3 {root}/.venv\n"
        f"call: uv pip install --compile-bytecode --python {root}/.venv/bin/python -c {root}/constraints.txt -e "
        f"{root}[train]\n"
        "call: compile for cpu\n"
    )
    ready = "environment: .venv, ready; to use it in this shell: source .venv/bin/activate\n"
    assert first.stderr.endswith(ready.replace(".venv/", str(root).replace(" ", "\\ ") + "/.venv/"))
    assert machine.run("setup", cwd=root).stderr == ready
    assert (
        machine.run("setup", VIRTUAL_ENV=str(root / ".venv")).stderr
        == "environment: .venv, ready\n"
    )
    assert machine.calls() == ""


def test_nothing_is_compiled_ahead_where_there_is_a_gpu(machine: Machine) -> None:
    machine.program("nvidia-smi", "#!/usr/bin/env bash\n")
    machine.run("setup")
    assert "call: compile" not in machine.calls()


@pytest.mark.slow
def test_the_tests_bring_their_own_tools(machine: Machine) -> None:
    machine.run("test")
    calls = machine.calls()
    assert f"-e {machine.checkout}[train,dev]\n" in calls
    assert "--compile-bytecode" not in calls
    assert machine.run("setup").stderr.startswith("environment: .venv, ready")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_the_requirements_is_installed(machine: Machine, file: str) -> None:
    machine.run("setup")
    machine.calls()
    with (machine.checkout / file).open("a") as text:
        text.write("# changed\n")
    machine.run("setup")
    assert machine.calls().startswith("call: uv pip install ")


@pytest.mark.slow
def test_a_failed_installation_gives_the_reason_and_is_repeated(machine: Machine) -> None:
    done = machine.run("setup", STUB_FAIL="1", STUB_CODE="1")
    assert done.returncode == 74
    assert "no network" in done.stderr
    assert "environment: pip failed; " in done.stderr
    log = re.search(r"uv failed; all of its output is in (\S+)", done.stderr)
    assert log
    assert Path(log[1]).read_text() == "no network\n"
    assert not list((machine.checkout / ".venv").glob(".dsf-trainer*"))
    machine.calls()
    assert machine.run("setup").returncode == 0
    assert machine.calls().startswith("call: uv pip install ")


def test_pip_is_tried_where_uv_cannot_fetch(machine: Machine) -> None:
    """A company's certificate may be one that pip alone knows."""
    done = machine.run("setup", STUB_FAIL="1")
    assert done.returncode == 0
    assert (
        "trying pip instead (with a certificate of your own for uv: UV_SYSTEM_CERTS=1)"
        in done.stderr
    )
    assert (
        f"call: python -m pip\nword: install\nword: -c\nword: {machine.checkout}/constraints.txt\n"
        in machine.calls()
    )


def test_progress_is_shown_while_it_installs(machine: Machine) -> None:
    done = machine.run("setup")
    size = "(some minutes the first time, and 6 GB with the CUDA build of torch)"
    assert (
        f"installing dsf-trainer[train] {size}\n  Resolved 90 packages\n  Downloading torch (845.2MiB)\n"
        in done.stderr
    )
    assert "torch==" not in done.stderr


def test_pips_progress_is_a_package_and_its_size(machine: Machine) -> None:
    (machine.bin / "uv").unlink()
    wheel = "    Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (539.1 MB)"
    assert "\n      Downloading torch (539.1 MB)\n" in machine.run("setup", STUB_SAYS=wheel).stderr


def test_the_build_of_torch_for_processors_is_taken_where_its_index_is_reached(
    machine: Machine,
) -> None:
    machine.run("setup", STUB_NO_INDEX="0")
    assert (
        f"--python {machine.checkout}/.venv/bin/python --torch-backend=auto -c " in machine.calls()
    )


@pytest.mark.slow
def test_further_extras_are_installed_on_request(machine: Machine) -> None:
    assert machine.run("setup", "text", "bench").returncode == 0
    assert f"-e {machine.checkout}[train,text,bench]\n" in machine.calls()
    machine.run("setup", "text", "bench")
    machine.run("setup")
    assert machine.calls() == ""


def test_what_does_not_compile_is_named_in_one_line(machine: Machine) -> None:
    line = "c++: it is not here; install g++ [op-not-loadable]"
    done = machine.run("setup", STUB_COMPILER=line)
    assert done.returncode == 0
    assert f"environment: {line}; until then no run on processors starts\n" in done.stderr
    assert "noise" not in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_a_clone_of_another_user_is_left_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own nobody else can look into
        Path(folder).chmod(0o755)
        check_clone_of_somebody_else(Machine(Path(folder)))


def check_clone_of_somebody_else(machine: Machine) -> None:
    venv = machine.checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/mine").write_text("")
    command = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        str(machine.checkout / "launch.sh"),
        "setup",
    ]
    done = subprocess.run(
        [shutil.which(command[0]) or command[0], *command[1:]],
        env=machine.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 74
    assert done.stderr.startswith(
        f"environment: {machine.checkout} cannot be written by nobody: it belongs to somebody else;"
    )
    assert len(done.stderr.splitlines()) == 1
    assert (venv / "bin/mine").exists()


def test_an_environment_without_a_python_is_made_again(machine: Machine) -> None:
    (machine.checkout / ".venv").mkdir()
    done = machine.run("setup")
    assert ".venv has no Python that runs" in done.stderr
    assert machine.calls().startswith("call: uv venv --clear ")


def test_uv_is_installed_beside_if_there_is_none(machine: Machine) -> None:
    (machine.bin / "uv").rename(machine.bin / "uv-elsewhere")
    done = machine.run("setup", STUB_UV=str(machine.bin / "uv-elsewhere"))
    assert "uv installed into .venv-tools" in done.stderr
    assert "call: uv venv " in machine.calls()
    assert (machine.checkout / ".venv-tools/.gitignore").read_text() == "*\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_active", [False, True])
def test_an_environment_that_uv_made_is_completed_without_uv_on_the_path(
    machine: Machine, is_active: bool
) -> None:
    """It has no pip of its own to get uv with, whether it is active or not."""
    venv = machine.checkout / ".venv"
    machine.run("setup")
    machine.calls()
    (machine.bin / "uv").rename(machine.bin / "uv-elsewhere")
    (venv / "bin/python3").symlink_to("python")
    active = {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{machine.bin}"} if is_active else {}
    done = machine.run("test", STUB_UV=str(machine.bin / "uv-elsewhere"), **active)
    assert "uv installed into .venv-tools" in done.stderr
    assert machine.calls().startswith("call: uv pip install ")


def test_plain_pip_where_uv_cannot_be_had(machine: Machine) -> None:
    (machine.bin / "uv").unlink()
    done = machine.run("setup")
    assert done.returncode == 0
    assert "and pip (uv is not to be had)" in done.stderr
    calls = machine.calls()
    root = machine.checkout
    assert calls.startswith(
        f"call: python -m venv --clear {root}/.venv\ncall: python -m pip\nword: install\nword: -c\n"
    )
    assert f"word: {root}/constraints.txt\nword: -e\nword: {root}[train]\n" in calls


def test_no_usable_python_ends_with_78(machine: Machine) -> None:
    done = machine.run("setup", STUB_TOO_OLD="1")
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1
    assert "no Python >= 3.10 found" in done.stderr


# ------------------------------------------------------------------------------------------------- the requirements


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    return dict(line.split("==") for line in lines)


def test_every_requirement_is_pinned_within_its_range() -> None:
    pinned = pins()
    for requirement in requirements(["train", "dev", "text", "data", "bench"]):
        name, _, floor = requirement.partition(">=")
        version = pinned[normalized(name)]
        assert numbers(version) >= numbers(floor), requirement


def test_pins_are_names_and_versions_only() -> None:
    for name, version in pins().items():
        assert name == normalized(name)
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), name


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt", *SCRIPTS])
def test_no_address_is_written_down(file: str) -> None:
    assert not re.search(
        r"://|index-url|find-links|curl|wget", (ROOT / file).read_text(encoding="utf-8")
    )


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
