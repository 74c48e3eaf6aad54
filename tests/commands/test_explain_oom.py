"""``plan --explain-oom``: lines for a person, JSON for tools, and texts that hold nothing."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest

from framework.cli import main
from tests.plan.out_of_memory_texts import TEXTS

RUN = [
    "ds_configs/gpt_zero3.yaml",
    "model={kind: gpt, size: llama-3-8b}",
    "batch={micro_size: 4}",
    "--num_gpus",
    "8",
]
Capture = pytest.CaptureFixture[str]


def explained(tmp_path: Path, name: str, *words: str, capsys: Capture) -> str:
    log = tmp_path / "rank0.log"
    log.write_text(TEXTS[name], encoding="utf-8")
    assert main(["plan", *RUN, *words, "--explain-oom", str(log)]) == 0
    return capsys.readouterr().out


def test_lines_name_moment_sizes_component_estimate_and_fixes(
    tmp_path: Path, capsys: Capture
) -> None:
    lines = explained(tmp_path, "step-adamw", "zero.stage=1", capsys=capsys).splitlines()
    assert lines[:3] == [
        "lacking   a device has no memory left, in the optimizer's step (torch/optim/optimizer.py: _use_grad)",
        "          130.0 MiB asked for, 87.2 MiB free, 94.99 GiB on the device",
        "asked by  optimizer copies",
    ]
    assert lines[3].startswith("estimate  ")
    assert "in the optimizer's step: weights 14.96 GiB, " in lines[3]
    assert lines[4].startswith("fixes     zero.stage: 3, zero.offload_optimizer.device: cpu: ")
    assert lines[4].endswith(" less, enough, by estimate")


def test_pieces_are_advised_on_beside_the_config(tmp_path: Path, capsys: Capture) -> None:
    out = explained(tmp_path, "fragmented", capsys=capsys)
    assert (
        "\nalso      torch holds 40.69 GiB in unused pieces, more than was asked for: set PYTORCH_CUDA_ALLOC_CONF"
        in out
    )


def test_a_config_that_was_not_the_runs_shows(tmp_path: Path, capsys: Capture) -> None:
    out = explained(tmp_path, "step-zero3", "zero.stage=2", capsys=capsys)
    assert " more than this estimate has at that moment\n" in out
    assert "also      the traceback is of zero.stage: 3, and the config has 2" in out
    assert "the traceback is of" not in explained(
        tmp_path, "step-zero3", "zero.stage=3", capsys=capsys
    )


def test_a_kill_is_explained_by_what_lies_on_the_host(tmp_path: Path, capsys: Capture) -> None:
    out = explained(
        tmp_path,
        "killed-deepspeed",
        "zero={offload_optimizer: {device: cpu}, stage: 3}",
        capsys=capsys,
    )
    assert out.startswith(
        "lacking   a process was killed (SIGKILL), and lack of host memory is the usual reason\n"
    )
    assert " on the host: optimizer state " in out
    assert re.search(
        r"zero.offload_optimizer.device: none: .* less, and .* GiB at most on the device, by estimate",
        out,
    )
    assert "each rank of a host holds there what is offloaded: fewer of them take less\n" in out
    assert "checkpoint.mode" not in out
    out = explained(
        tmp_path, "killed-deepspeed", "zero.stage=1", "checkpoint.mode=async", capsys=capsys
    )
    assert re.search(
        r"\nfixes     checkpoint.mode: sync: (.*) less, and .* at most on the device, by estimate\n",
        out,
    )
    assert "\nalso      checkpoint.mode: async copies what" in out


def test_json_has_the_same(tmp_path: Path, capsys: Capture) -> None:
    found = json.loads(
        explained(tmp_path, "backward-zero3", "zero.stage=1", "--json", capsys=capsys)
    )
    assert found["shortage"]["moment"] == found["estimate"]["moment"] == "backward"
    assert found["estimate"]["is_estimate"] is True
    assert sum(found["estimate"]["bytes"].values()) > found["fixes"][0]["less_bytes"] > 0


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXTS["host"].encode())))
    assert main(["plan", *RUN, "--explain-oom", "-"]) == 0
    assert "3.73 GiB asked for" in capsys.readouterr().out


def test_a_text_without_such_a_message_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "log").write_text("all is well\n", encoding="utf-8")
    assert main(["plan", *RUN, "--explain-oom", str(tmp_path / "log")]) == 64
    assert "holds no message of memory that is not there" in capsys.readouterr().err
    assert main(["plan", *RUN, "--explain-oom", str(tmp_path / "absent")]) == 64
    assert "cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["9" * 5000, "1.2.3", ".", "1e5", "9" * 30])
def test_numbers_that_are_no_sizes_are_left_out(
    number: str, tmp_path: Path, capsys: Capture
) -> None:
    log = tmp_path / "rank0.log"
    text = f"CUDA out of memory. Tried to allocate {number} GiB. GPU 0 has a total capacity of {number} GiB of which "
    text += f"{number} GiB is free. Process {number} has {number} GiB memory in use. "
    text += f"this process has {number} GiB memory in use\n"
    log.write_text(text)
    began = time.process_time()
    assert main(["plan", *RUN, "--explain-oom", str(log)]) == 0
    assert time.process_time() - began < 20, "no search begins anew at each digit"
    assert "asked for" not in capsys.readouterr().out
