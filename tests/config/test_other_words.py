"""What people who know another tool write first, and where `check` leads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from framework.cli import main
from framework.config.base import choices_of
from framework.config.other_words import meaning, same_key, value_here, value_rows
from framework.config.run_config import RunConfig

# KEY: VALUE  ->  a part of the answer. The value is written as in YAML.
MISTAKES: Final = """
optimizer: {kind: adamw, learning_rate: 1e-3}  ->  learning_rate is optimizer.lr here
optimizer: {learning_rate: 1e-3}  ->  learning_rate is optimizer.lr here
training.gradient_clip_val: 1.0  ->  Lightning's gradient_clip_val is training.clip_grad_norm
training.grad_clip: 1.0  ->  grad_clip is training.clip_grad_norm here
training.max_grad_norm: 1.0  ->  Hugging Face's max_grad_norm is training.clip_grad_norm
training.epochs: 3  ->  epochs is training.max_epochs here
epochs: 3  ->  epochs is training.max_epochs here
training.num_train_epochs: 3  ->  num_train_epochs is training.max_epochs here
training.per_device_train_batch_size: 8  ->  _train_batch_size is batch.micro_size here
batch.micro_batch_size: 8  ->  micro_batch_size is batch.micro_size here
batch_size: 32  ->  batch_size is batch.global_size or batch.micro_size here
gradient_accumulation_steps: 2  ->  gradient_accumulation_steps is batch.accumulation_steps
checkpoint.save_top_k: 3  ->  save_top_k is checkpoint.keep_best or checkpoint.keep_last
checkpoint.save_every: 100  ->  is checkpoint.every_steps or checkpoint.every_epochs here
checkpoint.monitor: eval/loss  ->  Lightning's monitor is checkpoint.keep_best here
training.logger: wandb  ->  monitors.wandb, monitors.mlflow or monitors.comet here
compile: true  ->  it exists as training.compile
zero.strategy: fsdp  ->  strategy is zero.stage
zero.strategy: fsdp  ->  fsdp is stage 3
parallel.tensor_parallel_degree: 2  ->  torchtitan's tensor_parallel_degree is parallel.tensor
training.mixed_precision: bf16  ->  accelerate's mixed_precision is precision.dtype
training.benchmark: true  ->  remove it: set torch.backends.cudnn.benchmark in a module
precision.dtype: float16  ->  did you mean 'fp16'?
precision.dtype: bfloat16  ->  did you mean 'bf16'?
precision.dtype: mixed  ->  did you mean 'autocast' (fp32 weights
precision.dtype: 16  ->  did you mean 'fp16'?
precision: {bf16: true}  ->  for bf16 write dtype: bf16
precision: float16  ->  write {dtype: fp16}
zero: 2  ->  write {stage: 2}
zero.stage: 4  ->  write 3 or less
zero.offload_optimizer: cpu  ->  write {device: cpu}
batch: 32  ->  write {global_size: 32}
callbacks: [early_stopping]  ->  write {kind: early_stopping}
callbacks: [{kind: early_stopping, metric: eval/acc}]  ->  did you mean eval/accuracy?
callbacks: [{kind: early_stopping, monitor: eval/loss}]  ->  monitor is callbacks.metric here
checkpoint.keep_best: val_loss  ->  did you mean eval/loss?
optimizer.kind: AdamW  ->  did you mean 'adamw'?
optimizer: {kind: adamw, lr: 1e-3x}  ->  text where a number belongs
optimizer: {kind: adamw, lr: -1}  ->  write 0 or more
model: {target: nets.Net}  ->  write nets:Net
model: {target: './nets.py:Net'}  ->  write nets:Net
model: {target: my/nets.py}  ->  write my.nets:NAME
data.image_size: 32  ->  set model.image_size: 32 or data.image_size: 28
checkpoint.resume: true  ->  write auto, for the newest checkpoint
checkpoint.resume: false  ->  leave the key out
checkpoint.folder: ckpt  ->  folder is run.output_dir here
training: max_epochs:1  ->  put a space after the colon: max_epochs: 1
training: {max_steps:1}  ->  put a space after the colon: max_steps: 1
optimizer: {kind: adamw, lr: 0,005}  ->  write decimals with a point
tensor_parallel: 2  ->  tensor_parallel is parallel.tensor here
data.validation_split: 0.1  ->  the second dataset that the function of data.target returns
run.output_dir: '${HOME}/x'  ->  variables are not replaced in a run config
"""


def config_with(key: str, text: str) -> str:
    """Return a run config that is fine but for one value, as YAML."""
    values: dict[str, Any] = {
        "run": {"name": "mistaken"},
        "model": {"kind": "lenet", "image_size": 28},
        "data": {"kind": "digits", "image_size": 28},
        "batch": {"global_size": 32},
        "training": {"max_steps": 2},
    }
    *sections, last = key.split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = yaml.safe_load(text)
    return yaml.safe_dump(values, sort_keys=False)


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_is_answered_with_what_was_meant(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    written, answer = mistake.split("  ->  ")
    key, text = written.split(": ", 1)
    path.write_text(config_with(key, text), encoding="utf-8")
    assert main(["check", str(path)]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("scheduler", "{kind: linear}"),
        ("scheduler", "{kind: cosine, warmup_ratio: 0.1}"),
        ("checkpoint.keep_last", "all"),
        ("monitors.wandb", "vision"),
        ("run.output_dir", "~/runs"),
    ],
)
def test_what_other_tools_take_and_a_run_takes_as_well_is_fine(
    key: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(config_with(key, text), encoding="utf-8")
    assert main(["check", str(path)]) == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("model:\n\tkind: lenet\n", "indent with spaces"),
        ("model: {kind: lenet\ndata: {kind: digits}\n", "check indentation, colons and quotes"),
        ("- a\n", "start with a section such as `run:`"),
        ("run: {name: a}\nrun: {name: b}\n", "the key is already set in line 1"),
    ],
)
def test_a_file_that_is_none_is_answered_with_how_one_begins(
    text: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["check", str(path)]) == 2
    assert answer in capsys.readouterr().err


def test_words_that_mean_the_same_are_written_by_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has two answers, or other values, stays for its writer."""
    path = tmp_path / "run.yaml"
    path.write_text(
        """\
epochs: 3
compile: true  # all of it
batch_size: 32
zero: 2
precision: {dtype: float16}
optimizer: {kind: adamw, learning_rate: 1e-3}
training: {gradient_clip_val: 0.5}
scheduler: {kind: cosine_with_restarts}
""",
        encoding="utf-8",
    )
    assert main(["check", "--fix", str(path)]) == 2
    capsys.readouterr()
    fixed = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert fixed == {
        "training": {"clip_grad_norm": 0.5, "max_epochs": 3, "compile": True},
        "batch_size": 32,
        "zero": {"stage": 2},
        "precision": {"dtype": "fp16"},
        "optimizer": {"kind": "adamw", "lr": "1e-3"},
        "scheduler": {"kind": "cosine_with_restarts"},
    }


def test_a_word_is_found_in_either_spelling_and_by_its_section() -> None:
    found = meaning("Per-Device-Train-Batch-Size")
    assert found is not None
    assert (found.tool, found.keys) == ("Hugging Face TrainingArguments", ("batch.micro_size",))
    in_callbacks = meaning("monitor", "callbacks")
    assert in_callbacks is not None
    assert in_callbacks.keys == ("callbacks.metric",)
    assert meaning("stage") is None
    assert same_key("learning_rate") == "optimizer.lr"
    assert same_key("monitor") is None
    assert value_here("precision.dtype", 16) == ("fp16", "")
    assert value_here("precision.dtype", "tf32") is None


def test_values_of_the_table_are_kinds_of_their_key() -> None:
    for key, rows in value_rows().items():
        section, _, name = key.partition(".")
        union = RunConfig.model_fields[section].annotation
        tag, choices = choices_of(union)
        assert tag == name
        assert {answer.partition("|")[0].strip() for answer in rows.values()} <= set(choices)
