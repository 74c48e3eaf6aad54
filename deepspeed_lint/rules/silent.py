"""Settings that DeepSpeed accepts silently and treats otherwise, and those that only have an effect
from code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from deepspeed_lint.facts import Facts
from deepspeed_lint.key_files import NAMES
from deepspeed_lint.keys import load_table
from deepspeed_lint.readers import FILLED
from deepspeed_lint.rules.base import Found, in_the_way, rule

_MONITORS: Final = ("tensorboard", "csv_monitor", "wandb", "comet")
# Sections that do nothing unless `enabled` is true, and have it false by default.
_SWITCHED: Final = NAMES["switched"]
# Switches inside them that work without `enabled` (deepspeed/runtime/config.py `_do_error_check`
# asks them anyway).
UNSWITCHED: Final = (
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
)
_RECOMPUTE: Final = "activation_checkpointing"
_WRITER: Final = "checkpoint.writer"
_CURRICULUM: Final = "data_efficiency.data_sampling.curriculum_learning"
_RANDOM_LTD: Final = "data_efficiency.data_routing.random_ltd"
_RANDOM_LTD_KEYS: Final = NAMES["random_ltd"]


@rule("warning")
def section_not_enabled(facts: Facts) -> Found:
    """deepspeed/runtime/precision_config.py `enabled` and its like: false unless given, with any
    other key.
    """
    for name in _SWITCHED:
        keys = [key for key in facts.section(name) if f"{name}.{key}" not in UNSWITCHED]
        if keys and "enabled" not in keys:
            fix = f"set {name}.enabled: true or remove {facts.written(name)}"
            yield f"{name}.enabled", f"left out it is false, and {name} does nothing", fix


@rule("warning")
def two_bf16_sections(facts: Facts) -> Found:
    """deepspeed/runtime/precision_config.py `get_bfloat16_config`: the old name is read where the
    new one is not.
    """
    if facts.values.get("bf16") is not None and facts.values.get("bfloat16") is not None:
        yield "bfloat16", "bf16 is given as well, and only that is read", "remove bfloat16"


@rule("note", since="0.18.3")
def monitor_without_loss(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `step` writes rate and loss scale; `Train/Samples/train_loss`
    went with 0.18.3.
    """
    on = [name for name in _MONITORS if facts.flag(f"{name}.enabled")]
    if on and not facts.given("pipeline"):
        yield (
            f"{on[0]}.enabled",
            "the engine writes the learning rate and no loss",
            "write the loss in code",
        )


@rule("note")
def activation_checkpointing_waits_for_code(facts: Facts) -> Found:
    """deepspeed/runtime/activation_checkpointing/checkpointing.py `configure`: only the code calls
    it.
    """
    if any(facts.section(_RECOMPUTE).values()):
        yield (
            _RECOMPUTE,
            "nothing is checkpointed until the code uses deepspeed.checkpointing",
            "call deepspeed.checkpointing.configure and use its checkpoint function",
        )


@rule("warning")
def data_efficiency_half_enabled(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `curriculum_learning_enabled` asks the inner switch alone, not
    those around it.
    """
    for section in (_CURRICULUM, _RANDOM_LTD):
        key = f"{section}.enabled"
        off = _off_around(facts, section)
        if facts.get(key) and off:
            settings = " and ".join(f"{name}: true" for name in off)
            yield key, f"it works although {off[0]} is not true", f"set {settings} or {key}: false"


def _off_around(facts: Facts, section: str) -> list[str]:
    """Return the switches around a section of data_efficiency that are not on."""
    switches = ("data_efficiency.enabled", f"{section.rpartition('.')[0]}.enabled")
    return [switch for switch in switches if not facts.get(switch)]


@rule()
def random_ltd_needs(facts: Facts) -> Found:
    """deepspeed/runtime/data_pipeline/data_routing/scheduler.py `RandomLTDScheduler`: a KeyError
    for what is missing.

    So do engine.py `random_ltd_initialize` and basic_layer.py `init_config`, and the schedule's
    `get_value` at the first step.
    """
    if not facts.get(f"{_RANDOM_LTD}.enabled"):
        return
    reason = "random layer token dropping is enabled and needs it"
    fix = f"add it, or set {_RANDOM_LTD}.enabled: false"
    for inner, names in _RANDOM_LTD_KEYS.items():
        for key in _missing_in(facts, f"{_RANDOM_LTD}{inner}", names):
            yield key, reason, fix


def _missing_in(facts: Facts, section: str, names: Iterable[str]) -> list[str]:
    """Return the keys that a section lacks; none if the section itself is left out."""
    if not facts.given(section):
        return []
    return [f"{section}.{name}" for name in names if name not in facts.section(section)]


@rule("note")
def vocabulary_alignment(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `_do_warning_check`: tensor cores like multiples of 8; nothing
    else reads the key.
    """
    key = "vocabulary_size"
    size = facts.whole(key) or 0
    if size > 0 and size % 8:
        fix = f"pad the vocabulary and set {key}: {-(-size // 8) * 8}"
        yield key, "tensor cores work on multiples of 8", fix


@rule()
def needs_cuda(facts: Facts) -> Found:
    """deepspeed/ops/op_builder/cpu/no_impl.py `NotImplementedBuilder`: "This op had not been
    implemented on CPU".
    """
    if facts.device != "cpu":
        return
    pins_memory = str(facts.get(f"{_WRITER}.type", "FAST")).upper() == "FAST"
    keys: dict[str, tuple[str, object]] = {
        "optimizer.type": ('"AdamW"', _is_cuda_optimizer(facts)),
        "optimizer.params.capturable": ("false", facts.flag("optimizer.params.capturable")),
        f"{_WRITER}.type": ('"PYTHON"', facts.given(_WRITER) and pins_memory),
    }
    if facts.stage == 3:
        keys |= _cuda_keys_of_stage_3(facts)
    keys["aio.use_gds"] = ("false", facts.flag("aio.use_gds"))
    yield from in_the_way(keys, "DeepSpeed has no CPU form of it")


def _is_cuda_optimizer(facts: Facts) -> bool:
    if facts.optimizer == "lion":
        return not facts.offloads_optimizer
    return facts.optimizer == "lamb"


def _cuda_keys_of_stage_3(facts: Facts) -> dict[str, tuple[str, object]]:
    """Return the keys as `in_the_way` takes them."""
    zero = "zero_optimization"
    switches = (
        f"{zero}.zero_quantized_weights",
        f"{zero}.zero_quantized_nontrainable_weights",
        f"{zero}.offload_optimizer.super_offload",
    )
    keys: dict[str, tuple[str, object]] = {key: ("false", facts.flag(key)) for key in switches}
    has_zenflow = facts.given(f"{zero}.zenflow") and facts.offloads_optimizer
    keys[f"{zero}.stage"] = ("2", has_zenflow)
    return keys


# Read by hand as a truth value: any text is true. `activation_checkpointing` is not read at all
# without code.
_AUTO_IS_TRUE: Final = tuple(NAMES["auto_is_true"])
_DEEPEST: Final = 12


@rule("warning")
def auto_value(facts: Facts) -> Found:
    """deepspeed/runtime/config_utils.py `DeepSpeedConfigModel`: drops "auto"; keys read by hand
    keep the text.
    """
    for path in _autos(facts.values, "", 0):
        if _knows_auto(path):
            continue
        if path in FILLED:
            fix = "write the value; Hugging Face's Trainer and Accelerate fill it in"
        else:
            fix = "write the value; Hugging Face does not fill it in either"
        if _drops_auto(facts, path):
            yield path, "DeepSpeed drops it and takes its default", fix
        elif path.startswith(_AUTO_IS_TRUE):
            yield path, "DeepSpeed takes the text for true", fix
        else:
            yield path, "DeepSpeed takes the text itself, and breaks on it", fix, "error"


def _knows_auto(path: str) -> bool:
    key = load_table().exact(path)
    return key is not None and key.knows_auto


def _drops_auto(facts: Facts, path: str) -> bool:
    return facts.is_lax(path) and "." in path and path != "timers.throughput"


def _autos(value: object, path: str, depth: int) -> Iterator[str]:
    """Yield the paths of all texts "auto" that stand as values, in lists as well."""
    if isinstance(value, str) and value == "auto":
        yield path.removeprefix(".")
    elif depth <= _DEEPEST:
        for name, item in _members(value):
            yield from _autos(item, f"{path}.{name}", depth + 1)


def _members(value: object) -> Iterable[tuple[object, object]]:
    """Return names and values of an object, or numbers and items of a list."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return ()
