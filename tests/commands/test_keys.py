"""`dsf keys`: a key by its name, by a part of it, by its sentence, or by another tool's word."""

from __future__ import annotations

import re

import pytest
import yaml

from deepspeed_lint.rows import cases_of
from framework.cli import main
from framework.commands.explained import explain_kind, explanations
from framework.commands.keys import find_keys
from framework.config.key_list import key_forms
from framework.errors import EXIT_OK, EXIT_PROBLEMS
from framework.plan.rules.base import read_rows
from tests.places import ROOT
from tools.docs_site.reference import config_keys


def test_a_key_is_shown_with_all_that_a_writer_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "zero.stage"]) == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [
        "zero.stage",
        "  whole number ≥ 0 ≤ 3 or auto; default 0",
        "  0: plain data parallel; 1: optimizer state is spread; 2: gradients too; 3:",
        "    weights too; auto: as the devices allow.",
        "  zero.stage=0",
    ]


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("learning_rate", "optimizer.lr"),
        ("per-device-train-batch-size", "batch.micro_size"),
        ("gradient_clip_val", "training.clip_grad_norm"),
        ("mixed precision", "precision.dtype"),
        ("tensor_parallel_degree", "parallel.tensor"),
        ("checkpoint.interval", "checkpoint.every_steps"),
        ("OUTPUT_DIR", "run.output_dir"),
        ("bucket", "data.bucket_steps"),
        ("deleted after", "checkpoint.keep_last"),
    ],
)
def test_a_word_leads_to_its_key(word: str, first: str) -> None:
    assert find_keys(word)[0] == first


def test_a_word_of_another_tool_without_a_key_gets_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["keys", "load_in_8bit_please"]) == EXIT_PROBLEMS
    assert "no key has load_in_8bit_please" in capsys.readouterr().out
    assert main(["keys", "gradient_clip_algorithm"]) == EXIT_OK
    assert capsys.readouterr().out.startswith("remove it: DeepSpeed clips by the norm")


def test_a_kind_of_problem_is_explained_within_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["keys", "[zero-with-pipeline]"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "zero-with-pipeline"
    assert lines[1].startswith("  cause: DeepSpeed's pipeline engine adds up gradients")
    assert "  fix: set zero.stage: 1, or train without stages (parallel.pipe: 1) at" in lines[3]
    assert lines[-2:] == ["  more: docs/pipeline.md", "  more: docs/parallelism.md"]
    assert max(map(len, lines)) <= 80
    for kind in explanations():
        shown = explain_kind(kind)
        for page in re.findall(r"more: (.*)", shown or ""):
            assert (ROOT / page).is_file(), kind


@pytest.mark.parametrize("kind", [*read_rows()])
def test_a_kind_of_a_rule_is_explained_by_its_rows(kind: str) -> None:
    shown = explain_kind(kind, width=80)
    assert shown is not None
    lines = shown.splitlines()
    assert lines[0] == kind
    assert max(map(len, lines)) <= 80
    if kind not in explanations():
        keys = {case["key"] for case in cases_of(read_rows()[kind])}
        assert all(f"cause: {key}" in shown for key in keys)
        assert "  fix: " in shown
        assert "  source: " in shown


def test_a_kind_of_the_linter_is_explained_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "[batch-arithmetic]"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "batch-arithmetic"
    assert lines[2].startswith("  meaning    train_batch_size is not the micro-batch times")
    # a key of DeepSpeed is none: it finds keys of a run config
    assert main(["keys", "train_batch_size"]) == EXIT_OK
    assert "batch.global_size" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check", "zero.stage=2"], ["plan", "zero.stage=2"]], ids=str)
def test_a_terminal_gets_the_command_that_explains(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "ds_configs" / "quickstart.yaml"
    command = [words[0], str(path), *words[1:], "parallel.pipe=2", "--num_gpus", "2"]
    assert main(command)
    assert "more:" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(command)
    assert capsys.readouterr().err.endswith("\nmore: dsf keys zero-with-pipeline\n")


def test_all_keys_are_listed_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(key_forms())
    assert max(map(len, lines)) <= 80
    assert main(["keys", "--names"]) == EXIT_OK
    assert capsys.readouterr().out.split() == list(key_forms())
    tags = {key for key in config_keys() if key not in key_forms()}
    assert {key.rpartition(".")[2] for key in tags} <= {"kind", "device", "dtype"}


def test_a_process_without_stdout_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["keys", "--names"]) == EXIT_OK


def test_every_example_is_a_value_as_a_setting_has_it() -> None:
    for forms in key_forms().values():
        for form in forms:
            assert form.example
            yaml.safe_load(form.example.strip("'"))
