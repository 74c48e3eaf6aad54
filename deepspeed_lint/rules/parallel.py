"""Tensor, pipeline and expert parallelism (AutoTP, AutoEP), as far as the JSON holds them, and
`compile`.

A `pipeline` section only hints that the model is a PipelineModule. If it is not, the section does
nothing, so what follows from the hint is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deepspeed_lint.facts import Facts
from deepspeed_lint.key_files import NAMES
from deepspeed_lint.rules.base import Found, divisor_below, in_the_way, rule
from deepspeed_lint.text.typos import nearest

_EP: Final = "expert_parallel"
_EXPERTS: Final = f"{_EP}.enabled"
_SIZE: Final = "tensor_parallel.autotp_size"
_DEEP: Final = "compile.deepcompile"
TP_PRESETS: Final = NAMES["tensor_presets"]
EXPERT_PRESETS: Final = NAMES["expert_presets"]
EXPERT_ACTIVATIONS: Final = NAMES["expert_activations"]
_CHOICES: Final = {
    "preset_model": EXPERT_PRESETS,
    "expert_activation": EXPERT_ACTIVATIONS,
    "top_k": ("auto",),
    "routed_scaling_factor": ("auto",),
}
_WEIGHTS: Final = NAMES["expert_weights"]
_PATTERNS: Final = NAMES["expert_patterns"]


@rule()
def tensor_parallel_does_not_fit(facts: Facts) -> Found:
    """deepspeed/utils/groups.py `_init_tp_mesh_device`: the world divides into groups of this size,
    or it is silent.
    """
    size = facts.tensor_parallel_size
    world = facts.world_size
    if size > 0 and world and world % size:
        reason = f"{world} ranks do not divide into groups of {size}"
        yield _SIZE, reason, f"set {_SIZE}: {divisor_below(world, size)}"


@rule(since="0.18.6")
def tensor_parallel_sizes(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_apply_autotp_partitioning`: "does not match
    tensor_parallel.autotp_size".
    """
    key = "tensor_parallel.tp.tp_size"
    size = facts.tensor_parallel_size
    other = facts.whole(key, 1)
    if size > 1 and other not in (None, 1, size):
        yield key, f"autotp_size says {size}", f"set {key}: {size} or {_SIZE}: {other}"


@rule("warning")
def tensor_parallel_preset(facts: Facts) -> Found:
    """deepspeed/module_inject/autotp_config.py `get_preset`: an unknown name is None, and
    DeepSpeed does not report it.
    """
    key = "tensor_parallel.preset_model"
    name = facts.text(key)
    if name and name.lower() not in TP_PRESETS:
        fix = f'set {key}: "{nearest(name, TP_PRESETS) or "llama"}" or remove {key}'
        yield key, "there is no such preset, and DeepSpeed goes on without one", fix


@rule(since="0.19.2", on=_EXPERTS)
def expert_parallel_does_not_fit(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_folding.py `build_folding_spec`: both widths divide the
    world.
    """
    key = f"{_EP}.autoep_size"
    world = facts.world_size or 0
    size = facts.whole(key, 1) or 0
    width = size * _expert_tensor_parallel_size(facts)
    if size > 0 and width > 0 and world % width:
        reason = f"{world} ranks do not divide into groups of {width}"
        yield key, reason, f"set {key}: {divisor_below(world, size + 1)}"


def _expert_tensor_parallel_size(facts: Facts) -> int:
    return facts.whole(f"{_EP}.expert_tensor_parallel_size", 1) or 0


@rule(since="0.19.3", on=_EXPERTS)
def expert_with_tensor_parallel(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_folding.py `validate_folding_global`: what AutoEP and AutoTP
    do not do.
    """
    if facts.tensor_parallel_size < 2:
        return
    together = f"AutoEP with AutoTP (autotp_size {facts.tensor_parallel_size})"
    refused = _refused_with_tensor_parallel(facts)
    yield from in_the_way(refused, f"{together} does not do it", f" or {_SIZE}: 1")
    for key in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        if facts.given(key):
            yield (
                key,
                f"{together} refuses offload, the mere section",
                f"remove {key} or set {_SIZE}: 1",
            )


def _refused_with_tensor_parallel(facts: Facts) -> dict[str, tuple[str, object]]:
    """Return the keys as `in_the_way` takes them."""
    is_one = facts.whole(f"{_EP}.autoep_size", 1) == 1
    return {
        _DEEP: ("false", facts.flag(_DEEP)),
        "sequence_parallel_size": ("1", _has_sequence_mesh(facts)),
        f"{_EP}.autoep_size": (str(facts.tensor_parallel_size), is_one),
        "use_data_before_expert_parallelism": (
            "false",
            facts.flag("use_data_before_expert_parallelism"),
        ),
        f"{_EP}.async_split_plan": ("false", facts.flag(f"{_EP}.async_split_plan") and not is_one),
        f"{_EP}.combine_impl": (
            '"auto"',
            facts.text(f"{_EP}.combine_impl") == "fused_weighted_sum",
        ),
    }


def _has_sequence_mesh(facts: Facts) -> bool:
    return (facts.whole("sequence_parallel_size") or 0) > 1 and facts.given("data_parallel_size")


@rule(since="0.19.3", on=_EXPERTS)
def presets_differ(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_folding.py `validate_folding_global`: "must match when both
    are set".
    """
    tensor = facts.text("tensor_parallel.preset_model")
    expert = facts.text(f"{_EP}.preset_model")
    if tensor and expert and tensor != expert:
        fix = f"remove tensor_parallel.preset_model or remove {_EP}.preset_model"
        yield f"{_EP}.preset_model", f"tensor_parallel.preset_model is {tensor}", fix


@rule(since="0.19.8", on=_EXPERTS)
def expert_options(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_config.py `validate_autoep_config`: options that need or
    exclude each other.
    """
    backend = facts.text(f"{_EP}.comm_backend", "comm")
    size = facts.whole(f"{_EP}.autoep_size", 1)
    yield from _fused_options(facts, is_deepep=backend != "comm" and size != 1)
    if backend == "deepep":
        yield from _deepep_options(facts, size or 0)
    groups = facts.whole(f"{_EP}.num_expert_groups") or 0
    limited = facts.whole(f"{_EP}.num_limited_groups") or 0
    if 0 < groups < limited:
        key = f"{_EP}.num_limited_groups"
        yield key, f"there are {groups} groups", f"set {key}: {groups}"


def _fused_options(facts: Facts, *, is_deepep: bool) -> Found:
    """Find what is fused and cannot be; `is_deepep`: DeepEP routes over more than one rank."""
    gate = f"{_EP}.gate_up_impl"
    weighting = f"{_EP}.row_weighting_impl"
    if facts.text(gate) == "fused" and facts.flag(f"{_EP}.use_grouped_mm", True) is False:
        fix = f'set {_EP}.use_grouped_mm: true or {gate}: "separate"'
        yield gate, "fused projections need use_grouped_mm", fix
    if facts.text(weighting) == "fused" and not is_deepep:
        reason = "it is fused in DeepEP's route only, over more than one rank"
        yield weighting, reason, f'set {weighting}: "auto"'


def _deepep_options(facts: Facts, size: int) -> Found:
    """Find options that do not go with DeepEP's communication."""
    tokens = f"{_EP}.comm_max_tokens_per_rank"
    combine = f"{_EP}.combine_impl"
    if facts.whole(tokens, 0) == 0:
        yield tokens, "DeepEP needs to know the most tokens of one rank", f"set {tokens}: 8192"
    if size > 1 and facts.text(combine) == "fused_weighted_sum":
        yield combine, "DeepEP already sums the rows", f'set {combine}: "auto"'


@rule(since="0.19.2", on=_EXPERTS)
def expert_choice(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_config.py `validate_autoep_config`: "Unknown preset_model"
    and its like.

    A text for `top_k` other than "auto" is passed over in silence there, and the model's own number
    holds.
    """
    for name, choices in _CHOICES.items():
        key = f"{_EP}.{name}"
        text = facts.text(key)
        if text is not None and text not in choices:
            guess = nearest(text, choices) or choices[0]
            yield key, _no_choice(choices), f'set {key}: "{guess}" or remove {key}'


def _no_choice(choices: Sequence[str]) -> str:
    if len(choices) > 1:
        return f"it is none of {', '.join(choices)}"
    return 'a text can only be "auto"'


@rule(since="0.19.2", on=_EXPERTS)
def expert_part_name(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_config.py `_validate_attr_name`: "must be a direct attribute
    name".
    """
    for name in _WEIGHTS + _PATTERNS:
        key = f"{_EP}.{name}"
        reason = _no_attribute(facts.text(key, "a"))
        if reason:
            yield key, reason, f"remove {key} for the name that the model's type gives"


def _no_attribute(name: str | None) -> str:
    """Return why a text is no name of a direct attribute; empty if it is one, or no text."""
    if name == "":
        return "an empty name"
    if name and "." in name:
        return "a name within the expert layer belongs here, no path"
    return ""


def _passes(facts: Facts) -> list[str]:
    passes = facts.get("compile.passes")
    if isinstance(passes, list):
        return [name for name in passes if isinstance(name, str)]
    return []


@rule(since="0.19.6", on=_DEEP)
def compile_offloads(facts: Facts) -> Found:
    """deepspeed/compile/init_z3.py `init_z3`: one of DeepCompile's three offloads at a time, and
    not beside ZeRO's.
    """
    if facts.stage != 3:
        return
    states = facts.flag("compile.offload_opt_states")
    parameters = _compile_offloads_parameters(facts)
    key = "compile.offload_opt_states"
    reason = "DeepCompile offloads one thing at a time"
    if states and facts.offloads_optimizer:
        reason = "zero_optimization.offload_optimizer manages the same states"
        yield key, reason, f"set {key}: false"
    elif facts.flag("compile.offload_activation") and (parameters or states):
        key = "compile.offload_activation"
        yield key, reason, f"set {key}: false"
    elif states and parameters:
        yield key, reason, f"set {key}: false"


def _compile_offloads_parameters(facts: Facts) -> bool:
    """Check whether parameters are offloaded: it is turned on by itself where ZeRO offloads both to
    the host.
    """
    is_implied = (facts.optimizer_device, facts.param_device) == ("cpu", "cpu")
    return is_implied or bool(facts.flag("compile.offload_parameters"))


@rule(since="0.18.9")
def compile_pass_unknown(facts: Facts) -> Found:
    """deepspeed/compile/config.py `PassName`: these and no others."""
    known = ["z1", "z3", "autosp"]
    if facts.since("0.19.6"):
        known.append("autotp")
    if not set(_passes(facts)) <= set(known):
        yield "compile.passes", "there is no such pass", f"use {', '.join(known)}"


@rule(since="0.19.5", on=_DEEP)
def compile_passes(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `get_deepspeed_compile_backend`: "The AutoTP compile pass cannot
    yet be combined".
    """
    passes = _passes(facts)
    if "autotp" in passes and {"autosp", "z1", "z3"} & set(passes):
        yield "compile.passes", "the autotp pass runs alone", 'set compile.passes: ["autotp"]'


@rule("warning", since="0.18.9", on=_DEEP)
def autosp_at_stage(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `get_autosp_backend`: "Currently AutoSP does not compose with
    ZeRO stage 2 and 3".
    """
    if "autosp" in _passes(facts) and facts.stage in (2, 3):
        reason = f"at stage {facts.stage} DeepSpeed leaves AutoSP out"
        yield "compile.passes", reason, "set zero_optimization.stage: 1 or remove compile.passes"
