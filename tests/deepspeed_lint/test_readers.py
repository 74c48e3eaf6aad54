"""Files for Hugging Face's Trainer and for Accelerate: what they fill in, and what they refuse,
held against their own code.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.check import check_document
from deepspeed_lint.readers import FILLED, Reader
from deepspeed_lint.report import CheckResult
from deepspeed_lint.text.hjson import parse_hjson
from deepspeed_lint.topology import Target
from tests.deepspeed_lint.rules.cases import merged
from tests.launched import run_ranks

ASK = Path(__file__).with_name("ask_hugging_face.py")
PLAIN: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
}


def autos(*paths: str) -> dict[str, Any]:
    """Return a file with "auto" at these paths; a section that needs more has it."""
    values: dict[str, Any] = {}
    for path in paths:
        change: Any = "auto"
        for name in reversed(path.split(".")):
            change = {name: change}
        values = merged(values, change)
    for section, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupDecayLR")):
        if section in values:
            values[section]["type"] = kind
    if "scheduler" in values:
        # the rate that the Trainer has
        needed = {"total_num_steps": 10, "warmup_num_steps": 2, "warmup_max_lr": 5e-5}
        values["scheduler"]["params"] = needed | values["scheduler"]["params"]
        values = merged({"optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}}, values)
    return merged(PLAIN, values)


# Questions to the readers: paths -> "auto" in them; the others are files as they stand.
UNFILLED = (
    "wall_clock_breakdown",
    "fp16.auto_cast",
    "fp16.loss_scale_window",
    "zero_optimization.overlap_comm",
    "zero_optimization.offload_optimizer.pin_memory",
    "checkpoint.load_universal",
    "communication_data_type",
    "zero_optimization.zenflow.select_strategy",
    "optimizer.params.torch_adam",
    "aio.block_size",
)
FILES: list[str] = [
    *(json.dumps(autos(path)) for path in (*sorted(FILLED), "steps_per_print", *UNFILLED)),
    json.dumps(
        {
            name: value
            for name, value in autos("gradient_clipping").items()
            if name != "zero_optimization"
        }
    ),
    json.dumps(autos("gradient_clipping")).replace("{", "{ // why\n", 1),
    json.dumps(autos("gradient_clipping"))[:-1] + ",}",
    "\ufeff" + json.dumps(autos("gradient_clipping")),
    json.dumps(autos("gradient_clipping")),
]


def judged(text: str, reader: Reader | None = None) -> CheckResult:
    return check_document(parse_hjson(text, name="x.json"), Target(reader=reader))


def errors(text: str, reader: Reader | None = None) -> list[tuple[str, str]]:
    return [
        (problem.kind, problem.key)
        for problem in judged(text, reader).problems
        if problem.severity == "error"
    ]


def test_a_file_with_auto_is_reported_as_the_trainers() -> None:
    verdict = judged(json.dumps(autos("optimizer.params.lr", "train_batch_size")))
    assert verdict.is_fine
    assert verdict.summary == "fine for Hugging Face's Trainer and DeepSpeed 0.19.8"
    (note,) = [problem for problem in verdict.problems if problem.kind == "reader-assumed"]
    assert "--for accelerate" in note.fix
    assert judged(json.dumps(PLAIN)).summary == "fine for DeepSpeed 0.19.8"
    own_word = merged(PLAIN, {"data_types": {"keep_in_fp32_modules": "auto"}})
    assert not errors(json.dumps(own_word)), "DeepSpeed's own word names no other reader"


def test_each_reader_has_its_own_keys() -> None:
    text = json.dumps(autos("optimizer.params.betas"))
    assert errors(text, "huggingface") == []
    assert (
        errors(text, "accelerate")
        == errors(text, "deepspeed")
        == [("auto-value", "optimizer.params.betas")]
    )
    assert errors(json.dumps(autos("wall_clock_breakdown")), "huggingface") == [
        ("auto-value", "wall_clock_breakdown")
    ]
    node_local = judged(json.dumps(autos("checkpoint.use_node_local_storage")), "huggingface")
    assert [
        problem.severity for problem in node_local.problems if problem.kind == "auto-value"
    ] == ["warning"]


def test_whole_numbers_are_read_as_json_load_does() -> None:
    text = json.dumps(autos("gradient_clipping")).replace(
        '"train_batch_size": 8', '"train_batch_size": 8e0'
    )
    assert ("wrong-type", "train_batch_size") in errors(text)
    plain = judged(text.replace('"auto"', "1.0"))
    assert plain.is_fine
    assert [problem.fix for problem in plain.problems if problem.kind == "loose-type"] == [
        "write 8"
    ]
    taken = json.dumps(
        merged(
            autos("gradient_clipping"),
            {"steps_per_print": 1, "zero_optimization": {"reduce_bucket_size": 1}},
        )
    )
    assert (
        errors(taken.replace('_size": 1}', '_size": 5e8}').replace('print": 1', 'print": 1e5'))
        == []
    )


def test_what_is_left_out_and_what_json_does_not_read() -> None:
    found = judged(
        '{"train_batch_size": "auto", // all\n "fp16": {"enabled": "auto"}, "_comment": "x",}'
    )
    kinds = {problem.kind: problem for problem in found.problems}
    assert {"not-json", "zero-section-missing", "accumulation-left-out"} <= kinds.keys()
    assert kinds["not-json"].line == 1
    assert "// comments" not in kinds["comment-key"].fix


@pytest.mark.slow
@pytest.mark.skipif(
    None in map(find_spec, ("accelerate", "transformers", "deepspeed")),
    reason="needs what it is held against",
)
def test_the_installed_trainer_and_accelerate_refuse_the_same(tmp_path: Path) -> None:
    """Their own code reads every file; it is stopped where it would call deepspeed.initialize."""
    (tmp_path / "files.json").write_text(json.dumps(FILES), encoding="utf-8")
    run_ranks(ASK, "files.json", num_ranks=1, cwd=tmp_path)
    answers = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    wrong = []
    for text, answer in zip(FILES, answers, strict=True):
        for reader in ("huggingface", "accelerate"):
            found = judged(text, reader)
            ours = [problem.kind for problem in found.problems if problem.severity == "error"]
            if bool(ours) != bool(answer[reader]):
                wrong.append((reader, text, ours, answer[reader]))
    assert wrong == []
    assert "ValueError" in answers[len(FILLED) + 1]["huggingface"]
    filled = answers[-1]["huggingface-config"]
    assert (filled["gradient_clipping"], filled["steps_per_print"]) == (1.0, "inf")
