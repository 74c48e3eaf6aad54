"""From DeepSpeed's sections to ours: precision, ZeRO, optimizer and schedule, and the state of an
import.

What DeepSpeed does where a key is left out is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from framework.config.deepspeed_words import OWNED, SCHEDULES, SHARED, TYPED
from framework.config.optimizer import SGD, Adagrad, Adam, AdamW, Lamb, Lion
from framework.config.precision import BF16, FP16
from framework.config.zero import NEEDED_STAGE, OFFLOADS, STAGE3_KEYS, Zero
from framework.dslint.facts import DEPRECATED, Facts, dotted, leaves
from framework.dslint.keys import Key, KeyTable
from framework.dslint.rules.silent import UNSWITCHED
from framework.errors import MISSING, Problem, show_value
from framework.plan.rules.passthrough import not_in_a_run

Values = dict[str, Any]
NO_KEY: Final = ("a run config has no key for it", "remove it, or train with DeepSpeed's own API")


@dataclass
class Reading:
    """A DeepSpeed JSON on its way to a run config.

    Attributes:
        facts: the values as DeepSpeed sees them.
        table: the keys of the release.
        comments: run-config key -> what to say beside it.
        left_out: what is said at the top about keys that have no effect.
        problems: what a run config cannot say.
        given: run-config key -> the DeepSpeed key that decided it; "auto" and keys left out decide
            nothing.
        further: DeepSpeed key -> value: keys beside those of a typed section.
    """

    facts: Facts
    table: KeyTable
    comments: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    further: dict[str, Any] = field(default_factory=dict)
    _placed: set[str] = field(default_factory=set)
    _idle: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._autos = {
            self.key_path(path)
            for path, value in dotted_leaves(self.facts.values)
            if value == "auto"
        }

    def is_auto(self, path: str) -> bool:
        """Check whether the value is left to another tool."""
        return path in self._autos

    def take(self, path: str, ours: Any, theirs: Any = MISSING) -> Any:
        """The value of a DeepSpeed key for the run-config key that stands for it.

        Args:
            path: DeepSpeed's key, which has found its place with this call.
            ours: our default, for "auto".
            theirs: what DeepSpeed does where the key is left out; not given: as the table says.
        """
        self.place(path)
        key = TYPED.get(path) or OWNED.get(path) or OWNED[path.partition(".")[0]]
        if self.is_auto(path):
            self.comments[key] = '"auto" in the file; this is our default'
            return ours
        if self.facts.given(path):
            self.given[key] = self.facts.written(path)
        known = self.key(path)
        if theirs is MISSING:
            if known is not None and known.default is not MISSING:
                theirs = known.default
            else:
                theirs = None
        found = self.facts.get(path, theirs)
        # sections that a model reads take "2" and 1.0 for whole numbers
        readers: dict[str, Callable[[str, Any], Any]] = {
            "boolean": self.facts.flag,
            "integer": self.facts.whole,
            "number": self.facts.number,
        }
        if known is not None and len(known.types) == 1:
            reader = readers.get(known.types[0])
        else:
            reader = None
        if found is None or reader is None:
            read = None
        else:
            read = reader(path, theirs)
        return found if read is None else read

    def place(self, path: str) -> None:
        """The key needs no more attention."""
        self._placed.add(path)

    def idle(self, section: str, why: str) -> None:
        """Mark the rest of this section as without effect."""
        self._idle[section] = why

    def refuse(self, path: str, reason: str, fix: str) -> None:
        """A run config cannot say this."""
        written = self.facts.written(path)
        value = self.facts.raw(path)
        self.problems.append(Problem("not-expressible", reason, fix, written, value))

    def drop(self, path: str, value: Any, why: str) -> None:
        """Say at the top that a key was left out, and why."""
        self.left_out.append(f"{path}: {show_value(value)} ({why})")

    def key(self, path: str) -> Key | None:
        """Look up a key in the table."""
        is_typed = path.startswith(("optimizer.", "scheduler."))
        return self.table.get(
            path, self.facts.text(f"{path.partition('.')[0]}.type") if is_typed else None
        )

    def key_path(self, written: str) -> str:
        """Today's name of a key, without the type that the table may hold it under."""
        found = self.key(written)
        if found is None or "[" in found.path or "*" in found.path:
            return written
        if written.startswith("bfloat16"):
            return f"bf16{written[8:]}"
        return found.path

    def settle(self, section: str) -> None:
        """Judge every key of a section that has found no place: without effect, or beyond what we
        can say.
        """
        for written, value in dotted_leaves(self.facts.values):
            path = self.key_path(written)
            if written.partition(".")[0] == section and path not in self._placed:
                self._settle(written, path, value)

    def _settle(self, written: str, path: str, value: Any) -> None:
        key = self.key(written)
        why = self.why_without_effect(written, value)
        idle = next(
            (text for part, text in self._idle.items() if f"{path}.".startswith(f"{part}.")), None
        )
        if path in DEPRECATED:
            return  # facts has put it under today's name
        if why is not None:
            self.drop(written, value, why)
        elif key is not None and (
            value is None or (key.default is not MISSING and value == key.default)
        ):
            return
        elif idle is not None and path not in UNSWITCHED:
            self.drop(written, value, idle)
        elif value != {}:
            self._pass(path, value)

    def _pass(self, path: str, value: Any) -> None:
        """A key beside those of a typed section goes to `deepspeed:`, where a run can have it."""
        refusal = not_in_a_run(path, value)
        if (
            path.partition(".")[0] in SHARED
            and path not in TYPED
            and refusal is None
            and value is not None
        ):
            self.further[path] = value
            self.given[f"deepspeed.{path}"] = self.facts.written(path)
        else:
            self.refuse(path, *(refusal or NO_KEY))

    def why_without_effect(self, written: str, value: Any) -> str | None:
        """Why DeepSpeed does nothing with a key; None where it does something."""
        key = self.key(written)
        release = self.table.release
        if key is None:
            return f"DeepSpeed {release} has no such key"
        if key.status == "refused":
            return f"DeepSpeed {release} refuses it"
        if key.status == "inert":
            return "DeepSpeed does nothing with it"
        if key.status == "deprecated" and not written.startswith("bfloat16"):
            return "DeepSpeed no longer looks at it"
        if value == "auto" and not key.knows_auto:
            return "other tools fill it in; DeepSpeed's default holds"
        return None


def dotted_leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return key and value of everything that is not a section."""
    return ((dotted(path), value) for path, value in leaves(values))


_COMPUTE: Final = {"bf16": "bf16", "fp16": "fp16"}
_COMMON: Final = (
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "round_robin_gradients",
)
_STAGE12: Final = ("allgather_bucket_size",)


def precision(reading: Reading) -> Values:
    """`fp16`, `bf16`, `torch_autocast`: at most one of them is on."""
    on = [name for name in ("fp16", "bf16", "torch_autocast") if _is_on(reading, name)]
    for name in ("fp16", "bf16", "torch_autocast"):
        if name not in on:
            reading.idle(name, f"{name} is not enabled")
    autos = [
        f"{name}.enabled"
        for name in ("fp16", "bf16", "torch_autocast")
        if reading.is_auto(f"{name}.enabled")
    ]
    if autos and not on:
        reading.comments["precision.dtype"] = (
            f'{" and ".join(autos)} "auto" in the file; this is our default'
        )
    else:  # one is enabled, so "auto" for another one means no
        reading.comments.pop("precision.dtype", None)
    if len(on) > 1:
        reading.refuse(
            f"{on[1]}.enabled",
            f"{on[0]} is enabled as well, and a run has one precision",
            "disable one",
        )
        return {}
    if on == ["fp16"]:
        ours = FP16()
        keys = [key for key in FP16.model_fields if key != "dtype"]
        return {
            "dtype": "fp16",
            **{key: reading.take(f"fp16.{key}", getattr(ours, key)) for key in keys},
        }
    if on == ["bf16"]:
        check = reading.take("bf16.check_grad_overflow", BF16().check_grad_overflow)
        return {"dtype": "bf16", "check_grad_overflow": check}
    if on:
        return _autocast(reading)
    return {"dtype": "fp32"}


def _is_on(reading: Reading, name: str) -> bool:
    path = f"{name}.enabled"
    return reading.take(path, False) is True


def _autocast(reading: Reading) -> Values:
    reading.place("torch_autocast.dtype")
    dtype = reading.facts.dtype("torch_autocast.dtype")
    if dtype not in _COMPUTE:
        reading.refuse(
            "torch_autocast.dtype",
            "a run config says what autocast computes in",
            "write bfloat16 or float16",
        )
        return {}
    reading.given["precision.compute_dtype"] = "torch_autocast.dtype"
    section: Values = {"dtype": "autocast", "compute_dtype": _COMPUTE[dtype]}
    modules = reading.take("torch_autocast.lower_precision_safe_modules", None)
    if modules is None:
        return section
    return {**section, "lower_precision_safe_modules": modules}


def zero(reading: Reading) -> Values:
    """`zero_optimization`: what works at its stage."""
    stage = reading.take("zero_optimization.stage", 0)
    reading.place("zero_optimization")
    section: Values = {"stage": stage}
    if stage == 0:
        reading.idle("zero_optimization", "it does nothing at stage 0")
        return section
    ours = Zero()
    for name in (*_COMMON, *(STAGE3_KEYS if stage == 3 else _STAGE12)):
        value = reading.take(f"zero_optimization.{name}", getattr(ours, name))
        if value is not None:
            section[name] = value
    for name in _STAGE12 if stage == 3 else STAGE3_KEYS:
        reading.idle(f"zero_optimization.{name}", f"it does nothing at stage {stage}")
    for name in OFFLOADS:
        section |= _offload(reading, name, stage)
    return section


def _offload(reading: Reading, name: str, stage: int) -> Values:
    path = f"zero_optimization.{name}"
    device = reading.take(f"{path}.device", "none")
    reading.place(path)
    if device in (None, "none"):
        reading.idle(path, "nothing is offloaded")
        return {}
    needed = NEEDED_STAGE[name].get(device, 3)
    if stage < needed:
        reading.idle(path, f"it does nothing at stage {stage}")
        reading.drop(
            reading.facts.written(f"{path}.device"),
            device,
            f"DeepSpeed offloads to {device} from stage {needed} on",
        )
        return {}
    kept: Values = {"device": device}
    for key, known in OFFLOADS[name][device].model_fields.items():
        if key != "device":
            kept[key] = reading.take(f"{path}.{key}", known.default)
    if device == "cpu":
        for key in (
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "pipeline_read",
            "pipeline_write",
        ):
            reading.idle(f"{path}.{key}", "it is for nvme")
    return {name: kept}


_OPTIMIZERS: Final[Mapping[str, type[Any]]] = {
    "adagrad": Adagrad,
    "lion": Lion,
    "lamb": Lamb,
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


def optimizer(reading: Reading) -> Values:
    """`optimizer`: DeepSpeed's "Adam" is AdamW unless `adam_w_mode` is false; torch's own classes
    become targets.
    """
    for key in (
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "optimizer.type",
        "optimizer.params",
    ):
        reading.place(key)
    name = reading.facts.optimizer
    if not name or reading.is_auto("optimizer.type"):
        reading.comments["optimizer"] = (
            "the file names none (DeepSpeed then takes one from code); this is our default"
        )
        return AdamW().model_dump()
    reading.given["optimizer.kind"] = "optimizer.type"
    params = reading.facts.section("optimizer.params")
    if name in ("adam", "adamw"):
        return _adam(reading, name, params)
    section = _OPTIMIZERS.get(name)
    if section is not None and (name != "SGD" or params.keys() <= section.model_fields.keys()):
        return {"kind": section.model_fields["kind"].default, **_fields(reading, section)}
    if reading.key("optimizer.params") is not None and name.lower() in _known(reading):
        reading.refuse(
            "optimizer.type",
            f"a run config has no {name}",
            "use adamw, or train with DeepSpeed's own API",
        )
        return {}
    return _target(reading, name, params)


def _known(reading: Reading) -> set[str]:
    return {variant.lower() for variant in reading.table.variants("optimizer.params")}


def _adam(reading: Reading, name: str, params: Mapping[str, Any]) -> Values:
    decoupled = reading.facts.flag("optimizer.params.adam_w_mode", True)
    reading.place("optimizer.params.adam_w_mode")
    is_torchs = reading.take("optimizer.params.torch_adam", True)
    section = AdamW if name == "adamw" or decoupled else Adam
    if is_torchs:
        reading.place("optimizer.params.fp32_optimizer_states")
        if not params.keys() <= section.model_fields.keys() | _NOT_TORCHS | {"fused"}:
            return _target(
                reading,
                section.__name__,
                {key: params[key] for key in params if key not in _NOT_TORCHS},
            )
    # torch.optim.AdamW decays by 0.01 where nothing is said, DeepSpeed's kernels by nothing.
    decay = section.model_fields["weight_decay"].default if is_torchs else 0.0
    if is_torchs and reading.take("optimizer.params.fused", False):
        kernel = "fused"
    else:
        kernel = "torch"
    implementation = kernel if is_torchs else "deepspeed"
    kind = section.model_fields["kind"].default
    return {
        "kind": kind,
        **_fields(reading, section, weight_decay=decay),
        "implementation": implementation,
    }


def _fields(reading: Reading, section: type[Any], **defaults: Any) -> Values:
    """Every parameter of one of our kinds, under the same name as DeepSpeed's."""
    found: Values = {}
    for name, ours in section.model_fields.items():
        path = f"optimizer.params.{name}"
        known = reading.key(path)
        # others have our default
        if name not in _OWN_FIELDS and (known is not None or name in _TORCH_DEFAULTS):
            theirs = known.default if known is not None else _TORCH_DEFAULTS[name]
            found[name] = reading.take(path, ours.default, defaults.get(name, theirs))
    return found


def _target(reading: Reading, name: str, params: Mapping[str, Any]) -> Values:
    """One of torch's own optimizers: DeepSpeed builds it from its name, we build it from its import
    path.
    """
    if not name.isidentifier() or name.islower():
        reading.refuse(
            "optimizer.type", "not the name of a class in torch.optim", "write for example AdamW"
        )
        return {}
    args = {}
    for key, value in params.items():
        if value == "auto":
            reading.comments["optimizer"] = f'left to {name}, because the file says "auto": {key}'
        else:
            args[key] = value
        reading.place(f"optimizer.params.{key}")
    reading.given["optimizer.target"] = reading.given["optimizer.args"] = reading.given.pop(
        "optimizer.kind"
    )
    return {"target": f"torch.optim:{name}", "args": args}


def scheduler(reading: Reading) -> Values:
    """`scheduler`: DeepSpeed's five; none is a constant rate."""
    name = reading.facts.text("scheduler.type", "")
    reading.place("scheduler.type")
    reading.place("scheduler.params")
    if not name or reading.is_auto("scheduler.type"):
        reading.comments["scheduler"] = (
            "the file names none; one from code, such as our cosine, does not stand in it"
        )
        return {"kind": "constant"}
    if name not in _SCHEDULES:
        reading.refuse(
            "scheduler.type",
            "a run config has DeepSpeed's five schedules, constant and cosine",
            f"use {', '.join(_SCHEDULES)}",
        )
        return {}
    reading.given["scheduler.kind"] = "scheduler.type"
    section, names = _SCHEDULES[name]
    found: Values = {"kind": section.model_fields["kind"].default}
    for ours, theirs in names.items():
        path = f"scheduler.params.{theirs}"
        value = reading.take(path, section.model_fields[ours].get_default())
        if isinstance(value, list):
            reading.refuse(path, "a run config has one rate for all parameters", "write one number")
        elif value is not None and not (ours == "warmup_steps" and value < 2):
            found[ours] = value
        elif value is not None:
            found[ours] = 2
            reading.comments[f"scheduler.{ours}"] = f"DeepSpeed turns {value} into 2"
    return _filled(reading, name, found)


def _filled(reading: Reading, name: str, found: Values) -> Values:
    """The length of the run stands in for "auto"; the rates of a cycle have no default."""
    if name == "OneCycle" and not {"min_lr", "max_lr"} <= found.keys():
        reading.refuse(
            "scheduler.params",
            'cycle_min_lr and cycle_max_lr have no default that "auto" could mean',
            "write both",
        )
    stand_ins = {"total_steps": "the length of the run", "max_lr": "the optimizer's rate"}
    reported = [
        f"{key} is {stand_in}"
        for key, stand_in in stand_ins.items()
        if f"scheduler.{key}" in reading.comments and key not in found
    ]
    if reported:
        reading.comments["scheduler.kind"] = (
            f'"auto" in the file, so left out: {" and ".join(reported)}'
        )
    return found
