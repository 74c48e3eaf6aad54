"""Every rule: a config that breaks only it, and one that comes close and does not."""

from __future__ import annotations

from typing import Any

from framework.plan.cluster import Device

LAMB = {"optimizer": {"kind": "lamb"}}
LION = {"optimizer": {"kind": "lion"}}
MUON = {"optimizer": {"kind": "muon"}}
ADAFACTOR = {"optimizer": {"kind": "adafactor"}}
EIGHT_BIT = {"optimizer": {"kind": "adamw_8bit", "betas": [0.9, 0.95]}}
SCHEDULE_FREE = {"optimizer": {"kind": "schedule_free"}, "scheduler": {"kind": "constant"}}
OWN_ADAM = {"optimizer": {"kind": "adamw", "implementation": "deepspeed"}}
TARGET = {"target": "a:b"}
GREY224 = {"kind": "synthetic_images", "channels": 1, "image_size": 28, "num_classes": 10}
GPT = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "task": {"kind": "causal_lm"}}
MIXED = GPT | {"model": {"kind": "gpt", "moe": {"num_experts": 4}}}
BERT = {"model": {"kind": "bert"}, "data": {"kind": "text_pairs"}, "task": {"kind": "masked_lm"}}
EMA = {"ema": {"decay": 0.99}}
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def offload(stage: int, device: str = "cpu", **rest: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage, "offload_optimizer": {"device": device, **rest}}}


def deep(stage: int, **more: Any) -> dict[str, Any]:
    compiled = {"backend": "deepcompile", **more}
    return {"zero": {"stage": stage}, "training": {"compile": compiled}}


def few_bits(form: str, width: int) -> dict[str, Any]:
    """Adapters on the row layers of two ranks."""
    return {
        **GPT,
        "model": {"kind": "gpt", "hidden_size": width},
        "parallel": {"tensor": 2},
        "training": {"lora": {"target_modules": ["output"], "quantization": form}},
    }


def zenflow(
    zero: dict[str, Any] | None = None, *, offload: bool = False, **sections: Any
) -> dict[str, Any]:
    section = {"device": "cpu", "zenflow": {"offload": offload}}
    every = {"stage": 2, "offload_optimizer": section, **(zero or {})}
    batch = {"accumulation_steps": 4}
    return {"zero": every, "batch": batch, **OWN_ADAM, **GPT, **sections}


CYCLE: dict[str, Any] = {
    "scheduler": {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1.0, "cycle_momentum": True}
}
OF_TEXTS: dict[str, Any] = {
    "model": {"kind": "bert", "num_classes": 2},
    "data": {"kind": "labelled_text"},
    "task": {"kind": "classification"},
}
NOT_WITH_ZENFLOW: tuple[dict[str, Any], ...] = (
    {"zero": {"stage": 3}},
    {"zero": {"reduce_scatter": False}},
    {"zero": {"contiguous_gradients": False}},
    {"zero": {"round_robin_gradients": True}},
    {"optimizer": {"kind": "adam", "implementation": "deepspeed"}},
    {"optimizer": {"target": "torch.optim:NAdam"}},
    {"precision": {"dtype": "fp16"}},
    {"precision": {"dtype": "bf16", "states": "bf16_weights"}},
    {"precision": {"dtype": "bf16", "grad_accumulation": "fp32"}},
    {"precision": {"dtype": "bf16", "grad_reduction": "fp32"}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"sequence": 2}},
    {"model": {"kind": "gpt", "moe": {"num_experts": 2}}},
    {"model": {"target": "own:Mixture"}, "parallel": {"expert": 2}},
    {"training": EMA},
    {"training": {"lora": {"target_modules": ["query"]}}},
    {"training": {"freeze": ["embed.*"]}},
    {"training": {"bad_steps": "skip"}},
    {"training": {"compile": True}},
)


def passed_at(stage: int, name: str, value: Any = True) -> dict[str, Any]:
    return {"zero": {"stage": stage}, "deepspeed": {"zero_optimization": {name: value}}}


def with_experts(expert: int = 2, stage: int = 1) -> dict[str, Any]:
    return MIXED | {"parallel": {"expert": expert}, "zero": {"stage": stage}}


COPIES = "zero_hpz_partition_size"
REDUCED = (
    {"round_robin_gradients": True},
    {"reduce_scatter": False},
    {"contiguous_gradients": False},
)
# micro-batches: no stage idles for long
MEASURED: dict[str, Any] = {"micro_size": "measured", "global_size": 64}
MANY: dict[str, Any] = {"batch": {"accumulation_steps": 8}}
FP16: dict[str, Any] = {"precision": {"dtype": "fp16"}}
AUTOCAST_FP16: dict[str, Any] = {"precision": {"dtype": "autocast", "compute_dtype": "fp16"}}


def piped(pipe: int = 2, partition: str | None = None, **sections: Any) -> dict[str, Any]:
    parallel = {"pipe": pipe} | ({"partition": partition} if partition else {})
    return {"parallel": parallel, "batch": {"accumulation_steps": 64}} | sections


def in_fp8(**options: Any) -> dict[str, Any]:
    return {"precision": {"dtype": "bf16", "fp8": options or True}}


def divided(**sections: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": 2}} | GPT | sections


def cut_at(stages: list[int], **sections: Any) -> dict[str, Any]:
    return {
        "parallel": {"pipe": 2, "stages": stages},
        "batch": {"accumulation_steps": 64},
    } | sections


# rule -> [(config, kind of device, kind of problem or None where the rule has nothing to say)]
OWN: dict[str, Any] = {
    "model": {"target": "mine:net"},
    "data": {"target": "mine:rows", "train_samples": 1000},
    "task": {"kind": "model_loss"},
}


def in_half(states: str = "bf16", dtype: str = "bf16") -> dict[str, Any]:
    return {"precision": {"dtype": dtype, "states": states}}


BETAS: dict[str, Any] = {"kind": "adamw", "betas": [0.9, 0.99]}
HOST_ADAM: dict[str, Any] = {"optimizer": {**BETAS, "implementation": "deepspeed"}}
CASES: dict[str, list[tuple[dict[str, Any], Device, str | None]]] = {
    "world_size_differs": [
        ({"run": {"world_size": 3}}, "cuda", "world-size-differs"),
        ({"run": {"world_size": 2}}, "cuda", None),
    ],
    "micro_size_measured": [
        ({"batch": MEASURED}, "cpu", None),
        ({"batch": {"micro_size": "measured"}}, "cpu", "micro-size-measured"),
        ({"batch": MEASURED | {"accumulation_steps": 2}}, "cpu", "micro-size-measured"),
        (piped(batch=MEASURED), "cpu", "micro-size-measured"),
        (deep(1) | {"batch": MEASURED}, "cuda", "micro-size-measured"),
        (offload(3, **NVME) | HOST_ADAM | {"batch": MEASURED}, "cuda", "micro-size-measured"),
    ],
    "bad_steps_not_found": [
        (
            {"training": {"bad_steps": "skip"}, "precision": {"dtype": "fp16"}},
            "cuda",
            "bad-steps-not-found",
        ),
        (
            {
                "training": {"bad_steps": "stop"},
                "precision": {"dtype": "autocast", "compute_dtype": "fp16"},
            },
            "cuda",
            "bad-steps-not-found",
        ),
        (piped() | {"training": {"bad_steps": {"rerun": True}}}, "cpu", "bad-steps-not-found"),
        ({"training": {"bad_steps": "roll_back"}}, "cpu", "bad-steps-not-found"),
        ({"training": {"bad_steps": "roll_back"}, "checkpoint": {"every_minutes": 5}}, "cpu", None),
        (piped() | {"training": {"bad_steps": "skip"}}, "cpu", None),
    ],
    "model_without_loss": [
        ({"task": {"kind": "model_loss"}}, "cpu", "model-without-loss"),
        ({"task": {"kind": "model_loss"}, "model": OWN["model"]}, "cpu", "model-without-loss"),
        (OWN, "cpu", None),
    ],
    "model_loss_divided": [
        (OWN | piped(), "cpu", None),
        (OWN | {"parallel": {"sequence": 2}}, "cpu", "model-loss-divided"),
        (OWN, "cpu", None),
    ],
    "loss_not_tiled": [
        (GPT | piped() | {"training": {"loss_tile": 64}}, "cpu", "loss-not-tiled"),
        ({"training": {"loss_tile": 64}}, "cpu", "loss-not-tiled"),
        (GPT | {"training": {"loss_tile": 64}}, "cpu", None),
        (GPT | piped() | {"training": {"loss_tile": "auto"}}, "cpu", None),
    ],
    "task_has_no_positions": [
        (OF_TEXTS | {"parallel": {"sequence": 2}}, "cpu", "task-has-no-positions"),
        (OF_TEXTS | {"parallel": {"tensor": 2}}, "cpu", None),
    ],
    "sequences_are_shared": [
        ({"parallel": {"sequence": 2}}, "cpu", "sequence-not-shared"),
        (GPT | {"parallel": {"sequence": 8}}, "cpu", None),  # a ring has what heads do not
        (divided(parallel={"tensor": 2, "sequence": 4}), "cpu", None),
        (
            BERT
            | {"parallel": {"sequence": 2}, "data": {"kind": "text_pairs", "sequence_length": 33}},
            "cpu",
            "sequence-not-shared",
        ),
        (GPT | {"parallel": {"sequence": 2}}, "cpu", None),
        (BERT | {"parallel": {"sequence": 2}}, "cpu", None),
        ({"model": TARGET, "task": TARGET, "parallel": {"sequence": 2}}, "cpu", None),
    ],
    "blocks_have_experts": [
        (
            GPT | {"model": {"kind": "gpt", "moe": {"num_experts": 2, "every": 5}}},
            "cpu",
            "no-block-of-experts",
        ),
        (GPT | {"model": {"kind": "gpt", "moe": {"num_experts": 2, "every": 4}}}, "cpu", None),
        (GPT, "cpu", None),
    ],
    "experts_divide": [
        (with_experts(), "cuda", None),
        (with_experts(stage=2), "cuda", None),
        (with_experts(3), "cuda", "experts-not-divisible"),
        (with_experts(4), "cuda", "experts-not-divisible"),
    ],
    "experts_need_zero": [
        (with_experts(stage=0), "cuda", "experts-need-zero"),
        *((with_experts(stage=stage), "cuda", None) for stage in (1, 2, 3)),
        (with_experts(1, stage=3), "cuda", None),
    ],
    "expert_without_moe": [
        (GPT | {"parallel": {"expert": 2}}, "cuda", "expert-without-moe"),
        (with_experts(), "cuda", None),
    ],
    "expert_with_other": [
        (with_experts() | {"optimizer": TARGET}, "cuda", None),
        (with_experts() | EIGHT_BIT, "cuda", None),
        (with_experts() | SCHEDULE_FREE, "cuda", None),
        (
            piped(**MIXED)
            | {"parallel": {"pipe": 2, "expert": 2, "tensor": 2}, "zero": {"stage": 1}},
            "cuda",
            None,
        ),
        *(
            (with_experts() | {"zero": {"stage": 1, **zero}}, "cuda", "expert-with-other")
            for zero in REDUCED
        ),
        (with_experts(), "cuda", None),
    ],
    "fp16_on_cpu": [
        ({"precision": {"dtype": "fp16"}}, "cpu", "fp16-on-cpu"),
        ({"precision": {"dtype": "fp16"}}, "cuda", None),
        ({"precision": {"dtype": "fp16"}}, "unknown", None),
        ({"precision": {"dtype": "bf16"}}, "cpu", None),
    ],
    "autocast_fp16_not_scaled": [
        *(
            (AUTOCAST_FP16 | {"zero": {"stage": stage}}, "cuda", "autocast-fp16-not-scaled")
            for stage in (1, 2, 3)
        ),
        (piped(**AUTOCAST_FP16), "cuda", "autocast-fp16-not-scaled"),
        (AUTOCAST_FP16, "cuda", None),
        (AUTOCAST_FP16, "cpu", None),
        ({"precision": {"dtype": "autocast"}, "zero": {"stage": 3}}, "cuda", None),
    ],
    "divided_in_advance": [
        (
            {"deepspeed": {"gradient_predivide_factor": 2.0}, "zero": {"stage": 3}},
            "cuda",
            "predivided-by-all-ranks",
        ),
        ({"deepspeed": {"gradient_predivide_factor": 4.0}, "zero": {"stage": 3}}, "cuda", None),
        ({"deepspeed": {"gradient_predivide_factor": 2.0}, "zero": {"stage": 2}}, "cuda", None),
    ],
    "offload_needs_stage": [
        (offload(0) | LION, "cuda", "offload-needs-stage"),
        (offload(2, **NVME) | LION, "cuda", "offload-needs-stage"),
        ({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}, "cuda", "offload-needs-stage"),
        (offload(1) | LION, "cuda", None),
        (offload(3, "nvme", nvme_path="/nvme") | LION, "cuda", None),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}, "cuda", None),
    ],
    "offload_optimizer_unsupported": [
        (LAMB | offload(2), "cuda", None),
        (LAMB | offload(3, **NVME), "cuda", None),
        (SCHEDULE_FREE | offload(3, **NVME), "cuda", None),
        (LION | offload(3, ratio=0.5), "cuda", "offload-optimizer-unsupported"),
        (MUON | offload(3, **NVME), "cuda", None),
        (MUON | offload(3), "cuda", None),
        (ADAFACTOR | offload(3, **NVME), "cuda", None),
        (offload(3, ratio=0.5) | OWN_ADAM, "cuda", None),
        (offload(2, ratio=0.5) | OWN_ADAM, "cuda", "offload-optimizer-unsupported"),
        (
            in_half() | HOST_ADAM | offload(3, ratio=0.5),
            "cuda",
            "offload-optimizer-unsupported",
        ),
        (
            OWN_ADAM
            | {
                "zero": {
                    "stage": 3,
                    "offload_param": {"device": "cpu"},
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                }
            },
            "cuda",
            "offload-optimizer-unsupported",
        ),
        (EIGHT_BIT | offload(3, **NVME), "cuda", None),
        (EIGHT_BIT | offload(3), "cuda", None),
        (offload(3, ratio=1.0) | OWN_ADAM, "cuda", None),
    ],
    "no_part_on_device": [
        (offload(3, ratio=0.5) | OWN_ADAM, "cpu", "no-part-on-device"),
        (offload(3, ratio=0.5) | OWN_ADAM, "cuda", None),
    ],
    "not_with_schedule_free": [
        (SCHEDULE_FREE, "cuda", None),
        (SCHEDULE_FREE | {"scheduler": {"kind": "cosine"}}, "cuda", "not-with-schedule-free"),
        (SCHEDULE_FREE | {"scheduler": TARGET}, "cuda", "not-with-schedule-free"),
        (SCHEDULE_FREE | {"training": EMA}, "cuda", "not-with-schedule-free"),
        (SCHEDULE_FREE | piped(), "cuda", "not-with-schedule-free"),
    ],
    "not_with_zenflow": [
        *((zenflow(**broken), "cuda", "not-with-zenflow") for broken in NOT_WITH_ZENFLOW),
        (zenflow(zero={"stage": 3}), "cpu", "not-with-zenflow"),
        (zenflow(zero={"overlap_comm": False}, offload=True), "cuda", "not-with-zenflow"),
        (zenflow(zero={"overlap_comm": True}, offload=True), "cuda", None),
        (zenflow(), "cpu", None),
        (zenflow(precision={"dtype": "bf16"}), "cuda", None),
        (offload(2) | OWN_ADAM, "cuda", None),
    ],
    "not_with_tensor": [
        (divided(**LAMB), "cuda", None),
        (divided(**MUON), "cuda", None),
        (divided(**ADAFACTOR), "cuda", None),
        (divided(**EIGHT_BIT), "cuda", None),
        (divided(**SCHEDULE_FREE), "cuda", None),
        (divided(precision={"dtype": "bf16"}), "cuda", None),
        (divided(**OWN_ADAM, precision={"dtype": "fp16"}), "cuda", "not-with-tensor"),
        (
            divided(parallel={"tensor": 2, "sequence": 2}, model={"kind": "gpt", "num_heads": 4}),
            "cuda",
            None,
        ),
        (
            divided(parallel={"tensor": 2, "pipe": 2}, batch={"accumulation_steps": 8}),
            "cuda",
            None,
        ),
        (divided(**offload(3, **NVME) | LION), "cuda", None),
        (divided(zero={"stage": 3, "offload_param": NVME}), "cuda", None),
        (divided(monitors={"tensorboard": {"histograms_every_steps": 5}}), "cuda", None),
        (divided(monitors={"tensorboard": {"samples": 5}}), "cuda", None),
        (divided(precision={"dtype": "bf16"}, zero={"stage": 1}), "cuda", None),
        (divided(**offload(3) | LION), "cuda", None),
    ],
    "parts_are_equal": [
        (
            divided(model={"kind": "gpt", "num_heads": 3, "hidden_size": 48}),
            "cuda",
            "tensor-not-divisible",
        ),
        (
            divided(model={"kind": "gpt", "num_heads": 4, "num_kv_heads": 1}),
            "cuda",
            "tensor-not-divisible",
        ),
        (divided(model={"kind": "gpt", "mlp_size": 63}), "cuda", "tensor-not-divisible"),
        (
            BERT | {"parallel": {"tensor": 2}, "model": {"kind": "bert", "mlp_size": 63}},
            "cuda",
            "tensor-not-divisible",
        ),
        (divided(model={"kind": "gpt", "vocab_size": 261}), "cuda", None),
        (BERT | {"parallel": {"tensor": 2}}, "cuda", None),
    ],
    "other_parts": [
        ({"parallel": {"tensor": 2}}, "cuda", "tensor-plan"),
        (divided(parallel={"tensor": 4}), "cuda", "tensor-over-hosts"),
        ({"parallel": {"tensor": 2, "tensor_plan": {"fc1": "column", "fc2": "row"}}}, "cuda", None),
        ({"parallel": {"tensor": 2}, "model": TARGET}, "cuda", None),
        (divided(**passed_at(3, COPIES, 2)), "cuda", None),
    ],
    "copies_of_weights_on_nvme": [
        (
            passed_at(3, COPIES, 2) | {"zero": {"stage": 3, "offload_param": NVME}},
            "cuda",
            "not-in-a-run",
        ),
        (passed_at(3, COPIES, 2), "cuda", None),
    ],
    "experts_beside_other_groups": [
        (with_experts() | passed_at(3, COPIES, 3), "cuda", "expert-with-other"),
        (with_experts() | passed_at(3, COPIES, 2), "cuda", None),
        (with_experts(stage=3), "cuda", None),
    ],
    "inert_stage3_keys": [
        ({"zero": {"stage": 2, "stage3_prefetch_bucket_size": 5}}, "cuda", "inert-at-stage"),
        ({"zero": {"sub_group_size": 5}}, "cuda", "inert-at-stage"),
        ({"zero": {"stage": 3, "stage3_prefetch_bucket_size": 5}}, "cuda", None),
        ({"zero": {"stage": 2}}, "cuda", None),
        ({"zero": {"stage": 1, "coalesce": True}}, "cuda", "inert-at-stage"),
        ({"zero": {"stage": 2, "coalesce": True}}, "cuda", None),
    ],
    "batch_norm_in_half_precision": [
        (
            {"model": {"kind": "small_resnet18"}, "precision": {"dtype": "bf16"}},
            "cuda",
            "batch-norm-in-half-precision",
        ),
        (
            {"model": {"kind": "small_resnet18"}, "precision": {"dtype": "fp16"}},
            "cuda",
            "batch-norm-in-half-precision",
        ),
        ({"model": {"kind": "small_resnet18"}, "precision": {"dtype": "autocast"}}, "cuda", None),
        ({"model": {"kind": "lenet"}, "precision": {"dtype": "bf16"}}, "cuda", None),
        ({"model": TARGET, "precision": {"dtype": "bf16"}}, "cuda", None),
    ],
    "fp32_sums_need_zero": [
        (
            {"precision": {"dtype": "bf16", "grad_accumulation": "fp32"}},
            "cuda",
            "fp32-sums-need-zero",
        ),
        (
            {"precision": {"dtype": "fp16", "grad_accumulation": "fp32"}},
            "cuda",
            "fp32-sums-need-zero",
        ),
        ({"precision": {"dtype": "bf16", "grad_accumulation": "bf16"}}, "cuda", None),
        (
            {"precision": {"dtype": "bf16", "grad_accumulation": "fp32"}, "zero": {"stage": 1}},
            "cuda",
            None,
        ),
    ],
    "schedule_needs_lr": [
        ({"optimizer": TARGET, "scheduler": {"kind": "warmup"}}, "cuda", "lr-unknown"),
        (
            {"optimizer": {**TARGET, "args": {"lr": "x"}}, "scheduler": {"kind": "warmup_decay"}},
            "cuda",
            "lr-unknown",
        ),
        (
            {"optimizer": {**TARGET, "args": {"lr": 1}}, "scheduler": {"kind": "warmup"}},
            "cuda",
            None,
        ),
        ({"optimizer": TARGET, "scheduler": {"kind": "warmup", "max_lr": 0.1}}, "cuda", None),
        ({"optimizer": TARGET, "scheduler": {"kind": "warmup_cosine"}}, "cuda", None),
    ],
    "one_warmup": [
        (
            {"scheduler": {"kind": "cosine", "warmup_steps": 9, "warmup_ratio": 0.1}},
            "cuda",
            "section-clash",
        ),
        ({"scheduler": {"kind": "linear", "warmup_ratio": 0.1}}, "cuda", None),
    ],
    "warmup_fits": [
        (
            {"scheduler": {"kind": "warmup_decay", "warmup_steps": 5, "total_steps": 5}},
            "cuda",
            "warmup-too-long",
        ),
        (
            {"scheduler": {"kind": "cosine", "warmup_steps": 9, "total_steps": 5}},
            "cuda",
            "warmup-too-long",
        ),
        (
            {"scheduler": {"kind": "warmup_decay", "warmup_steps": 5, "total_steps": 6}},
            "cuda",
            None,
        ),
    ],
    "nesterov_needs_momentum": [
        ({"optimizer": {"kind": "sgd", "nesterov": True}}, "cuda", "nesterov-needs-momentum"),
        ({"optimizer": {"kind": "sgd", "nesterov": True, "momentum": 0.9}}, "cuda", None),
    ],
    "image_shapes_agree": [
        ({"model": {"kind": "lenet", "image_size": 32}}, "cuda", "model-data-image-size"),
        ({"model": {"kind": "lenet", "in_channels": 3}}, "cuda", "model-data-in-channels"),
        ({"model": {"kind": "lenet", "num_classes": 11}}, "cuda", "model-data-num-classes"),
        ({"data": {"kind": "digits", "image_size": 8}}, "cuda", "model-data-image-size"),
        ({"model": {"kind": "lenet"}, "data": GREY224}, "cuda", None),
        ({"model": TARGET, "data": {"kind": "cifar10"}}, "cuda", None),
        ({"model": {"kind": "lenet", "num_classes": 11}, "data": TARGET}, "cuda", None),
        # the number of classes of a folder is only known from its files; the size of a ResNet's
        # images is free
        (
            {
                "model": {"kind": "resnet18", "num_classes": 3},
                "data": {"kind": "image_folder", "root": "x"},
            },
            "cuda",
            None,
        ),
    ],
    "parts_speak_of_the_same": [
        ({"data": {"kind": "text"}, "model": TARGET}, "cuda", "task-data-mismatch"),
        (
            {"data": {"kind": "text_pairs"}, "task": {"kind": "masked_lm"}},
            "cuda",
            "model-data-mismatch",
        ),
        ({"data": TARGET, "model": {"kind": "gpt"}}, "cuda", "task-model-mismatch"),
        (
            {"data": {"kind": "text"}, "task": {"kind": "causal_lm"}, "model": {"kind": "gpt"}},
            "cuda",
            None,
        ),
    ],
    "sequence_fits": [
        (GPT | {"data": {"kind": "text", "sequence_length": 257}}, "cuda", "sequence-too-long"),
        (GPT | {"data": {"kind": "text", "sequence_length": 256}}, "cuda", None),
    ],
    "vocabulary_fits": [
        (GPT | {"model": {"kind": "gpt", "vocab_size": 260}}, "cuda", "model-data-vocab-size"),
        (GPT | {"model": {"kind": "gpt", "vocab_size": 261}}, "cuda", None),
    ],
    "heads_divide": [
        (GPT | {"model": {"kind": "gpt", "num_heads": 5}}, "cuda", "heads-not-divisible"),
        (
            GPT | {"model": {"kind": "gpt", "hidden_size": 1}, "training": {"freeze": ["embed.*"]}},
            "cuda",
            "heads-not-divisible",
        ),
        (GPT | {"model": {"kind": "gpt", "num_kv_heads": 3}}, "cuda", "heads-not-divisible"),
        (
            GPT | {"model": {"kind": "gpt", "hidden_size": 12, "positions": "rotary"}},
            "cuda",
            "odd-rotary-heads",
        ),
        (BERT | {"model": {"kind": "bert", "num_heads": 3}}, "cuda", "heads-not-divisible"),
        (GPT | {"model": {"kind": "gpt", "num_heads": 8, "num_kv_heads": 2}}, "cuda", None),
        (GPT | {"model": {"kind": "gpt", "hidden_size": 12}}, "cuda", None),
    ],
    "recompute_in_parts": [
        ({"training": {"recompute_every": 12}}, "cuda", "recompute-whole-model"),
        ({"training": {"recompute_every": 11}}, "cuda", None),
        ({"training": {"recompute_every": 99}, "model": TARGET}, "cuda", None),
    ],
    "inert_for_model": [
        ({"training": {"sync_batch_norm": True}}, "cuda", "inert-for-model"),
        (GPT | {"training": {"channels_last": True}}, "cuda", "inert-for-model"),
        ({"training": {"channels_last": True}}, "cuda", None),
        ({"training": {"sync_batch_norm": True}, "model": TARGET}, "cuda", None),
        (
            {"training": {"sync_batch_norm": True}, "model": {"kind": "small_resnet18"}},
            "cuda",
            None,
        ),
    ],
    "not_with_compile": [
        (piped(training={"compile": True}), "cuda", "not-with-compile"),
        ({"training": {"compile": True, "detect_anomaly": True}}, "cuda", "not-with-compile"),
        (
            {"training": {"compile": True}, "profile": {"steps": "3-5", "modules": True}},
            "cuda",
            "not-with-compile",
        ),
        (
            {"training": {"compile": {"fullgraph": True}}, "zero": {"stage": 3}},
            "cuda",
            "not-with-compile",
        ),
        (
            {
                "training": {"compile": {"fullgraph": True}},
                "zero": {"stage": 2},
                "profile": {"steps": "3-5"},
            },
            "cuda",
            None,
        ),
        (piped(training={"compile": False}), "cuda", None),
    ],
    "compile_in_pieces": [
        (
            {"training": {"compile": {"per": "block"}}, "zero": {"stage": 3}},
            "cuda",
            "compile-in-pieces",
        ),
        ({"training": {"compile": True}, "zero": {"stage": 2}}, "cuda", None),
        ({"training": {"compile": False}, "zero": {"stage": 3}}, "cuda", None),
    ],
    "channels_last_with_pipeline": [
        (piped(training={"channels_last": True}), "cuda", "channels-last-with-pipeline"),
        ({"training": {"channels_last": True}}, "cuda", None),
    ],
    "inert_without_decay": [
        (
            {"optimizer": {"kind": "sgd", "weight_decay_on": "matrices"}},
            "cuda",
            "inert-without-decay",
        ),
        ({"optimizer": {"kind": "adamw", "weight_decay_on": "matrices"}}, "cuda", None),
        ({"optimizer": TARGET}, "cuda", None),
    ],
    "callbacks_have_evaluations": [
        ({"callbacks": [{"kind": "early_stopping"}]}, "cuda", "callback-without-evaluations"),
        (
            {"callbacks": [{"kind": "early_stopping"}], "evaluation": {"every_epochs": 1}},
            "cuda",
            None,
        ),
        (
            {
                "callbacks": [{"kind": "reduce_on_plateau"}],
                "evaluation": {"every_steps": 5},
                "scheduler": {"kind": "cosine"},
            },
            "cuda",
            "plateau-with-schedule",
        ),
        (
            {"callbacks": [{"target": "mine:Callback"}], "scheduler": {"kind": "cosine"}},
            "cuda",
            None,
        ),
    ],
    "optimizer_groups": [
        ({"optimizer": {"kind": "muon", "matrices": [r"fc1\.weight", "["]}}, "cuda", "bad-pattern"),
        (
            {"optimizer": {"kind": "adamw", "groups": [{"match": "*.bias", "lr": 0.1}]}},
            "cuda",
            "bad-pattern",
        ),
        (
            {"optimizer": {"kind": "adamw", "groups": [{"match": ".*bias"}]}},
            "cuda",
            "group-changes-nothing",
        ),
        (
            {"optimizer": {"kind": "adamw", "lr": 0, "groups": [{"match": ".*", "lr": 1}]}},
            "cuda",
            "group-lr-of-nothing",
        ),
        (
            {"optimizer": {"kind": "adamw", "groups": [{"match": "biases", "lr": 0.1}]}},
            "cuda",
            "group-matches-nothing",
        ),
        (
            {"optimizer": {"kind": "adamw", "groups": [{"match": ".*bias", "lr": 0.1}]}},
            "cuda",
            None,
        ),
        (
            {
                "optimizer": {"kind": "sgd", "layer_decay": 0.8},
                "zero": {"stage": 1},
                "parallel": {"pipe": 2},
                "batch": {"global_size": 128, "micro_size": 8},
            },
            "cuda",
            "groups-with-pipeline",
        ),
        (
            piped(**MANY | FP16 | {"optimizer": {"kind": "sgd", "layer_decay": 0.8}}),
            "cuda",
            "groups-with-pipeline",
        ),
        (
            piped(**FP16 | {"optimizer": {"kind": "adamw", "weight_decay_on": "matrices"}}),
            "cuda",
            None,
        ),
    ],
    "freeze_patterns": [
        ({"training": {"freeze": ["conv1.*", "*.bias"]}}, "cuda", "bad-pattern"),
        ({"training": {"freeze": ["conv1.*", ".*bias"]}}, "cuda", None),
        ({"training": {"freeze": ["conv1"]}}, "cuda", "freeze-matches-nothing"),
        (with_experts() | {"training": {"freeze": [r".*experts\..*"]}}, "cuda", None),
        (
            GPT | {"training": {"freeze": [{"match": ["embed.*", "*.bias"], "until_step": 3}]}},
            "cuda",
            "bad-pattern",
        ),
        (
            GPT | {"training": {"freeze": [{"match": "embde.*", "until_step": 3}]}},
            "cuda",
            "freeze-matches-nothing",
        ),
        (
            GPT | {"training": {"freeze": ["embed.*", {"match": ".*", "until_step": 3}]}},
            "cuda",
            "freeze-overlaps",
        ),
        (
            GPT | {"training": {"freeze": [{"match": ".*", "until_step": 3}]}},
            "cuda",
            "freeze-matches-all",
        ),
    ],
    "freeze_by_steps": [
        (GPT | {"training": {"freeze": [{"match": "embed.*", "until_step": 3}]}}, "cuda", None),
        (GPT | {"training": {"freeze": [{"match": "embed.*"}]}}, "cuda", "freeze-steps"),
        (
            GPT | {"training": {"freeze": [{"match": "embed.*", "until_step": 3, "from_step": 9}]}},
            "cuda",
            "freeze-steps",
        ),
        (
            GPT | {"training": {"freeze": [{"match": "embed.*", "until_step": 3}], "ema": {}}},
            "cuda",
            None,
        ),
        (
            GPT | {"training": {"freeze": [{"match": "embed.*", "from_step": 3}], "ema": {}}},
            "cuda",
            "freeze-steps",
        ),
        (
            GPT | {"training": {"freeze": [{"match": "embed.*", "until_step": 3}]}, **piped()},
            "cuda",
            None,
        ),
        (
            piped(**GPT | FP16 | {"training": {"freeze": [{"match": "embed.*", "until_step": 3}]}}),
            "cuda",
            "freeze-steps",
        ),
        (
            with_experts() | {"training": {"freeze": [{"match": ".*experts.*", "until_step": 3}]}},
            "cuda",
            None,
        ),
        (
            {"training": {"freeze": [{"match": "conv1.*", "until_step": 3}]}, "zero": {"stage": 1}}
            | {"optimizer": {"kind": "adagrad"}},
            "cuda",
            None,
        ),
    ],
    "adapted_modules": [
        (
            GPT
            | {
                "training": {
                    "lora": {"target_modules": ["query", "up"], "modules_to_save": ["norm"]}
                }
            },
            "cuda",
            None,
        ),
        (GPT | {"training": {"lora": {"target_modules": r"blocks\.\d\.mlp\..*"}}}, "cuda", None),
        (GPT | {"training": {"lora": {"target_modules": "all-linear"}}}, "cuda", None),
        (GPT | {"training": {"lora": {"target_modules": "*.query"}}}, "cuda", "bad-pattern"),
        (GPT | {"training": {"lora": {"target_modules": "query"}}}, "cuda", "lora-matches-nothing"),
        (
            GPT | {"training": {"lora": {"target_modules": ["query", "kee"]}}},
            "cuda",
            "lora-matches-nothing",
        ),
        (
            GPT | {"training": {"lora": {"target_modules": ["positions"]}}},
            "cuda",
            "lora-not-adaptable",
        ),
        (GPT | {"training": {"lora": {"target_modules": ["embed"]}}}, "cuda", "lora-tied"),
        (
            MIXED
            | {
                "training": {"lora": {"target_modules": ["query"]}},
                "parallel": {"expert": 2},
                "zero": {"stage": 1},
            },
            "cuda",
            None,
        ),
        (
            MIXED
            | {
                "training": {"lora": {"target_modules": ["query", "up"]}},
                "parallel": {"expert": 2},
                "zero": {"stage": 1},
            },
            "cuda",
            "lora-not-adaptable",
        ),
        (few_bits("nf4", 96), "cuda", "lora-not-adaptable"),
        (few_bits("int8", 96), "cuda", None),
        (few_bits("nf4", 128), "cuda", None),
    ],
    "not_with_lora": [
        (
            GPT | {"training": {"lora": {"target_modules": ["query"], "quantization": "nf4"}}},
            "cuda",
            None,
        ),
        (
            GPT
            | {
                "training": {
                    "lora": {"target_modules": ["query"], "quantization": "nf4", "use_dora": True}
                }
            },
            "cuda",
            "not-with-lora",
        ),
        (
            GPT
            | {"training": {"lora": {"target_modules": ["query"]}}, "optimizer": {"kind": "muon"}},
            "cuda",
            None,
        ),
        (MIXED | {"training": {"lora": {"target_modules": ["query"]}}}, "cuda", None),
        (
            GPT | {"training": {"lora": {"target_modules": ["query"]}}, "parallel": {"tensor": 2}},
            "cuda",
            None,
        ),
        (
            GPT
            | {
                "training": {"lora": {"target_modules": ["query"], "quantization": "int8"}},
                "parallel": {"tensor": 2},
            },
            "cuda",
            None,
        ),
        (
            GPT
            | {
                "training": {"lora": {"target_modules": ["query"], "use_dora": True}},
                "parallel": {"tensor": 2},
            },
            "cuda",
            None,
        ),
        (
            GPT | {"training": {"lora": {"target_modules": ["query"]}}, "zero": {"stage": 3}},
            "cuda",
            None,
        ),
        (
            GPT | {"training": {"lora": {"target_modules": ["query"]}}, **piped()},
            "cuda",
            None,
        ),
        (
            GPT
            | {"training": {"lora": {"target_modules": ["query"], "quantization": "nf4"}}}
            | piped(),
            "cuda",
            None,
        ),
        (
            divided(
                training={"lora": {"target_modules": ["query"]}},
                parallel={"pipe": 2, "tensor": 2},
                batch={"accumulation_steps": 64},
            ),
            "cuda",
            None,
        ),
        (
            GPT | {"training": {"lora": {"target_modules": ["query"]}, "freeze": ["embed.*"]}},
            "cuda",
            "not-with-lora",
        ),
    ],
    "deepspeed_section": [
        ({"deepspeed": {"fp16": {"enabled": True}}}, "cuda", "section-clash"),
        ({"deepspeed": {"train_batch_size": 3}}, "cuda", "section-clash"),
        ({"deepspeed": {"zero_optimisation": {}}}, "cuda", "unknown-deepspeed-key"),
        ({"deepspeed": {"elasticity": {}}}, "cuda", "removed-deepspeed-key"),
        (
            {"deepspeed": {"flops_profiler": {"enabled": True}, "wall_clock_breakdown": True}},
            "cuda",
            None,
        ),
    ],
    "deepspeed_values": [
        ({"deepspeed": {"comms_logger": {"enabled": "auto"}}}, "cuda", "auto-in-deepspeed"),
        ({"deepspeed": {"log_level": "auto"}}, "cuda", "auto-in-deepspeed"),
        (passed_at(3, "zero_quantized_gradients", "auto"), "cuda", "auto-in-deepspeed"),
        (passed_at(3, "zero_quantized_gradients", "auto"), "cpu", "auto-in-deepspeed"),
        (
            {"deepspeed": {"flops_profiler": {"enabled": True, "top_modules": None}}},
            "cuda",
            "null-in-deepspeed",
        ),
        ({"deepspeed": {"gradient_predivide_factor": float("inf")}}, "cuda", "not-json"),
        ({"deepspeed": {"timers": {"x": print}}}, "cuda", "not-json"),
        (passed_at(3, COPIES, "2"), "cuda", "wrong-type"),
        (passed_at(3, COPIES, 2.0), "cuda", "wrong-type"),
        (passed_at(3, COPIES, 2), "cuda", None),
        ({"deepspeed": {"expert_parallel": {"score_func": "auto"}}}, "cuda", None),
        ({"deepspeed": {"data_types": {"keep_in_fp32_modules": "auto"}}}, "cuda", None),
        (
            {
                "deepspeed": {
                    "comms_logger": {"prof_ops": ["all"], "enabled": True, "verbose": True},
                    "gradient_predivide_factor": 1.5,
                }
            },
            "cuda",
            None,
        ),
    ],
    "passed_without_effect": [
        ({"deepspeed": {"comms_logger": {"enabled": True}}}, "cuda", "inert-in-a-run"),
        (
            {
                "profile": {"steps": "1-2", "modules": True},
                "deepspeed": {"comms_logger": {"enabled": True}},
            },
            "cuda",
            "inert-in-a-run",
        ),
        (passed_at(3, "zero_quantized_gradients"), "cuda", "inert-in-a-run"),
        (passed_at(3, "zero_quantized_weights"), "cuda", None),
        ({"deepspeed": {"comms_logger": {"enabled": True, "verbose": True}}}, "cuda", None),
        ({"deepspeed": {"comms_logger": {"enabled": False}}}, "cuda", None),
        (
            {
                "deepspeed": {"comms_logger": {"enabled": True}},
                "callbacks": [{"target": "mine:Sent"}],
            },
            "cuda",
            None,
        ),
    ],
    "fp8_on_device": [
        (GPT | in_fp8(), "cuda", None),
        (GPT | in_fp8(), "cpu", "fp8-on-device"),
        (GPT | in_fp8(emulate=True), "cpu", None),
    ],
    "not_with_fp8": [
        (
            GPT | in_fp8() | {"parallel": {"tensor": 2}, "zero": {"stage": 1}},
            "cuda",
            "not-with-fp8",
        ),
        (GPT | in_fp8() | {"parallel": {"sequence": 2}}, "cuda", "not-with-fp8"),
        (
            GPT | in_fp8() | {"training": {"lora": {"target_modules": ["query"]}}},
            "cuda",
            "not-with-fp8",
        ),
        (
            GPT
            | in_fp8()
            | {"training": {"compile": {"backend": "deepcompile"}}, "zero": {"stage": 1}},
            "cuda",
            "not-with-fp8",
        ),
        (MIXED | in_fp8(), "cuda", "not-with-fp8"),
        (GPT | in_fp8() | {"zero": {"stage": 2}}, "cuda", None),
    ],
    "fp8_not_compiled": [
        (GPT | in_fp8() | {"training": {"compile": False}}, "cuda", "fp8-not-compiled"),
        (GPT | in_fp8() | {"zero": {"stage": 3}}, "cuda", "fp8-not-compiled"),
        (GPT | in_fp8(emulate=True) | {"training": {"compile": False}}, "cuda", None),
    ],
    "attention_kernel_on_cpu": [
        ({"training": {"attention": "flash"}}, "cuda", None),
        ({"training": {"attention": "cudnn"}}, "cpu", "attention-kernel-on-cpu"),
    ],
    "shares_are_quantized": [
        (GPT | passed_at(3, "zero_quantized_weights"), "cuda", None),
        (divided(**passed_at(3, "zero_quantized_weights")), "cuda", None),
        (
            GPT
            | {"model": {"kind": "gpt", "vocab_size": 50_257, "hidden_size": 36, "num_heads": 2}}
            | passed_at(3, "zero_quantized_weights"),
            "cuda",
            "quantized-share",
        ),
    ],
    "quantized_on_cpu": [
        (passed_at(3, "zero_quantized_weights"), "cpu", "needs-cuda"),
        (passed_at(3, "zero_quantized_gradients"), "cpu", "needs-cuda"),
        (passed_at(3, "zero_quantized_weights"), "cuda", None),
        (passed_at(3, "zero_quantized_weights"), "unknown", None),
    ],
    "states_unsupported": [
        (in_half() | {"optimizer": BETAS}, "cuda", "states-unsupported"),
        (
            in_half("bf16_weights") | HOST_ADAM | {"zero": {"stage": 2}},
            "cuda",
            "states-unsupported",
        ),
        (
            in_half() | offload(2) | {"optimizer": {**BETAS, "kind": "lion"}},
            "cuda",
            "states-unsupported",
        ),
        (in_half() | HOST_ADAM | offload(3, **NVME), "cuda", "states-unsupported"),
        (in_half() | MUON | {"zero": {"stage": 2}}, "cuda", None),
        (in_half() | ADAFACTOR | {"zero": {"stage": 2}}, "cuda", None),
        (in_half() | EIGHT_BIT | {"zero": {"stage": 2}}, "cuda", "states-unsupported"),
        (
            in_half() | {"optimizer": {**BETAS, "kind": "lamb"}, "zero": {"stage": 2}},
            "cuda",
            "states-unsupported",
        ),
        (
            in_half("bf16_weights") | HOST_ADAM | offload(3, **NVME),
            "cuda",
            "states-unsupported",
        ),
        (in_half("bf16_weights") | HOST_ADAM | offload(1), "cuda", None),
        (in_half() | {"optimizer": BETAS, "zero": {"stage": 1}}, "cuda", None),
    ],
    "second_moment_in_bf16": [
        (in_half() | {"zero": {"stage": 1}}, "cuda", "moment-stands-still"),
        (in_half() | {"zero": {"stage": 1}, "optimizer": BETAS}, "cuda", None),
        (
            in_half()
            | {"zero": {"stage": 1}, "optimizer": {"kind": "adamw", "betas": [0.9, 0.998]}},
            "cuda",
            None,
        ),
    ],
    "zero_with_pipeline": [
        (piped(zero={"stage": 2}), "cuda", "zero-with-pipeline"),
        (piped(zero={"stage": 3}), "cuda", "zero-with-pipeline"),
        (piped(zero={"stage": 1}), "cuda", None),
        ({"zero": {"stage": 2}}, "cuda", None),
    ],
    "coalesce_with_offload": [
        (
            {
                "zero": {"stage": 2, "coalesce": True, "offload_optimizer": {"device": "cpu"}},
                "optimizer": {"kind": "adamw", "implementation": "deepspeed"},
            },
            "cuda",
            "coalesce-with-offload",
        ),
        ({"zero": {"stage": 2, "coalesce": True}}, "cuda", None),
    ],
    "bf16_pipeline_without_zero": [
        (piped(precision={"dtype": "bf16"}), "cuda", "bf16-pipeline-without-zero"),
        (piped(precision={"dtype": "bf16"}, zero={"stage": 1}), "cuda", None),
        (piped(precision={"dtype": "autocast"}), "cuda", None),
        ({"precision": {"dtype": "bf16"}}, "cuda", None),
    ],
    "stages_fit": [
        (piped(13), "cuda", "pipe-exceeds-layers"),
        (piped(12), "cuda", None),
        (piped(13, model={"target": "a:b"}), "cuda", None),
        (cut_at([0, 1]), "cuda", "stages-differ-from-layers"),
        (cut_at([1] * 6 + [0] * 6), "cuda", "stages-out-of-order"),
        (cut_at([0, 1, 0], model={"target": "a:b"}), "cuda", "stages-out-of-order"),
        (piped(2, partition="type:["), "cuda", "bad-pattern"),
        (piped(2, partition="type:linear|conv"), "cuda", None),
        (cut_at([0] * 6 + [1] * 6), "cuda", None),
        (cut_at([0, 1], model={"target": "a:b"}), "cuda", None),
    ],
    "memory_for_length": [
        (piped(2, training={"offload_activations": True}), "cuda", "not-in-pipelines"),
        (GPT | piped(2, training={"mlp_tile": 64}), "cuda", None),
        (GPT | {"training": {"offload_activations": True, "mlp_tile": 64}}, "cuda", None),
    ],
    "partition_beside_stages": [
        (
            {
                "parallel": {"pipe": 2, "partition": "uniform", "stages": [0] * 6 + [1] * 6},
                "batch": {"accumulation_steps": 8},
            },
            "cuda",
            "inert-beside-stages",
        ),
        (cut_at([0] * 6 + [1] * 6), "cuda", None),
        (piped(2, partition="uniform"), "cuda", None),
    ],
    "inert_undivided": [
        ({"parallel": {"partition": "uniform"}}, "cuda", "inert-undivided"),
        ({"parallel": {"stages": [0, 0]}}, "cuda", "inert-undivided"),
        ({"parallel": {"tensor_plan": {"fc1": "column"}}}, "cuda", "inert-undivided"),
        (piped(2, partition="uniform"), "cuda", None),
        (divided(parallel={"tensor": 2, "tensor_plan": {"fc1": "column"}}), "cuda", None),
        ({"parallel": {"pipe": 1}}, "cuda", None),
    ],
    "slow_host_optimizer": [
        (offload(2), "cuda", "slow-host-optimizer"),
        (
            offload(2) | {"optimizer": {"kind": "adamw", "implementation": "deepspeed"}},
            "cuda",
            None,
        ),
        ({"zero": {"stage": 2}}, "cuda", None),
    ],
    "ema_not_kept": [
        ({"evaluation": {"weights": "ema"}}, "cuda", "ema-not-kept"),
        ({"evaluation": {"weights": "ema"}, "training": EMA}, "cuda", None),
        ({"training": EMA}, "cuda", None),
    ],
    "credentials_of_monitors": [
        (
            {"monitors": {"mlflow": {"tracking_uri": "https://me:secret@host/x"}}},
            "cuda",
            "credential-in-config",
        ),
        *(
            (
                {"monitors": {"others": [{"target": "a.b:C", "args": {name: "x"}}]}},
                "cuda",
                "credential-in-config",
            )
            for name in ("api_key", "apikey", "TOKEN", "hf_token", "db_password", "client_secret")
        ),
        *(
            ({"monitors": {"others": [{"target": "a.b:C", "args": {name: "x"}}]}}, "cuda", None)
            for name in ("tokenizer", "max_tokens", "key", "channel")
        ),
        ({"monitors": {"mlflow": {"tracking_uri": "https://host/x@y"}}}, "cuda", None),
    ],
    "not_with_nvme": [
        (
            {
                "zero": {"stage": 3, "offload_param": NVME},
                "monitors": {"tensorboard": {"histograms_every_steps": 5}},
            },
            "cuda",
            "not-with-nvme",
        ),
        (
            {"zero": {"stage": 3}, "monitors": {"tensorboard": {"histograms_every_steps": 5}}},
            "cuda",
            None,
        ),
        (
            {"zero": {"stage": 3, "offload_param": NVME, "stage3_max_reuse_distance": 5}},
            "cuda",
            "not-with-nvme",
        ),
        (
            {"zero": {"stage": 3, "offload_param": NVME, "stage3_max_reuse_distance": 0}},
            "cuda",
            None,
        ),
        ({"zero": {"stage": 3, "offload_param": NVME}}, "cuda", None),
        ({"zero": {"stage": 3, "stage3_max_reuse_distance": 5}}, "cuda", None),
    ],
    "deepcompile_unsupported": [
        (deep(1), "cpu", "deepcompile-unsupported"),
        (deep(0), "cuda", "deepcompile-unsupported"),
        (deep(1, per="block"), "cuda", "deepcompile-unsupported"),
        (deep(1, mode="max-autotune"), "cuda", "deepcompile-unsupported"),
        (
            OWN_ADAM | {"zero": offload(2)["zero"], "training": deep(2)["training"]},
            "cuda",
            "deepcompile-unsupported",
        ),
        (deep(1), "cuda", None),
        (deep(2, passes=["z1"]), "cuda", None),
        ({"training": {"compile": True}, "zero": {"stage": 1}}, "cpu", None),
    ],
    "passes_of_deepcompile": [
        *(
            (deep(1, passes=[name]), "cuda", "deepcompile-pass")
            for name in ("autosp", "autotp", "z3")
        ),
        ({"training": {"compile": {"passes": ["z1"]}}}, "cuda", "deepcompile-pass"),
        (deep(1, passes=["z1"]), "cuda", None),
    ],
    "samples_with_pipeline": [
        (
            MANY | {"parallel": {"pipe": 2}, "monitors": {"tensorboard": {"samples": 4}}},
            "cuda",
            "samples-with-pipeline",
        ),
        ({"monitors": {"tensorboard": {"samples": 4}}}, "cuda", None),
        (MANY | {"parallel": {"pipe": 2}, "monitors": {"tensorboard": False}}, "cuda", None),
    ],
    "ema_with_offload": [
        (offload(3, **NVME) | LION | {"training": EMA}, "cuda", "ema-with-offload"),
        (offload(2) | LION | {"training": EMA}, "cuda", None),
    ],
    "best_is_measured": [
        ({"checkpoint": {"keep_best": "eval/acc"}}, "cuda", "unknown-metric"),
        (
            {"checkpoint": {"keep_best": "eval/accuracy"}, "evaluation": {"at_end": False}},
            "cuda",
            "metric-never-measured",
        ),
        (
            {"checkpoint": {"keep_best": "eval/accuracy", "every_steps": 5}},
            "cuda",
            "metric-measured-once",
        ),
        ({"checkpoint": {"keep_best": "eval/accuracy"}}, "cuda", None),
        *(
            (
                {
                    "callbacks": [{"kind": kind, "metric": "eval/acc"}],
                    "evaluation": {"every_epochs": 1},
                    "scheduler": {"kind": "constant"},
                },
                "cuda",
                "unknown-metric",
            )
            for kind in ("early_stopping", "reduce_on_plateau")
        ),
        (
            {
                "callbacks": [{"kind": "early_stopping", "metric": "train/loss"}],
                "evaluation": {"every_epochs": 1},
            },
            "cuda",
            None,
        ),
    ],
    "best_has_a_direction": [
        ({"checkpoint": {"keep_best": "eval/loss"}}, "cuda", "largest-is-best"),
        ({"checkpoint": {"keep_best": "eval/loss", "best_is": "min"}}, "cuda", None),
        *(
            (
                {
                    "callbacks": [{"kind": "early_stopping", "metric": "eval/accuracy"} | more],
                    "evaluation": {"every_epochs": 1},
                },
                "cuda",
                kind,
            )
            for more, kind in (({}, "smallest-is-best"), ({"best_is": "max"}, None))
        ),
    ],
    "paths_are_complete": [
        ({"run": {"output_dir": "${HOME}/runs"}}, "cuda", "path-not-complete"),
        ({"checkpoint": {"resume": "$SCRATCH/x"}}, "cuda", "path-not-complete"),
        ({"run": {"output_dir": "~no-such-user/runs"}}, "cuda", "path-not-complete"),
        ({"run": {"output_dir": "~/runs"}, "checkpoint": {"resume": "~/x"}}, "cuda", None),
        ({"run": {"output_dir": "runs$"}}, "cuda", None),
    ],
    "profile_steps": [
        ({"profile": {"steps": "12-10"}}, "cuda", "profile-range"),
        ({"profile": {"steps": 10, "modules": True}}, "cuda", "profile-range"),
        (
            {
                "profile": {"steps": "1-2", "communication": True},
                "deepspeed": {"comms_logger": {"enabled": True}},
            },
            "cuda",
            "section-clash",
        ),
        (
            {
                "profile": {"steps": "1-2", "modules": True},
                "deepspeed": {"comms_logger": {"enabled": True, "verbose": True}},
            },
            "cuda",
            None,
        ),
        ({"profile": {"steps": 10}}, "cuda", None),
    ],
    "perceptrons_in_tiles": [
        ({"training": {"mlp_tile": 64}}, "cuda", "mlp-not-tiled"),
        (
            GPT
            | {"training": {"mlp_tile": 64}}
            | {"model": {"kind": "gpt", "moe": {"num_experts": 4, "every": 1}}},
            "cuda",
            "mlp-not-tiled",
        ),
        (MIXED | {"training": {"mlp_tile": 64}}, "cuda", None),
        (GPT | {"training": {"mlp_tile": 64}}, "cuda", None),
        ({"training": {"mlp_tile": 64}, "model": TARGET}, "cuda", None),
    ],
    "cycled_momentum": [
        (CYCLE | {"optimizer": {"kind": "sgd", "momentum": 0.9}}, "cuda", "overruled-key"),
        (CYCLE | {"optimizer": {"kind": "adamw", "betas": [0.9, 0.95]}}, "cuda", "overruled-key"),
        (CYCLE | {"optimizer": TARGET}, "cuda", None),
        (CYCLE, "cuda", None),
    ],
    "bounds_in_order": [
        (
            {"scheduler": {"kind": "one_cycle", "min_lr": 1.0, "max_lr": 0.1}},
            "cuda",
            "upside-down",
        ),
        ({"scheduler": {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1.0}}, "cuda", None),
        (
            {"optimizer": {"kind": "lamb", "min_coeff": 5, "max_coeff": 1}},
            "cuda",
            "upside-down",
        ),
        ({"optimizer": {"kind": "lamb", "min_coeff": 1, "max_coeff": 1}}, "cuda", None),
    ],
}
QUANTIZED = "zero_quantized_gradients"
# The same, on two hosts of two devices each.
ON_TWO_HOSTS: dict[str, list[tuple[dict[str, Any], Device, str | None]]] = {
    "other_parts": [
        (divided(**passed_at(3, QUANTIZED)), "cuda", "not-with-tensor"),
        (divided(**passed_at(3, QUANTIZED, False)), "cuda", None),
    ],
    "experts_beside_other_groups": [
        (with_experts() | passed_at(3, QUANTIZED), "cuda", "expert-with-other"),
        (with_experts() | passed_at(3, QUANTIZED, False), "cuda", None),
    ],
}
