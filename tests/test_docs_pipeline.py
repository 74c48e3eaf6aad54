"""docs/pipeline.md is true: its model code trains as plain PyTorch does, its commands print what it
says, its kinds exist.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli import main
from framework.config.load import load_with_source
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.setup.components import gather_parts
from framework.setup.pipeline_stages import cut_model
from framework.setup.user_code import Objects
from tests.engine.pipe_oracle import plain_run
from tests.launched import series, train_cases
from tests.places import ROOT

PAGE = (ROOT / "docs/pipeline.md").read_text(encoding="utf-8")
CONFIG = ROOT / "ds_configs/lenet_pipeline.yaml"
NUM_STEPS = 10


def block(language: str) -> str:
    """Return the first block in a language: of YAML that of the page's own models."""
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0])


def case(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"target": f"my_nets:{name}"},
        "data": {"kind": "digits", "image_size": 28},
        "parallel": {"pipe": 2},
        "batch": {"global_size": 16, "micro_size": 4},
        "training": {"max_steps": NUM_STEPS, "log_every": 1},
        "evaluation": {"at_end": False},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
        **sections,
    }


@pytest.mark.slow
def test_the_models_of_the_page_train_in_two_stages_as_in_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_nets.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    cases = [case(name, tmp_path) for name in ("perceptron", "as_list", "Residual")]
    cases.append(case("bigrams", tmp_path, **yaml.safe_load(block("yaml"))))
    train_cases(cases, num_ranks=2, folder=tmp_path)
    for values in cases:
        name = values["run"]["name"]
        found = series(tmp_path / name, "train/loss")
        if name == "as_list":  # no module in plain PyTorch: the run itself is what is promised
            assert found[NUM_STEPS] < found[1]
            continue
        losses, _, _ = plain_run(values, micro_size=4, num_steps=NUM_STEPS)
        assert max(abs(found[step] - loss) for step, loss in enumerate(losses, start=1)) < 1e-5, (
            name
        )


def lines_for(*settings: str) -> list[str]:
    config, source = load_with_source(str(CONFIG), list(settings))
    parts = gather_parts(config, Objects())
    plan = make_plan(
        config,
        Cluster(devices_per_host=2),
        num_train_samples=len(parts.splits.train),
        source=source,
    )
    return list(cut_model(plan, parts).table.lines())


def test_the_tables_of_stages_are_what_is_printed() -> None:
    rows = re.findall(
        r"^\| `([a-z:|\\]+)`.*\| ([a-z0-9 .]+) \(([\d,]+)\), ([a-z0-9 .]+) \(([\d,]+)\) \|$",
        PAGE,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["parameters", "uniform", "type:linear\\|conv"]
    for partition, *reported in rows:
        lines = lines_for("parallel.partition=" + partition.replace("\\", ""))
        shown = [re.search(r"layers \((.*?)\), ([\d,]+) parameters", line) for line in lines]
        assert [part for found in shown if found for part in found.groups()] == reported
    (setting,) = re.findall(r"^`parallel.stages: (\[.*?\])`", PAGE, re.MULTILINE)
    assert "\n".join(lines_for(f"parallel.stages={setting}")) in PAGE


def test_the_commands_of_the_page_print_what_it_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed in the checkout: the file of the page is one that is shipped."""
    monkeypatch.chdir(ROOT)
    steps = re.findall(r"^\$ (dsf check .*)\n(.*)$", PAGE, re.MULTILINE)
    assert len(steps) == 3
    for command, line in steps:
        assert main(shlex.split(command)[1:]) == 2
        assert capsys.readouterr().err.splitlines() == [line]


def test_every_kind_of_the_page_is_one_that_the_code_reports() -> None:
    table = PAGE.partition("| kind | why |")[2].partition("## ")[0]
    kinds = re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", table)
    files = [
        *(ROOT / "framework").rglob("*.py"),
        *(ROOT / "deepspeed_lint").rglob("*.py"),
        ROOT / "framework/plan/rules/rules.json",
    ]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert len(kinds) > 10
    assert not [kind for kind in kinds if f'"{kind}"' not in source]


def test_the_one_line_is_what_makes_the_quickstart_a_pipeline() -> None:
    """The shipped config differs from the quickstart by that line and by the size of its
    micro-batches.
    """
    quickstart, pipeline = (
        yaml.safe_load((ROOT / "ds_configs" / f"{name}.yaml").read_text())
        for name in ("quickstart", "lenet_pipeline")
    )
    added = re.findall(r"^\+(.*)$", block("diff"), re.MULTILINE)
    changes = yaml.safe_load("\n".join(added)) | {"batch": {"global_size": 120, "micro_size": 15}}
    assert quickstart | {"run": {"name": "lenet_pipeline"}} | changes == pipeline
