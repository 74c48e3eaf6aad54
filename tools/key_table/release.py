"""Which keys the installed DeepSpeed reads: its models introspected, its parser watched, its source
read.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tools.key_table.models import Entry, entries_of, json_value
from tools.key_table.probes import CURRICULA, ELASTICITY, RANDOM_LTD, probes
from tools.key_table.recorder import NO_DEFAULT, Log, Recorder
from tools.key_table.sources import reads_of
from tools.key_table.types import optimizers, schedulers

Table = dict[str, Entry]

# pydantic model -> its section. A model that is in neither list stops the build: somebody must say
# what it is.
MODELS: Final[Mapping[str, str]] = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedMonitorConfig": "",
    "CommsLoggerConfig": "comms_logger",
    "CompileConfig": "compile",
    "HybridEngineConfig": "hybrid_engine",
    "WeightQuantConfig": "weight_quantization",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "TPTrainingConfig": "tensor_parallel",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
}
# Not part of a training config: models of the inference engines, and what their names say.
_NOT_TRAINING: Final = ("deepspeed.inference",)
_METRIC: Final = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*"
_LTD: Final = "data_efficiency.data_routing.random_ltd"
# Read after parsing: module -> expression in its source -> section.
LATE_READS: Final[tuple[tuple[str, str, Mapping[str, str]], ...]] = (
    ("runtime.pipe.engine", "", {"self._config.pipeline": "pipeline"}),
    (
        "runtime.data_pipeline.data_sampling.data_sampler",
        "",
        {
            "self.data_efficiency_config": "data_efficiency",
            "data_efficiency_config": "data_efficiency",
        },
    ),
    (
        "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr",
        "",
        {"batching_config": "data_efficiency.data_sampling.dynamic_batching"},
    ),
    ("runtime.data_pipeline.data_routing.basic_layer", "init_config", {"config": _LTD}),
    (
        "runtime.engine",
        "",
        {
            "random_ltd_config": _LTD,
            "self.pld_params()": "progressive_layer_drop",
            "self.curriculum_params_legacy()": "curriculum_learning",
        },
    ),
    (
        "module_inject.autotp_config",
        "from_dict",
        {
            "config_dict": "tensor_parallel.partition_config",
            "spec_dict": "tensor_parallel.partition_config.layer_specs.*",
        },
    ),
    ("__init__", "initialize", {"config": "", "config_class._param_dict": ""}),
    ("compile.init_sp", "", {"param_dict": "", "config": ""}),
)
# Keys that DeepSpeed writes into the same dict itself, and one that a getter looks for a level too
# high.
_NO_KEYS: Final = (
    f"{_LTD}.global_batch_size",
    f"{_LTD}.micro_batch_size",
    "compression_training.shared_parameters",
)


def read_release() -> tuple[str, Table]:
    """Version of the DeepSpeed on the import path, and every key that it reads, without
    sentences.
    """
    import deepspeed

    table: Table = {}
    for path, entry in _everything():
        _merge(table, path, entry)
    for path in _NO_KEYS:
        table.pop(path, None)
    _close(table)
    return str(deepspeed.__version__), table


def _everything() -> Iterator[tuple[str, Entry]]:
    removed = dict(_removed())
    yield from removed.items()
    yield from _from_models()
    yield from optimizers()
    yield from schedulers()
    yield from _from_parser(frozenset(removed))
    for module, inside, roots in LATE_READS:
        yield from reads_of(module, roots, inside=inside)


def _merge(table: Table, path: str, entry: Entry) -> None:
    """The first reader describes a key; a later one may add the default that it missed."""
    known = table.setdefault(path, entry)
    # A section that is looked up with the default None may be null; the check for removed keys
    # looks at all of them so.
    if (
        known.get("type") == "object"
        and entry.get("default", 0) is None
        and "_reject_removed" not in entry["source"]
    ):
        known["nullable"] = True
    if (
        "default" not in known
        and "default" in entry
        and known.get("type") != "object"
        and "status" not in known
    ):
        known["default"] = entry["default"]


def _removed() -> Iterator[tuple[str, Entry]]:
    """Keys whose presence alone is an error."""
    config = importlib.import_module("deepspeed.runtime.config")
    for table, section in (
        ("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ""),
        ("_REMOVED_ZERO_CONFIG_KEYS", "zero_optimization."),
    ):
        for key in getattr(config, table, {}):
            source = f"runtime/config.py:{table}"
            yield (
                f"{section}{key}",
                {"type": "any", "status": "refused", "reader": "recorded", "source": source},
            )


def _from_models() -> Iterator[tuple[str, Entry]]:
    # Imported for their models; a release without one of them has no such section.
    for module in (
        "runtime.config",
        "runtime.zero.config",
        "monitor.config",
        "compile.config",
        "utils.config",
    ):
        importlib.import_module(f"deepspeed.{module}")
    base = importlib.import_module("deepspeed.runtime.config_utils").DeepSpeedConfigModel
    roots = {
        model.__name__: model
        for model in _subclasses(base)
        if not model.__module__.startswith(_NOT_TRAINING)
    }
    weights = importlib.import_module("deepspeed.inference.config").WeightQuantConfig
    roots["WeightQuantConfig"] = weights
    nested = {field_model.__name__ for model in roots.values() for field_model in _models_in(model)}
    unexpected_files = set(roots) - set(MODELS) - nested
    if unexpected_files:
        raise SystemExit(
            f"no section is known for the models {sorted(unexpected_files)}: add them to MODELS"
        )
    for name, section in MODELS.items():
        if name in roots:
            yield from entries_of(roots[name], section)
            if section:
                yield (
                    section,
                    {
                        "type": "object",
                        "unknown": "error",
                        "reader": "pydantic",
                        "source": _home(roots[name]),
                    },
                )


def _home(model: type) -> str:
    return f"{model.__module__.partition('deepspeed.')[2].replace('.', '/')}.py:{model.__name__}"


def _subclasses(cls: type[Any]) -> Iterator[Any]:
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _models_in(model: Any) -> Iterator[type]:
    from tools.key_table.models import models_in_annotation

    for field in model.model_fields.values():
        yield from models_in_annotation(field.annotation)


def _from_parser(removed: frozenset[str]) -> Iterator[tuple[str, Entry]]:
    """Hand DeepSpeed's parsers dicts that remember, and tell what was asked of them."""
    config = importlib.import_module("deepspeed.runtime.config")
    log = Log()
    for probe in probes(removed):
        config.DeepSpeedConfig(Recorder(probe, log=log))
    for key, default in config.get_pipeline_config({}).items():
        yield (
            f"pipeline.{key}",
            {
                "default": default,
                "reader": "recorded",
                "source": "runtime/config.py:get_pipeline_config",
            },
        )
    curriculum = importlib.import_module(
        "deepspeed.runtime.data_pipeline.curriculum_scheduler"
    ).CurriculumScheduler
    for probe in CURRICULA:
        curriculum(Recorder(probe, path=_METRIC, log=log))
        if "curriculum_learning" not in removed:
            curriculum(Recorder(probe, path="curriculum_learning", log=log))
    scheduler = importlib.import_module(
        "deepspeed.runtime.data_pipeline.data_routing.scheduler"
    ).RandomLTDScheduler
    scheduler(Recorder(RANDOM_LTD, path=_LTD, log=log)).update_seq(1)
    if "elasticity" not in removed:
        elasticity = importlib.import_module("deepspeed.elasticity.config").ElasticityConfig
        elasticity(Recorder(ELASTICITY, path="elasticity", log=log))
        elasticity(Recorder({"enabled": False}, path="elasticity", log=log))
    for read in log.reads.values():
        entry: Entry = {"reader": "recorded", "source": read.source}
        if read.default is not NO_DEFAULT:
            entry["default"] = json_value(read.default)
        yield read.path, entry


def _close(table: Table) -> None:
    """What follows from the whole: sections are objects, a type follows from a default."""
    parents = {path.rpartition(".")[0] for path in table if "." in path}
    for path in sorted(parents | {"optimizer.params", "scheduler.params"}):
        for place in _upward(path):
            entry = table.setdefault(place, {"reader": "recorded", "source": ""})
            if "type" not in entry:
                entry |= {"type": "object", "unknown": "ignored"}
                entry.pop("default", None)
    for entry in table.values():
        if "type" not in entry:
            entry["type"] = _type_of(entry.get("default"))
        if "default" in entry and entry["default"] is None:
            entry["nullable"] = True
        if entry["type"] == "object" and entry.get("default") == {}:
            del entry["default"]


def _upward(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _type_of(default: Any) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(default), "any")
