"""docs/start.md: every block is a run that would start, or a manifest that is printed."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from framework.cli import main
from framework.config.load import load_config
from framework.hosts.devices import LocalDevices
from framework.launch import local, node
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from tests.places import ROOT

PAGE = (ROOT / "docs/start.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace(
    "\\\n", ""
)
COMMANDS = [words for line in BLOCKS.splitlines() if (words := shlex.split(line, comments=True))]


def ours(words: list[str]) -> list[str]:
    """Return the arguments of `python -m framework`; none for other programs."""
    if words[0] == "./launch.sh":
        return ["launch", *({"train": [], "node": ["node"]}[words[1]]), *words[2:]]
    return words[3:] if words[:3] == ["python", "-m", "framework"] else []


def test_every_way_has_its_block() -> None:
    """The headings promise one for each."""
    started = {
        words[0] if words[0] != "python" or words[1] != "-m" else " ".join(words[3:5])
        for words in COMMANDS
    }
    assert started >= {
        "./launch.sh",
        "deepspeed",
        "torchrun",
        "python",
        "launch k8s",
        "launch slurm",
    }
    assert "CONFIG" not in BLOCKS


@pytest.mark.parametrize(
    "words", [ours(words) for words in COMMANDS if ours(words)[:1] == ["launch"]], ids=" ".join
)
def test_our_commands_would_start(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run on machines with four GPUs."""
    monkeypatch.chdir(ROOT)
    for module in (local, node):
        monkeypatch.setattr(module, "find_devices", lambda _: LocalDevices("cuda", 4))
    assert main([*words, *(["--dry_run"] if "--dry_run" not in words else [])]) == 0


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if "train.py" in words], ids=" ".join
)
def test_commands_of_other_launchers_have_a_plan(words: list[str]) -> None:
    """Each command names train.py, a config that exists, and a number of ranks that it can be split
    over.
    """
    script = words.index("train.py")
    options = dict(itertools.pairwise(words[:script]))
    hosts = 2 if "--hostfile" in options or "--nnodes" in options else 1
    ranks = int(
        options.get("--num_gpus")
        or options.get("--nproc-per-node")
        or (4 if "--hostfile" in options else 1)
    )
    assert (ROOT / "train.py").is_file()
    config = load_config(ROOT / words[words.index("--config") + 1])
    assert make_plan(config, Cluster(hosts, ranks)).layout.data_parallel_size == hosts * ranks
