"""The optimizer section, with what ZeRO, offload and precision allow of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import DEEPSPEED_OPTIMIZERS, REMOVED_OPTIMIZERS, Facts
from framework.dslint.rules.base import error, holds, note, warning
from framework.errors import Problem
from framework.text.typos import nearest

# Classes of torch.optim; Muon came with torch 2.9. DeepSpeed takes them by exact name.
TORCH_OPTIMIZERS: Final = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "LBFGS",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    }
)
# What ZeRO was tested with. mup's MuAdam and MuAdamW build torch's Adam, which is on the list; MuSGD builds SGD.
TESTED: Final = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})


_CLASS: Final = re.compile(r"^(?:DeepSpeed)?(?:CPU|Fused)?_?", re.IGNORECASE)


def optimizer_known(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_is_supported_optimizer`: DeepSpeed's own names, or a class of torch.optim."""
    name = facts.optimizer
    if (
        not name
        or name in TORCH_OPTIMIZERS | DEEPSPEED_OPTIMIZERS
        or (name in REMOVED_OPTIMIZERS and not facts.since("0.19.7"))
    ):
        return
    if name.lower() in REMOVED_OPTIMIZERS:
        yield error(
            facts,
            "optimizer-unknown",
            "optimizer.type",
            "DeepSpeed 0.19.7 removed the optimizers that compress to one bit",
            'set optimizer.type: "AdamW"',
        )
        return
    known = (
        TORCH_OPTIMIZERS
        | {"Lamb", "Lion"}
        | ({"MuAdam", "MuAdamW", "MuSGD"} if name.lower().startswith("mu") else set())
    )
    # the class that DeepSpeed itself picks: its FusedAdam and CPU Adam decay as AdamW does
    plain = _CLASS.sub("", name).removesuffix("_8bit") or name
    guess = "AdamW" if plain.lower() == "adam" else nearest(plain, known) or "AdamW"
    yield error(
        facts,
        "optimizer-unknown",
        "optimizer.type",
        "neither DeepSpeed nor torch.optim has such an optimizer",
        f'set optimizer.type: "{guess}"',
    )


def optimizer_steps_alone(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_take_model_step`: `step` is called without a closure, and gradients are dense."""
    needed = {
        "LBFGS": "it asks for a closure that computes the loss again, and DeepSpeed gives none",
        "SparseAdam": "it takes sparse gradients only, and those of most layers are dense",
    }
    if facts.optimizer in needed:
        yield error(
            facts, "optimizer-cannot-step", "optimizer.type", needed[facts.optimizer], 'set optimizer.type: "AdamW"'
        )


def optimizer_tested_with_zero(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/utils.py `is_zero_supported_optimizer`, asked by engine.py
    `_do_optimizer_sanity_check`.
    """
    name = facts.optimizer
    known = name in TORCH_OPTIMIZERS or name in ("lamb", "musgd")
    allowed = facts.get("zero_allow_untested_optimizer", False)  # any true value will do
    if known and name not in TESTED and facts.stage in (1, 2, 3) and not allowed:
        yield error(
            facts,
            "optimizer-untested",
            "optimizer.type",
            f"DeepSpeed takes it with ZeRO stage {facts.stage} only when told to",
            "set zero_allow_untested_optimizer: true",
        )


def optimizer_from_code(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_zero_optimizer`: "zero stage {} requires an optimizer".

    Without ZeRO the first backward asks for one; stage 3 makes do with none until the first step.
    """
    if facts.given("optimizer.type") or facts.stage is None or _asks_for_a_cpu_optimizer(facts):
        return
    when = {0: "stops at its first backward", 3: "stops at its first step"}.get(facts.stage, "does not start")
    yield note(
        facts,
        "optimizer-from-code",
        "optimizer",
        f"there is none: at stage {facts.stage} training {when} unless deepspeed.initialize is given one",
        "pass optimizer=, or add an optimizer section",
    )


def _asks_for_a_cpu_optimizer(facts: Facts) -> bool:
    forced = facts.get("zero_force_ds_cpu_optimizer", True)
    return bool(facts.offloads_optimizer and not facts.given("optimizer") and facts.stage in (1, 2, 3) and forced)


def offload_with_client_optimizer(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_optimizer`: raises for a client optimizer that is not DeepSpeed's for
    CPU.
    """
    if _asks_for_a_cpu_optimizer(facts):
        yield note(
            facts,
            "offload-needs-cpu-optimizer",
            "zero_optimization.offload_optimizer.device",
            "the optimizer comes from code and must be DeepSpeedCPUAdam or DeepSpeedCPULion",
            "set zero_force_ds_cpu_optimizer: false, which is slower, or add an optimizer section",
        )


def lamb_needs_dynamic_scale(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "optimizer requires dynamic loss scaling", asked without fp16
    too.
    """
    scale = facts.number("fp16.loss_scale", 0)
    if facts.optimizer == "lamb" and scale is not None and scale > 0:
        yield error(
            facts,
            "lamb-with-fixed-loss-scale",
            "fp16.loss_scale",
            "DeepSpeed's Lamb needs dynamic loss scaling",
            "set fp16.loss_scale: 0",
        )


@holds(since="0.18.9")
def muon_reduce_scatter(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage3.py `DeepSpeedZeroOptimizer_Stage3`: "Muon and reduce scatter cannot be used
    together".
    """
    if facts.optimizer == "muon" and facts.stage == 3 and facts.flag("zero_optimization.reduce_scatter", True):
        yield error(
            facts,
            "muon-with-reduce-scatter",
            "zero_optimization.reduce_scatter",
            "Muon at stage 3 cannot use reduce-scatter, which is on unless turned off",
            "set zero_optimization.reduce_scatter: false",
        )


@holds(since="0.18.9")
def muon_quantized_gradients(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage3.py `DeepSpeedZeroOptimizer_Stage3`: "Muon and all2all process group"."""
    if (
        facts.optimizer == "muon"
        and facts.stage == 3
        and facts.flag("zero_optimization.zero_quantized_gradients", False)
    ):
        yield error(
            facts,
            "muon-with-quantized-gradients",
            "zero_optimization.zero_quantized_gradients",
            "Muon at stage 3 cannot use quantized gradients",
            "set zero_optimization.zero_quantized_gradients: false",
        )


def adam_is_adamw(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `ADAM_W_MODE_DEFAULT`: "Adam" decays weights as AdamW does unless told otherwise."""
    decay = facts.number("optimizer.params.weight_decay", 0)
    if facts.optimizer == "adam" and decay and facts.get("optimizer.params.adam_w_mode") is None:
        yield warning(
            facts,
            "adam-is-adamw",
            "optimizer.type",
            f"with weight_decay {decay:g} DeepSpeed's Adam is AdamW: the decay is not part of the gradient",
            'set optimizer.type: "AdamW" or optimizer.params.adam_w_mode: false',
        )


def adamw_stays_adamw(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer`: `effective_adam_w_mode` is true for the name AdamW."""
    if facts.optimizer == "adamw" and facts.flag("optimizer.params.adam_w_mode", True) is False:
        yield warning(
            facts,
            "adamw-mode-ignored",
            "optimizer.params.adam_w_mode",
            "AdamW stays AdamW whatever it says",
            'set optimizer.type: "Adam" or optimizer.params.adam_w_mode: true',
        )


def kernel_without_amsgrad(facts: Facts) -> Iterator[Problem]:
    """deepspeed/ops/lamb/fused_lamb.py `FusedLamb`: "FusedLamb does not support the AMSGrad variant."; so did 1-bit
    optimizers.
    """
    if facts.optimizer in REMOVED_OPTIMIZERS | {"lamb"} and facts.flag("optimizer.params.amsgrad", False):
        yield error(
            facts,
            "amsgrad-not-supported",
            "optimizer.params.amsgrad",
            "DeepSpeed's kernel has no AMSGrad",
            "set optimizer.params.amsgrad: false",
        )


def amsgrad_of_adagrad(facts: Facts) -> Iterator[Problem]:
    """deepspeed/ops/adagrad/cpu_adagrad.py `DeepSpeedCPUAdagrad` keeps `amsgrad` among its defaults, and never looks at
    it.
    """
    on_host = facts.optimizer == "adagrad" and facts.offloads_optimizer
    if on_host and facts.flag("optimizer.params.amsgrad", False):
        yield warning(
            facts,
            "amsgrad-ignored",
            "optimizer.params.amsgrad",
            "DeepSpeed's Adagrad on the host does nothing with it",
            "set optimizer.params.amsgrad: false",
        )


@holds(before="0.19.7")
def one_bit_without_zero(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer` until 0.19.7: each of the three asserted that ZeRO is
    off.
    """
    if facts.optimizer in REMOVED_OPTIMIZERS and facts.stage in (1, 2, 3):
        yield error(
            facts,
            "one-bit-with-zero",
            "optimizer.type",
            f"it does not go with ZeRO stage {facts.stage}",
            'set optimizer.type: "AdamW" or zero_optimization.stage: 0',
        )


def amsgrad(facts: Facts) -> Iterator[Problem]:
    """deepspeed/ops/adam/fused_adam.py `FusedAdam`: "FusedAdam does not support the AMSGrad variant"."""
    if facts.optimizer not in ("adam", "adamw") or facts.flag("optimizer.params.amsgrad", False) is not True:
        return
    if facts.flag("optimizer.params.torch_adam", False) is False:
        yield error(
            facts,
            "amsgrad-needs-torch-adam",
            "optimizer.params.amsgrad",
            "DeepSpeed's own Adam has no AMSGrad",
            "set optimizer.params.torch_adam: true or optimizer.params.amsgrad: false",
        )
