"""Lightning's CLI config under the keys of a run config: trainer, seed, and the classes of
optimizer and schedule.

The order of the steps is the order of the sections in the file that `import` prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from deepspeed_lint.facts import value_at
from framework.config import base
from framework.config.optimizer import SGD, Adam, AdamW
from framework.config.zero import Zero
from framework.errors import Problem, show_value
from framework.imports.foreign_arguments import (
    DEFAULTS,
    ForeignArguments,
    Values,
    WatchedSection,
    disagreement,
    launch_options,
)

_STRATEGY: Final = re.compile(
    r"deepspeed(?:_stage_(?P<stage>[123]))?(?P<offload>_offload)?(?P<nvme>_nvme)?"
)
_STRATEGY_CLASS: Final = "lightning.DeepSpeedStrategy"
_TORCH_OPTIMIZERS: Final[Mapping[str, type[base.Section]]] = {
    "AdamW": AdamW,
    "Adam": Adam,
    "SGD": SGD,
}
_TORCH_RATE: Final = 1e-3  # torch's default
_DEFAULT_EPOCHS: Final = 1000
_READ_SECTIONS: Final = frozenset(
    {"trainer", "seed_everything", "optimizer", "lr_scheduler", "model", "data"}
)
# Arguments of DeepSpeedStrategy with the same name in `zero:`.
_ZERO_KEYS: Final = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
)
_STRATEGY_ARGUMENTS: Final = frozenset(_ZERO_KEYS) | {
    "stage",
    "offload_optimizer",
    "offload_optimizer_device",
    "offload_parameters",
    "offload_params_device",
    "nvme_path",
}


def take_lightning_config(arguments: ForeignArguments) -> None:
    """Put Lightning's CLI config under the keys of a run config."""
    seed = arguments.document.value.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool):
        arguments.put("run.seed", seed, "seed_everything")
    is_deepspeed, deepspeed_config = _take_strategy(arguments)
    _take_precision(arguments, is_deepspeed=is_deepspeed)
    _leave_out_devices(arguments)
    _take_length(arguments)
    _take_clipping(arguments)
    log_every = arguments.take("log_every_n_steps") or 50
    arguments.put("training.log_every", log_every, "log_every_n_steps")
    arguments.move("deterministic", "training.deterministic", bool)
    _take_evaluation(arguments)
    _take_switches(arguments)
    _take_classes(arguments)
    _leave_out_sections(arguments)
    arguments.add_deepspeed(deepspeed_config, "strategy", _find_refused)


def _take_clipping(arguments: ForeignArguments) -> None:
    clipping = arguments.take("gradient_clip_val")
    comment = "" if clipping else "there is no clipping there"
    arguments.put("training.clip_grad_norm", clipping or 0, "gradient_clip_val", comment)


def _take_switches(arguments: ForeignArguments) -> None:
    """Take whether the run saves, and shows a bar."""
    if arguments.take("enable_checkpointing") is False:
        arguments.put("checkpoint.at_end", False, "enable_checkpointing")
    else:
        arguments.put("checkpoint.every_epochs", 1, comment="as there by itself")
    if arguments.take("enable_progress_bar") is False:
        arguments.put("monitors.progress", "off", "enable_progress_bar")


def _leave_out_devices(arguments: ForeignArguments) -> None:
    """List devices and accelerator: the launcher decides them, not the run config."""
    devices = arguments.take("devices")
    num_nodes = arguments.take("num_nodes")
    if devices not in ("auto", 1, "1", None) or num_nodes > 1:
        options = launch_options(devices, num_nodes)
        reason = f"at the start: dsf train FILE {options}"
        arguments.omit("devices", str(devices), reason)
    accelerator = "DeepSpeed's accelerator of this machine, or DS_ACCELERATOR"
    arguments.leave_out("accelerator", accelerator)


def _take_length(arguments: ForeignArguments) -> None:
    """Take max_steps or max_epochs; fast_dev_run, a number of steps, wins over both."""
    fast_dev_run = arguments.take("fast_dev_run")
    if fast_dev_run:
        arguments.put("training.max_steps", int(fast_dev_run), "fast_dev_run")
        arguments.leave_out("max_steps", "fast_dev_run is the length, as there")
        arguments.leave_out("max_epochs", "fast_dev_run is the length, as there")
        return
    max_steps = arguments.take("max_steps")
    max_epochs = arguments.take("max_epochs")
    if max_steps > 0:
        arguments.put("training.max_steps", max_steps, "max_steps")
        reason = "max_steps is the length here; the first to come is there"
        arguments.leave_out("max_epochs", reason)
    elif max_epochs != -1:
        comment = "" if max_epochs else "the default there"
        arguments.put("training.max_epochs", max_epochs or _DEFAULT_EPOCHS, "max_epochs", comment)


def _take_evaluation(arguments: ForeignArguments) -> None:
    """Take val_check_interval: an int counts batches, a float is a share of an epoch."""
    interval = arguments.take("val_check_interval")
    if isinstance(interval, int):
        _take_batches_between(arguments, interval)
        return
    num_epochs = arguments.take("check_val_every_n_epoch") or 1
    arguments.put("evaluation.every_epochs", num_epochs, "check_val_every_n_epoch")
    if isinstance(interval, float) and interval != 1.0:
        share = f"{interval:g} of an epoch"
        arguments.omit("val_check_interval", share, "set evaluation.every_steps")


def _take_batches_between(arguments: ForeignArguments, num_batches: int) -> None:
    """Take a number of batches between two evaluations."""
    batches_per_step = arguments.take("accumulate_grad_batches") or 1
    comment = ""
    if batches_per_step > 1:
        comment = f"{num_batches} batches there, of which a step takes {batches_per_step}"
    num_steps = max(1, round(num_batches / batches_per_step))
    arguments.put("evaluation.every_steps", num_steps, "val_check_interval", comment)


def _half_of(precision: str) -> str:
    """Return the half precision that Lightning's name means; empty for none."""
    if precision.startswith("bf16"):
        return "bf16"
    if precision.startswith("16"):
        return "fp16"
    return ""


def _take_precision(arguments: ForeignArguments, *, is_deepspeed: bool) -> None:
    """Take fp16 or bf16; fp32 is our default, and any other precision is listed as left out."""
    precision = str(arguments.take("precision") or "32-true")
    dtype = _half_of(precision)
    if not dtype and not precision.startswith("32"):
        reason = "a run computes in fp32, fp16, bf16 or autocast"
        arguments.omit("precision", precision, reason)
    if not dtype:
        return
    arguments.put_half_precision(dtype, "precision", with_deepspeed=is_deepspeed)
    if not is_deepspeed:
        _comment_on_weights(arguments, precision, dtype)


def _comment_on_weights(arguments: ForeignArguments, precision: str, dtype: str) -> None:
    """Comment on a precision of Lightning's that has no weights in fp32."""
    if precision.endswith("true"):
        arguments.comments["precision.dtype"] = (
            f"{precision} has no fp32 weights there; dtype: {dtype} keeps them in the optimizer, "
            "unless precision.states is bf16"
        )


# The strategy.


def _take_strategy(arguments: ForeignArguments) -> tuple[bool, Any]:
    """Take the strategy, by name or by class.

    Returns:
        Whether it is a DeepSpeed strategy, and its DeepSpeed JSON, its path, or None.
    """
    name, options = _name_and_options(arguments.take("strategy"))
    named_deepspeed = _STRATEGY.fullmatch(name)
    if named_deepspeed is not None:
        options |= _named_options(named_deepspeed)
    elif name != "DeepSpeedStrategy":
        _take_other_strategy(arguments, name, options)
        return False, None
    config = options.pop("config", None)
    if config is None:
        _take_deepspeed_strategy(arguments, options)
        return True, None
    # pytorch_lightning/strategies/deepspeed.py: "All defaults will be ignored if a config is passed
    # in"
    for option, value in options.items():
        reason = "the strategy's config wins, as there"
        arguments.omit(f"strategy.{option}", show_value(value), reason)
    return True, config


def _name_and_options(strategy: Any) -> tuple[str, WatchedSection]:
    """Return name, or class, and options of a strategy."""
    if not isinstance(strategy, Mapping):
        return str(strategy), WatchedSection({})
    name = str(strategy.get("class_path", "")).rpartition(".")[2]
    return name, WatchedSection(strategy.get("init_args") or {})


def _named_options(name: re.Match[str]) -> Values:
    """Return the options after a name such as ``deepspeed_stage_3_offload``."""
    options: Values = {"stage": int(name["stage"] or 2)}
    if name["offload"]:
        device = "nvme" if name["nvme"] else "cpu"
        options["offload_optimizer"] = True
        options["offload_optimizer_device"] = device
        options["offload_parameters"] = name["stage"] == "3"
        options["offload_params_device"] = device
    return options


def _take_other_strategy(arguments: ForeignArguments, name: str, options: WatchedSection) -> None:
    if name.lower().startswith("fsdp"):
        _take_fsdp(arguments, options)
    elif not _is_plain_strategy(name):
        arguments.omit("strategy", name, "see zero.stage and parallel")
    for option, value in options.unread().items():
        reason = "see the keys of zero and parallel"
        arguments.omit(f"strategy.{option}", show_value(value), reason)


def _take_fsdp(arguments: ForeignArguments, options: WatchedSection) -> None:
    """Take FSDP's sharding as a ZeRO stage, and its offloading."""
    shards_gradients_only = "SHARD_GRAD_OP" in str(options.get("sharding_strategy"))
    arguments.put("zero.stage", 2 if shards_gradients_only else 3, "strategy")
    if options.get("cpu_offload"):
        arguments.put_offload("offload_param", "cpu", None, "strategy")


def _is_plain_strategy(name: str) -> bool:
    return name in ("auto", "ddp", "single_device") or name.startswith(("ddp_", "DDPStrategy"))


def _take_deepspeed_strategy(arguments: ForeignArguments, options: Values) -> None:
    """Take the arguments of DeepSpeedStrategy, with its defaults where ours differ."""
    defaults = DEFAULTS[_STRATEGY_CLASS]
    settings = {name: value for name, value in defaults.items() if value is not None}
    settings.update(options)
    stage = int(settings["stage"])
    arguments.put("zero.stage", stage, "strategy")
    if stage != 0:
        _take_zero_keys(arguments, settings, stage)
    for offload, name, device in (
        ("offload_optimizer", "offload_optimizer", "offload_optimizer_device"),
        ("offload_parameters", "offload_param", "offload_params_device"),
    ):
        if settings[offload]:
            arguments.put_offload(name, settings[device], settings["nvme_path"], "strategy")
    _leave_out_options(arguments, options, defaults)


def _leave_out_options(
    arguments: ForeignArguments, options: Values, defaults: Mapping[str, Any]
) -> None:
    """List options of DeepSpeedStrategy that have no key, and are not its defaults."""
    for name, value in options.items():
        if name not in _STRATEGY_ARGUMENTS and value != defaults.get(name):
            reason = "see the keys of zero, precision and deepspeed"
            arguments.omit(f"strategy.{name}", show_value(value), reason)


def _take_zero_keys(arguments: ForeignArguments, settings: Values, stage: int) -> None:
    our_defaults = Zero()
    for name in _ZERO_KEYS:
        if name == "allgather_bucket_size" and stage == 3:
            continue
        if settings[name] != getattr(our_defaults, name):
            arguments.put(f"zero.{name}", settings[name], "strategy")


_OTHER_HALF: Final = {"bf16": "fp16", "fp16": "bf16"}


def _find_refused(arguments: ForeignArguments, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Find what Lightning, or DeepSpeed below it, refuses of the JSON beside the arguments
    (pytorch_lightning/strategies/deepspeed.py `_format_batch_size_and_grad_accum_config`,
    lightning_fabric's `_format_precision_config`).
    """
    key = "gradient_accumulation_steps"
    if key in config:
        reason = "Lightning refuses the key there, as accumulate_grad_batches sets it"
        value = arguments.take("accumulate_grad_batches")
        fix = "remove it from the JSON"
        yield disagreement(key, config[key], "accumulate_grad_batches", value, reason, fix)
    precision = str(arguments.take("precision") or "32-true")
    dtype = _half_of(precision)
    if not dtype:
        return
    other = _OTHER_HALF[dtype]
    if dtype not in config and value_at(config, [other, "enabled"], None) is True:
        reason = f"Lightning adds {dtype} to it: DeepSpeed refuses both at once"
        fix = f"remove {other} from the JSON, or change precision"
        yield disagreement(f"{other}.enabled", True, "precision", precision, reason, fix)


# Sections beside the trainer.


def _take_classes(arguments: ForeignArguments) -> None:
    """Take the classes of optimizer and schedule, as a kind of ours or as a target."""
    for name, key in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
        section = arguments.document.value.get(name)
        if isinstance(section, str):
            section = {"class_path": section}
        if isinstance(section, Mapping):
            _take_class(arguments, name, key, section)


def _take_class(
    arguments: ForeignArguments, name: str, key: str, section: Mapping[str, Any]
) -> None:
    """Take the class of a section of Lightning's under one of ours."""
    module, _, class_name = str(section.get("class_path", "")).rpartition(".")
    class_args = dict(section.get("init_args", {}))
    optimizer = _torch_optimizer(module, class_name, class_args)
    if optimizer is not None:
        kind = optimizer.model_fields["kind"].default
        arguments.sections[key] = {"kind": kind, "lr": _TORCH_RATE, **class_args}
    elif not module:
        reason = f"name its class, with its module, as {key}.target"
        arguments.omit(name, show_value(section), reason)
    else:
        arguments.sections[key] = {"target": f"{module}:{class_name}", "args": class_args}
        if key == "scheduler":
            arguments.comments[key] = (
                "stepped after every step here; after every epoch there by itself"
            )


def _torch_optimizer(
    module: str, class_name: str, class_args: Mapping[str, Any]
) -> type[base.Section] | None:
    """Return our section for a class of torch.optim, if it has a field for every argument."""
    if module != "torch.optim":
        return None
    section = _TORCH_OPTIMIZERS.get(class_name)
    if section is None or not class_args.keys() <= section.model_fields.keys():
        return None
    return section


def _leave_out_sections(arguments: ForeignArguments) -> None:
    """List model, data and all other sections that are not read as left out."""
    values = arguments.document.value
    for name in ("model", "data"):
        if values.get(name) is not None:
            reason = "name its nn.Module, dataset and loss: docs/tutorials/from-lightning.md"
            arguments.omit(name, None, reason)
    for name, value in values.items():
        if name not in _READ_SECTIONS and value not in (None, "", [], {}):
            arguments.omit(name, show_value(value), "no key that is read here")
