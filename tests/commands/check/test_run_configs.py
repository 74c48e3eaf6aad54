"""`check` on run configs: the JSON that they render to is judged as well, against the release and
the GPU that were named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.cli import main

Capture = pytest.CaptureFixture[str]


def reported(path: Path, text: str, capsys: Capture, *words: str) -> tuple[int, list[str]]:
    """Exit code and problem lines, without the name of the file."""
    path = path / "run.yaml"
    path.write_text(text)
    code = main(["check", str(path), *words])
    return code, [line.replace(f"{path}:", "") for line in capsys.readouterr().err.splitlines()]


def test_an_unknown_release_is_refused_for_any_file(tmp_path: Path, capsys: Capture) -> None:
    for text in ("{}\n", "zero: {stge: 1}\n", "deepspeed: {dump_state: true}\n"):
        code, (line,) = reported(tmp_path, text, capsys, "--deepspeed", "banana")
        assert (code, line.startswith("no table of DeepSpeed banana: known are 0.16.9, ")) == (
            64,
            True,
        )


def test_a_patch_without_a_table_is_judged_by_the_next_one(tmp_path: Path, capsys: Capture) -> None:
    code, (line,) = reported(tmp_path, "{}\n", capsys, "--deepspeed", "0.18.3")
    assert (code, "no table of DeepSpeed 0.18.3, so 0.18.9 was taken" in line) == (0, True)
    assert reported(tmp_path, "{}\n", capsys, "--deepspeed", "0.19.99")[0] == 64


def test_typed_sections_are_judged_against_the_release(tmp_path: Path, capsys: Capture) -> None:
    """DeepSpeed 0.16.9 reads no torch_autocast; a run without autocast renders it too, switched
    off, which is the same there.
    """
    assert reported(tmp_path, "precision: {dtype: fp32}\n", capsys, "--deepspeed", "0.16.9") == (
        0,
        [],
    )
    code, (line,) = reported(
        tmp_path, "precision:\n  dtype: autocast\n", capsys, "--deepspeed", "0.16.9"
    )
    assert code == 2
    assert line.startswith("2:")
    assert "precision.dtype = autocast: DeepSpeed 0.16.9 reads no such key" in line
    assert (
        reported(tmp_path, "precision: {dtype: autocast}\n", capsys, "--deepspeed", "0.17.6")[0]
        == 0
    )


def test_typed_sections_are_judged_against_the_gpu(tmp_path: Path, capsys: Capture) -> None:
    code, (line,) = reported(tmp_path, "precision: {dtype: fp16}\n", capsys, "--gpu", "p100-16gb")
    assert (code, "precision.dtype = fp16: DeepSpeed does not train fp16 on p100-16gb" in line) == (
        2,
        True,
    )
    assert "set precision.dtype: fp32 [fp16-unsupported]" in line
    code, (line,) = reported(
        tmp_path, "precision: {dtype: bf16}\nzero: {stage: 1}\n", capsys, "--gpu", "t4-16gb"
    )
    assert (code, line.startswith("warning: ")) == (0, True)
    assert line.endswith("; set precision.dtype: fp16 [bf16-emulated]")
    assert reported(
        tmp_path, "precision: {dtype: bf16}\nzero: {stage: 1}\n", capsys, "--gpu", "h100-80gb"
    ) == (0, [])


def test_fp8_takes_a_gpu_that_has_it_and_its_package(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "model: {kind: gpt}\ndata: {kind: text}\ntask: {kind: causal_lm}\nzero: {stage: 1}\n"
    text += "precision: {dtype: bf16, fp8: true}\n"
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *_: None if name == "torchao" else 1
    )
    code, (line,) = reported(tmp_path, text, capsys, "--gpu", "h200-141gb")
    assert code == 0
    assert line.startswith("warning: 5:")
    assert "precision.fp8: precision.fp8 needs the package torchao, which " in line
    assert line.endswith("./launch.sh setup fp8, or pip install -e '.[fp8]' [package-missing]")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: 1)
    assert reported(tmp_path, text, capsys, "--gpu", "l4-24gb") == (0, [])
    code, (line,) = reported(tmp_path, text, capsys, "--gpu", "a100-80gb")
    assert code == 2
    assert "a100-80gb has no products in fp8: its compute capability is 8.0; set" in line
    code, (line,) = reported(tmp_path, text, capsys, "--gpu", "mi300x-192gb")
    assert code == 2
    assert "no GPU of NVIDIA" in line
    emulated = text.replace("fp8: true", "fp8: {emulate: true}")
    assert reported(tmp_path, emulated, capsys, "--gpu", "a100-80gb") == (0, [])
    code, (line,) = reported(tmp_path, text.replace("bf16", "fp16"), capsys)
    assert code == 2
    assert "it exists as precision.fp8 of bf16 [unknown-key]" in line
    in_fp32 = text.replace("dtype: bf16, fp8: true", "dtype: fp32, states: bf16")
    code, (line,) = reported(tmp_path, in_fp32, capsys)
    assert code == 2
    assert "it exists as precision.states of fp16, bf16 [unknown-key]" in line


def test_a_length_that_only_the_data_has_stops_no_judgement(
    tmp_path: Path, capsys: Capture
) -> None:
    text = "data: {target: torch.utils.data:TensorDataset}\nscheduler: {kind: warmup_decay, warmup_steps: 10}\n"
    code, lines = reported(tmp_path, text, capsys)
    assert (code, [line for line in lines if "run-length" in line]) == (0, [])


def test_all_problems_come_at_once(tmp_path: Path, capsys: Capture) -> None:
    """Neither a typed section nor a misspelt key above hides what is wrong in single keys under
    `deepspeed:`.
    """
    text = (
        "zero: {stge: 2}\ndeepspeed:\n  wall_clock_breakdown: maybe\n  flops_profiler: {enabled: true, modul_depth: "
        "3}\n"
        "  wandbb: {}\n  timers.throughput: {}\n"
    )
    for wrong, expected in ((text, 5), (text.replace("stge", "stage"), 4)):
        code, lines = reported(tmp_path, wrong, capsys)
        assert (code, len(lines)) == (2, expected), lines
        assert any(
            "3:" in line and "deepspeed.wall_clock_breakdown = maybe" in line for line in lines
        )
        assert any(
            "4:" in line and "did you mean deepspeed.flops_profiler.module_depth?" in line
            for line in lines
        )
        assert any("deepspeed.wandbb" in line for line in lines)
        assert any("deepspeed.timers.throughput" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "deepspeed: {data_types: {param_dtype: fp16}}\n",
            "deepspeed.data_types.param_dtype = fp16: fp16 and bf16 say that",
        ),
        (
            "zero: {stage: 2}\ndeepspeed: {gradient_predivide_factor: 2.0}\n",
            "set zero.reduce_scatter: false or deepspeed.gradient_predivide_factor: 1.0",
        ),
        ("deepspeed: {compile: {passes: [z4]}}\n", "deepspeed.compile.passes"),
        # the key at fault stands in a typed section, the cause under deepspeed:
        (
            "zero: {stage: 1}\noptimizer: {kind: sgd}\ndeepspeed: {zero_optimization: {compute_grad_norm: false}}\n",
            "training.clip_grad_norm = 1.0: clipping at 1 needs the norm",
        ),
        (
            "deepspeed: {optimizer: {params: {foo: 1}}}\n",
            "deepspeed.optimizer.params.foo = 1: DeepSpeed 0.19.8 refuses it",
        ),
    ],
)
def test_what_deepspeed_keys_cause_is_reported_in_the_words_of_the_run(
    text: str, expected: str, tmp_path: Path, capsys: Capture
) -> None:
    code, lines = reported(tmp_path, text, capsys)
    assert code == 2
    assert [line for line in lines if expected in line], lines


def test_deepspeeds_words_are_reported_by_their_name_here(tmp_path: Path, capsys: Capture) -> None:
    text = "train_batch_size: 8\nzero_optimization: {stage: 2}\nbatch: {gradient_clipping: 1.0}\nwall_clock_breakdown: true\n"  # noqa: E501
    code, lines = reported(tmp_path, text, capsys)
    assert code == 2
    fixes = [
        "batch.global_size here",
        "zero here",
        "training.clip_grad_norm here",
        "write it as deepspeed.wall_clock_breakdown",
    ]
    assert all(any(fix in line for line in lines) for fix in fixes), lines


def test_accelerates_config_is_one_problem(tmp_path: Path, capsys: Capture) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
    code, (line,) = reported(tmp_path, text, capsys)
    assert (code, "[accelerate-config]" in line) == (2, True)


def test_the_batch_of_a_tensor_group_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    plan = "{fc1: column, fc2: row, fc3: column_gathered}"
    path.write_text(
        f"parallel: {{tensor: 2, tensor_plan: {plan}}}\nbatch: {{global_size: 64, micro_size: 16}}\n"
    )
    assert main(["check", str(path), "--num_gpus", "4"]) == 0
    assert (
        "64 samples per step = 16 x 2 accumulation x 2 data-parallel, 2 tensor-parallel"
        in capsys.readouterr().out
    )
    assert main(["check", str(path), "--num_gpus", "4", "parallel.tensor=4"]) == 0
    assert main(["check", str(path), "--num_gpus", "3"]) == 2
    assert "[parallel-not-divisible]" in capsys.readouterr().err
