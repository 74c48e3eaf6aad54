"""`dsf completion`: the scripts, run by the shells that are installed here."""

from __future__ import annotations

import argparse
import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from framework.commands.completion import _COMPLETES_WORDS, SHELLS, _add_completion, script

pytestmark = pytest.mark.slow  # commands that need torch import it

CASES = [
    ("dsf tra", {"train"}),
    ("dsf launch sl", {"slurm"}),
    ("dsf train --num_", {"--num_gpus", "--num_nodes"}),
    ("dsf export --form", {"--format"}),
    ("dsf check --for ", {"accelerate", "deepspeed", "huggingface"}),
    ("dsf train run.yaml optimizer.l", {"optimizer.lr=", "optimizer.layer_decay="}),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / f"dsf.{shell}").write_text(script(shell), encoding="utf-8")
    return folder


def needs(shell: str) -> str:
    """Return the path of a shell, or skip."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} here: apt-get install {shell}")
    return path


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize(
    ("names", "metavar", "completed"),
    [
        (["run"], "RUN", "folder"),
        (["checkpoint"], "CHECKPOINT|RUN", "folder"),
        (["--trust"], "FOLDER", "folder"),
        (["--out"], "FILE.html", "file"),
        (["--tokenizer"], "bytes|FILE.json", "file"),
        (["--explain-oom"], "LOG", "file"),
        (["file"], "FILE|key=value", "words"),
        (["config"], "CONFIG key=value", "words"),
        (["--steps"], "N", ""),
    ],
)
def test_an_argument_is_completed_by_what_its_value_is_called(
    names: list[str], metavar: str, completed: str
) -> None:
    action = argparse.ArgumentParser().add_argument(*names, metavar=metavar)
    file = dict.fromkeys(SHELLS, "file")
    folder = dict.fromkeys(SHELLS, "folder")
    _add_completion(action, file, folder)
    words = {"folder": folder, "file": file, "words": _COMPLETES_WORDS, "": None}
    assert getattr(action, "complete", None) == words[completed]


def test_bash_completes(scripts: Path) -> None:
    """Readline would set the words and the place; a key gets no blank behind its equals sign."""
    lines = []
    for line, _ in CASES:
        words = line.split(" ")
        lines.append(f"COMP_WORDS=({' '.join(repr(word) for word in words)})")
        lines.append(f"COMP_CWORD={len(words) - 1}; COMPREPLY=(); _dsf 2>/dev/null")
        lines.append('echo "${COMPREPLY[*]}"')
    text = "\n".join([f"source {scripts}/dsf.bash", *lines])
    shown = output(needs("bash"), "--norc", "-c", text).splitlines()
    assert [set(line.split()) for line in shown] == [words for _, words in CASES]


def test_fish_completes(scripts: Path) -> None:
    lines = [f"complete -C '{line}'; echo" for line, _ in CASES]
    text = "\n".join([f"source {scripts}/dsf.fish", *lines])
    shown = output(needs("fish"), "--no-config", "-c", text).strip().split("\n\n")
    found = [{line.partition("\t")[0] for line in part.splitlines()} for part in shown]
    assert found == [words for _, words in CASES]


def test_zsh_completes(scripts: Path) -> None:
    """On a terminal: zsh completes nowhere else. Lines with one answer are completed to their end."""
    (scripts / "_dsf").write_text((scripts / "dsf.zsh").read_text(encoding="utf-8"))
    zsh = needs("zsh")
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="dumb", COLUMNS="200")
        os.execv(zsh, ["zsh", "-f", "-i"])
    try:
        os.write(
            terminal, f"fpath=({scripts} $fpath); autoload -Uz compinit; compinit -u -D\n".encode()
        )
        os.write(terminal, b"echo re''ady\n")
        read_until(terminal, "ready")
        for line, words in CASES:
            if len(words) == 1:
                os.write(terminal, f"{line}\t".encode())
                read_until(terminal, f"{line.rpartition(' ')[0]} {next(iter(words))}")
                os.write(terminal, b"\x15")  # Ctrl-U
        os.write(terminal, b"dsf plan run.yaml training.log_e\t")
        read_until(terminal, "training.log_every=")
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def read_until(terminal: int, text: str, seconds: float = 60.0) -> None:
    """Read what a terminal shows until it shows a text."""
    shown = ""
    end = time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
