"""The Dockerfile. No test builds it: that takes a daemon and five gigabytes. These hold what can be
held without.

Executed here is the step that decides what is installed; the rest is read.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework.deploy.k8s.request import K8sRequest
from framework.deploy.options import what_is_wrong_with_image
from framework.hosts.environment import requirements
from tests.places import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Name and arguments, continued lines in one."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (name, rest)
        for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)
    ]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_every_instruction_is_one_of_docker() -> None:
    assert {name for name, _ in instructions()} == {
        "ARG",
        "FROM",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "CMD",
    }


def test_the_base_can_be_pinned_and_does_not_move() -> None:
    (argument,) = of("ARG")
    name, _, base = argument.partition("=")
    assert of("FROM") == [f"${{{name}}}"]
    assert what_is_wrong_with_image(base) == ""
    assert all(
        not what_is_wrong_with_image(image) for image in re.findall(rf"{name}=(\S+?)[.]?\s", TEXT)
    )


def test_it_ends_as_a_numbered_user_who_is_not_root() -> None:
    """Kubernetes refuses `runAsNonRoot` where the image names its user by a word."""
    (user,) = of("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert int(user.partition(":")[0]) == K8sRequest(["c"]).run_as_user
    names = [name for name, _ in instructions()]
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :])


@pytest.mark.parametrize(
    ("users", "made"), [("root:x:0:0", True), ("root:x:0:0\nubuntu:x:1000:1000", False)]
)
def test_a_base_may_have_the_user_already(users: str, made: bool, tmp_path: Path) -> None:
    """Ubuntu's images have one of this number, and `useradd` ends with 4 for a second one."""
    (step,) = (rest for rest in of("RUN") if "useradd" in rest)
    (tmp_path / "passwd").write_text(f"{users}\n")
    known = f"grep -q ':x:1000:' {shlex.quote(str(tmp_path / 'passwd'))}"
    stubs = {
        "getent": f'[ "$*" = "passwd 1000" ] && {known} || exit 2',
        "useradd": f'{known} && exit 4; echo "$@" > made',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", step],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "made").exists() == made


def test_no_shell_stands_before_the_agent() -> None:
    (command,) = of("CMD")
    assert command.startswith('["python", ')
    assert not of("ENTRYPOINT")


def test_what_is_installed_is_what_was_tested() -> None:
    installs = [rest for rest in of("RUN") if "pip install" in rest]
    assert all("--constraint constraints.txt" in rest or "--no-deps" in rest for rest in installs)
    assert not re.search(r"https?://|--index-url|--extra-index-url|--trusted-host", TEXT)
    packages = [
        part for rest in of("RUN") for part in rest.split("apt-get ") if part.startswith("install")
    ]
    assert packages
    assert all("--no-install-recommends" in part for part in packages)


def test_nothing_secret_gets_in() -> None:
    assert not re.search(r"(?i)(token|secret|password|api_?key|credential)\s*=", TEXT)
    assert not of("ADD")
    copied = [word for rest in of("COPY") for word in rest.split()[:-1]]
    assert "." not in copied
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {word.partition("/")[0] for word in copied} == kept
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_every_copied_file_is_there() -> None:
    for rest in of("COPY"):
        for word in rest.split()[:-1]:
            assert (ROOT / word).exists(), word


def first_layer(folder: Path) -> str:
    """Only what is copied before the step that installs; returns the step."""
    (step,) = (rest for rest in of("RUN") if "framework/hosts/environment.py" in rest)
    before = TEXT[: TEXT.index("RUN python framework/hosts/environment.py")]
    for rest in re.findall(r"^COPY (.*)$", before, re.MULTILINE):
        *sources, target = rest.split()
        (folder / target).mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, folder / target)
    return step


def programs(folder: Path) -> dict[str, str]:
    """The environment of a fresh venv of Python 3.11, whose setuptools is an old one, and a pip
    that notes what it is given.
    """
    old = folder / "site/setuptools-65.5.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: setuptools\nVersion: 65.5.0\n")
    pip = '#!/bin/sh\necho "$@" > noted\ncat requirements.txt >> noted\nexit "${PIP_CODE:-0}"\n'
    python = (
        f'#!/bin/sh\n[ -z "$NO_PYTHON" ] || exit 1\nexec {shlex.quote(sys.executable)} -S "$@"\n'
    )
    (folder / "bin").mkdir()
    for name, text in (("pip", pip), ("python", python)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder}/bin:/usr/bin:/bin", "PYTHONPATH": str(folder / "site")}


@pytest.mark.parametrize(
    ("broken", "code"), [({}, 0), ({"PIP_CODE": "3"}, 3), ({"NO_PYTHON": "1"}, 1)], ids=str
)
def test_the_step_that_installs_takes_everything_or_fails(
    broken: dict[str, str], code: int, tmp_path: Path
) -> None:
    """As docker runs it: by /bin/sh, where a pipe would hide the failure of what is before it."""
    layer = tmp_path / "layer"
    step = first_layer(layer)
    done = subprocess.run(
        ["sh", "-c", step], cwd=layer, env=programs(tmp_path) | broken, timeout=60, check=False
    )
    assert done.returncode == code
    if "NO_PYTHON" not in broken:
        words, *wanted = (layer / "noted").read_text().splitlines()
        assert words == "install --constraint constraints.txt --requirement requirements.txt"
        assert wanted == requirements(["train", "text"])
        assert "setuptools>=77" in wanted


_PORT = "registry:5000/trainer"


@pytest.mark.parametrize(
    "image", ["trainer:12", "trainer:1.2", "a/b:3", f"{_PORT}:7", f"{_PORT}@sha256:{'0' * 64}"]
)
def test_images_that_stay_are_known(image: str) -> None:
    """The number of a build is a tag as well, and no port."""
    assert what_is_wrong_with_image(image) == ""


@pytest.mark.parametrize(
    "image", ["python", "python:latest", "a/b", _PORT, "A:1", "a b:1", "a@sha256:12"]
)
def test_images_that_move_are_known(image: str) -> None:
    assert what_is_wrong_with_image(image)
