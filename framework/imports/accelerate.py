"""Accelerate's config file under the keys of a run config.

The order of the steps is the order of the sections in the file that `import` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from deepspeed_lint.facts import value_at
from framework.errors import Problem, show_value
from framework.imports.foreign_arguments import (
    ForeignArguments,
    WatchedSection,
    launch_options,
    refused_beside_json,
)

_HALF_PRECISIONS: Final = ("bf16", "fp16")
# fsdp_sharding_strategy, by name or number, or fsdp_reshard_after_forward -> ZeRO stage; 3 for any
# other.
_STAGES: Final = {"SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0, "3": 0}
# Accelerate's key -> the key of the JSON (accelerate/utils/dataclasses.py
# `DeepSpeedPlugin._deepspeed_config_checks`).
_NOT_BESIDE_A_FILE: Final[Mapping[str, str]] = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


def take_accelerate_config(arguments: ForeignArguments) -> None:
    """Put Accelerate's config under the keys of a run config."""
    deepspeed = arguments.take_section("deepspeed_config")
    _leave_out_processes(arguments)
    dtype = str(arguments.take("mixed_precision", "no"))
    if dtype in _HALF_PRECISIONS:
        arguments.put_half_precision(dtype, "mixed_precision", with_deepspeed=bool(deepspeed))
    _take_deepspeed(arguments, deepspeed)
    _take_fsdp(arguments)
    _take_dynamo(arguments)
    if arguments.take("use_cpu"):
        arguments.omit("use_cpu", "true", "the environment variable DS_ACCELERATOR=cpu")


def _leave_out_processes(arguments: ForeignArguments) -> None:
    """List the number of processes: the launcher decides it, not the run config."""
    num_processes = arguments.take("num_processes", 1)
    num_machines = arguments.take("num_machines", 1)
    if num_processes > 1:
        options = launch_options(num_processes, num_machines)
        reason = f"at the start: dsf train FILE {options}"
        arguments.omit("num_processes", str(num_processes), reason)


def _take_deepspeed(arguments: ForeignArguments, section: WatchedSection) -> None:
    stage = _zero_stage(section)
    if stage is not None:
        arguments.put("zero.stage", stage, "deepspeed_config.zero_stage")
    _take_value(arguments, section, "gradient_accumulation_steps", "batch.accumulation_steps")
    _take_value(arguments, section, "gradient_clipping", "training.clip_grad_norm")
    _take_offloads(arguments, section)
    saves_16bit = section.get("zero3_save_16bit_model")
    if saves_16bit is not None and stage == 3:
        key = "zero.stage3_gather_16bit_weights_on_model_save"
        arguments.put(key, saves_16bit, "deepspeed_config.zero3_save_16bit_model")
    config_file = section.get("deepspeed_config_file")
    arguments.add_deepspeed(config_file, "deepspeed_config", _find_keys_beside_a_file)
    hostfile = section.get("deepspeed_hostfile")
    if hostfile:
        reason = f"at the start: dsf train FILE -H {hostfile}"
        arguments.omit("deepspeed_config.deepspeed_hostfile", None, reason)


def _take_value(arguments: ForeignArguments, section: WatchedSection, name: str, key: str) -> None:
    """Put a value of `deepspeed_config` under a key, unless it is left out or "auto"."""
    value = section.get(name)
    if value not in (None, "auto"):
        arguments.put(key, value, f"deepspeed_config.{name}")


def _take_offloads(arguments: ForeignArguments, section: WatchedSection) -> None:
    for name in ("offload_optimizer", "offload_param"):
        device = section.get(f"{name}_device", "none")
        nvme_path = section.get(f"{name}_nvme_path")
        if device not in (None, "none"):
            arguments.put_offload(name, device, nvme_path, f"deepspeed_config.{name}_device")


def _zero_stage(section: WatchedSection) -> Any:
    """Return the ZeRO stage of `deepspeed_config`; None if the section is empty or a JSON file
    decides it.
    """
    stage = section.get("zero_stage")
    if stage is None and section and section.get("deepspeed_config_file") is None:
        return 2  # accelerate/utils/dataclasses.py `DeepSpeedPlugin`
    return stage


def _take_fsdp(arguments: ForeignArguments) -> None:
    """Take FSDP's sharding as a ZeRO stage, its offloading and its activation checkpointing."""
    fsdp = arguments.take_section("fsdp_config")
    if not fsdp:
        return
    reshards = fsdp.get("fsdp_reshard_after_forward", "FULL_SHARD")
    strategy = str(fsdp.get("fsdp_sharding_strategy", reshards)).upper()
    arguments.put("zero.stage", _STAGES.get(strategy, 3), "fsdp_config")
    if fsdp.get("fsdp_offload_params"):
        arguments.put_offload("offload_param", "cpu", None, "fsdp_config")
        arguments.put_offload("offload_optimizer", "cpu", None, "fsdp_config")
    if fsdp.get("fsdp_activation_checkpointing"):
        arguments.put("training.recompute_every", 1, "fsdp_config")


def _take_dynamo(arguments: ForeignArguments) -> None:
    old_backend = arguments.take("dynamo_backend")
    dynamo = arguments.take_section("dynamo_config")
    backend = str(dynamo.get("dynamo_backend", old_backend) or "no").lower()
    if backend == "no":
        return
    options = {name: dynamo.get(f"dynamo_use_{name}") for name in ("fullgraph", "dynamic")}
    options["backend"] = backend
    options["mode"] = dynamo.get("dynamo_mode")
    if dynamo.get("dynamo_use_regional_compilation"):
        options["per"] = "block"
    arguments.put_compile(options, "dynamo_config")


def _find_keys_beside_a_file(
    arguments: ForeignArguments, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Find Accelerate's own keys for settings of a `deepspeed_config_file`: it refuses both."""
    section = arguments.values["deepspeed_config"]
    reason = "Accelerate refuses the key beside deepspeed_config_file, where it would be ignored"
    for name, json_key in _NOT_BESIDE_A_FILE.items():
        if section.get(name) is not None:
            json_value = value_at(config, json_key.split("."), None)
            message = f"{reason}; the DeepSpeed JSON has {json_key} = {show_value(json_value)}"
            yield refused_beside_json(f"deepspeed_config.{name}", section[name], message)
    precision = arguments.values.get("mixed_precision")
    if precision is not None:
        message = f"{reason}; the DeepSpeed JSON enables {_enabled_precision(config)}"
        yield refused_beside_json("mixed_precision", precision, message)


def _enabled_precision(config: Mapping[str, Any]) -> str:
    for name in _HALF_PRECISIONS:
        if value_at(config, [name, "enabled"], None) is True:
            return name
    return "neither"
