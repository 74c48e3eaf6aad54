"""`check --resolve`: the values that Hugging Face's Trainer writes for "auto", and values that
cannot be known.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepspeed_lint.errors import UsageError
from deepspeed_lint.resolve import Resolution, resolve
from deepspeed_lint.text.hjson import parse_hjson

# The ZeRO-3 file of transformers' own documentation.
DOCUMENTED: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
STATED = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 50,
    "max_steps": 1000,
    "bf16": True,
    "hidden_size": 1000,
}


def resolved(values: dict[str, Any], settings: dict[str, Any], world_size: int | None = 8) -> Any:
    found = resolve(parse_hjson(json.dumps(values), name="x"), settings, world_size=world_size)
    assert not found.problems
    return json.loads(found.text)


def unknown(
    values: dict[str, Any], settings: dict[str, Any], world_size: int | None = None
) -> Resolution:
    text = json.dumps(values)
    found = resolve(parse_hjson(text, name="x"), settings, world_size=world_size)
    assert found.text == text, "a file is whole or untouched"
    return found


def test_the_documented_file() -> None:
    assert resolved(DOCUMENTED, STATED) == {
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 3e-4,
                "warmup_num_steps": 50,
                "total_num_steps": 1000,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": 900_000,
            "stage3_param_persistence_threshold": 10_000,
        },
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
    }


def test_the_prefetch_bucket_is_a_whole_number() -> None:
    """0.9 x 768 x 768 is 530841.6, which DeepSpeed refuses."""
    zero = resolved(DOCUMENTED, {**STATED, "hidden_size": 768})["zero_optimization"]
    assert (zero["stage3_prefetch_bucket_size"], type(zero["stage3_prefetch_bucket_size"])) == (
        530_841,
        int,
    )


def test_what_hugging_face_leaves_is_dropped_only_where_deepspeed_drops_it() -> None:
    """Before 0.17.1 DeepSpeed read fp16 by hand, and took the text for true."""
    document = parse_hjson('{"fp16": {"enabled": false, "auto_cast": "auto"}}', name="x")
    assert json.loads(resolve(document, {}, world_size=8, release="0.19.8").text) == {
        "fp16": {"enabled": False}
    }
    (problem,) = resolve(document, {}, world_size=8, release="0.16.9").problems
    assert (problem.key, problem.kind) == ("fp16.auto_cast", "auto-unknown")


def test_all_unknown_values_are_reported_at_once_with_their_options() -> None:
    found = unknown(DOCUMENTED, {})
    assert {problem.key: problem.fix.split(",")[0] for problem in found.problems} == {
        "scheduler.params.total_num_steps": "give max_steps=N",
        "zero_optimization.reduce_bucket_size": "give hidden_size=N",
        "zero_optimization.stage3_prefetch_bucket_size": "give hidden_size=N",
        "zero_optimization.stage3_param_persistence_threshold": "give hidden_size=N",
        "train_batch_size": "give world_size=N",
    }
    assert {problem.kind for problem in found.problems} == {"auto-unknown"}
    assert {problem.line for problem in found.problems} == {1}


def test_the_reported_options_are_enough() -> None:
    assert "auto" not in json.dumps(resolved(DOCUMENTED, {"max_steps": 9, "hidden_size": 64}))


def test_defaults_are_the_trainers_and_are_printed_once_each() -> None:
    found = resolve(
        parse_hjson(json.dumps(DOCUMENTED), name="x"),
        {"max_steps": 9, "hidden_size": 64},
        world_size=1,
    )
    values = json.loads(found.text)
    assert values["optimizer"]["params"] == {
        "lr": 5e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert (values["train_batch_size"], values["gradient_clipping"], values["bf16"]) == (
        8,
        1.0,
        {"enabled": False},
    )
    stated = [note.reason for note in found.notes]
    assert sum("learning_rate=5e-05" in reason for reason in stated) == 1
    assert any("adam_beta1=0.9 and adam_beta2=0.999" in reason for reason in stated)
    assert {note.severity for note in found.notes} == {"note"}


def test_numbers_in_the_file_give_the_arguments() -> None:
    values = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    found = resolved(values, {}, 2)
    assert found["train_batch_size"] == 96
    assert found["scheduler"]["params"]["warmup_max_lr"] == 0.01


def test_two_values_for_one_argument_are_refused_as_the_trainer_does() -> None:
    values = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": "auto"}}}
    (problem,) = unknown(values, {"learning_rate": 0.02}).problems
    assert (problem.kind, problem.key, problem.value) == (
        "auto-mismatch",
        "optimizer.params.lr",
        0.01,
    )
    assert "learning_rate=0.02" in problem.reason


def test_warmup_by_ratio() -> None:
    values = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    params = resolved(values, {"warmup_ratio": 0.03, "max_steps": 110})["scheduler"]["params"]
    assert params == {"warmup_num_steps": 4}
    assert resolved(values, {"warmup_ratio": 0.5, "max_steps": 110, "warmup_steps": 7})[
        "scheduler"
    ]["params"] == {"warmup_num_steps": 7}


@pytest.mark.parametrize(
    ("precision", "fp16", "bf16"),
    [("no", False, False), ("fp16", True, False), ("bf16", False, True)],
)
def test_accelerates_name_for_precision(precision: str, fp16: bool, bf16: bool) -> None:
    found = resolved(
        {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"mixed_precision": precision}
    )
    assert (found["fp16"]["enabled"], found["bf16"]["enabled"]) == (fp16, bf16)


def test_what_hugging_face_leaves_goes_where_deepspeed_drops_it() -> None:
    values = {
        "zero_optimization": {
            "stage": 2,
            "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": "auto",
        }
    }
    found = resolve(parse_hjson(json.dumps(values), name="x"), {"hidden_size": 10})
    assert json.loads(found.text) == {"zero_optimization": {"stage": 2, "reduce_bucket_size": 100}}
    assert "DeepSpeed's default 50000000 holds" in found.notes[0].reason


def test_values_that_deepspeed_would_break_on_are_required() -> None:
    values = {"steps_per_print": "auto"}
    (problem,) = unknown(values, {}).problems
    assert problem.fix == "give steps_per_print=VALUE, or remove it"
    assert resolved(values, {"steps_per_print": 5}) == {"steps_per_print": 5}


def test_offload_is_accelerates() -> None:
    values = {
        "zero_optimization": {
            "stage": "auto",
            "offload_param": {"device": "auto", "nvme_path": "auto"},
        }
    }
    assert resolved(values, {})["zero_optimization"] == {
        "stage": 2,
        "offload_param": {"device": "none"},
    }
    (problem,) = unknown(values, {"offload_param_device": "nvme"}).problems
    assert problem.key == "zero_optimization.offload_param.nvme_path"
    stated = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/disk"}
    assert resolved(values, stated)["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/disk"},
    }


def test_auto_stays_where_it_is_deepspeeds_own_value() -> None:
    values = {
        "zero_optimization": {
            "stage": 2,
            "zenflow": {"select_interval": "auto", "update_interval": "auto"},
        }
    }
    assert resolved(values, {}) == values


def test_layout_stays() -> None:
    text = '{\n  "gradient_clipping":   "auto",\n\n  "steps_per_print": 7 }\n'
    found = resolve(parse_hjson(text, name="x"), {"max_grad_norm": 0.5})
    assert found.text == text.replace('"auto"', "0.5")


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        (
            {"hiden_size": 3},
            "hiden_size: not an argument of the Trainer; did you mean hidden_size?",
        ),
        ({"hidden_size": "big"}, "hidden_size=big: not a whole number of 1 or more"),
        ({"hidden_size": 0}, "not a whole number of 1 or more"),
        ({"learning_rate": float("nan")}, "not a number of 0 or more"),
        ({"bf16": 1}, "bf16=1: not true or false"),
        ({"mixed_precision": "fp8"}, "known are no, fp16, bf16"),
        ({"lr": 0.1, "learning_rate": 0.2}, "learning_rate=0.2: learning_rate is 0.1 already"),
        ({"zero_optimization.stage": 1}, 'only "auto" is filled in'),
        ({"optimizer.params.lr": float("inf")}, "JSON has no such number"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing(settings: dict[str, Any], stated: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(parse_hjson(json.dumps(DOCUMENTED), name="x"), settings)
    assert stated in str(caught.value)


@pytest.mark.parametrize("odd", ["x", "10", [], True, -1, 10**40, None, {}])
def test_odd_values_in_the_file_decide_nothing(odd: Any) -> None:
    values = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": odd,
        "gradient_accumulation_steps": 2,
    }
    found = resolved(values, {}, 2)
    assert found["train_batch_size"] == 2 * 2 * (odd if odd == 10**40 else 8)


def test_a_run_without_warmup_is_one_that_deepspeed_takes() -> None:
    """DeepSpeed refuses 0, so the Trainer writes 1 at least."""
    values = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    assert [
        resolved(values, {"max_steps": 40, **given})["scheduler"]["params"]["warmup_num_steps"]
        for given in ({}, {"warmup_steps": 0}, {"warmup_steps": 0.1}, {"warmup_steps": 7})
    ] == [1, 1, 4, 7]


def test_accumulation_that_the_file_leaves_out_is_one() -> None:
    (problem,) = unknown(
        {"train_batch_size": "auto"}, {"gradient_accumulation_steps": 4}, 2
    ).problems
    assert (problem.key, problem.kind) == ("gradient_accumulation_steps", "auto-mismatch")
