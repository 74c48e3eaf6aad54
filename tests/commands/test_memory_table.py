"""What `plan` says of memory: of the plan, of its alternatives, and of a device."""

from __future__ import annotations

import importlib.util
import json

import pytest

from framework.cli import main
from framework.commands import own_work

GPT = ["ds_configs/gpt_zero3.yaml", "model={kind: gpt, size: llama-3-8b}", "batch={micro_size: 1}", "--num_gpus", "64"]
Capture = pytest.CaptureFixture[str]


def plan(*words: str, capsys: Capture) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_alternatives_are_told_from_the_smallest(capsys: Capture) -> None:
    lines = plan(*GPT, "zero.stage=1", capsys=capsys).splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("memory ")]
    assert "on each rank between steps" in lines[at]
    assert lines[at].endswith("; estimated")
    assert lines[at + 1].split()[:2] == ["at", "most:"]
    told = [line.strip() for line in lines[at + 2 :] if line.startswith("          zero.stage: ")]
    assert [line[:13] for line in told] == [f"zero.stage: {n}" for n in (3, 3, 2, 0)]
    assert not any("fit" in line for line in lines)


def test_what_does_not_fit_is_told_with_what_would(capsys: Capture) -> None:
    out = plan(*GPT, "zero.stage=0", "--gpu", "a100-40gb", capsys=capsys)
    assert "and a100-40gb has 40 GiB; set zero.stage: 1 [memory-too-small]" in out
    assert "memory-too-small" not in plan(*GPT, "zero.stage=3", "--gpu", "a100-40gb", capsys=capsys)
    none = plan(*GPT[:3], "--num_gpus", "1", "--gpu", "t4-16gb", "precision.dtype=fp16", capsys=capsys)
    assert "and t4-16gb has 16 GiB; use 16 devices with zero.stage: 3 [memory-too-small]" in none


def test_json_has_the_bytes_of_each_moment(capsys: Capture) -> None:
    memory = json.loads(plan(*GPT, "--json", capsys=capsys))["memory"]
    assert memory["is_estimate"] is True
    assert memory["total_bytes"]["between"] == sum(memory["bytes"]["between"].values())
    assert memory["peak"] == max(memory["total_bytes"], key=memory["total_bytes"].get)


def test_a_model_of_ones_own_is_not_guessed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch nobody can look at it."""
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else own(name))
    monkeypatch.setattr(own_work, "_cache_file", lambda *_: None)
    words = ["ds_configs/quickstart.yaml", "model={target: 'framework.models.small_nets:LeNet'}"]
    reason = "the model is one of your own (it takes torch, which is not installed)"
    assert f"memory    not estimated: {reason}" in plan(*words, capsys=capsys)
    assert json.loads(plan(*words, "--json", capsys=capsys))["memory"] == {"unknown": reason}


def test_an_unknown_gpu_is_refused(capsys: Capture) -> None:
    assert main(["plan", *GPT, "--gpu", "h900"]) == 64
    assert "--gpu h900: not known; known are" in capsys.readouterr().err
