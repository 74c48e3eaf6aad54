"""Files of other training tools and templates are named for what they are, by `check` and by
`import`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.cli import main

_TOOLS = {
    "axolotl": [
        "base_model: /m\ndatasets:\n  - {path: d.jsonl, type: alpaca}\nmicro_batch_size: 2\nbf16: auto\n"
        "learning_rate: 2e-4\noutput_dir: o\n",
        "base_model: /m\nsequence_len: 512\nrl: dpo\n",
    ],
    "LLaMA-Factory": [
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: a\ntemplate: b\ncutoff_len: 64\n"
        "bf16: true\noutput_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 1\n",
        "model_name_or_path: m\nstage: dpo\ndataset: a\noutput_dir: o\nlearning_rate: 1e-4\n",
    ],
    "ms-swift": [
        "model: m\ndataset: [a]\ntrain_type: lora\nlearning_rate: 1e-4\noutput_dir: o\n",
        "model: m\ndataset: a\nlora_rank: 8\ntorch_dtype: bfloat16\nnum_train_epochs: 1\nlearning_rate: 1e-4\n",
    ],
    "torchtune": ["model:\n  _component_: torchtune.models.x\nbatch_size: 2\nepochs: 1\n"],
    "NeMo": [
        "trainer: {devices: 8, num_nodes: 1, accelerator: gpu, precision: bf16}\nexp_manager: {name: x}\n",
        "run: {name: x}\ntrainer: {devices: 8, max_steps: 10}\nmodel: {micro_batch_size: 1, mcore_gpt: true}\n",
    ],
    "TRL": [
        "model_name_or_path: m\ndataset_name: d\nlearning_rate: 2e-4\nuse_peft: true\noutput_dir: o\n",
        "output_dir: o\nlearning_rate: 1e-6\nnum_generations: 8\nper_device_train_batch_size: 2\n",
    ],
    "GPT-NeoX": [
        '{"pipe_parallel_size": 2, "num-layers": 12, "optimizer": {"type": "Adam"}}\n',
        '{"data_path": "d", "vocab_file": "v.json", "tokenizer_type": "x"}\n',
        "checkpoint_factor: 100\neval_iters: 10\n",
        "profile: true\nprofile_step_start: 10\nprofile_step_stop: 12\n",
        '{"attention_config": [[["local", "global"], "all"]], "sparsity_config": {"block": 16}}\n',
    ],
}
_CASES = [(tool, text) for tool, texts in _TOOLS.items() for text in texts]


@pytest.mark.parametrize(("tool", "text"), _CASES)
def test_a_file_of_another_tool_is_one_line(
    tool: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    kind = "gpt-neox-config" if tool == "GPT-NeoX" else "other-tools-config"
    for command, code in (("check", 2), ("import", 78)):
        assert main([command, str(path)]) == code
        stated = capsys.readouterr()
        (line,) = (stated.out + stated.err).splitlines()
        assert f"this is a config of {tool}, neither a run config nor DeepSpeed JSON" in line
        assert line.endswith(f"[{kind}]")
    assert (
        "micro_batch_size is batch.micro_size" in line
        or "micro_batch_size" not in text
        or tool == "NeMo"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.json",
            '{\n"train_batch_size": CONFIG_BATCH_SIZE,\n"zero_optimization": {"stage": ZERO_STAGE, "x": 1}\n}',
        ),
        (
            "b.json",
            '{\n"train_batch_size": CONFIG_BATCH_SIZE,\n"zero_optimization": {\n"stage": ZERO_STAGE\n}\n}',
        ),
        ("c.json", '{"train_batch_size": "${BATCH}", "zero_optimization": {"stage": "<stage>"}}'),
        ("d.json", '{"train_batch_size": {{ batch }}, "zero_optimization": {"stage": 1}}'),
        ("e.yaml", "run: {name: a}\nzero: {stage: '${STAGE}'}\ntraining: {max_steps: $STEPS}\n"),
        ("f.yaml", "run: {name: a}\nzero: {stage: {{ stage }} }\n"),
        ("g.yaml", "run: {name: a}\ntraining: {max_steps: MAX_STEPS}\n"),
    ],
)
def test_a_template_is_one_line(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a template: " in line
    assert line.endswith("[config-template]")
    if name.endswith(".json"):
        assert main(["import", str(path)]) == 78
        assert capsys.readouterr().err.rstrip().endswith("[config-template]")


def test_what_is_wrong_is_not_taken_for_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(
        '{"train_batch_size": 8, "bf16": {"enabled": "TRUE"}, "optimizer": {"type": "ADAMX", "params": {}}}'
    )
    main(["check", str(path)])
    assert "template" not in capsys.readouterr().err


def test_accelerates_file_with_a_key_twice_is_read_as_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndebug: false\nmixed_precision: fp16\ndebug: true\n"
    )
    assert main(["check", str(path)]) == 2
    assert "[accelerate-config]" in capsys.readouterr().err
    assert main(["import", str(path)]) == 0
    stated = capsys.readouterr()
    assert "compute_dtype: fp16" in stated.out
    assert (
        "debug: the key is already set in line 2; the last one counts, as there [duplicate-key]"
        in stated.err
    )
    path.write_text("run: {name: a}\nrun: {name: b}\n")
    assert main(["check", str(path)]) == 2
    assert "[duplicate-key]" in capsys.readouterr().err
