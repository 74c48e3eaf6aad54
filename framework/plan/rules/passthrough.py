"""Keys under `deepspeed:`: which pass through to the JSON, which a typed section decides, and which a run cannot have.

A key passes beside the typed ones of its section (`zero_optimization.zero_hpz_partition_size` beside `zero`); one that
a typed section decides is a contradiction, whether the section was written or not, because rendering writes its default
out. What would change the layout of ranks, the number of samples or the state in a checkpoint is refused, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Final

from framework.config.base import Object, Target
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH, SHARED, TYPED
from framework.config.optimizer import Constant, Cosine
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.text.typos import nearest

_STATE: Final = "the optimizer's state is then not what a checkpoint here holds, and could not be resumed or moved"
_SPLIT: Final = "leave it out (a run config has data and pipeline parallelism)"
# DeepSpeed's dotted key -> (why a run cannot have it, what to do).
_NOT_IN_A_RUN: Final[Mapping[str, tuple[str, str]]] = {
    "sequence_parallel_size": (
        "a run config gives every rank samples of its own, and has no sequence parallelism",
        _SPLIT,
    ),
    "data_parallel_size": ("the layout of the run decides it: devices divided by parallel.pipe", "remove it"),
    "allgather_size": ("it belongs to a form of zero_optimization that is gone", "set zero.allgather_bucket_size"),
    "autotuning.enabled": (
        "DeepSpeed's autotuner ends every rank after some steps, in the middle of the run",
        "remove it; the deepspeed launcher's --autotuning works on scripts of its own",
    ),
    "dataloader_drop_last": ("the samples are read by a loader of the framework, which never sees it", "remove it"),
    "data_efficiency.data_sampling.enabled": (
        "the samples are read by a loader of the framework, "
        "so that DeepSpeed's sampler and curriculum would do nothing",
        "remove data_sampling; the order of samples is the dataset's, or data.shuffle's",
    ),
    "data_efficiency.data_sampling.curriculum_learning.enabled": (
        "the samples are read by a loader of the framework, so that DeepSpeed's curriculum would do nothing",
        "remove data_sampling; the order of samples is the dataset's, or data.shuffle's",
    ),
    "hybrid_engine.enabled": ("it trains through another engine, which no checkpoint here knows", "remove it"),
    "disable_allgather": ("DeepSpeed reads it and does nothing with it", "remove it"),
    "tensor_parallel.autotp_size": (
        "the ranks of a tensor-parallel group must see the same samples, and a run config gives every rank its own",
        _SPLIT,
    ),
    "expert_parallel.autoep_size": (
        "the experts would be spread over ranks, and checkpoints here hold every weight for all data-parallel ranks",
        _SPLIT,
    ),
    "zero_optimization.zenflow": (f"ZenFlow counts the micro-batches of a step itself, and {_STATE}", "remove it"),
    "zero_optimization.offload_optimizer.super_offload": (
        f"SuperOffload steps in a process of its own, and {_STATE}",
        "remove it",
    ),
    "zero_optimization.parameter_alignment": (f"weights are then padded, and {_STATE}", "remove it"),
    "zero_optimization.elastic_checkpoint": (
        "checkpoints here load on another number of ranks without it",
        "remove it",
    ),
    "zero_optimization.load_from_fp32_weights": ("a resumed run would go on from rounded weights", "remove it"),
    "fp16.fp16_master_weights_and_grads": (f"without weights in fp32 {_STATE}", "remove it"),
    "bf16.bf16_master_weights_and_grads": (f"without weights in fp32 {_STATE}", "remove it"),
    "bf16.bf16_optimizer_states": (f"in bf16 {_STATE}", "remove it"),
    "optimizer.params.amsgrad": (f"with a third moment {_STATE}", "remove it"),
    "optimizer.params.fp32_optimizer_states": (f"in half precision {_STATE}", "remove it"),
    "checkpoint.load_universal": ("checkpoints here load into any layout without being converted", "remove it"),
    "checkpoint.writer": (
        "the files would be named and written otherwise than a checkpoint here is verified and read",
        "remove it; checkpoint.mode: async writes beside training",
    ),
    "datastates_ckpt": (
        "the files would be written otherwise than a checkpoint here is verified and read",
        "remove it; checkpoint.mode: async writes beside training",
    ),
}
# Values that are as good as left out; false and null where nothing stands here.
_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "tensor_parallel.autotp_size": (0, 1),
    "expert_parallel.autoep_size": (1,),
    "optimizer.params.fp32_optimizer_states": (True,),
    "zero_optimization.load_from_fp32_weights": (True,),
    "sequence_parallel_size": (),
    "data_parallel_size": (),
    "datastates_ckpt": (False,),
    "checkpoint.writer": (None,),
    "zero_optimization.zenflow": (),
}
# Top-level keys whose mere presence DeepSpeed 0.19.8 refuses (runtime/config.py `_REMOVED_TOP_LEVEL_CONFIG_KEYS`), with
# the release that began to; a test holds them against the key tables, which the plan cannot see.
REMOVED: Final[Mapping[str, tuple[str, str]]] = {
    "amp": ("0.19.8", "use precision"),
    "elasticity": ("0.19.8", "use batch"),
    "sparse_gradients": ("0.19.8", "nothing is needed in its place"),
    "curriculum_learning": ("0.19.8", "use data_efficiency.data_sampling.curriculum_learning"),
    **dict.fromkeys(("eigenvalue", "progressive_layer_drop", "graph_harvesting"), ("0.19.8", "remove it")),
    **dict.fromkeys(
        ("compression_training", "quantize_training", "sparse_attention", "nebula"), ("0.19.7", "remove it")
    ),
}
# The two places where the word "auto" means something to DeepSpeed; elsewhere it silently stands for the default.
_AUTO_HAS_MEANING: Final = ("deepspeed.expert_parallel.", "deepspeed.data_types.keep_in_fp32_modules")


def not_in_a_run(path: str, value: Any) -> tuple[str, str] | None:
    """Why a run cannot have a DeepSpeed key with this value, and what to do; None where it can."""
    if path not in _NOT_IN_A_RUN or value in _HARMLESS.get(path, (False, None)):
        return None
    return _NOT_IN_A_RUN[path]


def deepspeed_section(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed drops unknown top-level keys silently, and a second place for one setting is a contradiction."""
    for key, value in config.deepspeed.items():
        if key in SHARED and isinstance(value, dict):
            yield from _shared(config, key, value)
        elif key in OWNED:
            yield _clash(key, value, OWNED[key])
        elif key in REMOVED:
            release, instead = REMOVED[key]
            yield Problem(
                kind="removed-deepspeed-key",
                key=f"deepspeed.{key}",
                value=value,
                reason=f"DeepSpeed removed it in {release} and refuses it",
                fix=instead,
            )
        elif (refusal := not_in_a_run(key, value)) is not None:
            yield _refusal(key, value, *refusal)
        elif key not in PASSED_THROUGH:
            guess = nearest(key, [*PASSED_THROUGH, *OWNED])
            meant = f"{OWNED[guess]} decides '{guess}'" if guess and guess in OWNED else f"did you mean '{guess}'?"
            yield Problem(
                kind="unknown-deepspeed-key",
                key=f"deepspeed.{key}",
                value=value,
                reason="DeepSpeed reads no such key and would ignore it",
                fix=meant if guess else "remove it",
            )
        elif isinstance(value, dict):
            for inner, item in _paths(value, key):
                if (refusal := not_in_a_run(inner, item)) is not None:
                    yield _refusal(inner, item, *refusal)


def _shared(config: RunConfig, section: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Further keys of a section that a typed one decides."""
    absent = _why_absent(config, section)
    for path, value in _paths(values, section):
        ours = TYPED.get(path)
        if ours is not None and _is_typed(config, ours):
            yield _clash(path, value, ours)
        elif absent is not None:
            yield _clash(path, value, absent)
        elif (refusal := not_in_a_run(path, value)) is not None:
            yield _refusal(path, value, *refusal)
        elif (
            path.startswith("zero_optimization.offload_")
            and path.count(".") == 2
            and _stays(config, path.split(".")[1])
        ):
            name = path.split(".")[1]
            yield Problem(
                kind="section-clash",
                key=f"deepspeed.{path}",
                value=value,
                reason=f"zero.{name} moves nothing",
                fix=f"set zero.{name}: {{device: cpu}}, or remove it here",
            )


def _why_absent(config: RunConfig, section: str) -> str | None:
    """Return our setting that makes a section which the JSON does not have at all; None where it has it."""
    if section == "optimizer" and isinstance(config.optimizer, (Target, Object)):
        return "optimizer.target"
    if section == "scheduler" and isinstance(config.scheduler, (Constant, Cosine)):
        return "scheduler.kind"
    return "parallel.pipe" if section == "pipeline" and config.parallel.pipe == 1 else None


def _is_typed(config: RunConfig, key: str) -> bool:
    """Check whether the typed section has the key; sgd has no betas, for example, and then nothing contradicts."""
    section, _, name = key.partition(".")
    fields = type(getattr(config, section)).model_fields
    return section not in ("optimizer", "scheduler") or name in fields


def _stays(config: RunConfig, name: str) -> bool:
    return bool(getattr(config.zero, name).device == "none")


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys that hold no section, and sections that are refused as a whole."""
    for name, value in values.items():
        path = f"{prefix}.{name}"
        if isinstance(value, dict) and value and path not in _NOT_IN_A_RUN:
            yield from _paths(value, path)
        else:
            yield path, value


def _clash(path: str, value: Any, ours: str) -> Problem:
    return Problem(
        kind="section-clash",
        key=f"deepspeed.{path}",
        value=value,
        reason=f"{ours} decides it",
        fix=f"set {ours} and remove it here",
    )


def _refusal(path: str, value: Any, reason: str, fix: str) -> Problem:
    return Problem(kind="not-in-a-run", key=f"deepspeed.{path}", value=value, reason=reason, fix=fix)


def deepspeed_values(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed drops "auto" silently and fails on most nulls; JSON knows neither NaN nor Python's objects."""
    for key, value in _leaves(config.deepspeed, "deepspeed"):
        if value == "auto" and not key.startswith(_AUTO_HAS_MEANING):
            yield Problem(
                kind="auto-in-deepspeed",
                key=key,
                value=value,
                reason="DeepSpeed drops it and takes its default",
                fix="write the value, or remove the key",
            )
        elif value is None:
            yield Problem(
                kind="null-in-deepspeed",
                key=key,
                value=value,
                reason="DeepSpeed wants a value or no key",
                fix="remove the key",
            )
        elif not isinstance(value, (str, int, float)) or (isinstance(value, float) and not isfinite(value)):
            yield Problem(
                kind="not-json",
                key=key,
                value=value,
                reason="JSON has no such value",
                fix="write text, a finite number, true, false, a list or a section",
            )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{key}.{index}")
    else:
        yield key, value
