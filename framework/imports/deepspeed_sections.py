"""From DeepSpeed's sections to ours: precision, ZeRO, optimizer and schedule.

What DeepSpeed does where a key is left out is written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Final

from framework.config.deepspeed_words import SCHEDULES
from framework.config.optimizer import SGD, Adagrad, Adam, AdamW, Lamb, Lion, Muon
from framework.config.precision import BF16, FP16
from framework.config.zero import NEEDED_STAGE, OFFLOADS, STAGE3_KEYS, ZenFlow, Zero
from framework.imports.deepspeed_reader import DeepSpeedReader, Values

_PRECISIONS: Final = ("fp16", "bf16", "torch_autocast")
_COMPUTE: Final = {"bf16": "bf16", "fp16": "fp16"}
_ZENFLOW: Final = "zero_optimization.zenflow"
_MUON_BUFFER: Final = "zero_optimization.save_muon_momentum_buffer_in_memory"
# Micro-batches of a step where the file leaves them to DeepSpeed: its own example's.
_ZENFLOW_MICRO_BATCHES: Final = 4
_ALL_STAGES: Final = (
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "round_robin_gradients",
)
_STAGES_1_AND_2: Final[tuple[str, ...]] = ("allgather_bucket_size",)
_NVME_KEYS: Final = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
)


def precision(reader: DeepSpeedReader) -> Values:
    """Return `precision:` from `fp16`, `bf16` and `torch_autocast`; at most one of them is on."""
    enabled = [name for name in _PRECISIONS if reader.take(f"{name}.enabled", False) is True]
    for name in _PRECISIONS:
        if name not in enabled:
            reader.mark_without_effect(name, f"{name} is not enabled")
    _comment_on_auto_precision(reader, enabled)
    if len(enabled) > 1:
        reader.refuse(
            f"{enabled[1]}.enabled",
            f"{enabled[0]} is enabled as well, and a run has one precision",
            "disable one",
        )
        return {}
    read_section = {"fp16": _fp16, "bf16": _bf16, "torch_autocast": _autocast}
    if enabled:
        return read_section[enabled[0]](reader)
    return {"dtype": "fp32"}


def _bf16(reader: DeepSpeedReader) -> Values:
    check = reader.take("bf16.check_grad_overflow", BF16().check_grad_overflow)
    return {"dtype": "bf16", "check_grad_overflow": check, **_states(reader, "bf16")}


def _comment_on_auto_precision(reader: DeepSpeedReader, enabled: list[str]) -> None:
    """Comment on the default precision if "auto" decides it."""
    switches = [f"{name}.enabled" for name in _PRECISIONS]
    autos = [switch for switch in switches if reader.is_auto(switch)]
    if autos and not enabled:
        reader.comments["precision.dtype"] = (
            f'{" and ".join(autos)} "auto" in the file; this is our default'
        )
    else:  # one is enabled, so "auto" for another one means no
        reader.comments.pop("precision.dtype", None)


def _fp16(reader: DeepSpeedReader) -> Values:
    our_defaults = FP16()
    section: Values = {"dtype": "fp16"}
    for key in FP16.model_fields:
        if key not in ("dtype", "states"):
            section[key] = reader.take(f"fp16.{key}", getattr(our_defaults, key))
    return section | _states(reader, "fp16")


def _states(reader: DeepSpeedReader, dtype: str) -> Values:
    """Return `precision.states`, empty for fp32."""
    moments = False
    if dtype == "bf16":
        moments = reader.take("bf16.bf16_optimizer_states", False) is True
    weights = reader.take(f"{dtype}.{dtype}_master_weights_and_grads", False) is True
    if not weights:
        return {}
    return {"states": dtype if moments else f"{dtype}_weights"}


def _autocast(reader: DeepSpeedReader) -> Values:
    """Return `precision:` of torch_autocast; refuses a type other than bf16 and fp16."""
    reader.mark_handled("torch_autocast.dtype")
    dtype = reader.facts.dtype("torch_autocast.dtype")
    if dtype not in _COMPUTE:
        reader.refuse(
            "torch_autocast.dtype",
            "a run config says what autocast computes in",
            "write bfloat16 or float16",
        )
        return {}
    reader.sources["precision.compute_dtype"] = "torch_autocast.dtype"
    section: Values = {"dtype": "autocast", "compute_dtype": _COMPUTE[dtype]}
    modules = reader.take("torch_autocast.lower_precision_safe_modules", None)
    if modules is not None:
        section["lower_precision_safe_modules"] = modules
    return section


def zero(reader: DeepSpeedReader) -> Values:
    """Return `zero:` from `zero_optimization`, with the keys that work at its stage."""
    stage = reader.take("zero_optimization.stage", 0)
    reader.mark_handled("zero_optimization")
    section: Values = {"stage": stage}
    if stage == 0:
        reader.mark_without_effect("zero_optimization", "it does nothing at stage 0")
        return section
    section |= _keys_of_stage(reader, stage)
    for name in OFFLOADS:
        section |= _offload(reader, name, stage)
    _release_weights_on_nvme(reader, section)
    _zenflow(reader, section)
    return section


def _release_weights_on_nvme(reader: DeepSpeedReader, section: Values) -> None:
    """Leave out DeepSpeed's default of `stage3_max_reuse_distance` for weights on NVMe: each that
    is kept takes a buffer, and DeepSpeed ends where none is left.
    """
    key = "stage3_max_reuse_distance"
    weights = section.get("offload_param", {})
    if weights.get("device") == "nvme" and not reader.facts.given(f"zero_optimization.{key}"):
        section.pop(key, None)


def _keys_of_stage(reader: DeepSpeedReader, stage: int) -> Values:
    """Return the keys of `zero:` that work at a stage above 0; marks the keys of other stages."""
    if stage == 3:
        stage_keys = STAGE3_KEYS
        other_keys = _STAGES_1_AND_2
    else:
        stage_keys = _STAGES_1_AND_2
        other_keys = STAGE3_KEYS
    our_defaults = Zero()
    values: Values = {}
    for name in _ALL_STAGES + stage_keys:
        value = reader.take(f"zero_optimization.{name}", getattr(our_defaults, name))
        if value is not None:
            values[name] = value
    for name in other_keys:
        path = f"zero_optimization.{name}"
        reader.mark_without_effect(path, f"it does nothing at stage {stage}")
    return values


def micro_batches_of_zenflow(reader: DeepSpeedReader) -> int | None:
    """Return ZenFlow's `update_interval`, which DeepSpeed takes for the micro-batches of a step, in
    place of `gradient_accumulation_steps`; None without ZenFlow.
    """
    if not reader.facts.given(_ZENFLOW):
        return None
    interval = reader.take(f"{_ZENFLOW}.update_interval", None, "auto")
    if isinstance(interval, int):
        return interval
    reader.comments["batch.accumulation_steps"] = (
        "DeepSpeed decides update_interval while it trains; a step has a number of its own here"
    )
    return _ZENFLOW_MICRO_BATCHES


def _zenflow(reader: DeepSpeedReader, section: Values) -> None:
    """Add ZenFlow to the offloaded optimizer of `zero:`; its intervals are micro-batches in the
    file, and steps here.
    """
    size = micro_batches_of_zenflow(reader)
    if size is None:
        return
    offload = section.get("offload_optimizer")
    if not offload or offload["device"] != "cpu":
        reader.refuse(_ZENFLOW, "ZenFlow needs an optimizer on the host", "set offload_optimizer")
        return
    values: Values = {}
    for name in ("topk_ratio", "offload"):
        values[name] = reader.take(f"{_ZENFLOW}.{name}", ZenFlow.model_fields[name].default)
    rounds = reader.take(f"{_ZENFLOW}.full_warm_up_rounds", 0)
    values["full_warm_up_steps"] = ceil(rounds / size)
    values |= _selection_of_zenflow(reader, size)
    offload["zenflow"] = values


def _selection_of_zenflow(reader: DeepSpeedReader, size: int) -> Values:
    """Return when ZenFlow chooses columns; `size`: micro-batches of a step."""
    strategy = reader.take(f"{_ZENFLOW}.select_strategy", "auto", "auto")
    interval = reader.take(f"{_ZENFLOW}.select_interval", "auto", "auto")
    for name in ("select_strategy", "select_interval"):
        reader.mark_handled(f"{_ZENFLOW}.{name}")
    reader.comments.pop("zero.offload_optimizer.zenflow.select_every", None)
    if strategy == "step":
        return {"select_every": max(1, round(interval / size))}
    if strategy == "epoch" and interval != 1:
        reason = "a run config chooses columns once per epoch, or after a number of steps"
        reader.refuse(f"{_ZENFLOW}.select_interval", reason, "set it to 1")
        return {}
    return {"select_every": "epoch"}


def _offload(reader: DeepSpeedReader, name: str, stage: int) -> Values:
    """Return `{name: its section}` of `zero:`; empty, with reasons in the reader, if nothing is
    offloaded or the stage is too low.
    """
    path = f"zero_optimization.{name}"
    device = reader.take(f"{path}.device", "none")
    reader.mark_handled(path)
    if device in (None, "none"):
        reader.mark_without_effect(path, "nothing is offloaded")
        return {}
    needed_stage = NEEDED_STAGE[name].get(device, 3)
    if stage < needed_stage:
        reader.mark_without_effect(path, f"it does nothing at stage {stage}")
        reader.leave_out(
            reader.facts.written(f"{path}.device"),
            device,
            f"DeepSpeed offloads to {device} from stage {needed_stage} on",
        )
        return {}
    return {name: _offload_section(reader, name, device)}


def _offload_section(reader: DeepSpeedReader, name: str, device: str) -> Values:
    """Return the section of what is offloaded to a device."""
    path = f"zero_optimization.{name}"
    if reader.facts.get(f"{path}.super_offload"):
        reader.mark_without_effect(f"{path}.cpuadam_cores_perc", "it belongs to SuperOffload")
    section: Values = {"device": device}
    for key, field_info in OFFLOADS[name][device].model_fields.items():
        if key not in ("device", "zenflow"):
            section[key] = reader.take(f"{path}.{key}", field_info.default)
    if device == "cpu":
        for key in _NVME_KEYS:
            reader.mark_without_effect(f"{path}.{key}", "it is for nvme")
    return section


_OPTIMIZERS: Final[Mapping[str, type[Any]]] = {
    "adagrad": Adagrad,
    "lion": Lion,
    "SGD": SGD,
}
_OWN_FIELDS: Final = frozenset({"kind", "implementation"})
# torch's names: what torch.optim takes and its defaults where DeepSpeed's table has none.
_TORCH_DEFAULTS: Final[Mapping[str, Any]] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "nesterov": False,
}
# What DeepSpeed takes out of the parameters before torch's own Adam sees them.
_NOT_TORCHS: Final = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})
# DeepSpeed's name -> our section, and our field -> DeepSpeed's parameter.
_SCHEDULES: Final = {name: (section, names) for section, (name, names) in SCHEDULES.items()}


def optimizer(reader: DeepSpeedReader) -> Values:
    """Return `optimizer:`.

    DeepSpeed's "Adam" is AdamW unless `adam_w_mode` is false; torch's own classes become targets.
    """
    reader.mark_handled(
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "optimizer.type",
        "optimizer.params",
    )
    name = reader.facts.optimizer
    if not name or reader.is_auto("optimizer.type"):
        reader.comments["optimizer"] = (
            "the file names none (DeepSpeed then takes one from code); this is our default"
        )
        return AdamW().model_dump()
    reader.sources["optimizer.kind"] = "optimizer.type"
    params = reader.facts.section("optimizer.params")
    if name in ("adam", "adamw"):
        return _adam(reader, name, params)
    if name == "muon":
        return _muon(reader)
    if name == "lamb":
        return _lamb(reader)
    return _other_optimizer(reader, name, params)


def _other_optimizer(reader: DeepSpeedReader, name: str, params: Mapping[str, Any]) -> Values:
    """Return `optimizer:` for one of our other kinds, or a class of torch's; refuses others of
    DeepSpeed's.
    """
    section = _OPTIMIZERS.get(name)
    if section is not None and (name != "SGD" or params.keys() <= section.model_fields.keys()):
        return {"kind": section.model_fields["kind"].default, **_fields(reader, section)}
    if reader.key("optimizer.params") is not None and _is_deepspeeds(reader, name):
        reader.refuse(
            "optimizer.type",
            f"a run config has no {name}",
            "use adamw, or train with DeepSpeed's own API",
        )
        return {}
    return _target(reader, name, params)


def _lamb(reader: DeepSpeedReader) -> Values:
    """Return `optimizer:` for LAMB; a run adds its epsilon to the root alone."""
    inside = "optimizer.params.eps_inside_sqrt"
    if reader.take(inside, False):
        reason = "a run's LAMB adds eps to the root of the second mean, and not to the mean"
        reader.refuse(inside, reason, "remove it")
    return {"kind": "lamb", **_fields(reader, Lamb)}


def _is_deepspeeds(reader: DeepSpeedReader, name: str) -> bool:
    """Check whether the key table has parameters of an optimizer of this name."""
    variants = {variant.lower() for variant in reader.table.variants("optimizer.params")}
    return name.lower() in variants


def _adam(reader: DeepSpeedReader, name: str, params: Mapping[str, Any]) -> Values:
    """Return `optimizer:` for Adam or AdamW: of torch, torch's fused one, or DeepSpeed's kernel;
    torch's class as a target if it has arguments that the section has no key for.
    """
    decouples_decay = reader.facts.flag("optimizer.params.adam_w_mode", True)
    reader.mark_handled("optimizer.params.adam_w_mode")
    section = AdamW if name == "adamw" or decouples_decay else Adam
    if not reader.take("optimizer.params.torch_adam", True):
        # without weight_decay DeepSpeed's kernels do not decay
        return _adam_section(reader, section, "deepspeed", weight_decay=0.0)
    return _torch_adam(reader, section, params)


def _torch_adam(
    reader: DeepSpeedReader, section: type[Adam] | type[AdamW], params: Mapping[str, Any]
) -> Values:
    """Return `optimizer:` for torch's Adam or AdamW."""
    reader.mark_handled("optimizer.params.fp32_optimizer_states")
    if not params.keys() <= section.model_fields.keys() | _NOT_TORCHS | {"fused"}:
        torch_params = {key: params[key] for key in params if key not in _NOT_TORCHS}
        return _target(reader, section.__name__, torch_params)
    implementation = "torch"
    if reader.take("optimizer.params.fused", False):
        implementation = "fused"
    # without weight_decay torch.optim.AdamW decays by 0.01
    weight_decay = section.model_fields["weight_decay"].default
    return _adam_section(reader, section, implementation, weight_decay=weight_decay)


# What DeepSpeed's groups have where the file has nothing (runtime/zero/muon/original_muon.py
# `MuonWithAuxAdam`).
_MUON_DEFAULTS: Final[Mapping[str, Any]] = {
    "momentum": 0.95,
    "weight_decay": 0.0,
    "betas": [0.9, 0.95],
    "eps": 1e-10,
}


def _rate_of_half(reader: DeepSpeedReader, name: str, default: float) -> Any:
    """Return the rate of one half of Muon: its own, or that of both."""
    shared = reader.take("optimizer.params.lr", default, default)
    if reader.facts.given(f"optimizer.params.{name}"):
        return reader.take(f"optimizer.params.{name}", default, default)
    return shared


def _muon(reader: DeepSpeedReader) -> Values:
    """Return `optimizer:` for Muon: `lr` is the rate of both halves unless each has its own."""
    values: Values = {"kind": "muon"}
    values["lr"] = _rate_of_half(reader, "muon_lr", 0.02)
    values["adam_lr"] = _rate_of_half(reader, "adam_lr", 3e-4)
    for name, default in _MUON_DEFAULTS.items():
        ours = Muon.model_fields[name].get_default()
        values[name] = reader.take(f"optimizer.params.{name}", ours, default)
    reader.mark_handled("optimizer.params.adam_w_mode", "optimizer.params.torch_adam")
    reader.mark_handled("optimizer.params.ns_method", _MUON_BUFFER)
    if reader.facts.given(_MUON_BUFFER):
        reason = "momentum lies where the optimizer's state does"
        reader.leave_out(_MUON_BUFFER, reader.facts.get(_MUON_BUFFER), reason)
    if reader.take("optimizer.params.per_head_muon", False):
        reason = "a run makes whole matrices orthogonal, not those of a head"
        reader.refuse("optimizer.params.per_head_muon", reason, "remove it")
    reader.comments["optimizer.kind"] = (
        "matrices of numbered blocks, where DeepSpeed takes all but those with embed or lm_head in "
        "their name (write optimizer.matrices), and clipped before they are made orthogonal"
    )
    return values


def _adam_section(
    reader: DeepSpeedReader,
    section: type[Adam] | type[AdamW],
    implementation: str,
    *,
    weight_decay: float,
) -> Values:
    """Return `optimizer:` for our section; `weight_decay` is the value where the file has none."""
    values: Values = {"kind": section.model_fields["kind"].default}
    values |= _fields(reader, section, weight_decay=weight_decay)
    values["implementation"] = implementation
    return values


def _fields(
    reader: DeepSpeedReader, section: type[Any], *, weight_decay: float | None = None
) -> Values:
    """Return the fields of one of our optimizers, each from DeepSpeed's parameter of its name.

    Args:
        reader: the DeepSpeed JSON.
        section: our optimizer.
        weight_decay: DeepSpeed's default; by default the table's.
    """
    defaults: Values = {}
    if weight_decay is not None:
        defaults["weight_decay"] = weight_decay
    values: Values = {}
    for name, field_info in section.model_fields.items():
        path = f"optimizer.params.{name}"
        key = reader.key(path)
        if name in _OWN_FIELDS or (key is None and name not in _TORCH_DEFAULTS):
            continue  # it has our default
        default = _TORCH_DEFAULTS[name] if key is None else key.default
        values[name] = reader.take(path, field_info.default, defaults.get(name, default))
    return values


def _target(reader: DeepSpeedReader, name: str, params: Mapping[str, Any]) -> Values:
    """Return one of torch's own optimizers as a target; refuses a name that is none of its classes.

    DeepSpeed builds it from its name, we build it from its import path. An "auto" argument is left
    out, with a comment.
    """
    if not name.isidentifier() or name.islower():
        reader.refuse(
            "optimizer.type", "not the name of a class in torch.optim", "write for example AdamW"
        )
        return {}
    class_args = _class_args(reader, name, params)
    source = reader.sources.pop("optimizer.kind")
    reader.sources["optimizer.target"] = source
    reader.sources["optimizer.args"] = source
    return {"target": f"torch.optim:{name}", "args": class_args}


def _class_args(reader: DeepSpeedReader, name: str, params: Mapping[str, Any]) -> Values:
    """Return the arguments of a class of torch's, without "auto" ones."""
    class_args = {}
    for key, value in params.items():
        if value == "auto":
            reader.comments["optimizer"] = f'left to {name}, because the file says "auto": {key}'
        else:
            class_args[key] = value
        reader.mark_handled(f"optimizer.params.{key}")
    return class_args


def scheduler(reader: DeepSpeedReader) -> Values:
    """Return `scheduler:`, one of DeepSpeed's five; without one the rate is constant."""
    name = reader.facts.text("scheduler.type", "")
    reader.mark_handled("scheduler.type", "scheduler.params")
    if not name or reader.is_auto("scheduler.type"):
        reader.comments["scheduler"] = (
            "the file names none; one from code, such as our cosine, does not stand in it"
        )
        return {"kind": "constant"}
    if name not in _SCHEDULES:
        reader.refuse(
            "scheduler.type",
            "a run config has DeepSpeed's five schedules, constant and cosine",
            f"use {', '.join(_SCHEDULES)}",
        )
        return {}
    reader.sources["scheduler.kind"] = "scheduler.type"
    values = _schedule_values(reader, name)
    _check_schedule_values(reader, name, values)
    return values


def _schedule_values(reader: DeepSpeedReader, name: str) -> Values:
    """Return `scheduler:` with the parameters of one of DeepSpeed's schedules; a rate for each
    group is refused, and a warm-up below 2 becomes 2 as DeepSpeed has it.
    """
    section, parameters = _SCHEDULES[name]
    values: Values = {"kind": section.model_fields["kind"].default}
    for our_name, parameter in parameters.items():
        path = f"scheduler.params.{parameter}"
        value = reader.take(path, section.model_fields[our_name].get_default())
        if isinstance(value, list):
            reader.refuse(path, "a run config has one rate for all parameters", "write one number")
        elif value is not None:
            values[our_name] = value
    warmup = values.get("warmup_steps", 2)
    if warmup < 2:
        values["warmup_steps"] = 2
        reader.comments["scheduler.warmup_steps"] = f"DeepSpeed turns {warmup} into 2"
    return values


def _stand_ins(reader: DeepSpeedReader, values: Values) -> list[str]:
    """List what "auto" values that are left out mean."""
    notes = []
    stand_ins = {"total_steps": "the length of the run", "max_lr": "the optimizer's rate"}
    for key, stand_in in stand_ins.items():
        if f"scheduler.{key}" in reader.comments and key not in values:
            notes.append(f"{key} is {stand_in}")
    return notes


def _check_schedule_values(reader: DeepSpeedReader, name: str, values: Values) -> None:
    """Refuse a cycle without rates, and comment on "auto" values that are left out."""
    if name == "OneCycle" and not {"min_lr", "max_lr"} <= values.keys():
        reader.refuse(
            "scheduler.params",
            'cycle_min_lr and cycle_max_lr have no default that "auto" could mean',
            "write both",
        )
    notes = _stand_ins(reader, values)
    if notes:
        reader.comments["scheduler.kind"] = (
            f'"auto" in the file, so left out: {" and ".join(notes)}'
        )
