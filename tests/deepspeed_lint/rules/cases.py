"""For every kind: configs that break only its rule, and near misses that do not. DeepSpeed itself
judges them too.

A config is a change to `BASE`: sections are merged, `GONE` takes a key away. `asked` is the
question to DeepSpeed in the slow tests: where it must refuse a broken config, or how far it must
take a near miss. It stays empty where a CPU cannot show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from deepspeed_lint.facts import Facts
from deepspeed_lint.rules.parallel import EXPERT_ACTIVATIONS, EXPERT_PRESETS
from deepspeed_lint.topology import Device, Topology, gpu_kinds

Asked = Literal["", "parse", "autoep", "init", "step", "compile", "configure"]
GONE: Final = "(gone)"
BASE: Final[dict[str, Any]] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}


@dataclass(frozen=True)
class Case:
    """One config, the ranks it is for, and the question to DeepSpeed about it."""

    change: Mapping[str, Any]
    asked: Asked = ""
    world: int | None = None
    device: Device = "unknown"
    gpu: str = ""
    release: str = "0.19.8"
    beside: tuple[str, ...] = ()  # a note that always goes with it

    @property
    def config(self) -> dict[str, Any]:
        """Return the whole config."""
        return merged(BASE, self.change)

    def facts(self, config: Mapping[str, Any] | None = None) -> Facts:
        """Return the facts that the rules see."""
        topology = Topology(
            world_size=self.world, device=self.device, gpu=gpu_kinds().get(self.gpu)
        )
        return Facts(
            self.config if config is None else config, release=self.release, topology=topology
        )


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the changes in it."""
    result = {key: value for key, value in base.items() if change.get(key) != GONE}
    for key, value in change.items():
        if isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = merged(inner if isinstance(inner, Mapping) else {}, value)
        elif value != GONE:
            result[key] = value
    return result


def zero(stage: int, **rest: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **rest}}


def offload(stage: int, device: str = "cpu", **rest: Any) -> dict[str, Any]:
    return zero(stage, offload_optimizer={"device": device, **rest})


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"torch_adam": GONE, **params}}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def zenflow(stage: int, **rest: Any) -> dict[str, Any]:
    """Return ZenFlow with an offloaded optimizer."""
    return zero(stage, offload_optimizer={"device": "cpu"}, zenflow=rest) | ADAM


def experts(**rest: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, **rest}}


BF16: Final = {"bf16": {"enabled": True}}
FP16: Final = {"fp16": {"enabled": True}}
ADAM: Final = optimizer("AdamW")
# Sections of before 0.19.8.
ELASTIC: Final = {
    "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
}
AMP: Final = {"amp": {"enabled": True, "opt_level": "O1"}}
UNTESTED: Final = {"zero_allow_untested_optimizer": True}
TP2: Final = {"tensor_parallel": {"autotp_size": 2}}
PIPE: Final = {"pipeline": {"activation_checkpoint_interval": 1}}
DECAY: Final = {"total_num_steps": 10, "warmup_num_steps": 2}
EVERY_2: Final = {"select_strategy": "step", "select_interval": 2, "update_interval": 2}
MASTER: Final = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
MASTER_FP16: Final = {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}}
NO_NORM: Final = {"compute_grad_norm": False}
COMPILE_STATES: Final = {"compile": {"deepcompile": True, "offload_opt_states": True}}
WAITS: Final = ("compile-waits-for-code",)
RECOMPUTE: Final = ("activation-checkpointing-waits-for-code",)
LAUNCHER: Final = ("checkpoint-writer-needs-launcher",)
SP: Final = "sequence_parallel_size"
LTD_SCHEDULE: Final = {
    "min_value": 8,
    "max_value": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 2, "seq_per_step": 8},
}
LTD: Final[dict[str, Any]] = {
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [0],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": LTD_SCHEDULE,
}
CURRICULUM: Final = {"enabled": True, "curriculum_metrics": {}}


def sampling(enabled: bool = True, **rest: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": enabled, "data_sampling": {"enabled": enabled, **rest}}}


def routing(enabled: bool = True, **rest: Any) -> dict[str, Any]:
    return {
        "data_efficiency": {
            "enabled": True,
            "data_routing": {"enabled": True, "random_ltd": {"enabled": enabled, **rest}},
        }
    }


# kind -> (configs that break its rule and no other, near misses about which no rule speaks)
CASES: Final[dict[str, tuple[list[Case], list[Case]]]] = {
    "batch-size-missing": (
        [
            Case({"train_micro_batch_size_per_gpu": GONE}, "parse"),
            Case(
                {"train_micro_batch_size_per_gpu": GONE, "gradient_accumulation_steps": 2}, "parse"
            ),
        ],
        [
            Case({"train_micro_batch_size_per_gpu": GONE, "train_batch_size": 4}, "step"),
            Case({"train_micro_batch_size_per_gpu": GONE} | ELASTIC, release="0.19.6"),
        ],
    ),
    "elastic-batch-sizes": (
        [
            Case(ELASTIC, release="0.19.7"),
            Case({"train_batch_size": None} | ELASTIC, release="0.19.6"),
            Case(
                {"train_micro_batch_size_per_gpu": GONE, "gradient_accumulation_steps": 2}
                | ELASTIC,
                release="0.16.9",
            ),
        ],
        [
            Case({"elasticity": {"enabled": False}}, release="0.19.7"),
            Case(
                {"elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True}},
                release="0.19.7",
            ),
            Case(ELASTIC),
        ],
    ),
    "batch-arithmetic": (
        [
            Case({"train_batch_size": 7}, "parse", world=1),
            Case({"train_batch_size": 7}, "parse"),
            Case({"train_batch_size": 1}, "parse"),
            Case({"train_batch_size": 8, "gradient_accumulation_steps": 2}, "parse", world=4),
            Case({"train_batch_size": 6, "train_micro_batch_size_per_gpu": GONE}, "parse", world=4),
            Case({"train_batch_size": 2, "train_micro_batch_size_per_gpu": GONE}, "parse", world=4),
            Case(
                {
                    "train_batch_size": 9,
                    "train_micro_batch_size_per_gpu": GONE,
                    "gradient_accumulation_steps": 2,
                },
                "parse",
            ),
            Case({"train_batch_size": 7} | PIPE, "", world=8),
        ],
        [
            Case({"train_batch_size": 8}, "parse", world=4),
            Case({"train_batch_size": 8}, "parse", world=1),
            Case({"train_batch_size": 8}),
            Case({"train_batch_size": 16, "gradient_accumulation_steps": 2}, "parse", world=4),
            Case({"train_batch_size": 8, "train_micro_batch_size_per_gpu": GONE}, "parse", world=4),
            Case({"train_batch_size": 8, "gradient_accumulation_steps": 2} | PIPE, "", world=4),
            Case(
                {
                    "train_batch_size": 7,
                    "elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True},
                },
                release="0.19.7",
            ),
        ],
    ),
    "batch-with-tensor-parallel": (
        [Case({"train_batch_size": 8} | TP2, world=2), Case({"train_batch_size": 8} | TP2)],
        [Case(TP2, world=2), Case({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 1}})],
    ),
    "sequence-parallel-mesh": (
        [Case({SP: 2, "data_parallel_size": 1}, "init", world=1)],
        [Case({SP: 1, "data_parallel_size": 1}, "init", world=1)],
    ),
    "sequence-parallel-fraction": (
        [Case({SP: 3}, world=4), Case({SP: 2, "train_batch_size": 5}, "parse", world=3)],
        [Case({SP: 1}, world=4)],
    ),
    "sequence-parallel-gradients": (
        [Case({SP: 2, "data_parallel_size": 2}, world=4), Case({SP: 2, "data_parallel_size": 2})],
        [Case({SP: 1, "data_parallel_size": 2})],
    ),
    "sequence-parallel-alone": ([Case({SP: 2}), Case({SP: 2}, world=4)], [Case({SP: 1})]),
    "optimizer-unknown": (
        [
            Case(optimizer("AdamX"), "init"),
            Case(optimizer("sgd"), "init"),
            Case(optimizer("OneBitAdam"), "init"),
            Case(optimizer("onebitadam"), "init"),
        ],
        [
            Case(optimizer("SGD"), "step"),
            Case(optimizer("ADAGRAD"), "step"),
            Case(optimizer("OneBitAdam"), release="0.19.6"),
        ],
    ),
    "optimizer-cannot-step": (
        [Case(optimizer("LBFGS"), "step"), Case(optimizer("SparseAdam"), "step")],
        [Case(optimizer("RMSprop"), "step")],
    ),
    "optimizer-untested": (
        [
            Case(optimizer("SGD") | zero(1), "init"),
            Case(optimizer("NAdam") | zero(3), "init"),
            Case(optimizer("Lamb") | zero(2)),
            Case(optimizer("MuSGD") | zero(2)),
        ],
        [
            Case(optimizer("MuAdam") | zero(2)),
            Case(optimizer("SGD") | zero(1) | {"zero_allow_untested_optimizer": True}, "step"),
            Case(optimizer("SGD"), "step"),
            Case(optimizer("Adagrad") | zero(2), "step"),
        ],
    ),
    "optimizer-from-code": (
        [
            Case({"optimizer": GONE}),
            Case({"optimizer": GONE} | zero(1)),
            Case({"optimizer": GONE} | zero(3)),
        ],
        [Case({"optimizer": {"params": GONE}}, "step"), Case({"optimizer": GONE} | offload(2))],
    ),
    "offload-needs-cpu-optimizer": (
        [Case({"optimizer": GONE} | offload(3))],
        [
            Case({"optimizer": GONE, "zero_force_ds_cpu_optimizer": False} | offload(3)),
            Case(offload(3), "step"),
        ],
    ),
    "lamb-with-fixed-loss-scale": (
        [Case(optimizer("Lamb") | {"fp16": {"enabled": False, "loss_scale": 128}}, "init")],
        [
            Case(optimizer("Lamb") | {"fp16": {"enabled": False, "loss_scale": 0}}),
            Case({"fp16": {"enabled": False, "loss_scale": 128}}, "step"),
        ],
    ),
    "muon-with-reduce-scatter": (
        [
            Case(optimizer("Muon") | zero(3), "init"),
            Case(optimizer("muon") | zero(3, reduce_scatter=True), "init"),
        ],
        [
            Case(optimizer("Muon") | zero(3, reduce_scatter=False), "init"),
            Case(optimizer("Muon") | zero(2), "init"),
            Case(optimizer("Muon") | zero(3), release="0.18.3"),
        ],
    ),
    "muon-with-quantized-gradients": (
        [
            Case(
                optimizer("Muon") | zero(3, reduce_scatter=False, zero_quantized_gradients=True),
                "init",
            )
        ],
        [Case(zero(3, zero_quantized_gradients=True), "init")],
    ),
    "adam-is-adamw": (
        [Case(optimizer("Adam", weight_decay=0.1))],
        [
            Case(optimizer("Adam")),
            Case(optimizer("Adam", weight_decay=0.1, adam_w_mode=False)),
            Case(optimizer("AdamW", weight_decay=0.1)),
        ],
    ),
    "adamw-mode-ignored": (
        [Case(optimizer("AdamW", adam_w_mode=False))],
        [Case(optimizer("Adam", adam_w_mode=False)), Case(optimizer("AdamW", adam_w_mode=True))],
    ),
    "amsgrad-needs-torch-adam": (
        [
            Case(optimizer("AdamW", amsgrad=True), "init"),
            Case(optimizer("Adam", amsgrad=True) | offload(2), "init"),
        ],
        [Case(optimizer("AdamW", amsgrad=True, torch_adam=True), "step")],
    ),
    "amsgrad-not-supported": (
        [
            Case(optimizer("Lamb", amsgrad=True)),
            Case(optimizer("ZeroOneAdam", amsgrad=True), release="0.19.6"),
        ],
        [
            Case(optimizer("Lamb", amsgrad=False)),
            Case(optimizer("AdamW", amsgrad=True, torch_adam=True), "step"),
        ],
    ),
    "amsgrad-ignored": (
        [Case(optimizer("Adagrad", amsgrad=True) | offload(2))],
        [
            Case(optimizer("Adagrad", amsgrad=False) | offload(2), "step"),
            Case(optimizer("AdamW", amsgrad=True, torch_adam=True) | offload(2), "step"),
        ],
    ),
    "one-bit-with-zero": (
        [
            Case(optimizer("OneBitAdam") | zero(2), release="0.19.6"),
            Case(optimizer("onebitlamb") | zero(1), release="0.16.9"),
        ],
        [
            Case(optimizer("OneBitAdam") | zero(0), release="0.19.6"),
            Case(zero(2), release="0.19.6"),
        ],
    ),
    "scheduler-unknown": (
        [Case(scheduler("warmuplr"), "init"), Case(scheduler("CosineWarmup"), "init")],
        [Case(scheduler("WarmupLR"), "step"), Case(scheduler("StepLR", step_size=1), "step")],
    ),
    "scheduler-from-code": (
        [
            Case(scheduler("LambdaLR", lr_lambda="x"), "init"),
            Case(scheduler("SequentialLR", schedulers=[], milestones=[]), "init"),
        ],
        [Case(scheduler("MultiStepLR", milestones=[3]), "step")],
    ),
    "torch-scheduler-with-wrapper": (
        [
            Case(scheduler("StepLR", step_size=1) | zero(1), "init"),
            Case(scheduler("StepLR", step_size=1) | BF16, "init"),
        ],
        [
            Case(scheduler("StepLR", step_size=1), "step"),
            Case(scheduler("WarmupLR") | zero(2) | BF16, "step"),
        ],
    ),
    "plateau-without-metric": (
        [Case(scheduler("ReduceLROnPlateau"))],
        [Case(scheduler("ExponentialLR", gamma=0.9), "step")],
    ),
    "warmup-decay-peak": (
        [Case(scheduler("WarmupDecayLR", **DECAY) | optimizer("AdamW", lr=5e-5))],
        [
            Case(scheduler("WarmupDecayLR", **DECAY)),
            Case(scheduler("WarmupLR") | optimizer("AdamW", lr=5e-5)),
            Case(
                scheduler("WarmupDecayLR", **DECAY, warmup_max_lr=5e-5)
                | optimizer("AdamW", lr=5e-5)
            ),
        ],
    ),
    "warmup-peak": (
        [Case(scheduler("WarmupLR") | optimizer("AdamW", lr=5e-5), release="0.16.9")],
        [
            Case(scheduler("WarmupLR") | optimizer("AdamW", lr=5e-5), release="0.17.2"),
            Case(
                scheduler("WarmupLR", warmup_max_lr=5e-5) | optimizer("AdamW", lr=5e-5),
                release="0.16.9",
            ),
        ],
    ),
    "warmup-too-long": (
        [
            Case(scheduler("WarmupCosineLR", total_num_steps=100)),
            Case(scheduler("WarmupDecayLR", total_num_steps=100, warmup_num_steps=100)),
        ],
        [
            Case(scheduler("WarmupCosineLR", total_num_steps=100, warmup_num_steps=99), "step"),
            Case(scheduler("WarmupCosineLR", total_num_steps=2000), "step"),
        ],
    ),
    "warmup-falls": (
        [
            Case(scheduler("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.01)),
            Case(scheduler("WarmupLR", warmup_min_lr=0.1)),
            Case(scheduler("WarmupDecayLR", warmup_min_lr=0.1, **DECAY)),
        ],
        [
            Case(scheduler("WarmupLR", warmup_min_lr=0.01, warmup_max_lr=0.01), "step"),
            Case(scheduler("WarmupDecayLR", warmup_min_lr=0.0001, **DECAY), "step"),
        ],
    ),
    "zero-as-switch": (
        [Case({"zero_optimization": True})],
        [Case({"zero_optimization": False}, "step"), Case(zero(1), "step")],
    ),
    "bucket-too-large": (
        [
            Case(zero(2, reduce_bucket_size=10**40), "step"),
            Case(zero(3, reduce_bucket_size=10**40), "init"),
        ],
        [
            Case(zero(0, reduce_bucket_size=10**40), "step"),
            Case(zero(2, reduce_bucket_size=10**9), "init"),
            Case(zero(2, reduce_bucket_size=10**40, contiguous_gradients=False), "step"),
        ],
    ),
    "autocast-module-path": (
        [
            Case(
                {
                    "torch_autocast": {
                        "enabled": True,
                        "dtype": "bf16",
                        "lower_precision_safe_modules": ["Linear", "torch.nn.GELU"],
                    }
                },
                "init",
            )
        ],
        [
            Case(
                {
                    "torch_autocast": {
                        "enabled": True,
                        "dtype": "bf16",
                        "lower_precision_safe_modules": ["torch.nn.Linear"],
                    }
                },
                "step",
            ),
            Case(
                {
                    "torch_autocast": {
                        "enabled": False,
                        "dtype": "bf16",
                        "lower_precision_safe_modules": ["Linear"],
                    }
                },
                "step",
            ),
        ],
    ),
    "contiguous-checkpoints": (
        [
            Case(
                {
                    "activation_checkpointing": {
                        "contiguous_memory_optimization": True,
                        "partition_activations": True,
                    }
                },
                "configure",
                beside=RECOMPUTE,
            ),
            Case(
                {
                    "activation_checkpointing": {
                        "contiguous_memory_optimization": True,
                        "number_checkpoints": 4,
                    }
                },
                "configure",
                beside=RECOMPUTE,
            ),
        ],
        [
            Case(
                {
                    "activation_checkpointing": {
                        "contiguous_memory_optimization": True,
                        "partition_activations": True,
                        "number_checkpoints": 4,
                    }
                },
                "configure",
            ),
            Case(
                {"activation_checkpointing": {"contiguous_memory_optimization": False}}, "configure"
            ),
        ],
    ),
    "warmup-without-steps": (
        [
            Case(scheduler("WarmupLR", warmup_num_steps=0), "init"),
            Case(scheduler("WarmupCosineLR", warmup_num_steps=-3, total_num_steps=9), "init"),
            Case(scheduler("WarmupLR", warmup_num_steps=0), release="0.19.2"),
        ],
        [Case(scheduler("WarmupLR", warmup_num_steps=1), "step")],
    ),
    "fp16-with-bf16": (
        [
            Case(FP16 | BF16, "parse"),
            Case(FP16 | {"bfloat16": {"enabled": True}}, "parse"),
            Case(
                {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
                release="0.16.9",
                beside=("auto-value",),
            ),
            Case({"fp16": {"enabled": "auto"}} | BF16, release="0.17.0", beside=("auto-value",)),
        ],
        [
            Case({"fp16": {"enabled": False}} | BF16, "step"),
            Case(FP16 | {"bf16": {"enabled": False}}, "parse"),
            Case({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "step"),
            Case({"fp16": {"enabled": "auto"}} | BF16, release="0.17.1"),
        ],
    ),
    "amp-not-alone": (
        [
            Case(AMP | zero(2), release="0.19.7"),
            Case(AMP | BF16, release="0.19.6"),
            Case(AMP | FP16 | zero(1), release="0.16.9"),
        ],
        [
            Case(AMP, release="0.19.7"),
            Case({"amp": {"enabled": False}} | FP16 | zero(2), release="0.19.7"),
        ],
    ),
    "comms-logger-always-on": (
        [
            Case({"comms_logger": {"enabled": False}}),
            Case({"comms_logger": {"enabled": False, "verbose": True}}),
        ],
        [Case({"comms_logger": {"enabled": True}}), Case({"flops_profiler": {"enabled": False}})],
    ),
    "auto-cast-without-fp16": (
        [
            Case({"fp16": {"enabled": False, "auto_cast": True}}, "step"),
            Case({"fp16": {"enabled": False, "auto_cast": True}} | BF16, "step"),
        ],
        [
            Case({"fp16": {"enabled": True, "auto_cast": True}}),
            Case({"fp16": {"enabled": False, "auto_cast": False}}, "step"),
        ],
    ),
    "dynamic-loss-scale": (
        [
            Case({"fp16": {"enabled": True, "loss_scale_window": 0}}, "parse"),
            Case({"fp16": {"enabled": True, "min_loss_scale": -1}}, "parse"),
            Case({"fp16": {"enabled": True, "loss_scale_window": 0}}, release="0.19.2"),
        ],
        [
            Case({"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}}, "parse"),
            Case({"fp16": {"enabled": False, "min_loss_scale": -1}}, "step"),
        ],
    ),
    "loss-scale-stuck": (
        [
            Case({"fp16": {"enabled": True, "hysteresis": 0}}),
            Case({"fp16": {"enabled": True, "hysteresis": -1}}),
            Case({"fp16": {"enabled": True, "initial_scale_power": 2000}}),
            Case({"fp16": {"enabled": False, "initial_scale_power": 10**12}} | zero(2)),
        ],
        [
            Case({"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 24}}, "parse"),
            Case({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 0}}, "parse"),
            Case({"fp16": {"enabled": False, "initial_scale_power": 10**5}} | zero(2), "step"),
        ],
    ),
    "autosp-at-stage": (
        [
            Case(
                {"compile": {"deepcompile": True, "passes": ["autosp"]}} | zero(2),
                beside=("compile-waits-for-code",),
            )
        ],
        [
            Case({"compile": {"deepcompile": True, "passes": ["autosp"]}} | zero(1)),
            Case({"compile": {"passes": ["autosp"]}} | zero(2)),
        ],
    ),
    "data-parallel-size-alone": (
        [Case({"data_parallel_size": 3}, world=4)],
        [Case({"data_parallel_size": 2, "sequence_parallel_size": 2}, world=4)],
    ),
    "tensor-parallel-below-0": (
        [Case({"tensor_parallel": {"autotp_size": -2}}, world=4)],
        [Case({"tensor_parallel": {"autotp_size": 0}}, "step")],
    ),
    "loss-scale-boolean": (
        [
            Case({"fp16": {"enabled": False, "loss_scale": True}}, "parse"),
            Case({"fp16": {"enabled": True, "loss_scale_window": True}}, "parse"),
        ],
        [
            Case({"fp16": {"enabled": False, "loss_scale": "1", "hysteresis": True}}, "step"),
            Case({"fp16": {"enabled": False, "loss_scale": True}}, release="0.19.2"),
        ],
    ),
    "fp16-unsupported": (
        [Case(FP16, "init", device="cpu"), Case(FP16, device="cuda", gpu="p100-16gb")],
        [Case(FP16, device="cuda", gpu="t4-16gb"), Case(FP16), Case(BF16, "step", device="cpu")],
    ),
    "bf16-emulated": (
        [Case(BF16, gpu="v100-32gb")],
        [Case(BF16, gpu="h100-80gb"), Case(FP16, gpu="v100-32gb"), Case(BF16, "step")],
    ),
    "grad-accum-dtype": (
        [
            Case(BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, "init"),
            Case({"data_types": {"grad_accum_dtype": "bf16"}}, "init"),
        ],
        [
            Case(BF16 | {"data_types": {"grad_accum_dtype": "fp32"}} | zero(2), "step"),
            Case(BF16 | {"data_types": {"grad_accum_dtype": "bfloat16"}}, "step"),
            Case({"data_types": {"grad_accum_dtype": "fp32"}}, "step"),
        ],
    ),
    "param-dtype": (
        [
            Case({"data_types": {"param_dtype": "bf16"}}, "init"),
            Case(BF16 | {"data_types": {"param_dtype": "fp32"}}, "init"),
        ],
        [
            Case(BF16 | {"data_types": {"param_dtype": "bfloat16"}}, "step"),
            Case({"data_types": {"param_dtype": "bf16"}}, release="0.19.1"),
        ],
    ),
    "fp16-master-needs-stage2": (
        [
            Case(
                {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}} | zero(1),
                release="0.18.2",
            )
        ],
        [
            Case(
                {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
                | offload(2)
                | ADAM,
                release="0.18.2",
            )
        ],
    ),
    "master-weights-need-zero": (
        [Case(MASTER, "parse"), Case(MASTER_FP16, "parse")],
        [Case(MASTER | offload(2) | ADAM, "step"), Case(MASTER_FP16 | offload(1) | ADAM, "parse")],
    ),
    "bf16-states-need-bf16-master": (
        [Case({"bf16": {"enabled": True, "bf16_optimizer_states": True}} | zero(2), "parse")],
        [
            Case(
                {
                    "bf16": {
                        "enabled": True,
                        "bf16_optimizer_states": True,
                        "bf16_master_weights_and_grads": True,
                    }
                }
                | zero(2),
                "step",
            )
        ],
    ),
    "two-master-dtypes": (
        [Case(MASTER | MASTER_FP16 | offload(2) | ADAM, "init")],
        [
            Case(
                MASTER
                | {"fp16": {"enabled": False, "fp16_master_weights_and_grads": False}}
                | offload(2)
                | ADAM,
                "init",
            )
        ],
    ),
    "master-weights-need-cpu-adam": (
        [
            Case(MASTER | zero(2), "init"),
            Case(MASTER | offload(2), "init"),
            Case(MASTER | zero(3), "init"),
            Case(MASTER_FP16 | offload(1), "init"),
            Case(MASTER | offload(3) | optimizer("Adagrad"), "init"),
        ],
        [
            Case(MASTER | offload(3) | ADAM, "step"),
            Case(
                {
                    "bf16": {
                        "enabled": True,
                        "bf16_optimizer_states": True,
                        "bf16_master_weights_and_grads": True,
                    }
                }
                | zero(3),
                "step",
            ),
        ],
    ),
    "autocast-without-dtype": (
        [Case({"torch_autocast": {"enabled": True}})],
        [
            Case({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "step"),
            Case({"torch_autocast": {"enabled": True}}, release="0.16.9"),
        ],
    ),
    "autocast-in-int8": (
        [
            Case({"torch_autocast": {"enabled": True, "dtype": "int8"}} | zero(3), "step"),
            Case({"torch_autocast": {"enabled": True, "dtype": "torch.int8"}}),
        ],
        [
            Case({"torch_autocast": {"enabled": False, "dtype": "int8"}} | zero(1), "step"),
            Case({"torch_autocast": {"enabled": True, "dtype": "bf16"}} | zero(1), "step"),
        ],
    ),
    "autocast-of-half-weights": (
        [Case({"torch_autocast": {"enabled": True, "dtype": "bf16"}} | BF16)],
        [
            Case(
                {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "bf16": {"enabled": False}},
                "step",
            )
        ],
    ),
    "autocast-with-half-precision": (
        [Case({"torch_autocast": {"enabled": True, "dtype": "bf16"}} | BF16, release="0.17.6")],
        [Case({"torch_autocast": {"enabled": False, "dtype": "bf16"}} | BF16, release="0.17.6")],
    ),
    "autocast-with-quantized-weights": (
        [
            Case(
                {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
                | zero(3, zero_quantized_weights=True),
                "init",
            )
        ],
        [
            Case(
                {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
                | zero(3, zero_quantized_weights=False),
                "step",
            )
        ],
    ),
    "zero-stage-left-out": (
        [Case({"zero_optimization": {"overlap_comm": True}})],
        [
            Case({"zero_optimization": {}}, "step"),
            Case(zero(0, overlap_comm=True), "step"),
            Case({"zero_optimization": True}, "step"),
        ],
    ),
    "inert-at-stage": (
        [
            Case(zero(2, stage3_max_live_parameters=5)),
            Case(zero(1, max_live_parameters=5)),
            Case(zero(2, zero_quantized_weights=True)),
            Case(zero(3, round_robin_gradients=True)),
            Case(zero(2, zero_hpz_partition_size=2)),
        ],
        [
            Case(zero(3, stage3_max_live_parameters=5, sub_group_size=9), "step"),
            Case(zero(2, round_robin_gradients=True), "step"),
            Case(zero(2, zero_quantized_weights=False, zero_hpz_partition_size=1), "step"),
            Case(zero(0, sub_group_size=9)),
        ],
    ),
    "grad-norm-off-at-stage": (
        [Case(zero(3, **NO_NORM), "parse"), Case(zero(0, **NO_NORM), "parse")],
        [
            Case(zero(2, **NO_NORM) | {"gradient_clipping": 0.0}, "step"),
            Case(zero(3, compute_grad_norm=True), "step"),
        ],
    ),
    "grad-norm-off-with-clipping": (
        [
            Case(zero(1, **NO_NORM), "init"),
            Case(zero(2, **NO_NORM) | {"gradient_clipping": GONE}, "init"),
        ],
        [Case(zero(1, **NO_NORM) | {"gradient_clipping": 0.0}, "step")],
    ),
    "grad-norm-needed": (
        [
            Case(
                {"gradient_clipping": 0.0}
                | zero(2, offload_optimizer={"device": "cpu"}, **NO_NORM),
                "init",
            ),
            Case(
                {"gradient_clipping": 0.0, "data_types": {"grad_accum_dtype": "fp32"}}
                | BF16
                | zero(1, **NO_NORM),
                "init",
            ),
        ],
        [
            Case(
                {"gradient_clipping": 0.0, "data_types": {"grad_accum_dtype": "fp32"}}
                | BF16
                | zero(2, **NO_NORM),
                "step",
            )
        ],
    ),
    "prescale-with-reduce-scatter": (
        [
            Case({"prescale_gradients": True} | zero(2), "init"),
            Case({"gradient_predivide_factor": 2.0} | zero(3), "init"),
        ],
        [
            Case({"prescale_gradients": True} | zero(1), "step"),
            Case({"gradient_predivide_factor": 1.0} | zero(3), "step"),
            Case({"prescale_gradients": True} | zero(2, reduce_scatter=False), "step"),
            Case({"prescale_gradients": True, "gradient_allreduce_op": "sum"} | zero(2), "step"),
        ],
    ),
    "unmanaged-with-overlap": (
        [
            Case({"managed_gradient_accumulation": False} | zero(1, overlap_comm=True), "init"),
            Case({"managed_gradient_accumulation": False} | zero(0, overlap_comm=True), "init"),
        ],
        [
            Case({"managed_gradient_accumulation": False} | zero(2, overlap_comm=True), "step"),
            Case({"managed_gradient_accumulation": False} | zero(1), "step"),
            Case({"managed_gradient_accumulation": False} | zero(3), "step"),
        ],
    ),
    "unmanaged-with-deepcompile": (
        [
            Case(
                {
                    "managed_gradient_accumulation": False,
                    "compile": {"deepcompile": True, "passes": ["autosp"]},
                },
                "init",
            )
        ],
        [Case({"managed_gradient_accumulation": False, "compile": {"deepcompile": False}}, "step")],
    ),
    "sum-of-gradients": (
        [
            Case({"gradient_allreduce_op": "sum"} | zero(3), "parse"),
            Case({"gradient_allreduce_op": "SUM"} | zero(3), "parse"),
            Case(
                {
                    "gradient_allreduce_op": "sum",
                    "compile": {"deepcompile": True, "passes": ["autosp"]},
                },
                "parse",
            ),
        ],
        [
            Case({"gradient_allreduce_op": "sum"} | zero(2), "step"),
            Case({"gradient_allreduce_op": "mean"} | zero(3), "step"),
        ],
    ),
    "quantized-gradients-need-reduce-scatter": (
        [Case(zero(3, zero_quantized_gradients=True, reduce_scatter=False), "init")],
        [
            Case(zero(3, zero_quantized_gradients=True), "step"),
            Case(zero(3, reduce_scatter=False), "step"),
        ],
    ),
    "hpz-does-not-divide": (
        [Case(zero(3, zero_hpz_partition_size=3), world=4)],
        [
            Case(zero(3, zero_hpz_partition_size=2), world=4),
            Case(zero(3, zero_hpz_partition_size=3)),
        ],
    ),
    "hpz-larger-than-world": (
        [Case(zero(3, zero_hpz_partition_size=3), world=1)],
        [Case(zero(3, zero_hpz_partition_size=2), world=2)],
    ),
    "elastic-checkpoint": (
        [Case(zero(2, elastic_checkpoint=True))],
        [Case(zero(2, elastic_checkpoint=False))],
    ),
    "deprecated-with-its-heir": (
        [
            Case(zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}), "parse"),
            Case(
                zero(
                    3,
                    stage3_gather_fp16_weights_on_model_save=True,
                    stage3_gather_16bit_weights_on_model_save=True,
                ),
                "parse",
            ),
        ],
        [
            Case(zero(2, cpu_offload=True), "step"),
            Case(zero(3, stage3_gather_fp16_weights_on_model_save=True), "step"),
        ],
    ),
    "offload-without-zero": (
        [Case(offload(0)), Case(offload(0), device="cpu")],
        [Case(offload(1), "step"), Case(offload(0, "none"), "step")],
    ),
    "lamb-with-offload": (
        [
            Case(optimizer("Lamb") | offload(2) | UNTESTED),
            Case(optimizer("lamb") | offload(3, "nvme", nvme_path="/nvme") | UNTESTED),
        ],
        [Case(optimizer("Lamb") | offload(2, "none") | UNTESTED), Case(offload(2) | ADAM, "step")],
    ),
    "nvme-optimizer-in-memory": (
        [Case(offload(2, "nvme", nvme_path="/nvme"))],
        [Case(offload(3, "nvme", nvme_path="/nvme")), Case(offload(2, "cpu"), "step")],
    ),
    "param-offload-ignored": (
        [Case(zero(2, offload_param={"device": "cpu"})), Case(zero(2, cpu_offload_param=True))],
        [
            Case(zero(3, offload_param={"device": "cpu"}), "step"),
            Case(zero(2, offload_param={"device": "none"}), "step"),
        ],
    ),
    "nvme-path-missing": (
        [Case(offload(3, "nvme"), "init"), Case(zero(3, offload_param={"device": "nvme"}), "init")],
        [Case(offload(3, "nvme", nvme_path="/nvme"))],
    ),
    "partial-offload-needs-stage-3": (
        [Case(offload(2, ratio=0.5) | ADAM, "parse")],
        [Case(offload(3, ratio=0.5) | ADAM, "step"), Case(offload(2, ratio=1.0), "step")],
    ),
    "partial-offload-needs-cpu-adam": (
        [
            Case(offload(3, ratio=0.5), "init", beside=("partial-offload-without-schedule",)),
            Case(
                offload(3, ratio=0.5) | optimizer("Adagrad"),
                "init",
                beside=("partial-offload-without-schedule",),
            ),
        ],
        [Case(offload(3, ratio=0.5) | ADAM, "step"), Case(offload(3, ratio=1.0), "step")],
    ),
    "partial-offload-without-schedule": (
        [Case(offload(3, ratio=0.5) | ADAM)],
        [Case(offload(3, ratio=1.0) | ADAM), Case(offload(2, ratio=1.0))],
    ),
    "super-offload-ignored": (
        [Case(offload(2, super_offload=True))],
        [Case(offload(3, super_offload=True)), Case(offload(2, super_offload=False), "step")],
    ),
    "super-offload-needs-adam": (
        [
            Case(offload(3, super_offload=True) | optimizer("Lion")),
            Case(offload(3, super_offload=True) | optimizer("SGD") | UNTESTED),
            Case(offload(3, "none", super_offload=True) | ADAM),
            Case(zero(3, offload_optimizer={"super_offload": True})),
        ],
        [
            Case(offload(3, super_offload=True) | ADAM),
            Case(offload(3) | optimizer("Adagrad"), "step"),
            Case(offload(3, super_offload=True) | optimizer("MuAdamW")),
        ],
    ),
    "super-offload-needs-cores": (
        [Case(offload(3, super_offload=True, cpuadam_cores_perc=0) | ADAM)],
        [
            Case(offload(3, super_offload=True, cpuadam_cores_perc=1.0) | ADAM),
            Case(offload(3, cpuadam_cores_perc=0), "step"),
        ],
    ),
    "contiguous-gradients-forced": (
        [Case(zero(2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}))],
        [Case(zero(2, contiguous_gradients=False), "step")],
    ),
    "zenflow-needs-offload": (
        [
            Case(zero(2, zenflow={"topk_ratio": 0.1}) | ADAM, "init"),
            Case(zero(1, zenflow={}) | ADAM, "init"),
        ],
        [Case(zenflow(2, topk_ratio=0.1), "init"), Case(zero(2, zenflow={}), release="0.17.4")],
    ),
    "zenflow-intervals": (
        [
            Case(zenflow(2, select_interval=4), "init"),
            Case(zenflow(2, select_strategy="step"), "init"),
            Case(zenflow(2, select_strategy="step", select_interval=2, update_interval=4), "init"),
            Case(zenflow(2, select_interval="x"), "parse"),
            Case(
                zenflow(2, select_strategy="step", select_interval=2, update_interval="2"), "parse"
            ),
        ],
        [
            Case(zenflow(2, select_strategy="step", select_interval=4, update_interval=4), "init"),
            Case(zenflow(2, select_interval="auto"), "init"),
        ],
    ),
    "zenflow-needs-overlap": (
        [Case(zenflow(2, offload=True), "init")],
        [
            Case(
                merged(zenflow(2, offload=True), {"zero_optimization": {"overlap_comm": True}}),
                "init",
            )
        ],
    ),
    "zenflow-params": (
        [
            Case(zenflow(2) | optimizer("AdamW", torch_adam=True), "init"),
            Case(zenflow(1) | optimizer("Adam", adam_w_mode=True), "init"),
        ],
        [Case(zenflow(2) | optimizer("AdamW", weight_decay=0.1), "init")],
    ),
    "zenflow-needs-adam": (
        [
            Case(zenflow(2, **EVERY_2) | optimizer("Adagrad"), "step"),
            Case(zenflow(3) | optimizer("AdamW", torch_adam=True)),
        ],
        [Case(zenflow(2, **EVERY_2) | optimizer("AdamW"), "step")],
    ),
    "zenflow-replaces-accumulation": (
        [
            Case(zenflow(2) | {"gradient_accumulation_steps": 4}),
            Case(zenflow(2, update_interval=2) | {"gradient_accumulation_steps": 4}),
        ],
        [
            Case(zenflow(2, update_interval=4) | {"gradient_accumulation_steps": 4}),
            Case(zenflow(2)),
        ],
    ),
    "tensor-parallel-does-not-fit": (
        [Case(TP2, "init", world=1), Case({"tensor_parallel": {"autotp_size": 4}}, world=6)],
        [Case(TP2, world=6), Case(TP2)],
    ),
    "tensor-parallel-sizes": (
        [Case({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}})],
        [
            Case({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}),
            Case({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, release="0.18.5"),
        ],
    ),
    "tensor-parallel-preset": (
        [Case({"tensor_parallel": {"autotp_size": 2, "preset_model": "lama"}})],
        [Case({"tensor_parallel": {"autotp_size": 2, "preset_model": "Llama"}})],
    ),
    "pipeline-with-zero": ([Case(PIPE | zero(2))], [Case(PIPE | zero(1))]),
    "pipeline-with-tensor-parallel": (
        [Case(PIPE | TP2)],
        [Case(PIPE | {"tensor_parallel": {"autotp_size": 1}})],
    ),
    "pipeline-needs-steps-per-print": (
        [
            Case(PIPE | {"wall_clock_breakdown": True}),
            Case(PIPE | {"flops_profiler": {"enabled": True}}),
        ],
        [
            Case(PIPE | {"wall_clock_breakdown": True, "steps_per_print": 10}),
            Case({"wall_clock_breakdown": True}, "step"),
        ],
    ),
    "pipeline-unmanaged": (
        [Case(PIPE | {"managed_gradient_accumulation": False})],
        [Case(PIPE | {"managed_gradient_accumulation": True})],
    ),
    "pipeline-overlap": (
        [Case(PIPE | zero(1, overlap_comm=True))],
        [Case(PIPE | zero(1, overlap_comm=False))],
    ),
    "pipeline-bf16-checkpoint": ([Case(PIPE | BF16)], [Case(PIPE | BF16 | zero(1)), Case(PIPE)]),
    "expert-parallel-does-not-fit": (
        [
            Case(experts(autoep_size=2), "init", world=1),
            Case(experts(autoep_size=4), "autoep", world=6),
        ],
        [
            Case(experts(autoep_size=2), "autoep", world=4),
            Case(experts(autoep_size=1), "init", world=1),
        ],
    ),
    "expert-tensor-parallel": (
        [Case(experts(autoep_size=2, expert_tensor_parallel_size=2), "autoep", world=4)],
        [Case(experts(autoep_size=2, expert_tensor_parallel_size=1), "autoep", world=4)],
    ),
    "expert-with-tensor-parallel": (
        [
            Case(experts(autoep_size=1) | TP2, "autoep", world=4),
            Case(
                experts(autoep_size=2) | TP2 | {"use_data_before_expert_parallelism": True},
                "autoep",
                world=4,
            ),
            Case(experts(autoep_size=2) | TP2 | offload(2, "none"), "autoep", world=4),
            Case(experts(autoep_size=2, async_split_plan=True) | TP2, "autoep", world=4),
            Case(
                experts(autoep_size=2, combine_impl="fused_weighted_sum") | TP2, "autoep", world=4
            ),
        ],
        [
            Case(experts(autoep_size=2) | TP2, "autoep", world=4),
            Case(experts(autoep_size=2) | offload(2), "autoep", world=4),
        ],
    ),
    "presets-differ": (
        [
            Case(
                experts(preset_model="mixtral") | {"tensor_parallel": {"preset_model": "llama"}},
                "autoep",
                world=1,
            )
        ],
        [
            Case(
                experts(preset_model="mixtral") | {"tensor_parallel": {"preset_model": "mixtral"}},
                "autoep",
                world=1,
            )
        ],
    ),
    "expert-parallel-at-stage-3": (
        [Case(experts(autoep_size=2) | zero(3, zero_quantized_gradients=True))],
        [Case(experts(autoep_size=2) | zero(3), "autoep", world=4)],
    ),
    "expert-options": (
        [
            Case(experts(gate_up_impl="fused", use_grouped_mm=False), "autoep", world=1),
            Case(experts(row_weighting_impl="fused"), "autoep", world=1),
            Case(experts(comm_backend="deepep", autoep_size=2), "autoep", world=2),
            Case(
                experts(
                    comm_backend="deepep",
                    autoep_size=2,
                    comm_max_tokens_per_rank=9,
                    combine_impl="fused_weighted_sum",
                ),
                "autoep",
                world=2,
            ),
            Case(experts(num_expert_groups=2, num_limited_groups=3), "autoep", world=1),
        ],
        [
            Case(experts(gate_up_impl="fused"), "autoep", world=1),
            Case(
                experts(
                    comm_backend="deepep",
                    autoep_size=2,
                    comm_max_tokens_per_rank=9,
                    row_weighting_impl="fused",
                ),
                "autoep",
                world=2,
            ),
            Case(experts(num_expert_groups=3, num_limited_groups=3), "autoep", world=1),
        ],
    ),
    "compile-waits-for-code": (
        [Case({"compile": {"deepcompile": True}} | zero(2))],
        [Case({"compile": {"deepcompile": False}} | zero(2))],
    ),
    "deepcompile-without-zero": (
        [Case({"compile": {"deepcompile": True}})],
        [Case({"compile": {"deepcompile": True, "passes": ["autosp"]}})],
    ),
    "compile-offloads": (
        [
            Case(COMPILE_STATES | offload(3), beside=WAITS),
            Case(
                {
                    "compile": {
                        "deepcompile": True,
                        "offload_activation": True,
                        "offload_parameters": True,
                    }
                }
                | zero(3),
                beside=WAITS,
            ),
            Case(
                {"compile": {"deepcompile": True, "offload_activation": True}}
                | zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
                beside=WAITS,
            ),
            Case(
                {
                    "compile": {
                        "deepcompile": True,
                        "offload_opt_states": True,
                        "offload_parameters": True,
                    }
                }
                | zero(3),
                beside=WAITS,
            ),
        ],
        [Case({"compile": {"deepcompile": False, "offload_opt_states": True}} | offload(3))],
    ),
    "compile-passes": (
        [Case({"compile": {"deepcompile": True, "passes": ["autotp", "z1"]}})],
        [Case({"compile": {"deepcompile": True, "passes": ["autotp"]}})],
    ),
    "expert-choice": (
        [
            Case(experts(preset_model="mixtrl"), "autoep", world=1),
            Case(experts(expert_activation="foo"), "autoep", world=1),
            Case(experts(routed_scaling_factor="x"), "autoep", world=1),
            Case(experts(top_k="x")),
        ],
        [
            *(Case(experts(preset_model=name), "autoep", world=1) for name in EXPERT_PRESETS),
            *(
                Case(experts(expert_activation=name), "autoep", world=1)
                for name in EXPERT_ACTIVATIONS
            ),
            Case(experts(top_k=2, routed_scaling_factor=2.5), "autoep", world=1),
        ],
    ),
    "expert-part-name": (
        [
            Case(experts(expert_w1="a.b"), "autoep", world=1),
            Case(experts(router_pattern=""), "autoep", world=1),
            Case(experts(expert_w3="a.b"), "autoep", world=1),
            Case(experts(shared_experts_gate_pattern="a.b"), "autoep", world=1),
        ],
        [Case(experts(expert_w1="up", expert_w3=None), "autoep", world=1)],
    ),
    "compile-around-experts": (
        [
            Case({"compile": {"autoep_non_moe": True}} | zero(3), "compile"),
            Case({"compile": {"autoep_non_moe": True}} | offload(2), "compile"),
        ],
        [Case({"compile": {"autoep_non_moe": True}} | zero(2))],
    ),
    "clipping-left-out": (
        [Case({"gradient_clipping": GONE})],
        [
            Case({"gradient_clipping": 0.0}, "step"),
            Case({"gradient_clipping": GONE}, release="0.19.2"),
        ],
    ),
    "section-not-enabled": (
        [Case({"fp16": {"loss_scale": 0}}), Case({"tensorboard": {"output_path": "x"}})],
        [Case({"fp16": {}}), Case({"tensorboard": {"enabled": False, "output_path": "x"}}, "step")],
    ),
    "two-bf16-sections": (
        [Case(BF16 | {"bfloat16": {"enabled": False}})],
        [Case({"bfloat16": {"enabled": True}}, "step")],
    ),
    "monitor-without-loss": (
        [Case({"csv_monitor": {"enabled": True}})],
        [
            Case({"csv_monitor": {"enabled": False}}),
            Case({"csv_monitor": {"enabled": True}}, release="0.18.2"),
            Case({"csv_monitor": {"enabled": True}} | PIPE),
        ],
    ),
    "activation-checkpointing-waits-for-code": (
        [Case({"activation_checkpointing": {"partition_activations": True}})],
        [Case({"activation_checkpointing": {"partition_activations": False}}, "step")],
    ),
    "checkpoint-writer-data-parallel": (
        [
            Case(zero(2) | {"checkpoint": {"writer": {"type": "PYTHON"}}}, beside=LAUNCHER),
            Case({"checkpoint": {"writer": {"data_parallel": None}}}, beside=LAUNCHER),
        ],
        [
            Case(zero(3) | {"checkpoint": {"writer": {"type": "PYTHON"}}}),
            Case({"checkpoint": {"writer": {"data_parallel": "SOCKET"}}}),
            Case({"checkpoint": {"writer": {}}} | PIPE),
            Case({"checkpoint": {}}, "step"),
        ],
    ),
    "checkpoint-writer-needs-launcher": (
        [Case({"checkpoint": {"writer": {"type": "FAST", "data_parallel": "REPLICA"}}})],
        [Case({"checkpoint": {"tag_validation": "Fail"}}, "step")],
    ),
    "curriculum-needs-metrics": (
        [Case(sampling(curriculum_learning={"enabled": True}), "parse")],
        [
            Case(sampling(curriculum_learning=CURRICULUM), "parse"),
            Case(sampling(curriculum_learning={"enabled": False}), "step"),
        ],
    ),
    "data-efficiency-half-enabled": (
        [Case(sampling(enabled=False, curriculum_learning=CURRICULUM))],
        [Case(sampling(curriculum_learning=CURRICULUM))],
    ),
    "random-ltd-needs": (
        [
            Case(routing(), "init"),
            Case(routing(**LTD | {"random_ltd_schedule": {}}), "init"),
            Case(routing(**LTD, layer_token_lr_schedule={}), "init"),
            *(
                Case(routing(**{name: value for name, value in LTD.items() if name != left_out}))
                for left_out in (
                    "random_ltd_layer_id",
                    "model_mask_name",
                    "model_type",
                    "hidden_state_order",
                )
            ),
            *(
                Case(
                    routing(
                        **LTD
                        | {
                            "random_ltd_schedule": merged(
                                LTD_SCHEDULE, {"schedule_config": {left_out: GONE}}
                            )
                        }
                    ),
                    "step",
                )
                for left_out in ("require_steps", "seq_per_step")
            ),
        ],
        [Case(routing(enabled=False), "step"), Case(routing(**LTD), "step")],
    ),
    "dynamic-batching-needs-tokens": (
        [Case(sampling(dynamic_batching={"enabled": True}), "parse")],
        [Case(sampling(dynamic_batching={"enabled": False}), "step")],
    ),
    "dynamic-batching-waits-for-code": (
        [Case(sampling(dynamic_batching={"enabled": True, "max_tokens": 5}))],
        [Case(sampling(dynamic_batching={"enabled": False, "max_tokens": 5}), "step")],
    ),
    "vocabulary-alignment": (
        [Case({"vocabulary_size": 50257})],
        [Case({"vocabulary_size": 50304}, "step")],
    ),
    "flops-profiler-depth": (
        [Case({"flops_profiler": {"enabled": True, "module_depth": 9}})],
        [
            Case({"flops_profiler": {"enabled": True, "module_depth": 2}}, "step"),
            Case({"flops_profiler": {"enabled": True}}, "step"),
            Case({"flops_profiler": {"enabled": False, "module_depth": 9}}, "step"),
        ],
    ),
    "autotuning-folder-empty": (
        [
            Case({"autotuning": {"enabled": False, "exps_dir": ""}}, "parse"),
            Case({"autotuning": {"enabled": False, "results_dir": ""}}, "parse"),
        ],
        [Case({"autotuning": {"enabled": False, "exps_dir": "here"}}, "step")],
    ),
    "legacy-stage1": (
        [Case(zero(1, legacy_stage1=True), "init"), Case(zero(3, legacy_stage1=True), "init")],
        [Case(zero(0, legacy_stage1=True), "step"), Case(zero(1, legacy_stage1=False), "step")],
    ),
    "odd-allgather-bucket": (
        [
            Case(zero(2, allgather_bucket_size=7), "init"),
            Case(zero(1, allgather_bucket_size=True), "init"),
        ],
        [
            Case(zero(2, allgather_bucket_size=8), "step"),
            Case(zero(3, allgather_bucket_size=7), "step"),
            Case(zero(0, allgather_bucket_size=7), "step"),
            Case(
                BF16
                | {"data_types": {"grad_accum_dtype": "fp32"}}
                | zero(1, allgather_bucket_size=7),
                "init",
            ),
        ],
    ),
    "compile-pass-unknown": (
        [
            Case({"compile": {"passes": ["z4"]}}, "parse"),
            Case({"compile": {"passes": ["autotp"]}}, release="0.19.5"),
        ],
        [
            Case({"compile": {"passes": ["z3"]}}, "parse"),
            Case({"compile": {"passes": ["autotp"]}}, "parse"),
        ],
    ),
    "keep-in-fp32-text": (
        [Case({"data_types": {"keep_in_fp32_modules": "norm"}}, "parse")],
        [Case({"data_types": {"keep_in_fp32_modules": ["norm"]}}, "step")],
    ),
    "needs-cuda": (
        [
            Case(optimizer("Lion"), "init", device="cpu"),
            Case(optimizer("Lamb"), "init", device="cpu"),
            Case(zenflow(3), "step", device="cpu"),
            Case(zero(3, zero_quantized_weights=True), "init", device="cpu"),
            Case(zero(3, zero_quantized_nontrainable_weights=True), "init", device="cpu"),
            Case(optimizer("AdamW", torch_adam=True, capturable=True), "step", device="cpu"),
            Case(
                {"checkpoint": {"writer": {"data_parallel": "REPLICA"}}},
                device="cpu",
                beside=LAUNCHER,
            ),
            Case({"aio": {"use_gds": True}}, "parse", device="cpu"),
        ],
        [
            Case(optimizer("Lion") | offload(2), device="cpu"),
            Case(optimizer("Lion")),
            Case({"aio": {"use_gds": True}}),
        ],
    ),
    "auto-value": (
        [
            Case({"train_micro_batch_size_per_gpu": "auto"}, "parse"),
            Case({"train_batch_size": "auto"}, "parse"),
            Case(optimizer("AdamW", lr="auto", torch_adam=True), "init"),
            Case({"gradient_clipping": "auto"}, "step"),
            Case({"steps_per_print": "auto"}, "step"),
            Case({"communication_data_type": "auto"}, "parse"),
            Case({"wall_clock_breakdown": "auto"}, "parse"),
            Case(scheduler("WarmupLR", warmup_num_steps="auto"), "init"),
            Case({"fp16": "auto"}, "parse"),
            Case({"timers": {"throughput": "auto"}}, "parse"),
            Case({"fp16": {"enabled": "auto"}}),
            Case(zero(2, reduce_bucket_size="auto")),
            Case({"zero_allow_untested_optimizer": "auto"}),
            Case({"bf16": {"enabled": "auto"}}, release="0.16.9"),
        ],
        [
            Case({"data_types": {"keep_in_fp32_modules": "auto"}}, "step"),
            Case(experts(score_func="auto"), "autoep", world=1),
            Case({"pipeline": {"stages": "auto"}}, "step"),
        ],
    ),
}
