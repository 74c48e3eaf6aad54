"""Runs a page of docs/ from top to bottom in an empty folder: its files are written, its commands
executed.

    python -m tests.docs.run_page docs/tutorials/first-run.md      # writes what the commands print into the page

A block with a ``title`` is a file. Commands of a ``bash`` block are for other machines; those that
train are planned here, and no more. In other blocks a line ``$ COMMAND`` is executed, and the lines
below it are what it prints; ``...`` stands for any lines. Commands that train, ``python FILE.py``
among them, run on ranks that are forked (`tests/warm_ranks.py`), and their figures may differ; all
others must print what the page shows, to the letter.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from unittest import mock

from framework.cli import main
from tests.launched import ROOT, TIMEOUT_SECONDS
from tests.warm_ranks import end_session_ranks, session_ranks

_BLOCK: Final = re.compile(
    r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL
)
_COMMAND: Final = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_FIGURE: Final = re.compile(r"-?\d[\d,]*(\.\d+)?(e[-+]\d+)?%?")
_PARTS: Final = re.compile(
    r"((data|copy|forward|backward|communication|bubble|optimizer|other|checkpoint) #(, |$))+"
)


class Page:
    """A page and the folder in which it is played."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self._folder = folder
        for name in ("ds_configs", "hostfiles"):
            shutil.copytree(ROOT / name, folder / name)

    def steps(self) -> Iterator[tuple[str, str, str]]:
        """Write its files, run its commands: each command with what the page shows and what it
        prints.
        """
        for _, language, title, body in _BLOCK.findall(self.text):
            if title:
                (self._folder / title).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / title).write_text(body, encoding="utf-8")
                continue
            for command, shown in _COMMAND.findall(body):
                yield command, shown, self._run(command.replace("\\\n", " "))
            for line in body.splitlines() if language == "bash" else ():
                words = shlex.split(line, comments=True)
                if words[:2] == ["dsf", "train"] or words[:3] == ["dsf", "launch", "node"]:
                    with (
                        contextlib.redirect_stdout(io.StringIO()),
                        contextlib.redirect_stderr(io.StringIO()),
                    ):
                        assert main([*words[1:], "--dry_run"]) == 0, line

    def _run(self, command: str) -> str:
        words, target = shlex.split(command, comments=True), ""
        if ">" in words:
            target, words = words[-1], words[:-2]
        if words[0] == "cat":
            return Path(self._folder, words[1]).read_text(encoding="utf-8")
        trains = trained(words)
        output = self._train(*trains) if trains else self._ours(words)
        if target:
            (self._folder / target).write_text(output, encoding="utf-8")
        return "" if target else output

    def _ours(self, words: list[str]) -> str:
        ours = words[1:]
        # without measured rates
        own_cache = {"COLUMNS": "100", "XDG_CACHE_HOME": str(self._folder / ".cache")}
        with (
            mock.patch.dict(os.environ, own_cache),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            main(ours)
        text = f"{out.getvalue()}{err.getvalue()}"
        return text.replace(f"{sys.prefix}/bin/", "").replace(f"{ROOT}/", "")  # as in the checkout

    def _train(self, script: str, arguments: list[str], num_ranks: int) -> str:
        folder = self._folder / f".printed-{len(list(self._folder.iterdir()))}"
        path = ROOT / "train.py" if script == "train.py" else self._folder / script
        job = session_ranks().start(
            arguments, num_ranks=num_ranks, folder=folder, script=path, cwd=self._folder
        )
        codes = job.wait(TIMEOUT_SECONDS)
        assert not any(codes), job.stated()
        return job.stated(0).replace(f"{sys.prefix}/bin/", "")


def trained(words: list[str]) -> tuple[str, list[str], int] | None:
    """Script, arguments and ranks of a command that trains; None for any other."""
    if words[:2] == ["dsf", "train"] and "--dry_run" not in words:
        ranks = int(words[words.index("--num_gpus") + 1]) if "--num_gpus" in words else 2
        return (
            "train.py",
            ["--config", *(w for w in words[2:] if w not in ("--num_gpus", str(ranks)))],
            ranks,
        )
    for launcher, option in (
        ("torchrun", "--nproc-per-node"),
        ("deepspeed", "--num_gpus"),
        ("python", ""),
    ):
        if words[0] == launcher and words[1] != "-m":
            script = next(word for word in words if word.endswith(".py"))
            ranks = int(words[words.index(option) + 1]) if option else 1
            return script, words[words.index(script) + 1 :], ranks
    return None


def comparable(command: str, text: str) -> list[str]:
    """Lines as they are compared: of commands that measure something, without the figures."""
    # The first start on a machine compiles an operator, and says so; a busy machine keeps waiting.
    silent = ("DeepSpeed deepspeed.ops.", "waiting for ")
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith(silent)]
    if (
        trained(shlex.split(command.replace("\\\n", " "), comments=True))
        or " report " in command
        or " inspect " in command
    ):
        lines = [
            _PARTS.sub("parts", _FIGURE.sub("#", re.sub(r"\S*/?(tensorboard --)", r"\1", line)))
            for line in lines
        ]
    # on a busy machine there is time left to speak of
    lines = [re.sub(r"  left #:#:#$", "", line) for line in lines]
    # which classes took time differs
    lines = [re.sub(r"^(\s*goodput ).*", r"\1#", line) for line in lines]
    lines = [re.sub(r"(finished after # steps; ).*", r"\1verdict", line) for line in lines]
    return [re.sub(r"\s+#", " #", line) for line in lines]


def is_shown(shown: list[str], printed: list[str]) -> bool:
    """Check that the lines are those that were printed; ``...`` stands for any number of them."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line) + r"\n" for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[None]:
    """The environment of somebody who types in `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _update(path: Path, folder: Path) -> None:
    page = Page(path, folder)
    with playing(folder):
        for command, shown, printed in page.steps():
            if not is_shown(comparable(command, shown), comparable(command, printed)):
                page.text = page.text.replace(f"$ {command}\n{shown}", f"$ {command}\n{printed}", 1)
    path.write_text(page.text, encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            _update(Path(name).absolute(), Path(place))
    end_session_ranks()
