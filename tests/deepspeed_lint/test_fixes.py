"""What --fix changes, and what it leaves alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_lint.fixes import fixed_text, lines_to_change
from deepspeed_lint.keys import is_slip
from deepspeed_lint.lint import lint
from deepspeed_lint.text.hjson import parse_hjson
from framework.cli import main
from tests.deepspeed_lint.differential.generate import questions


def fixed(text: str, release: str | None = None) -> str:
    return fixed_text(parse_hjson(text, name="x.json"), release=release)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"gradient_cliping": 1.0}', '{"gradient_clipping": 1.0}'),
        ('{"zero_optimisation": {"stag": 2}}', '{"zero_optimization": {"stage": 2}}'),
        ('{"zero_optimization": {"stage": "2"}}', '{"zero_optimization": {"stage": 2}}'),
        (
            '{"fp16": {"enabled": "yes", "hysteresis": true}}',
            '{"fp16": {"enabled": true, "hysteresis": 1}}',
        ),
        ('{"amp": {"enabled": false}, "steps_per_print": 5}', '{"steps_per_print": 5}'),
        (
            '{"train_batch_size": "8", "gradient_clipping": "1.0"}',
            '{"train_batch_size": 8, "gradient_clipping": 1.0}',
        ),
        (
            '{"prescale_gradients": "false", "wall_clock_breakdown": "True"}',
            '{"prescale_gradients": false, "wall_clock_breakdown": true}',
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}}}',
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}',
        ),
        ('{"max_grad_norm": 1.0}', '{"gradient_clipping": 1.0}'),
        ('{"per_device_train_batch_size": 4}', '{"train_micro_batch_size_per_gpu": 4}'),
        (
            '{"optimizer": {"name": "AdamW", "params": {"lr": 0.1}}}',
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}',
        ),
        (
            '{"scheduler": {"type": "WarmupLR", "params": {"max_lr": 0.1, "min_lr": 0.0, "warmup_steps": 9}}}',
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_min_lr": 0.0, '
            '"warmup_num_steps": 9}}}',
        ),
        # a key that only one other section has
        ('{"stage": 2}', '{"zero_optimization": {"stage": 2}}'),
        (
            '{"optimizer": {"type": "AdamW", "lr": 0.001}}',
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}',
        ),
        (
            '{"zero_optimization": {"stage": 2, "steps_per_print": 5}}',
            '{"zero_optimization": {"stage": 2}, "steps_per_print": 5}',
        ),
    ],
)
def test_one_safe_answer_is_given(before: str, after: str) -> None:
    assert parse_hjson(fixed(before), name="x").value == parse_hjson(after, name="x").value


@pytest.mark.parametrize(
    "text",
    [
        '{"stage": 2, "zero_optimization": {"stage": 3}}',  # which of the two?
        '{"comet": 1, "stag": "x"}',
        '{"train_batch_size": "8x", "gradient_clipping": "inf"}',
        '{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}',
        '{"zero_optimization.stage": 2, "zero_optimization": {}}',  # a name with a dot is no path
        '{"gradient_cliping": 1.0, "gradient_clipping": 0.5}',  # which of the two?
        '{"bf16": {"loss_scale": 0}}',  # another section: perhaps fp16 was meant, perhaps not
        '{"amp": {"enabled": true}}',  # switched on: something must take its place
        '{"zero_optimization": {"stage": 7}}',
        '{"zzz": 1}',
        '{"train_batch_size": "auto"}',
    ],
)
def test_the_rest_is_left_alone(text: str) -> None:
    assert fixed(text) == text


@pytest.mark.parametrize("value", ['"words"', "1", "{}", "true", "[]", '{"enabled": true}'])
@pytest.mark.parametrize(
    "name",
    [
        "_comment",
        "comment",
        "//",
        "checkpoint_dir",
        "vocab_size",
        "tensorboard_dir",
        "wandb_run",
        "time",
        "memory",
        "io",
        "data",
        "log",
        "fp8",
        "fp32",
        "tp",
        "model",
        "run",
        "config",
        "schedule_type",
    ],
)
def test_peoples_own_keys_are_not_made_into_deepspeeds(name: str, value: str) -> None:
    text = f'{{"{name}": {value}}}'
    assert fixed(text) == text


def test_an_edit_that_brings_an_error_is_not_made_and_the_others_are() -> None:
    """With its new name, fp16 would stand beside bf16, and DeepSpeed refuses both together."""
    text = '{"bf16": {"enabled": true}, "fp_16": {"enabled": true}, "gradient_cliping": 1.0}'
    assert fixed(text) == text.replace("cliping", "clipping")


@pytest.mark.parametrize(
    ("written", "known", "expected"),
    [
        ("gradient_cliping", "gradient_clipping", True),
        ("stge", "stage", True),
        ("zeroOptimization", "zero_optimization", True),
        ("learning_rate", "lr", True),
        ("overlap-comm", "overlap_comm", True),
        ("bf61", "bf16", True),
        ("fp8", "fp16", False),
        ("io", "aio", False),
        ("time", "timers", False),
        ("comments", "comet", False),
        ("lr", "l", False),
        ("x" * 200, "y" * 200, False),
    ],
)
def test_what_is_a_slip(written: str, known: str, expected: bool) -> None:
    assert is_slip(written, known) is expected


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_wrong_config_is_not_made_worse(seed: int) -> None:
    """Property: of any config with one thing wrong, no error is left that was not there, and a
    second time changes nothing.
    """
    (question,) = questions(seed=seed, count=1)
    before = json.dumps(question.config)
    after = fixed(before)
    assert fixed(after) == after
    found = [lint(parse_hjson(text, name="x")) for text in (before, after)]
    errors = [
        Counter((p.kind, p.key) for p in problems if p.severity == "error") for problems in found
    ]
    assert errors[1].total() <= errors[0].total(), (question.detail, errors[1] - errors[0])


def test_layout_stays() -> None:
    before = '{\n  "gradient_cliping":   1.0,\n\n  "steps_per_print": 7 }\n'
    assert fixed(before) == before.replace("cliping", "clipping")


def test_hjson_stays_and_its_lines_to_change_are_listed() -> None:
    """Lines are listed in order: a key to rename, one to move, a value, and one that goes."""
    text = """{
  // mine
  gradient_cliping: 1.0   # half of it
  "steps_per_print": "7"
  overlap_comm: true
  amp: {enabled: false}
}"""
    assert fixed(text) == text
    assert lines_to_change(parse_hjson(text, name="x")) == [
        "x:3: gradient_cliping: 1.0 -> gradient_clipping: 1.0",
        'x:4: steps_per_print: "7" -> steps_per_print: 7',
        "x:5: overlap_comm: true -> zero_optimization.overlap_comm: true",
        "x:6: amp: {enabled: false} -> nothing",
    ]
    assert lines_to_change(parse_hjson('{"gradient_cliping": 1.0}', name="x")) == []


def test_another_release_has_other_answers() -> None:
    assert fixed('{"amp": {"enabled": false}}', "0.18.9") == '{"amp": {"enabled": false}}'


def test_the_command_writes_the_file_and_shows_the_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "train_batch_size": 8,\n  "gradient_cliping": 1.0\n}\n', encoding="utf-8")
    assert main(["check", str(path)]) == 2
    capsys.readouterr()
    assert main(["check", "--fix", str(path)]) == 0
    shown = capsys.readouterr().out
    assert '-  "gradient_cliping": 1.0' in shown
    assert '+  "gradient_clipping": 1.0' in shown
    assert (
        path.read_text(encoding="utf-8")
        == '{\n  "train_batch_size": 8,\n  "gradient_clipping": 1.0\n}\n'
    )
    assert main(["check", "--fix", str(path)]) == 0
    assert "clipping" not in capsys.readouterr().out


def test_true_is_no_intended_number() -> None:
    text = '{"zero_optimization": {"stage": true}}'
    assert fixed_text(parse_hjson(text, name="x.json")) == text
