"""`import`: a DeepSpeed JSON becomes a run config that renders back to the same meaning.

What the file leaves out is written down as DeepSpeed decides it, where our default is another.
"auto", which only other tools fill in, becomes our default, with a comment. Keys without effect are
named at the top. What a run config cannot express, and a key that this release does not read and
that was on, is a problem: there is no run config then, or, for the command `import`, one without
it that names it (`partly`). The ways in which the rendering differs from the file on purpose:

- `steps_per_print`, `tensorboard`, `csv_monitor`: the Trainer reports; the engine stays silent
(`training.log_every`, `monitors`);
- `timers.throughput` is off unless the file gives it;
- `zero_allow_untested_optimizer`, `zero_force_ds_cpu_optimizer`: set as the optimizer needs them;
- torch's own optimizers are built by us, so the JSON has no `optimizer` for them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from deepspeed_lint.facts import Facts, value_at
from deepspeed_lint.key_files import was_off
from deepspeed_lint.keys import load_table
from deepspeed_lint.lint import lint, placed
from deepspeed_lint.templates import without_placeholders
from deepspeed_lint.text.document import MAX_BYTES, Document
from deepspeed_lint.text.hjson import parse_hjson, read_hjson
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH
from framework.config.load import Source, config_from_values
from framework.config.run_config import RunConfig, kind_of_default
from framework.errors import ConfigError, Problem, printable, show_value
from framework.imports.deepspeed_reader import NO_KEY, DeepSpeedReader, Omission, Values, is_default
from framework.imports.deepspeed_sections import (
    micro_batches_of_zenflow,
    optimizer,
    precision,
    scheduler,
    zero,
)
from framework.plan.plan import default_cluster, make_plan
from framework.plan.render import merged
from framework.plan.rules.devices import PASSES_NOT_IN_A_RUN
from framework.plan.rules.passthrough import not_in_a_run

_BATCH: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# What is left out with a comment, so that it does not stop an import: these, and keys of other
# releases that are off.
_LEFT_OUT: Final = frozenset({"auto-value", "inert-key"})
_GONE: Final = frozenset({"removed-key", "key-of-another-release"})
# Keys that DeepSpeed's release does not have: `import` names them and goes on without them.
_OUTSIDE_OF_RELEASE: Final = _GONE | {"unknown-key"}
# Rendered in any case, so not worth a line.
_SILENT: Final[Values] = {
    "wall_clock_breakdown": False,
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
    "steps_per_print": 1_000_000_000,
}
_PLACEHOLDER_SAMPLES: Final = 1437  # training samples of the default data
_REPORTS: Final = ("tensorboard", "csv_monitor")
_REPORT_KEYS: Final = ("output_path", "job_name")
# Section of DeepSpeed -> its key and ours.
_SERVICES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "wandb": (("project", "project"), ("group", "group"), ("team", "entity")),
    "comet": (("project", "project"), ("workspace", "workspace")),
}
_SERVICE_KEYS_LEFT_OUT: Final = (
    "api_key",
    "online",
    "mode",
    "experiment_key",
    "experiment_name",
    "samples_log_interval",
)


_DIVIDING: Final = ("expert_parallel", "tensor_parallel")
_OF_COMPILING: Final = ("deepcompile", "passes")  # they are training.compile
_IN_TENSOR_GROUPS: Final = (
    "it does something in stages that tensor groups divide: write it under deepspeed.pipeline "
    "beside parallel.pipe and parallel.tensor"
)
# Key of DeepSpeed's section `pipeline` -> why a run config does without it.
_OF_PIPELINES: Final = {
    "stages": "DeepSpeed does nothing with it: PipelineModule decides, and parallel.pipe here",
    "partition": "DeepSpeed does nothing with it: PipelineModule decides, parallel.partition here",
    "seed_layers": "DeepSpeed does nothing with it: PipelineModule(seed_layers=...) decides",
    "use_reentrant": "a run recomputes layers without re-entrance, with the same numbers",
    "pipe_partitioned": _IN_TENSOR_GROUPS,
    "grad_partitioned": _IN_TENSOR_GROUPS,
}


@dataclass(frozen=True)
class Imported:
    """A run config, with what became of the keys of the file.

    Attributes:
        values: sections of the run config.
        comments: dotted key -> comment beside it.
        left_out: keys of the file that have no effect, each with the reason.
        sources: run-config key -> the key of the file that decided it; the other values are
            defaults.
        not_taken: keys that a run config cannot express, or that the release does not read.
    """

    values: Values
    comments: Mapping[str, str]
    left_out: tuple[Omission, ...]
    sources: Mapping[str, str]
    not_taken: tuple[Problem, ...] = ()

    def decided_sections(self) -> set[str]:
        """Return the names of the sections in which the file decides something."""
        return {key.partition(".")[0] for key in self.sources}

    def decided_values(self) -> Values:
        """Return these sections."""
        decided = self.decided_sections()
        return {name: values for name, values in self.values.items() if name in decided}


def import_deepspeed(
    values: Mapping[str, Any], *, name: str = "", release: str | None = None
) -> dict[str, Any]:
    """Return the run config, as nested dicts, that renders back to what a DeepSpeed JSON means.

    Raises:
        ConfigError: DeepSpeed would refuse the file, or a run config cannot express it.
    """
    return import_document(Document(name, dict(values)), release=release).values


def import_document(
    document: Document, *, release: str | None = None, partly: bool = False
) -> Imported:
    """Import a DeepSpeed JSON as `import_deepspeed` does, and keep the comments.

    Args:
        document: the JSON.
        release: the release of DeepSpeed that reads the keys; by default the newest.
        partly: whether a key that a run config cannot express is left out, and named in
            `not_taken`, instead of refused.

    Raises:
        ConfigError: as there; the problems name the lines of the document.
    """
    table = load_table(release)
    not_of_release = _keys_not_of_release(document, release, partly=partly)
    reader = DeepSpeedReader(Facts(document.value, table.release), table)
    sections = _sections(reader)
    not_expressible = [placed(document, problem, at_top=False) for problem in reader.problems]
    if not partly:
        _raise_any(not_expressible)
    sections["data"] = _placeholder_data(sections["batch"], reader)
    values = {key: section for key, section in sections.items() if section}
    _refuse_what_cannot_be_planned(values, document, reader)
    left_out = _not_named_by(not_of_release, reader.left_out)
    not_taken = (*not_of_release, *not_expressible)
    return Imported(values, reader.comments, left_out, reader.sources, not_taken)


def _keys_not_of_release(document: Document, release: str | None, *, partly: bool) -> list[Problem]:
    """Return the problems of keys that the release does not read, which `partly` leaves out.

    Raises:
        ConfigError: DeepSpeed would refuse the file, or drop a key that was on.
    """
    stopping = [problem for problem in lint(document, release=release) if _stops(problem)]
    not_of_release = [problem for problem in stopping if problem.kind in _OUTSIDE_OF_RELEASE]
    all_may_be_left_out = len(not_of_release) == len(stopping)
    if not partly or not all_may_be_left_out:
        _raise_any(without_placeholders(stopping, file=document.name))
    return not_of_release


def _not_named_by(
    problems: Sequence[Problem], omissions: Sequence[Omission]
) -> tuple[Omission, ...]:
    """Return the omissions of keys that have no problem."""
    keys = {problem.key for problem in problems}
    return tuple(omission for omission in omissions if omission.key not in keys)


def _refuse_what_cannot_be_planned(
    values: Values, document: Document, reader: DeepSpeedReader
) -> None:
    """Refuse a run config that cannot be planned.

    Raises:
        ConfigError: its problems, at the keys of the DeepSpeed JSON that they come from.
    """
    try:
        config = config_from_values(values)
        make_plan(config, default_cluster(config))
    except ConfigError as error:
        problems = [
            _at_deepspeeds_key(document, problem, reader.sources) for problem in error.problems
        ]
        problems.sort(key=lambda problem: (problem.line, problem.column))
        raise ConfigError(problems) from None


def _raise_any(problems: Sequence[Problem]) -> None:
    """Raise ConfigError for the problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def _stops(problem: Problem) -> bool:
    """Check whether a problem prevents the import: DeepSpeed refuses the file, or drops a key that
    was on.
    """
    if problem.kind in _GONE:
        return not was_off(problem.key, problem.value)
    return problem.severity == "error" and problem.kind not in _LEFT_OUT


def _sections(reader: DeepSpeedReader) -> dict[str, Values]:
    """Return the sections of the run config. Keys that no section takes are passed on, left out or
    refused in the reader.
    """
    sections = {
        "batch": _batch(reader),
        "precision": precision(reader),
        "zero": zero(reader),
        "optimizer": optimizer(reader),
        "scheduler": scheduler(reader),
        "training": _training(reader),
        "monitors": _monitors(reader),
        "deepspeed": _passed_through(reader),
    }
    for section in OWNED:
        reader.settle(section)
    _settle_top_level(reader)
    # Keys that the typed sections do not take, each where the file has it.
    for path, value in reader.further.items():
        sections["deepspeed"] = merged(sections["deepspeed"], _nested(path, value))
    return sections


def _nested(path: str, value: Any) -> Any:
    """Return a value in the sections of its dotted path."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def _at_deepspeeds_key(document: Document, problem: Problem, sources: Mapping[str, str]) -> Problem:
    """Move a problem of the run config to the key of the file that its value came from."""
    deepspeed_key = sources.get(problem.key)
    if deepspeed_key is None and problem.key.startswith("deepspeed."):
        deepspeed_key = problem.key.removeprefix("deepspeed.")
    if deepspeed_key is None:  # several keys together, or none of the file's
        return replace(problem, file=document.name)
    if deepspeed_key == problem.key:
        reason = problem.reason
    else:
        reason = f"{problem.reason} ({problem.key} of a run config)"
    return placed(document, replace(problem, key=deepspeed_key, reason=reason), at_top=False)


def _batch(reader: DeepSpeedReader) -> Values:
    """Return `batch:` from the three sizes; an "auto" one is listed as left out, without a comment
    beside a default.
    """
    section: Values = {}
    for name in _BATCH:
        value = reader.take(name, None)
        key = OWNED[name]
        if reader.comments.pop(key, None):
            reason = f"it follows from the number of devices; {key} decides it"
            reader.leave_out(name, "auto", reason)
        if value is not None:
            section[key.removeprefix("batch.")] = value
    size = micro_batches_of_zenflow(reader)
    if size is not None:
        _set_batch_of_zenflow(reader, section, size)
        section["accumulation_steps"] = size
    return section


def _set_batch_of_zenflow(reader: DeepSpeedReader, section: Values, size: int) -> None:
    """Put the batch that follows from ZenFlow's micro-batches of a step into `batch:`."""
    if "global_size" not in section:
        return
    before = section.get("accumulation_steps")
    if before is None and "micro_size" in section:
        reason = "it follows from the number of ranks, and from ZenFlow's update_interval"
        reader.leave_out("train_batch_size", section.pop("global_size"), reason)
        return
    section["global_size"] = section["global_size"] // (before or 1) * size


def _training(reader: DeepSpeedReader) -> Values:
    """Return `training:` from clipping, printing and recomputed layers; refuses step boundaries
    that DeepSpeed does not decide.
    """
    section: Values = {"clip_grad_norm": reader.take("gradient_clipping", 1.0)}
    section |= _logging(reader)
    interval = reader.take("pipeline.activation_checkpoint_interval", 0)
    if interval:
        section["recompute_every"] = interval
    compiled = _deepcompile(reader)
    if compiled:
        section["compile"] = compiled
    _leave_out_pipeline_keys(reader)
    if reader.comments.pop("training.log_every", None):
        reader.leave_out("steps_per_print", "auto", "training.log_every has a default")
    _refuse_own_boundaries(reader)
    return section


def _logging(reader: DeepSpeedReader) -> Values:
    """Return `log_every` of `training:`."""
    steps_per_print = reader.take("steps_per_print", None)
    if isinstance(steps_per_print, int) and steps_per_print != _SILENT["steps_per_print"]:
        return {"log_every": steps_per_print}
    return {}


def _refuse_own_boundaries(reader: DeepSpeedReader) -> None:
    reader.mark_handled("managed_gradient_accumulation")
    if reader.facts.flag("managed_gradient_accumulation", True) is not True:
        reader.refuse(
            "managed_gradient_accumulation",
            "the Trainer leaves the boundaries of a step to DeepSpeed",
            "remove it",
        )


def _deepcompile(reader: DeepSpeedReader) -> Values:
    """Return `training.compile:` of DeepCompile; empty where a file does not turn it on, or asks it
    for a pass that a run does not have.
    """
    passes = reader.facts.get("compile.passes")
    if not reader.facts.flag("compile.deepcompile", False):
        if passes is not None:
            reader.leave_out("compile.passes", passes, "compile.deepcompile is not enabled")
        return {}
    reader.sources["training.compile.backend"] = "compile.deepcompile"
    if passes:
        return _with_passes(reader, passes)
    if passes is not None:
        reader.leave_out("compile.passes", passes, "it names no pass")
    return {"backend": "deepcompile"}


def _with_passes(reader: DeepSpeedReader, passes: Sequence[str]) -> Values:
    """Return `training.compile:` of DeepCompile with these passes; empty, with a problem in the
    reader, if a run does not have one of them.
    """
    refused = [name for name in passes if name in PASSES_NOT_IN_A_RUN]
    for name in refused:
        reason, fix = PASSES_NOT_IN_A_RUN[name]
        reader.refuse("compile.passes", reason, fix)
    if refused:
        return {}
    return {"backend": "deepcompile", "passes": list(passes)}


def _leave_out_pipeline_keys(reader: DeepSpeedReader) -> None:
    """List keys of `pipeline` that the code decides, or that change no number, as left out."""
    for name, reason in _OF_PIPELINES.items():
        path = f"pipeline.{name}"
        reader.mark_handled(path)
        key = reader.key(path)
        value = reader.facts.get(path)
        if not reader.facts.given(path) or key is None:
            continue
        if key.status == "inert" or not is_default(key, value):
            reader.leave_out(path, value, reason)


def _monitors(reader: DeepSpeedReader) -> Values:
    """Return `monitors:`; keys of files and services that a run decides itself are listed as left
    out.
    """
    section = _reports(reader)
    for name in _SERVICES:
        if reader.take(f"{name}.enabled", False):
            section[name] = _service(reader, name) or True
        reader.mark_without_effect(name, "it is off")
        _leave_out_service_keys(reader, name)
    return section


def _reports(reader: DeepSpeedReader) -> Values:
    """Return which files of metrics are written."""
    section: Values = {}
    for name in _REPORTS:
        if reader.facts.given(f"{name}.enabled"):
            key = OWNED[name].removeprefix("monitors.")
            section[key] = reader.take(f"{name}.enabled", True)
        reader.mark_without_effect(name, "files go into the run folder")
        for key in _REPORT_KEYS:
            _leave_out_given(reader, f"{name}.{key}", "files go into the run folder")
    return section


def _leave_out_given(reader: DeepSpeedReader, path: str, reason: str) -> None:
    """List a key as left out if the file has it; the value of an API key is not shown."""
    if reader.facts.given(path):
        value = reader.facts.get(path)
        if path.endswith(".api_key"):
            value = "..."
        reader.leave_out(path, value, reason)
    reader.mark_handled(path)


def _service(reader: DeepSpeedReader, name: str) -> Values:
    section: Values = {}
    for deepspeed_key, key in _SERVICES[name]:
        value = reader.take(f"{name}.{deepspeed_key}", None)
        if value is not None:
            section[key] = value
    return section


def _leave_out_service_keys(reader: DeepSpeedReader, name: str) -> None:
    """List the keys of a service that a run config does not have."""
    for key in _SERVICE_KEYS_LEFT_OUT:
        reason = "see monitors.comet; its key comes from COMET_API_KEY"
        _leave_out_given(reader, f"{name}.{key}", reason)


def _passed_through(reader: DeepSpeedReader) -> Values:
    """Return `deepspeed:`: the top-level keys that no section of ours decides and that have an
    effect.
    """
    section: Values = {}
    for name, value in reader.facts.values.items():
        if name not in PASSED_THROUGH or value == _SILENT.get(name):
            continue
        effective = _passed_value(reader, name, value)
        if effective is not None:
            reader.sources[f"deepspeed.{name}"] = name
            section[name] = effective
    return section


def _passed_value(reader: DeepSpeedReader, name: str, value: Any) -> Any:
    """Return what is passed on of a top-level key; None for nothing."""
    if name == "compile" and isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if key not in _OF_COMPILING}
        if not value:
            return None
    num_refused = len(reader.problems)
    effective = _with_effect(reader, name, value)
    if name in _DIVIDING and len(reader.problems) > num_refused:
        return None  # the rest of the section belongs to what is refused
    return effective


def _with_effect(reader: DeepSpeedReader, written: str, value: Any) -> Any:
    """Return a value without the keys in it that have no effect; None if nothing is left. Lists
    those keys as left out, and refuses what a run cannot have, in the reader.
    """
    reason = reader.why_without_effect(written, value)
    if reason is not None:
        reader.leave_out(written, value, reason)
        return None
    refusal = not_in_a_run(written, value)
    if refusal is not None:
        refusal_reason, fix = refusal
        reader.refuse(written, refusal_reason, fix)
        return None
    key = reader.key(written)
    if isinstance(value, Mapping) and (key is None or key.unknown != "free"):
        return _section_with_effect(reader, written, value)
    if value is None and key is not None and key.default is not None:
        reader.refuse(written, "a run config passes no null on", "write a value")
    return value  # of a free section any keys: DeepSpeed reads them


def _section_with_effect(
    reader: DeepSpeedReader, written: str, section: Mapping[str, Any]
) -> Values:
    """Return the keys of a section that have an effect, as `_with_effect` does."""
    values: Values = {}
    for name, item in section.items():
        effective = _with_effect(reader, f"{written}.{name}", item)
        if effective is not None:
            values[name] = effective
    return values


def _settle_top_level(reader: DeepSpeedReader) -> None:
    """Leave out or refuse top-level keys that are neither ours nor passed through."""
    taken = {*OWNED, *PASSED_THROUGH, "$schema"}
    for name, value in reader.facts.values.items():
        if name in taken or value is None:
            continue
        reason = reader.why_without_effect(name, value)
        if reason is not None:
            reader.leave_out(name, value, reason)
        else:
            _settle_other_key(reader, name, value)


def _settle_other_key(reader: DeepSpeedReader, name: str, value: Any) -> None:
    """Leave out or refuse such a key with an effect, unless it asks for what a run does anyway."""
    key = reader.key(name)
    if key is not None and is_default(key, value):  # of an older release
        return
    if name == "sequence_parallel_size" and value == 1:
        reader.leave_out(name, value, "one is what a run config has")
        return
    reason, fix = not_in_a_run(name, value) or NO_KEY
    reader.refuse(name, reason, fix)


def _placeholder_data(batch: Values, reader: DeepSpeedReader) -> Values:
    """Return data of the size that a large batch needs, with a comment in the reader; empty where
    the default data is large enough to plan.
    """
    samples = batch.get("global_size")
    if not samples:
        samples = batch.get("micro_size", 1) * batch.get("accumulation_steps", 1)
    if samples <= _PLACEHOLDER_SAMPLES:
        return {}
    reader.comments["data"] = (
        "a placeholder of the size that the batch needs: write your own data, model and task"
    )
    return {
        "kind": "synthetic_images",
        "num_samples": 100 * samples,
        "image_size": 28,
        "channels": 1,
        "num_classes": 10,
    }


# The text of an imported run config: YAML with a comment beside what was decided for the user.


_STUBS: Final = {
    "run": "# run: {name: my-run}",
    "model": "# model: {target: my_module:MyModel}",
    "data": "# data: {target: my_module:make_data}",
    "task": "# task: {target: my_module:my_loss}",
    "training": "# training: {max_epochs: 3}",
}
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./:-]*[A-Za-z0-9_]|[A-Za-z_]")
_NOT_TEXT: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def run_config_text(imported: Imported, *, name: str) -> str:
    """Return the text of a run config file.

    Args:
        imported: the run config.
        name: the file that it was imported from.
    """
    lines = [f"# Imported from {printable(name)}. Model, data and task are not in it: write yours."]
    lines += _lines_about_rest(imported)
    for section, values in imported.values.items():
        lines.append("")
        lines += _lines(section, values, section, imported.comments, "")
    stubs = [line for section, line in _STUBS.items() if section not in imported.values]
    if stubs:
        lines += [
            "",
            "# Yours to write; a key of a section that stands above goes into it, as no section "
            "may stand twice:",
        ]
        lines += stubs
    return "\n".join(lines) + "\n"


def _lines_about_rest(imported: Imported) -> Iterator[str]:
    """Yield the comments about what is not taken over, and what is left out."""
    if imported.not_taken:
        yield "# NOT TAKEN OVER, so that the run trains without it:"
    for problem in imported.not_taken:
        shown = f"{problem.key}: {show_value(problem.value)}"
        yield f"#   {printable(f'{shown} ({problem.reason}; {problem.fix})')}"
    if imported.left_out:
        yield "# Left out, because it has no effect or is decided elsewhere:"
    for omission in imported.left_out:
        yield f"#   {printable(str(omission))}"


def _lines(
    name: str, value: Any, key: str, comments: Mapping[str, str], indent: str
) -> Iterator[str]:
    """Yield the lines of an entry `name: value` of the file, nested ones indented further; `key` is
    its dotted path, under which `comments` has its comment.
    """
    comment = ""
    if key in comments:
        comment = f"  # {printable(comments[key])}"
    if isinstance(value, Mapping) and value:
        yield f"{indent}{_text(name)}:{comment}"
        for inner, item in value.items():
            yield from _lines(inner, item, f"{key}.{inner}", comments, f"{indent}  ")
    else:
        yield f"{indent}{_text(name)}: {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style, on one line."""
    if isinstance(value, Mapping):
        members = [f"{_text(name)}: {_flow(item)}" for name, item in value.items()]
        return "{" + ", ".join(members) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)


def _text(text: str) -> str:
    """Return a text without quotes if YAML reads it as the same text, in quotes otherwise."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return yaml.dump(text, default_style='"', allow_unicode=False, width=10**9).strip()


# `train.py --deepspeed_config ds.json`: a run config and a DeepSpeed JSON describe one run
# together. What either of them sets holds; what both set must be the same, or the run is refused
# with both places named. What the JSON leaves out or has as "auto" is the run config's to set, and
# DeepSpeed's or our default where it does not.


_LONGEST_NAME: Final = 300
_UNIONS: Final = ("optimizer", "scheduler", "precision")


def with_deepspeed_config(
    config: RunConfig, path: str | Path, *, source: Source | None = None
) -> RunConfig:
    """Return the run config with what a DeepSpeed JSON decides.

    Args:
        config: the run config, as it was written.
        path: the DeepSpeed JSON; as DeepSpeed takes it, that may be the text itself in base64.
        source: where the run config's values came from; it is given a note for every key of the
            JSON without effect.

    Raises:
        ConfigError: the JSON cannot be imported, or contradicts the run config.
    """
    source = source or Source()
    document = _read(str(path))
    imported = import_document(document)
    source.notes += _left_out_notes(document, imported)
    written = config.written()
    _raise_any([source.locate(problem) for problem in _clashes(written, imported, document)])
    joined = merged(imported.decided_values(), written)
    return config_from_values(joined, source=source).noting_auto(config.was_auto)


def _read(path: str) -> Document:
    """Read a file; a name that is no file and reads as base64 of an object is the text itself
    (deepspeed/runtime/config.py `DeepSpeedConfig`).
    """
    if len(path) <= 2 * MAX_BYTES and not _exists(path):
        text = _text_in_base64(path)
        if text.lstrip().startswith("{"):
            return parse_hjson(text, name="--deepspeed_config (base64)")
    name = path
    if len(path) > _LONGEST_NAME:
        name = f"{path[:_LONGEST_NAME]}..."
    return read_hjson(Path(path), name=name)


def _text_in_base64(encoded: str) -> str:
    """Return a text in base64; empty if it is none."""
    try:
        return base64.b64decode(encoded, altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        return ""


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name, or with a zero byte in it
        return False


def _clashes(
    written: Mapping[str, Any], imported: Imported, document: Document
) -> Iterator[Problem]:
    """Find keys that the run config and the JSON both set, to different values."""
    for key, deepspeed_key in imported.sources.items():
        value = value_at(written, key.split("."), None)
        json_value = value_at(imported.values, key.split("."), None)
        if None not in (value, json_value) and value != json_value:
            place = _place(document, deepspeed_key)
            yield _clash(key, value, f"{place} amounts to {json_value}")
    yield from _kind_clashes(written, imported, document)


def _kind_clashes(
    written: Mapping[str, Any], imported: Imported, document: Document
) -> Iterator[Problem]:
    """Find sections in which the run config and the JSON name different kinds or targets."""
    for name in _UNIONS:
        section = written.get(name, {})
        tags = [tag for tag in ("target", *kind_of_default(name)) if tag in section]
        json_key = _first_key_of(imported, name)
        if tags and json_key and tags[0] not in imported.values[name]:
            place = _place(document, json_key)
            yield _clash(f"{name}.{tags[0]}", section[tags[0]], f"{place} names another one")


def _first_key_of(imported: Imported, section: str) -> str:
    """Return the first key of the JSON that decides something in a section; empty if none does."""
    for key, deepspeed_key in imported.sources.items():
        if key.startswith(f"{section}."):
            return deepspeed_key
    return ""


def _left_out_notes(document: Document, imported: Imported) -> list[Problem]:
    """Return a note for every key of the JSON without effect, in the order of the file."""
    notes = [_left_out_note(document, omission) for omission in imported.left_out]
    return sorted(notes, key=lambda note: (note.line, note.column))


def _left_out_note(document: Document, omission: Omission) -> Problem:
    key = omission.key
    rest = omission.note
    note = Problem(
        "key-left-out", f"left out of this run: {rest}", f"remove {key}", key, severity="note"
    )
    return placed(document, note, at_top=False)


def _clash(key: str, value: Any, reason: str) -> Problem:
    return Problem("deepspeed-config-clash", reason, "say it in one of the two", key, value)


def _place(document: Document, key: str) -> str:
    line, _ = document.places.get(tuple(key.split(".")), (0, 0))
    if line:
        return f"{key} in {document.name}:{line}"
    return f"{key} in {document.name}"
