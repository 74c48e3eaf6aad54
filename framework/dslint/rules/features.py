"""`compile`, which waits for `engine.compile()` in the code, and the names that `expert_parallel` (AutoEP) gives."""

from __future__ import annotations

from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import Found, in_the_way, rule
from framework.text.typos import nearest

_DEEP: Final = "compile.deepcompile"


def _passes(facts: Facts) -> list[str]:
    passes = facts.get("compile.passes")
    return [name for name in passes if isinstance(name, str)] if isinstance(passes, list) else []


@rule("note", on=_DEEP)
def compile_waits_for_code(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `compile`: nothing is compiled before the code calls it."""
    if facts.stage != 0:
        fix = "call engine.compile() after deepspeed.initialize"
        yield _DEEP, "it does nothing until the code calls engine.compile()", fix


@rule("warning", on=_DEEP)
def deepcompile_without_zero(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `get_deepcompile_backend`: "Falling back to the torch compiler" without ZeRO."""
    if facts.stage == 0 and not facts.get("compile.passes"):
        yield _DEEP, "at stage 0 it is plain torch.compile", f"set zero_optimization.stage: 2 or {_DEEP}: false"


@rule(since="0.19.6", on=_DEEP)
def compile_offloads(facts: Facts) -> Found:
    """deepspeed/compile/init_z3.py `init_z3`: one of DeepCompile's three offloads at a time, and not beside ZeRO's."""
    states, activation = facts.flag("compile.offload_opt_states"), facts.flag("compile.offload_activation")
    # offload_parameters is turned on by itself when ZeRO offloads both to the host
    implied = (facts.optimizer_device, facts.param_device) == ("cpu", "cpu")
    parameters = facts.flag("compile.offload_parameters") or implied
    key, reason = "compile.offload_opt_states", "DeepCompile offloads one thing at a time"
    if states and facts.offloads_optimizer:
        reason = "zero_optimization.offload_optimizer manages the same states"
    elif activation and (parameters or states):
        key = "compile.offload_activation"
    elif not (states and parameters):
        return
    if facts.stage == 3:
        yield key, reason, f"set {key}: false"


@rule(since="0.18.9")
def compile_pass_unknown(facts: Facts) -> Found:
    """deepspeed/compile/config.py `PassName`: these and no others."""
    known = ("z1", "z3", "autosp", *(("autotp",) if facts.since("0.19.6") else ()))
    if not set(_passes(facts)) <= set(known):
        yield "compile.passes", "there is no such pass", f"use {', '.join(known)}"


@rule(since="0.19.5", on=_DEEP)
def compile_passes(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `get_deepspeed_compile_backend`: "The AutoTP compile pass cannot yet be combined"."""
    passes = _passes(facts)
    if "autotp" in passes and {"autosp", "z1", "z3"} & set(passes):
        yield "compile.passes", "the autotp pass runs alone", 'set compile.passes: ["autotp"]'


@rule("warning", since="0.18.9", on=_DEEP)
def autosp_at_stage(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `get_autosp_backend`: "Currently AutoSP does not compose with ZeRO stage 2 and 3"."""
    if "autosp" in _passes(facts) and facts.stage in (2, 3):
        reason = f"at stage {facts.stage} DeepSpeed leaves AutoSP out"
        yield "compile.passes", reason, "set zero_optimization.stage: 1 or remove compile.passes"


@rule(since="0.19.8", on="compile.autoep_non_moe")
def compile_around_experts(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `compile`: what "compile.autoep_non_moe=True" does not go with."""
    against = {
        _DEEP: ("false", facts.flag(_DEEP)),
        "expert_parallel.comm_backend": ('"comm"', facts.text("expert_parallel.comm_backend") == "deepep"),
        "tensor_parallel.autotp_size": ("0", facts.tensor_parallel_size > 1),
        "zero_optimization.stage": ("2", facts.stage == 3),
        "zero_optimization.offload_optimizer.device": ('"none"', facts.offloads_optimizer),
        "zero_optimization.offload_param.device": ('"none"', facts.param_device in ("cpu", "nvme")),
    }
    return in_the_way(against, "compile.autoep_non_moe does not support it", " or compile.autoep_non_moe: false")


_EP: Final = "expert_parallel"
EXPERT_PRESETS: Final = ("deepseek_v2", "deepseek_v3", "minimax_m3", "mixtral", "qwen3_5_moe", "qwen3_moe")
EXPERT_ACTIVATIONS: Final = ("geglu_tanh", "swiglu", "swiglu_clamped", "swiglu_oai")
_CHOICES: Final = {
    "preset_model": EXPERT_PRESETS,
    "expert_activation": EXPERT_ACTIVATIONS,
    "top_k": ("auto",),
    "routed_scaling_factor": ("auto",),
}
_WEIGHTS: Final = ("expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr")
_PATTERNS: Final = ("router_pattern", "expert_pattern", "shared_experts_pattern", "shared_experts_gate_pattern")


@rule(since="0.19.2", on=f"{_EP}.enabled")
def expert_choice(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_config.py `validate_autoep_config`: "Unknown preset_model" and its like.

    A text for `top_k` other than "auto" is passed over in silence there, and the model's own number holds.
    """
    for name, choices in _CHOICES.items():
        key = f"{_EP}.{name}"
        text = facts.text(key)
        if text is not None and text not in choices:
            guess = nearest(text, choices) or choices[0]
            reason = f"it is none of {', '.join(choices)}" if len(choices) > 1 else 'a text can only be "auto"'
            yield key, reason, f'set {key}: "{guess}" or remove {key}'


@rule(since="0.19.2", on=f"{_EP}.enabled")
def expert_part_name(facts: Facts) -> Found:
    """deepspeed/module_inject/auto_ep_config.py `_validate_attr_name`: "must be a direct attribute name"."""
    for name in (*_WEIGHTS, *_PATTERNS):
        key = f"{_EP}.{name}"
        text = facts.text(key)
        if text is not None and (not text or "." in text):
            reason = "a name within the expert layer belongs here, no path" if text else "an empty name"
            yield key, reason, f"remove {key} for the name that the model's type gives"
