"""Expert parallelism (AutoEP): the names that `expert_parallel` gives to presets, functions and parts of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import error, holds
from framework.errors import Problem
from framework.text.typos import nearest

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
