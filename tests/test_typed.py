"""The sections of a run config are classes: checkers of types know their keys, a wrong one is
refused as in a file, and each says what the same section of a file does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import framework
from framework import sections
from framework.config.base import Section
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.registry import BUILT_IN, KINDS
from tests.launched import TIMEOUT_SECONDS
from tests.places import ROOT

WRONG = """\
import framework

framework.Batch(global_sise=64)
framework.Batch(global_size="64")
framework.GPT(hidden_size=64, depth=2)
framework.RunConfig(batch=framework.Zero())
framework.RunConfig(run={"name": "x"})
framework.Checkpoint(best_is="largest")
framework.fit(3)
framework.fit("run.yaml", loss=print)
framework.open_engine({}, callbacks=[])
framework.fit({}).history["eval/loss"].step
"""
# Types of torch and what stands on it, of which the lines here have none, take mypy ten times as long
# as all others. Without them the framework's own files are wrong; `--exhaustive` checks them too.
WITHOUT_TORCH = """\
[mypy]
[mypy-torch.*,torchvision.*,transformers.*,numpy.*,PIL.*]
follow_imports = skip
[mypy-framework.*,deepspeed_lint.*]
ignore_errors = true
[mypy-deepspeed.*]
ignore_missing_imports = true
"""


def wrong_lines(words: list[str], folder: Path) -> list[int]:
    """Return the lines of WRONG of which a checker has an error, and check that it has none of the
    example.
    """
    (folder / "wrong.py").write_text(WRONG, encoding="utf-8")
    checked = subprocess.run(
        [*words, "examples/typed.py", str(folder / "wrong.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert checked.returncode == 1, checked.stdout + checked.stderr
    errors = [line for line in checked.stdout.splitlines() if re.search(r"(?:: | - )error", line)]
    found = [re.search(r"wrong\.py:(\d+)", line) for line in errors]
    assert None not in found, "of other files than the wrong one:\n" + checked.stdout
    return sorted({int(place[1]) for place in found if place is not None})


@pytest.mark.slow
def test_mypy_finds_what_is_wrong_and_nothing_else(tmp_path: Path, exhaustive: bool) -> None:
    pytest.importorskip("mypy", reason="mypy comes with the dev extra")
    words = [sys.executable, "-m", "mypy", "--strict"]
    if not exhaustive:
        (tmp_path / "mypy.ini").write_text(WITHOUT_TORCH, encoding="utf-8")
        words += ["--config-file", str(tmp_path / "mypy.ini")]
    assert wrong_lines(words, tmp_path) == [*range(3, 13)]


@pytest.mark.slow
def test_pyright_finds_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    program = shutil.which("pyright")
    if program is None:
        pytest.skip("pyright is not installed: pip install pyright")
    assert wrong_lines([program, "--pythonpath", sys.executable], tmp_path) == [*range(3, 13)]


def subclasses(kind: type[Section]) -> set[type[Section]]:
    found = {kind}
    for below in kind.__subclasses__():
        found |= subclasses(below)
    return found


def test_every_kind_and_section_has_a_public_name() -> None:
    public = {getattr(framework, name) for name in sections.__all__}
    for group in KINDS:
        for path in BUILT_IN[group].values():
            assert path.partition(":")[2] in sections.__all__, path
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            assert field.annotation in public, name
    # bases, and what only a program's objects are described by
    left_out = {
        kind.__name__
        for kind in subclasses(Section) - public
        if "kind" in kind.model_fields and kind.__module__.startswith("framework.")
    }
    assert {name for name in left_out if not name.startswith("_")} == set()
    assert set(sections.__all__) <= set(dir(framework))
    assert framework.RunConfig is RunConfig


def test_classes_mean_what_a_file_means() -> None:
    typed = framework.RunConfig(
        run=framework.Run(name="x", seed=3),
        model=framework.GPT(hidden_size=64, num_heads=2),
        data=framework.Text(path="a.txt", sequence_length=32),
        task=framework.CausalLM(),
        precision=framework.BF16(),
        zero=framework.Zero(stage=2, offload_optimizer=framework.OptimizerToCPU()),
        scheduler=framework.Cosine(warmup_steps=3),
        training=framework.Training(
            ema=framework.EMA(), freeze=[framework.FrozenSteps(match="a", until_step=2), "b"]
        ),
        monitors=framework.Monitors(wandb=framework.WandB(project="p"), tensorboard=None),
    )
    values = {
        "run": {"name": "x", "seed": 3},
        "model": {"kind": "gpt", "hidden_size": 64, "num_heads": 2},
        "data": {"kind": "text", "path": "a.txt", "sequence_length": 32},
        "task": {"kind": "causal_lm"},
        "precision": {"dtype": "bf16"},
        "zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"kind": "cosine", "warmup_steps": 3},
        "training": {"ema": {}, "freeze": [{"match": "a", "until_step": 2}, "b"]},
        "monitors": {"wandb": {"project": "p"}, "tensorboard": False},
    }
    assert typed.to_dict() == config_from_values(values).to_dict()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: framework.Batch(global_sise=3),  # type: ignore[call-arg]
            "global_sise = 3: there is no such key; did you mean 'global_size'? [unknown-key]",
        ),
        (
            lambda: framework.RunConfig(batch=framework.Zero()),  # type: ignore[arg-type]
            "batch",
        ),
        (lambda: framework.LoRA(), "target_modules: the key is required here"),  # type: ignore[call-arg]
        (lambda: framework.Run(name="a b"), "name = a b"),
    ],
)
def test_a_wrong_section_is_refused_as_in_a_file(make: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(line)
