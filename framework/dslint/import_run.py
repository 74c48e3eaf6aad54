"""`import`: a DeepSpeed JSON becomes a run config that renders back to the same meaning.

What the file leaves out is written down as DeepSpeed decides it, where our default is another.
"auto", which only other tools fill in, becomes our default, with a comment. Keys without effect are
named at the top. What a run config cannot say, and a key that this release does not read and that
was on, is a problem, and then there is no run config. The ways in which the rendering differs from
the file on purpose:

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from framework.config.deepspeed_words import OWNED, PASSED_THROUGH
from framework.config.load import Source, config_from_values
from framework.config.run_config import RunConfig, kind_of_default
from framework.dslint.facts import Facts, value_at
from framework.dslint.import_sections import (
    NO_KEY,
    Reading,
    Values,
    optimizer,
    precision,
    scheduler,
    zero,
)
from framework.dslint.key_files import was_off
from framework.dslint.keys import load_table
from framework.dslint.lint import lint, placed
from framework.dslint.other_tools import without_placeholders
from framework.errors import MISSING, ConfigError, Problem, printable
from framework.plan.plan import default_cluster, make_plan
from framework.plan.render import merged
from framework.plan.rules.passthrough import not_in_a_run
from framework.text.document import MAX_BYTES, Document
from framework.text.hjson import parse_hjson, read_hjson

_BATCH: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# What is left out with a comment, so that it does not stop an import: these, and keys of other
# releases that are off.
_LEFT_OUT: Final = frozenset({"auto-value", "inert-key"})
_GONE: Final = frozenset({"removed-key", "key-of-another-release"})
# Rendered in any case, so not worth a line.
_SILENT: Final[Values] = {
    "wall_clock_breakdown": False,
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
    "steps_per_print": 1_000_000_000,
}
_PLACEHOLDER_SAMPLES: Final = 1437  # of the default data
_REPORTS: Final = {"tensorboard": "tensorboard", "csv_monitor": "csv"}
# Their key and ours.
_SERVICES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "wandb": (("project", "project"), ("group", "group"), ("team", "entity")),
    "comet": (("project", "project"), ("workspace", "workspace")),
}


@dataclass(frozen=True)
class Imported:
    """A run config and what there is to say about it.

    Attributes:
        values: sections of the run config.
        comments: dotted key -> what to say beside it.
        left_out: keys of the file that have no effect, each with the reason.
        given: run-config key -> the key of the file that decided it; the other values are defaults.
    """

    values: Values
    comments: Mapping[str, str]
    left_out: tuple[str, ...]
    given: Mapping[str, str]


def import_deepspeed(
    values: Mapping[str, Any], *, name: str = "", release: str | None = None
) -> dict[str, Any]:
    """The run config, as nested dicts, that renders back to what a DeepSpeed JSON means.

    Raises:
        ConfigError: DeepSpeed would refuse the file, or a run config cannot say what it says.
    """
    return import_document(Document(name, dict(values)), release=release).values


def import_document(document: Document, *, release: str | None = None) -> Imported:
    """As `import_deepspeed`, with the comments; problems name the lines of the document."""
    table = load_table(release)
    wrong = [problem for problem in lint(document, release=release) if _stops(problem)]
    if wrong:
        raise ConfigError(without_placeholders(wrong, file=document.name))
    reading = Reading(Facts(document.value, table.release), table)
    sections = {
        "batch": _batch(reading),
        "precision": precision(reading),
        "zero": zero(reading),
        "optimizer": optimizer(reading),
        "scheduler": scheduler(reading),
        "training": _training(reading),
        "monitors": dict(_monitors(reading)),
        "deepspeed": dict(_passed(reading)),
    }
    for section in OWNED:
        reading.settle(section)
    _no_place(reading)
    # beside those of typed sections, each where the file has it
    for path, value in reading.further.items():
        for part in reversed(path.split(".")):
            value = {part: value}
        sections["deepspeed"] = merged(sections["deepspeed"], value)
    if reading.problems:
        raise ConfigError([placed(document, problem, at_top=False) for problem in reading.problems])
    sections["data"] = _placeholder(sections["batch"], reading)
    found = {key: section for key, section in sections.items() if section}
    try:
        config = config_from_values(found)
        make_plan(config, default_cluster(config))
    except ConfigError as error:
        theirs = [_in_their_words(document, problem, reading.given) for problem in error.problems]
        raise ConfigError(
            sorted(theirs, key=lambda problem: (problem.line, problem.column))
        ) from None
    return Imported(found, reading.comments, tuple(reading.left_out), reading.given)


def _stops(problem: Problem) -> bool:
    """Check whether there is nothing to import: DeepSpeed refuses the file, or drops what somebody
    meant.
    """
    if problem.kind == "comment-key":
        return problem.reason.endswith("refuses it")
    if problem.kind in _GONE:
        return not was_off(problem.key, problem.value)
    return problem.severity == "error" and problem.kind not in _LEFT_OUT


def _in_their_words(document: Document, problem: Problem, given: Mapping[str, str]) -> Problem:
    """Report a run config's objection to a value at the key of the file that it came from."""
    theirs = given.get(problem.key)
    if theirs is None and problem.key.startswith("deepspeed."):
        theirs = problem.key.removeprefix("deepspeed.")
    if theirs is None:  # several keys together, or none of the file's
        return replace(problem, file=document.name)
    if theirs == problem.key:
        words = problem.reason
    else:
        words = f"{problem.reason} ({problem.key} of a run config)"
    return placed(document, replace(problem, key=theirs, reason=words), at_top=False)


def _batch(reading: Reading) -> Values:
    found: Values = {}
    for name in _BATCH:
        value = reading.take(name, None)
        key = OWNED[name]
        if reading.comments.pop(key, None):
            reading.left_out.append(
                f"{name}: auto (it follows from the number of devices; {key} decides it)"
            )
        if value is not None:
            found[key.removeprefix("batch.")] = value
    return found


def _training(reading: Reading) -> Values:
    section: Values = {"clip_grad_norm": reading.take("gradient_clipping", 1.0)}
    every = reading.take("steps_per_print", None)
    if isinstance(every, int) and every != _SILENT["steps_per_print"]:
        section["log_every"] = every
    if reading.comments.pop("training.log_every", None):
        reading.left_out.append("steps_per_print: auto (training.log_every has a default)")
    reading.place("managed_gradient_accumulation")
    if reading.facts.flag("managed_gradient_accumulation", True) is not True:
        reading.refuse(
            "managed_gradient_accumulation",
            "the Trainer leaves the boundaries of a step to DeepSpeed",
            "remove it",
        )
    return section


def _monitors(reading: Reading) -> Iterator[tuple[str, Any]]:
    for name in _REPORTS:
        if reading.facts.given(f"{name}.enabled"):
            yield OWNED[name].removeprefix("monitors."), reading.take(f"{name}.enabled", True)
        reading.idle(name, "files go into the run folder")
        for key in ("output_path", "job_name"):
            path = f"{name}.{key}"
            if reading.facts.given(path):
                reading.drop(path, reading.facts.get(path), "files go into the run folder")
            reading.place(path)
    for section, names in _SERVICES.items():
        if reading.take(f"{section}.enabled", False):
            taken = {name: reading.take(f"{section}.{theirs}", None) for theirs, name in names}
            found = {name: value for name, value in taken.items() if value is not None}
            yield section, found or True
        reading.idle(section, "it is off")
        for key in (
            "api_key",
            "online",
            "mode",
            "experiment_key",
            "experiment_name",
            "samples_log_interval",
        ):
            if reading.facts.given(path := f"{section}.{key}"):
                if key == "api_key":
                    value = "..."
                else:
                    value = reading.facts.get(path)
                reading.drop(path, value, "see monitors.comet; its key comes from COMET_API_KEY")
            reading.place(path)


def _passed(reading: Reading) -> Iterator[tuple[str, Any]]:
    """Pass on to `deepspeed:` what no section of ours decides, without keys that have no effect."""
    for name, value in reading.facts.values.items():
        if name in PASSED_THROUGH and value != _SILENT.get(name):
            kept = _with_effect(reading, name, value)
            if kept is not None:
                reading.given[f"deepspeed.{name}"] = name
                yield name, kept


def _with_effect(reading: Reading, written: str, value: Any) -> Any:
    why = reading.why_without_effect(written, value)
    if why is not None:
        reading.drop(written, value, why)
        return None
    refusal = not_in_a_run(written, value)
    if refusal is not None:
        reading.refuse(written, *refusal)
        return None
    key = reading.key(written)
    if value is None and key is not None and key.default is not None:
        reading.refuse(written, "a run config passes no null on", "write a value")
    if not isinstance(value, Mapping) or (key is not None and key.unknown == "free"):
        return value
    kept = {name: _with_effect(reading, f"{written}.{name}", item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item is not None}


def _no_place(reading: Reading) -> None:
    """Top-level keys that are neither ours nor passed through."""
    for name, value in reading.facts.values.items():
        if name in OWNED or name in PASSED_THROUGH or value is None or name == "$schema":
            continue
        why = reading.why_without_effect(name, value)
        if why is not None:
            reading.drop(name, value, why)
        elif (
            (key := reading.key(name)) is not None
            and key.default is not MISSING
            and value == key.default
        ):
            continue  # of an older release: it says what a run does anyway
        elif name == "sequence_parallel_size" and value == 1:
            reading.drop(name, value, "one is what a run config has")
        else:
            reading.refuse(name, *(not_in_a_run(name, value) or NO_KEY))


def _placeholder(batch: Values, reading: Reading) -> Values:
    """The default data is small; a large batch needs more for a plan to be made at all."""
    samples = batch.get("global_size") or batch.get("micro_size", 1) * batch.get(
        "accumulation_steps", 1
    )
    if samples <= _PLACEHOLDER_SAMPLES:
        return {}
    reading.comments["data"] = (
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


_YOURS: Final = {
    "run": "# run: {name: my-run}",
    "model": "# model: {target: my_module:MyModel}",
    "data": "# data: {target: my_module:make_data}",
    "task": "# task: {target: my_module:my_loss}",
    "training": "# training: {max_epochs: 3}",
}
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./:-]*[A-Za-z0-9_]|[A-Za-z_]")
_NOT_TEXT: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def run_config_text(imported: Imported, *, name: str) -> str:
    """A run config file."""
    lines = [f"# Imported from {printable(name)}. Model, data and task are not in it: write yours."]
    if imported.left_out:
        lines.append("# Left out, because it has no effect or is decided elsewhere:")
        lines += [f"#   {printable(line)}" for line in imported.left_out]
    for section, values in imported.values.items():
        lines += ["", *_lines(section, values, section, imported.comments, "")]
    stubs = [line for section, line in _YOURS.items() if section not in imported.values]
    if stubs:
        lines += [
            "",
            "# Yours to write; a key of a section that stands above goes into it, as no section "
            "may stand twice:",
        ]
        lines += stubs
    return "\n".join(lines) + "\n"


def _lines(
    name: str, value: Any, key: str, comments: Mapping[str, str], indent: str
) -> Iterator[str]:
    if key in comments:
        comment = f"  # {printable(comments[key])}"
    else:
        comment = ""
    if isinstance(value, Mapping) and value:
        yield f"{indent}{_text(name)}:{comment}"
        for inner, item in value.items():
            yield from _lines(inner, item, f"{key}.{inner}", comments, f"{indent}  ")
    else:
        yield f"{indent}{_text(name)}: {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_text(name)}: {_flow(item)}" for name, item in value.items()) + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)


def _text(text: str) -> str:
    """Plain where YAML reads it as the same text, in quotes otherwise."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return yaml.dump(text, default_style='"', allow_unicode=False, width=10**9).strip()


# `train.py --deepspeed_config ds.json`: a run config and a DeepSpeed JSON describe one run
# together. What either of them says holds; what both say must be the same, or the run is refused
# with both places named. What the JSON leaves out or calls "auto" is the run config's to say, and
# DeepSpeed's or our default where it says nothing.


_LONGEST_NAME: Final = 300
_UNIONS: Final = ("optimizer", "scheduler", "precision")


def with_deepspeed_config(
    config: RunConfig, path: str | Path, *, source: Source | None = None
) -> RunConfig:
    """The run config with what a DeepSpeed JSON decides.

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
    notes = [_left_out(document, line) for line in imported.left_out]
    for note in sorted(notes, key=lambda note: (note.line, note.column)):
        source.notes.append(note)
    written = config.written()
    clashes = [source.locate(problem) for problem in _clashes(written, imported, document)]
    if clashes:
        raise ConfigError(clashes)
    decided = {key.partition(".")[0] for key in imported.given}
    ours = {name: section for name, section in imported.values.items() if name in decided}
    return config_from_values(merged(ours, written), source=source).noting_auto(config.was_auto)


def _read(path: str) -> Document:
    """Read a file; a name that is no file and reads as base64 of an object is the text itself
    (deepspeed/runtime/config.py `DeepSpeedConfig`).
    """
    if len(path) <= 2 * MAX_BYTES and not _exists(path):
        try:
            text = base64.b64decode(path, altchars=b"-_", validate=True).decode("utf-8")
        except ValueError:
            text = ""
        if text.lstrip().startswith("{"):
            return parse_hjson(text, name="--deepspeed_config (base64)")
    return read_hjson(
        Path(path), name=path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]}..."
    )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name, or with a zero byte in it
        return False


def _clashes(
    written: Mapping[str, Any], imported: Imported, document: Document
) -> Iterator[Problem]:
    """Keys that both say, differently."""
    for key, theirs in imported.given.items():
        mine, decided = (
            value_at(values, key.split("."), None) for values in (written, imported.values)
        )
        if mine is not None and decided is not None and mine != decided:
            yield _clash(key, mine, f"{_place(document, theirs)} amounts to {decided}")
    for name in _UNIONS:
        mine = written.get(name, {})
        tags = [tag for tag in ("target", *kind_of_default(name)) if tag in mine]
        given = [key for key in imported.given if key.startswith(f"{name}.")]
        if tags and given and tags[0] not in imported.values[name]:
            yield _clash(
                f"{name}.{tags[0]}",
                mine[tags[0]],
                f"{_place(document, imported.given[given[0]])} names another one",
            )


def _left_out(document: Document, line: str) -> Problem:
    key, _, rest = line.partition(": ")
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
