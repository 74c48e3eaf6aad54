"""`Facts`: a DeepSpeed JSON as its rules see it.

Values are plain, deprecated spellings settled, and nothing can raise. A rule asks for a value and
gives DeepSpeed's default. What it gets is what DeepSpeed would use: the old names (`bfloat16`,
`cpu_offload`, `max_live_parameters`, `zero_optimization: true`) stand under today's, and "auto" in
a section that drops it is the default. A value of the wrong type is the key table's problem: here
the typed readers return None, which equals nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import isfinite
from typing import Any, Final, Literal

from deepspeed_lint.errors import MISSING
from deepspeed_lint.keys import load_table
from deepspeed_lint.text.document import KeyPath
from deepspeed_lint.topology import Device, Topology

Dtype = Literal["fp32", "fp16", "bf16", "int8"]

# Read by hand, as they stand, until deepspeed/runtime/precision_config.py came with 0.17.1.
_PRECISIONS: Final = frozenset({"fp16", "bf16", "bfloat16"})
# In a section that a model reads, but an open dictionary.
_OPEN: Final = "tensor_parallel.partition_config."
# Deprecated key -> (today's key, the value that true stands for).
DEPRECATED: Final[Mapping[str, tuple[str, Any]]] = {
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        True,
    ),
}
# deepspeed/runtime/config.py `DEEPSPEED_OPTIMIZERS`, the names that are compared without regard to
# case.
DEEPSPEED_OPTIMIZERS: Final = frozenset(
    {"adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd"}
)
REMOVED_OPTIMIZERS: Final = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})  # gone in 0.19.7
_NAMES: Final[Mapping[Dtype, tuple[str, ...]]] = {
    "fp32": ("fp32", "float32", "torch.float32", "float"),
    "fp16": ("fp16", "float16", "torch.float16", "half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "int8": ("int8", "torch.int8"),
}
_DTYPES: Final = {name: dtype for dtype, names in _NAMES.items() for name in names}
# What pydantic takes for a truth value.
TRUE: Final = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE: Final = frozenset({"false", "f", "no", "n", "off", "0"})
_DEEPEST: Final = 12  # DeepSpeed's own sections end at six


@dataclass(frozen=True)
class Facts:
    """One DeepSpeed JSON, the release it is judged against, and where it is to run.

    Attributes:
        values: the JSON as it was read.
        release: DeepSpeed's version, for example ``0.19.8``.
        topology: what is known about the machines.
    """

    values: Mapping[str, Any]
    release: str = "0.19.8"
    topology: Topology = field(default_factory=Topology)

    def given(self, path: str) -> bool:
        """Check whether the file sets the key, under any of its names, to more than null."""
        return self._settled.get(path, (None, ""))[0] is not None

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value as DeepSpeed would see it, of any type; `default` where it is left
        out.
        """
        return self._settled.get(path, (default, ""))[0]

    def written(self, path: str) -> str:
        """Return the key as the file spells it, for messages and places."""
        return self._settled.get(path, (None, path))[1]

    def raw(self, path: str) -> Any:
        """Return the value in the file under the written key; `MISSING` when there is none."""
        return value_at(self.values, _parts(self.written(path)))

    def flag(self, path: str, default: bool = False) -> bool | None:
        """Return a truth value, None when it is something else."""
        value = self.get(path, default)
        # `_walk` keeps "auto" for a release that reads these sections by hand: any text is true.
        if value == "auto" and path.startswith(("fp16.", "bf16.")):
            return True
        if isinstance(value, bool):
            return value
        if self.is_lax(path):
            return _as_truth(value)
        return None

    def whole(self, path: str, default: int | None = None) -> int | None:
        """Return a whole number, None when it is something else."""
        value = self.get(path, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if self.is_lax(path):
            return _as_whole(value)
        return None

    def number(self, path: str, default: float | None = None) -> float | None:
        """Return a finite number, None when it is something else."""
        value = self.get(path, default)
        if isinstance(value, (bool, str)):
            value = _as_number(value) if self.is_lax(path) else None
        if isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
            return value
        return None

    def text(self, path: str, default: str | None = None) -> str | None:
        """Return a text, None when it is something else."""
        value = self.get(path, default)
        if isinstance(value, str):
            return value
        return None

    def section(self, path: str) -> Mapping[str, Any]:
        """Return the object under a key, empty when there is none."""
        value = self.get(path)
        if isinstance(value, Mapping):
            return value
        return {}

    def dtype(self, path: str) -> Dtype | None:
        """Return a dtype by any of the names that DeepSpeed knows (deepspeed/runtime/config.py
        `DtypeEnum`).
        """
        return _DTYPES.get(self.text(path) or "")

    def is_lax(self, path: str) -> bool:
        """Check whether a pydantic model reads the key: "auto" is dropped, and "2" is a number."""
        return read_by_model(path, self.release)

    def since(self, release: str) -> bool:
        """Check whether the release judged against is this one or a newer one."""
        return _version(self.release) >= _version(release)

    def is_release(self, since: str, before: str) -> bool:
        """Check whether the release judged against lies between two; empty ones are no limits."""
        if since and not self.since(since):
            return False
        return not (before and self.since(before))

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks, None if not known."""
        return self.topology.world_size

    @cached_property
    def device(self) -> Device:
        """Kind of device that it is to run on."""
        return self.topology.device

    @cached_property
    def is_elastic(self) -> bool:
        """Check whether elasticity sets the batch sizes and overrides the file's."""
        return bool(self.get("elasticity.enabled")) and not self.since("0.19.8")

    @cached_property
    def sums_gradients(self) -> bool:
        """Check whether gradients are summed over ranks instead of averaged."""
        return str(self.get("gradient_allreduce_op", "mean")).lower() == "sum"

    @cached_property
    def asks_for_cpu_optimizer(self) -> bool:
        """Check whether an optimizer from code has to be one of DeepSpeed's for the host (engine.py
        `_configure_optimizer`).
        """
        is_forced = self.get("zero_force_ds_cpu_optimizer", True)
        return bool(
            self.offloads_optimizer and not self.given("optimizer") and self.stage and is_forced
        )

    @cached_property
    def tensor_parallel_size(self) -> int:
        """AutoTP's ranks, 0 when the file gives no whole number."""
        return self.whole("tensor_parallel.autotp_size") or 0

    @cached_property
    def stage(self) -> int | None:
        """ZeRO stage, None when it is not one."""
        stage = self.whole("zero_optimization.stage", 0)
        return stage if stage in (0, 1, 2, 3) else None

    @cached_property
    def optimizer(self) -> str | None:
        """Name of the optimizer as DeepSpeed compares it; empty when the file has none."""
        name = self.text("optimizer.type", "")
        if self.since("0.19.7"):
            known = DEEPSPEED_OPTIMIZERS
        else:
            known = DEEPSPEED_OPTIMIZERS | REMOVED_OPTIMIZERS
        if name is not None and name.lower() in known:
            return name.lower()
        return name

    @cached_property
    def model_dtype(self) -> Dtype | None:
        """Dtype that DeepSpeed casts the weights to (deepspeed/runtime/engine.py
        `get_data_types`).
        """
        fp16 = self.flag("fp16.enabled", False)
        bf16 = self.flag("bf16.enabled", False)
        if fp16 is None or bf16 is None:
            return None
        if fp16:
            return "fp16"
        if bf16:
            return "bf16"
        return "fp32"

    @cached_property
    def accumulation_dtype(self) -> Dtype | None:
        """Dtype of the gradients between micro-batches; None when it is not a dtype."""
        if self.get("data_types.grad_accum_dtype") is not None:
            return self.dtype("data_types.grad_accum_dtype")
        if self.model_dtype == "bf16" and self.stage == 0 and not self.since("0.17.6"):
            return "fp32"
        return self.model_dtype

    @cached_property
    def optimizer_device(self) -> str | None:
        """Return where the optimizer states are: none (on the device), cpu or nvme."""
        return self._device("offload_optimizer")

    @cached_property
    def param_device(self) -> str | None:
        """Return where the parameters are, as `optimizer_device`."""
        return self._device("offload_param")

    def _device(self, name: str) -> str | None:
        device = self.text(f"zero_optimization.{name}.device", "none")
        return device if device in ("none", "cpu", "nvme") else None

    @cached_property
    def offloads_optimizer(self) -> bool:
        """Check whether the step runs on the host (deepspeed/runtime/engine.py
        `zero_use_cpu_optimizer`).
        """
        return self.optimizer_device in ("cpu", "nvme")

    @cached_property
    def uses_cpu_adam(self) -> bool | None:
        """Check whether DeepSpeedCPUAdam takes the step; None when the optimizer comes from
        code.
        """
        if not self.optimizer:
            return None
        is_adam = self.optimizer in ("adam", "adamw")
        is_deepspeeds = self.flag("optimizer.params.torch_adam", False) is False
        has_zenflow = self.given("zero_optimization.zenflow")
        return is_adam and is_deepspeeds and self.offloads_optimizer and not has_zenflow

    @cached_property
    def uses_bf16_optimizer(self) -> bool:
        """Check whether DeepSpeed wraps the optimizer as only stage 1 in bf16 with fp32
        accumulation has it (engine.py `_do_optimizer_sanity_check`).
        """
        dtypes = (self.model_dtype, self.accumulation_dtype)
        return self.stage == 1 and dtypes == ("bf16", "fp32") and self.optimizer_device != "cpu"

    @cached_property
    def data_parallel_size(self) -> int | None:
        """Ranks that DeepSpeed divides the batch by, without an mpu or a PipelineModule
        (`DeepSpeedConfig.__init__`).
        """
        world = self.topology.world_size
        sequence = self.whole("sequence_parallel_size")
        if world is None or (self.given("sequence_parallel_size") and not sequence):
            return None
        if sequence is None or not self.since("0.17.0"):
            return world
        if self.given("data_parallel_size"):
            return self.whole("data_parallel_size")
        return _quotient(world, sequence)

    @cached_property
    def _settled(self) -> dict[str, tuple[Any, str]]:
        """Today's dotted path -> (value, path as written)."""
        settled: dict[str, tuple[Any, str]] = {}
        for written, value in _walk(self.values, "", 0, self.release):
            is_old_section = written.split(".", 1)[0] == "bfloat16"
            if is_old_section and self.values.get("bf16") is not None:
                continue  # DeepSpeed does not look at the old name then
            settled.update(_todays(written, value))
        return settled


def _todays_name(written: str) -> str:
    """Return the name of a key that is written under an old section or an alias."""
    path = written
    if written.split(".", 1)[0] == "bfloat16":
        path = "bf16" + written.removeprefix("bfloat16")
    name = path
    if path.startswith("tensor_parallel.tensor_parallel."):
        # the inner section is an alias itself, and its key stays
        name = path.rsplit(".", 1)[0]
    return _other_names().get(name, name) + path[len(name) :]


def _replacement(path: str, written: str) -> dict[str, tuple[Any, str]]:
    """Return what a deprecated key that is true stands for, as `Facts._settled` has it."""
    today, meaning = DEPRECATED[path]
    settled = {today: (meaning, written)}
    if isinstance(meaning, dict):
        for key, item in meaning.items():
            settled[f"{today}.{key}"] = (item, written)
    return settled


def _todays(written: str, value: Any) -> dict[str, tuple[Any, str]]:
    """Return today's names of a key, with their values, as `Facts._settled` has them."""
    path = _todays_name(written)
    if path in DEPRECATED:
        return _replacement(path, written) if value is True else {}
    if path == "zero_optimization" and isinstance(value, bool):
        return {path: ({"stage": int(value)}, written), f"{path}.stage": (int(value), written)}
    return {path: (value, written)}


def _as_truth(value: Any) -> bool | None:
    """Return what pydantic makes of a value for a switch, None where it refuses it."""
    if isinstance(value, (int, float)):
        return bool(value) if value in (0, 1) else None
    if not isinstance(value, str):
        return None
    if value.lower() in TRUE:
        return True
    if value.lower() in FALSE:
        return False
    return None


def _as_whole(value: Any) -> int | None:
    """Return what pydantic makes of a value for a whole number, None where it refuses it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:  # fits 64 bits
        return int(value)
    return None


def _as_number(value: bool | str) -> float | None:
    """Return what pydantic makes of a text or a truth value for a number."""
    if isinstance(value, str) and len(value) >= 40:
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _quotient(number: int, divisor: int) -> int | None:
    if divisor > 0 and number % divisor == 0:
        return number // divisor
    return None


def _walk(
    section: Mapping[Any, Any], prefix: str, depth: int, release: str
) -> Iterator[tuple[str, Any]]:
    """Yield every key of every object, as dotted path, but not "auto" where DeepSpeed drops it."""
    for name, value in section.items():
        if not isinstance(name, str) or "." in name:
            continue  # no key of DeepSpeed
        path = f"{prefix}{name}"
        if depth and _is_auto(value) and read_by_model(path, release):
            continue
        yield path, value
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _walk(value, f"{path}.", depth + 1, release)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def value_at(values: Any, path: Iterable[str], default: Any = MISSING) -> Any:
    """Return the value at a path of names, into lists as well; `default` if there is none."""
    for name in path:
        values = _member(values, name)
        if values is MISSING:
            return default
    return values


def _member(values: Any, name: str) -> Any:
    if isinstance(values, Mapping):
        return values.get(name, MISSING)
    if isinstance(values, (list, tuple)) and _is_index(name, len(values)):
        return values[int(name)]
    return MISSING


def _is_index(name: str, length: int) -> bool:
    return name.isdecimal() and len(name) < 9 and int(name) < length


def dotted(path: KeyPath) -> str:
    """Return a path as messages write it."""
    return ".".join(map(str, path))


def leaves(values: Mapping[str, Any], section: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of everything but sections; an empty section counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*section, name))
        else:
            yield (*section, name), value


@lru_cache(maxsize=4096)
def read_by_model(path: str, release: str) -> bool:
    """Check whether a pydantic model reads the key in this release."""
    section = path.split(".", 1)[0]
    by_hand = section in _PRECISIONS and _version(release) < _version("0.17.1")
    return section in _model_sections() and not by_hand and not path.startswith(_OPEN)


@cache
def _model_sections() -> frozenset[str]:
    """Return the sections that a pydantic model reads (deepspeed/runtime/config_utils.py
    `DeepSpeedConfigModel`): "auto" is dropped and "2" or 1.0 pass as numbers. All others are read
    by hand, as they stand.
    """
    entries = load_table().entries.items()
    sections = {path.split(".")[0] for path, entry in entries if entry["reader"] == "pydantic"}
    return _PRECISIONS | sections


@cache
def _other_names() -> Mapping[str, str]:
    """Return Python's name of a field -> the name that JSON files give it; DeepSpeed takes both
    (`populate_by_name`).
    """
    names = {}
    for path, entry in load_table().entries.items():
        section = path.rpartition(".")[0]
        if section:
            for alias in entry.get("aliases", ()):
                names[f"{section}.{alias}"] = path
    return names


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


@lru_cache(maxsize=64)
def _version(release: str) -> tuple[int, ...]:
    """``0.19.8+cu130`` -> (0, 19, 8)."""
    return tuple(int(part) for part in release.split("+")[0].split(".") if part.isdecimal())
