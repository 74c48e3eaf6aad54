"""``inspect CHECKPOINT|RUN``: what a checkpoint is, whether its files are as they were written, and
whether they hold all weights.

Nothing is deserialised here. Manifests of earlier releases do not count the weights: a process with
torch reads the names of the weights in such checkpoints.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import SavedCheckpoint, diagnose, read_checkpoint
from framework.checkpoint.names import (
    LAYER_FILE,
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    REPLACED,
    SWAPPED,
    TAG,
    RawNames,
    find_raw,
    holders,
    irregular,
    latest_tag,
    named_folders,
    own_names,
    read_names,
    replaced_folders,
    size_of,
)
from framework.checkpoint.resume_point import at_step, named_best, refused_unverified
from framework.commands.torch_child import NoAnswerError, run_child
from framework.errors import (
    EXIT_OK,
    EXIT_STORAGE,
    ConfigError,
    StorageError,
    counted,
    printable,
    show_value,
)
from framework.system.arguments import add_step, parse_command
from framework.system.command_parser import CommandParser
from framework.train.best import best_in
from framework.train.events import failure_in

# a checkpoint can be read or not by their versions
_PACKAGES: Final = ("dsf-trainer", "deepspeed", "torch", "python")
# the names of one checkpoint take a second, and the imports some more
_LONGEST_SECONDS: Final = 300.0
_SIZES: Final = {
    "pipe_size": "pipeline stages",
    "tensor_size": "tensor-parallel",
    "sequence_size": "sequence-parallel",
}


@dataclass(frozen=True)
class Inspected:
    """One folder that bears the name of a checkpoint.

    Attributes:
        checkpoint: None if its manifest cannot be trusted.
        damage: a line for each file that is not as it was written; None: the files were not read.
        lacking: weights that no file has numbers of.
        unknown: why it is not known whether weights are lacking.
    """

    path: Path
    checkpoint: SavedCheckpoint | None
    damage: tuple[str, ...] | None
    lacking: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def faults(self) -> list[str]:
        """A line for each damaged file, and one for all weights that no file has."""
        lines = list(self.damage or ())
        if self.lacking:
            lines.append(f"weights: {self.lacking_line}")
        return lines

    @property
    def lacking_line(self) -> str:
        """What the files lack; there must be such a weight."""
        line = f"no file has the numbers of {self.lacking[0]}"
        if len(self.lacking) > 1:
            line += f" and {len(self.lacking) - 1} more"
        return line


def main(words: Sequence[str]) -> int:
    """Print what a checkpoint is, or all of a run; returns the exit code, see `run_inspect`."""
    arguments = parse_command("inspect", _add_arguments, words)
    return run_inspect(
        named_best(at_step(arguments.path, arguments.step, key="inspect"), key="inspect"),
        as_json=arguments.json,
        verify=not arguments.no_verify,
        allow_unverified=arguments.allow_unverified,
    )


def _add_arguments(inspect: CommandParser) -> None:
    place = "a folder global_step<N>, or a run: all of its checkpoints"
    inspect.add_argument("path", metavar="CHECKPOINT|RUN", help=place)
    add_step(inspect)
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.add_argument(
        "--no-verify",
        action="store_true",
        help="read the manifest only, not every byte of every file",
    )
    inspect.add_argument(
        "--allow-unverified",
        action="store_true",
        help="describe what DeepSpeed wrote without a manifest",
    )


def run_inspect(source: str, *, as_json: bool, verify: bool, allow_unverified: bool = False) -> int:
    """Print a checkpoint, or all of a run; returns 0 if all are sound and 74 if one is damaged.

    With `allow_unverified`, a checkpoint that DeepSpeed wrote without a manifest is described by
    the names of its files.

    Raises:
        ConfigError: there is no checkpoint, or one without a manifest and not `allow_unverified`;
            exit code 78.
        StorageError: the folder is there and cannot be read.
    """
    try:
        report = _make_report(Path(source), verify=verify, allow_unverified=allow_unverified)
        text = report.text(as_json=as_json)
    except OSError as error:
        reason = (
            f"inspect: {show_value(error.filename or source)}: it cannot be read: "
            f"{error.strerror or error}"
        )
        raise StorageError(f"{reason} [checkpoint-not-read]") from error
    print(text)
    if report.is_sound:
        return EXIT_OK
    return EXIT_STORAGE


@dataclass(frozen=True)
class _Report:
    """Lines for a person, and sections for JSON; each is computed when it is read."""

    lines: Iterator[str]
    sections: Iterator[dict[str, Any]]
    is_sound: bool

    def text(self, *, as_json: bool) -> str:
        """Return the report for a person, or as JSON."""
        if as_json:  # JSON escapes all control characters by itself, but for one
            return json.dumps(list(self.sections), indent=2).replace("\x7f", "\\u007f")
        return "\n".join(map(printable, self.lines))


def _make_report(path: Path, *, verify: bool, allow_unverified: bool) -> _Report:
    """Describe the checkpoint or run at a path; without a manifest by the names of its files."""
    paths = _checkpoints_at(path)
    if not paths:
        return _report_by_names(path, allow_unverified=allow_unverified)
    inspected = _with_lacking([_inspect(checkpoint, verify=verify) for checkpoint in paths])
    if len(inspected) == 1:
        lines = _lines(inspected[0])
    else:
        lines = _table(inspected)
    lines = itertools.chain(lines, _failure_of_run(path))
    is_sound = not any(checkpoint.faults for checkpoint in inspected)
    return _Report(lines, map(_as_json, inspected), is_sound)


def _failure_of_run(path: Path) -> Iterator[str]:
    """Yield a line if the path is a run and its last start failed."""
    failure = failure_in(path / "events.jsonl")
    if failure:
        yield f"{'run':<11}{failure}"


def _layout_of_names(names: RawNames) -> str:
    layout = "any number of ranks"
    if names.ranks:
        layout = counted(names.ranks, "rank")
    if names.has_layers:
        layout += ", pipeline"
    return f"{layout}, ZeRO stage {' or '.join(map(str, names.stages))}"


def _report_by_names(path: Path, *, allow_unverified: bool) -> _Report:
    """Describe a checkpoint without a manifest by the names of its files, which are not read."""
    folder = find_raw(path)
    assert folder is not None
    if not allow_unverified:
        raise refused_unverified(folder, key="inspect")
    names = read_names(folder)
    damage = list(irregular(folder))
    step = ""
    if names.step is not None:
        step = f"{names.step:,} (its name)"
    rows = {
        "checkpoint": str(folder),
        "written by": "DeepSpeed itself, without a manifest",
        "step": step,
        "layout": _layout_of_names(names),
        "files": f"{names.num_files:,}, {_size(names.num_bytes)}",
        "verified": "no: there are no checksums to hold the files against",
    }
    section = {"path": str(folder), "verified": False, "damage": damage, **asdict(names)}
    return _Report(_labelled(rows, damage), iter([section]), is_sound=not damage)


def _labelled(rows: Mapping[str, str], damage: Iterable[str]) -> Iterator[str]:
    """Yield a line for each row that has text, and one for each damaged file."""
    for label, text in rows.items():
        if text:
            yield f"{label:<11}{text}"
    for line in damage:
        yield f"{'damaged':<11}{line}"


def _has_manifest(path: Path) -> bool:
    for folder in holders(path):
        for _ in folder.glob(f"global_step*/{MANIFEST}"):
            return True
    return False


def _checkpoints_at(path: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint: the path, or those in it, oldest first.

    Empty for a checkpoint that DeepSpeed wrote without a manifest. Raises a ConfigError if there is
    none at all.
    """
    if find_raw(path) and not _has_manifest(path):
        return []
    for named in own_names(path):
        if _is_name_of_checkpoint(named.name) and named.is_dir():
            return [named]
    for folder in holders(path):
        checkpoints = _checkpoints_in(folder)
        if checkpoints:
            return checkpoints
    raise _not_found(path)


def _checkpoints_in(folder: Path) -> list[Path]:
    return [child for _, child in named_folders(folder) if child.is_dir()]


def _is_name_of_checkpoint(name: str) -> bool:
    return bool(TAG.match(name) or REPLACED.match(name))


def _not_found(path: Path) -> ConfigError:
    if path.exists():
        reason = "there is no checkpoint"
    else:
        reason = "there is no such folder"
    fix = "name a .../global_step<N> folder or a run folder that holds one"
    return ConfigError.of("checkpoint-not-found", reason, fix, key="inspect", value=str(path))


def _inspect(path: Path, *, verify: bool) -> Inspected:
    """Read one checkpoint, and with `verify` every byte of its files."""
    try:
        checkpoint = read_checkpoint(path)
    except OSError:
        checkpoint = None
    if checkpoint is None:
        return Inspected(path, None, (diagnose(path),))
    if not verify:
        return Inspected(path, checkpoint, None)
    return Inspected(path, checkpoint, tuple(checkpoint.damage()))


def _may_lack_weights(inspected: Inspected) -> bool:
    """Check that a sound checkpoint of ZeRO stage 3 has a manifest that does not count its weights.

    Only that stage writes a weight's numbers apart from its name, and may write none.
    """
    if inspected.checkpoint is None or inspected.damage != ():
        return False
    manifest = inspected.checkpoint.manifest
    return manifest["config"]["zero"]["stage"] == 3 and "weights" not in manifest


def _with_lacking(checkpoints: list[Inspected]) -> list[Inspected]:
    """Look for weights without numbers in the checkpoints that may lack some."""
    paths = [checkpoint.path for checkpoint in checkpoints if _may_lack_weights(checkpoint)]
    if not paths:
        return checkpoints
    lacking = dict(zip(paths, _find_lacking(paths), strict=True))
    return [_with_answer(each, lacking.get(each.path, ())) for each in checkpoints]


def _with_answer(inspected: Inspected, answer: Sequence[str]) -> Inspected:
    """Add the weights that a checkpoint lacks, or as text why they are not known."""
    if isinstance(answer, str):
        return replace(inspected, unknown=answer)
    return replace(inspected, lacking=tuple(answer))


def _find_lacking(paths: list[Path]) -> list[list[str] | str]:
    """Return for each path the weights that its checkpoint lacks, or text on why they are not
    known. Waits for a process with torch, at most `_LONGEST_SECONDS`.
    """
    words = ["-m", "framework.checkpoint.state.lacking"]
    environment = {"DS_ACCELERATOR": "cpu", **os.environ}
    try:
        question = json.dumps([str(path.absolute()) for path in paths])
        done = run_child(words, environment, longest_seconds=_LONGEST_SECONDS, text=question)
        answers: list[list[str] | str] = json.loads(done.stdout.rpartition("\n")[2])
    except (NoAnswerError, ValueError) as error:
        if isinstance(error, NoAnswerError):
            reason = str(error)
        else:
            reason = "it takes torch and deepspeed, which do not answer"
        return [reason for _ in paths]
    return answers


def _lines(inspected: Inspected) -> Iterator[str]:
    """Return the lines on one checkpoint."""
    path = inspected.path
    rows = {"checkpoint": str(path)}
    replaced = REPLACED.match(path.name)
    if replaced:
        rows["replaced"] = (
            f"set aside by a resume from an earlier step; mv {path} "
            f"{path.with_name(replaced['tag'])} brings it back, where nothing has that name"
        )
    if inspected.checkpoint is not None:
        rows |= _rows(inspected.checkpoint)
    rows["verified"] = _verified(inspected.damage)
    if inspected.unknown:
        rows["weights"] = f"not looked at: {inspected.unknown}"
    elif inspected.lacking:
        rows["weights"] = "not all of them are in its files"
    return _labelled(rows, inspected.faults)


def _verified(damage: Sequence[str] | None) -> str:
    if damage is None:
        return "no (--no-verify)"
    if not damage:
        return "every file is as it was written"
    if len(damage) == 1:
        return "1 file is not as written"
    return f"{len(damage)} files are not as written"


def _rows(checkpoint: SavedCheckpoint) -> dict[str, str]:
    """Return label -> text from a manifest; empty text for what it does not have."""
    manifest = checkpoint.manifest
    config = manifest["config"]
    return {
        "step": _step(checkpoint),
        "model": _name_of(config["model"]),
        "layout": _layout(manifest),
        "pipeline": _pipeline(manifest.get("pipeline")),
        "optimizer": _optimizer(config["optimizer"]),
        "metrics": _metrics(manifest),
        "best": str(best_in(manifest) or ""),
        "average": _average(config),
        "versions": _versions(checkpoint),
        "written": _written(checkpoint),
        "weights": _weights(manifest.get("weights")),
        "files": _files(checkpoint),
    }


def _step(checkpoint: SavedCheckpoint) -> str:
    step = f"{checkpoint.step:,}"
    total_steps = checkpoint.manifest.get("total_steps")
    if total_steps:
        step += f" of {total_steps:,}"
    return step + _place_in_data(checkpoint.manifest)


def _average(config: Mapping[str, Any]) -> str:
    ema = config.get("training", {}).get("ema")
    if ema:
        return f"of the weights, decay {ema['decay']:g}"
    return ""


def _versions(checkpoint: SavedCheckpoint) -> str:
    versions = [(name, checkpoint.versions.get(name)) for name in _PACKAGES]
    return ", ".join(f"{name} {version}" for name, version in versions if version)


def _files(checkpoint: SavedCheckpoint) -> str:
    sizes = _sizes(checkpoint)
    parts = " + ".join(f"{name} {_size(size)}" for name, size in sizes.items() if size)
    return f"{len(checkpoint.manifest['files']):,}, {_size(sum(sizes.values()))}: {parts}"


def _weights(weights: Mapping[str, int] | None) -> str:
    """Describe the weights that every save of the run was checked for: a checkpoint that lacked
    one was not written.
    """
    if weights is None:
        return ""
    return (
        f"{counted(weights['names'], 'tensor')} of {weights['elements']:,} numbers, all in its "
        "files"
    )


def _name_of(section: Mapping[str, Any]) -> str:
    """Return a section's kind, the import path of its code, or the type of its Python object."""
    return next(str(section[key]) for key in ("kind", "target", "object") if section.get(key))


def _place_in_data(manifest: Mapping[str, Any]) -> str:
    """Return epoch, step in it and samples in brackets, as far as the manifest has them."""
    parts = []
    if manifest.get("epoch") is not None:
        parts.append(f"epoch {manifest['epoch']:,}")
    if manifest.get("step_in_epoch") is not None:
        parts.append(f"step {manifest['step_in_epoch']:,} in it")
    if manifest.get("samples") is not None:
        parts.append(f"{manifest['samples']:,} samples")
    if parts:
        return f" ({', '.join(parts)})"
    return ""


def _layout(manifest: Mapping[str, Any]) -> str:
    """Return the numbers of ranks, the parallel sizes, ZeRO stage, precision and batch as text."""
    config = manifest["config"]
    layout = manifest.get("layout", {})
    parts = []
    if layout.get("world_size"):
        parts.append(counted(layout["world_size"], "rank"))
    sizes = [f"{layout[name]} {noun}" for name, noun in _SIZES.items() if layout.get(name, 1) > 1]
    if sizes:
        sizes.append(f"{layout['data_parallel_size']} data-parallel")
        parts.append(" x ".join(sizes))
    parts.append(f"ZeRO stage {config['zero']['stage']}")
    parts.append(str(config["precision"]["dtype"]))
    if layout:
        parts.append(
            f"{layout['global_size']:,} samples per step = {layout['micro_size']} x "
            f"{layout['accumulation_steps']} accumulation x {layout['data_parallel_size']}"
        )
    return ", ".join(parts)


def _pipeline(pipeline: Mapping[str, Any] | None) -> str:
    """Describe every stage by its first and last layer."""
    if pipeline is None:
        return ""
    layers = pipeline["layers"]
    bounds = pipeline.get("bounds") or [0, len(layers)]
    stages = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
    return " | ".join(_ends(stage) for stage in stages if stage)


def _ends(layers: Sequence[str]) -> str:
    if len(layers) > 1:
        return f"{layers[0]} .. {layers[-1]}"
    return layers[0]


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    text = _name_of(optimizer)
    if optimizer.get("lr") is not None:
        text += f", lr {optimizer['lr']:g}"
    return text


def _metrics(manifest: Mapping[str, Any]) -> str:
    """Return the metrics that rate a checkpoint. One that is not finite is text in the manifest,
    because JSON has no number for it.
    """
    metrics = manifest.get("metrics", {})
    rating = [name for name in metrics if name == "train/loss" or name.startswith("eval/")]
    return ", ".join(f"{name} {float(metrics[name]):.4g}" for name in rating)


def _written(checkpoint: SavedCheckpoint) -> str:
    """Return when it was saved. Manifests of older releases have no time: then it is the date of
    the file, which may be a copy's.
    """
    saved_at = checkpoint.manifest.get("saved_at")
    if saved_at:
        time = datetime.fromisoformat(saved_at)
    else:
        time = datetime.fromtimestamp((checkpoint.path / MANIFEST).stat().st_mtime)
    return time.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _sizes(checkpoint: SavedCheckpoint) -> dict[str, int]:
    """Return bytes by the contents of the files, as their names show them."""
    if "pipeline" in checkpoint.manifest:
        model_files = "optimizer"  # a pipeline's weights lie in the files of its layers
    elif checkpoint.manifest["config"]["zero"]["stage"] == 0:
        model_files = "weights and optimizer"
    else:
        model_files = "weights"
    sizes = {"weights": 0, "optimizer": 0, "weights and optimizer": 0, "rest": 0}
    for name, record in checkpoint.manifest["files"].items():
        sizes[_contents(name, model_files)] += record["num_bytes"]
    return sizes


def _contents(name: str, model_files: str) -> str:
    """Return what a file has; `model_files` is what DeepSpeed's files of the model have."""
    if OPTIMIZER_FILE.fullmatch(name) or name.startswith(f"{SWAPPED}/"):
        return "optimizer"
    if LAYER_FILE.fullmatch(name):
        return "weights"
    if MODEL_FILE.fullmatch(name):
        return model_files
    return "rest"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            if unit == "bytes":
                return f"{num_bytes:.0f} {unit}"
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _cells(inspected: Inspected, latest: str | None) -> Iterator[str]:
    """Yield the cells of a checkpoint's line; `latest` is the name of the newest one."""
    yield f"{inspected.path.name:<20}"
    if inspected.checkpoint is not None:
        yield from _cells_of_manifest(inspected.checkpoint)
    if inspected.path.name == latest:
        yield "latest"
    if inspected.damage is not None:
        yield "damaged" if inspected.faults else "sound"


def _cells_of_manifest(checkpoint: SavedCheckpoint) -> Iterator[str]:
    yield f"{_size(sum(_sizes(checkpoint).values())):>10}"
    yield _written(checkpoint)
    metrics = _metrics(checkpoint.manifest)
    if metrics:
        yield metrics


def _table(checkpoints: list[Inspected]) -> Iterator[str]:
    """Yield a line for each checkpoint of a run, one for each of its faults, and one for each
    folder that a resume has set aside. All are in one folder.
    """
    folder = checkpoints[0].path.parent
    latest = latest_tag(folder)
    for inspected in checkpoints:
        name = inspected.path.name
        yield "  ".join(_cells(inspected, latest))
        for line in inspected.damage or ():
            yield f"  damaged: {name}/{line}"
        if inspected.lacking:
            yield f"  damaged: {name}: {inspected.lacking_line}"
    for path in replaced_folders(folder):
        size = _size(size_of(path))
        yield f"{path.name:<20}  {size:>10}  set aside by a resume from an earlier step"


def _as_json(inspected: Inspected) -> dict[str, Any]:
    """Return the manifest, with sums in place of its list of files, and the result of the check."""
    section: dict[str, Any] = {
        "path": str(inspected.path),
        "verified": inspected.damage is not None,
        "damage": inspected.faults,
    }
    if inspected.checkpoint is None:
        return section
    section |= inspected.checkpoint.manifest
    files = section.pop("files")
    _ = section.pop("sha256", None)
    section["num_files"] = len(files)
    section["num_bytes"] = _sizes(inspected.checkpoint)
    section["written"] = _written(inspected.checkpoint)
    return section
