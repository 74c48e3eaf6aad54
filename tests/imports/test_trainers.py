"""Files of other trainers become run configs, and nothing that a file says is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.text.document import parse_document
from framework.cli import main
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.imports.deepspeed import run_config_text
from tests.imports.trainer_files import hugging_face, imported


def test_compiling_is_taken_over() -> None:
    asked = hugging_face(torch_compile=True).training.compile
    assert (asked.backend, asked.mode, asked.per) == ("inductor", None, "model")
    asked = hugging_face(
        torch_compile_backend="aot_eager", torch_compile_mode="max-autotune"
    ).training.compile
    assert (asked.backend, asked.mode) == ("aot_eager", "max-autotune"), (
        "one of them turns it on there"
    )
    assert hugging_face(torch_compile=False).training.compile == "auto"
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
    }
    found = imported(
        accelerate | {"dynamo_config": dynamo | {"dynamo_use_regional_compilation": True}}
    )
    assert found.values["training"]["compile"] == {
        "backend": "inductor",
        "mode": "default",
        "per": "block",
    }
    old = imported(accelerate | {"dynamo_backend": "NO", "mixed_precision": "bf16"})
    assert "compile" not in old.values.get("training", {})
    assert not [line for line in map(str, found.left_out + old.left_out) if "dynamo" in line]


def test_nothing_that_differs_is_dropped_in_silence() -> None:
    found = imported(
        {
            "output_dir": "o",
            "learning_rate": 1,
            "push_to_hub": True,
            "half_precision_backend": "auto",
            "fp16": False,
        }
    )
    names = [omission.key for omission in found.left_out]
    assert {"push_to_hub", "half_precision_backend"} <= set(names)
    assert "fp16" not in names, "as there by itself"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"per_device_train_batch_size": "many"}, "per_device_train_batch_size"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
    ],
)
def test_a_wrong_value_is_named_as_the_file_has_it(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported({"output_dir": "o", "learning_rate": 1e-4} | values)
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(
    "values",
    [{"num_train_epochs": "x"}, {"warmup_steps": []}, {"deepspeed": "none.json"}, {"optim": 3}],
)
def test_nonsense_ends_in_words(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "o", "learning_rate": 1e-4} | values))
    code = main(["import", str(path)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert (code == 78 and str(next(iter(values.values()))) in said.err) or (
        code == 0 and "optim: 3" in said.out
    )


@pytest.mark.slow
def test_defaults_are_those_of_the_installed_packages() -> None:
    for package in ("transformers", "pytorch_lightning"):
        pytest.importorskip(package, reason=f"{package} comes with the dev extra")
    from tools.trainer_defaults import OUT, defaults

    assert json.loads(OUT.read_text(encoding="utf-8")) == defaults(), (
        "run python -m tools.trainer_defaults"
    )


def test_lengths_in_other_units_and_what_other_tools_leave_out() -> None:
    trainer = {
        "max_epochs": 3,
        "max_steps": 10,
        "accumulate_grad_batches": 4,
        "val_check_interval": 100,
    }
    found = imported({"seed_everything": 1, "trainer": trainer})
    assert found.values["evaluation"]["every_steps"] == 25, "batches there"
    assert tuple(map(str, found.left_out)) == (
        "max_epochs: 3 (max_steps is the length here; the first to come is there)",
    )
    each = imported({"seed_everything": 1, "trainer": trainer | {"val_check_interval": 1}})
    assert each.values["evaluation"]["every_steps"] == 1
    assert hugging_face(lr_scheduler_type="constant", warmup_steps=100).scheduler.warmup_steps == 0
    assert (
        hugging_face(
            lr_scheduler_type="constant_with_warmup", warmup_steps=100
        ).scheduler.warmup_steps
        == 100
    )


def test_what_is_left_to_write_stands_below_and_is_a_run_config() -> None:
    text = run_config_text(imported({"output_dir": "o", "learning_rate": 1e-4}), name="args.json")
    stubs = text.partition("Yours to write")[2].splitlines()[1:]
    whole = text + "\n".join(line.removeprefix("# ") for line in stubs) + "\n"
    values = parse_document(whole, name="run.yaml").value
    assert {"run", "model", "data", "task", "training"} <= values.keys()
    assert config_from_values(values).training.max_epochs == 3
