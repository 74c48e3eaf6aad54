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
    """Return the arguments of `dsf`; none for other programs."""
    if words[0] == "dsf":
        return words[1:]
    return []


def test_every_way_has_its_block() -> None:
    """The headings promise one for each."""
    started = {words[0] for words in COMMANDS}
    started |= {" ".join(words[1:3]) for words in COMMANDS if words[:2] == ["dsf", "launch"]}
    assert started >= {
        "dsf",
        "deepspeed",
        "torchrun",
        "python",
        "launch node",
        "launch k8s",
        "launch slurm",
    }
    assert "CONFIG" not in BLOCKS


@pytest.mark.parametrize(
    "words",
    [ours(words) for words in COMMANDS if ours(words)[:1] in (["train"], ["launch"])],
    ids=" ".join,
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
