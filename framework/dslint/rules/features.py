"""Rules about `compile` and mixture of experts.

The compile section, which waits for `engine.compile()` in the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import error, holds, note, warning
from framework.errors import Problem
from framework.text.typos import nearest


def compile_waits_for_code(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `compile`: nothing is compiled before the code calls it."""
    if facts.flag("compile.deepcompile", False) and facts.stage != 0:
        yield note(
            facts,
            "compile-waits-for-code",
            "compile.deepcompile",
            "it does nothing until the code calls engine.compile()",
            "call engine.compile() after deepspeed.initialize",
        )


def deepcompile_without_zero(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `get_deepcompile_backend`: "Falling back to the torch compiler" without ZeRO."""
    passes = facts.get("compile.passes")
    if facts.flag("compile.deepcompile", False) and facts.stage == 0 and not passes:
        yield warning(
            facts,
            "deepcompile-without-zero",
            "compile.deepcompile",
            "at stage 0 it is plain torch.compile",
            "set zero_optimization.stage: 2 or compile.deepcompile: false",
        )


@holds(since="0.19.6")
def compile_offloads(facts: Facts) -> Iterator[Problem]:
    """deepspeed/compile/init_z3.py `init_z3`: one of DeepCompile's three offloads at a time, and not beside ZeRO's."""
    if facts.stage != 3 or not facts.flag("compile.deepcompile", False):
        return
    states = facts.flag("compile.offload_opt_states", False)
    # offload_parameters is turned on by itself when ZeRO offloads both to the host
    implied = (facts.optimizer_device, facts.param_device) == ("cpu", "cpu")
    parameters = facts.flag("compile.offload_parameters", False) or implied
    activation = facts.flag("compile.offload_activation", False)
    if states and facts.offloads_optimizer:
        yield error(
            facts,
            "compile-offloads",
            "compile.offload_opt_states",
            "zero_optimization.offload_optimizer manages the same states",
            "set compile.offload_opt_states: false",
        )
    elif activation and (parameters or states):
        yield error(
            facts,
            "compile-offloads",
            "compile.offload_activation",
            "DeepCompile offloads one thing at a time",
            "set compile.offload_activation: false",
        )
    elif states and parameters:
        yield error(
            facts,
            "compile-offloads",
            "compile.offload_opt_states",
            "DeepCompile offloads one thing at a time",
            "set compile.offload_opt_states: false",
        )


@holds(since="0.18.9")
def compile_pass_names(facts: Facts) -> Iterator[Problem]:
    """deepspeed/compile/config.py `PassName`: these and no others."""
    known = ("z1", "z3", "autosp", *(("autotp",) if facts.since("0.19.6") else ()))
    passes = facts.get("compile.passes")
    if isinstance(passes, list) and any(isinstance(name, str) and name not in known for name in passes):
        yield error(facts, "compile-pass-unknown", "compile.passes", "there is no such pass", f"use {', '.join(known)}")


@holds(since="0.19.5")
def compile_passes(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `get_deepspeed_compile_backend`: "The AutoTP compile pass cannot yet be combined"."""
    passes = facts.get("compile.passes")
    names = {name for name in passes if isinstance(name, str)} if isinstance(passes, list) else set()
    if facts.flag("compile.deepcompile", False) and "autotp" in names and names & {"autosp", "z1", "z3"}:
        yield error(
            facts, "compile-passes", "compile.passes", "the autotp pass runs alone", 'set compile.passes: ["autotp"]'
        )


@holds(since="0.18.9")
def autosp_at_stage(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `get_autosp_backend`: "Currently AutoSP does not compose with ZeRO stage 2 and 3"."""
    passes = facts.get("compile.passes")
    if (
        isinstance(passes, list)
        and "autosp" in passes
        and facts.stage in (2, 3)
        and facts.flag("compile.deepcompile", False)
    ):
        yield warning(
            facts,
            "autosp-at-stage",
            "compile.passes",
            f"at stage {facts.stage} DeepSpeed leaves AutoSP out",
            "set zero_optimization.stage: 1 or remove compile.passes",
        )


@holds(since="0.19.8")
def compile_around_experts(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `compile`: what "compile.autoep_non_moe=True" does not go with."""
    if not facts.flag("compile.autoep_non_moe", False):
        return
    size = facts.whole("tensor_parallel.autotp_size", 0)
    against = {
        "compile.deepcompile": ("false", facts.flag("compile.deepcompile", False)),
        "expert_parallel.comm_backend": ('"comm"', facts.text("expert_parallel.comm_backend", "comm") == "deepep"),
        "tensor_parallel.autotp_size": ("0", size is not None and size > 1),
        "zero_optimization.stage": ("2", facts.stage == 3),
        "zero_optimization.offload_optimizer.device": ('"none"', facts.offloads_optimizer),
        "zero_optimization.offload_param.device": ('"none"', facts.param_device in ("cpu", "nvme")),
    }
    for key, (right, found) in against.items():
        if found:
            yield error(
                facts,
                "compile-around-experts",
                key,
                "compile.autoep_non_moe does not support it",
                f"set {key}: {right} or compile.autoep_non_moe: false",
            )


# Expert parallelism (AutoEP): the names that `expert_parallel` gives to presets, functions and parts of the model.


_EP: Final = "expert_parallel"
EXPERT_PRESETS: Final = ("deepseek_v2", "deepseek_v3", "minimax_m3", "mixtral", "qwen3_5_moe", "qwen3_moe")
EXPERT_ACTIVATIONS: Final = ("geglu_tanh", "swiglu", "swiglu_clamped", "swiglu_oai")
_AUTO: Final = ("auto",)
_PARTS: Final = (
    "expert_w1",
    "expert_w2",
    "expert_w3",
    "num_experts_attr",
    "top_k_attr",
    "router_pattern",
    "expert_pattern",
    "shared_experts_pattern",
    "shared_experts_gate_pattern",
)


@holds(since="0.19.2")
def expert_choices(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_config.py `validate_autoep_config`: "Unknown preset_model" and its like.

    A text for `top_k` other than "auto" is passed over in silence there, and the model's own number holds.
    """
    if not facts.flag(f"{_EP}.enabled", False):
        return
    known = {
        "preset_model": EXPERT_PRESETS,
        "expert_activation": EXPERT_ACTIVATIONS,
        "top_k": _AUTO,
        "routed_scaling_factor": _AUTO,
    }
    for name, choices in known.items():
        key = f"{_EP}.{name}"
        text = facts.text(key)
        if text is not None and text not in choices:
            guess = nearest(text, choices) or choices[0]
            reason = f"it is none of {', '.join(choices)}" if len(choices) > 1 else 'a text can only be "auto"'
            yield error(facts, "expert-choice", key, reason, f'set {key}: "{guess}" or remove {key}')


@holds(since="0.19.2")
def expert_part_names(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_config.py `_validate_attr_name`: "must be a direct attribute name"."""
    if not facts.flag(f"{_EP}.enabled", False):
        return
    for name in _PARTS:
        text = facts.text(f"{_EP}.{name}")
        if text is not None and (not text or "." in text):
            yield error(
                facts,
                "expert-part-name",
                f"{_EP}.{name}",
                "a name within the expert layer belongs here, no path" if text else "an empty name",
                f"remove {_EP}.{name} for the name that the model's type gives",
            )
