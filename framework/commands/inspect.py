"""``inspect CHECKPOINT|RUN``: what a checkpoint is, whether its files are as written, and hold all
weights.

Nothing is deserialised here. Manifests of earlier releases do not count the weights: of their
checkpoints a process with torch reads the names.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
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
from framework.checkpoint.resume_point import refused_unverified
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
from framework.train.best import best_in

# their versions decide who can read a checkpoint
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
        checkpoint: None where its manifest cannot be trusted.
        damage: what is not as it was written, a line for each file; None where nobody has looked.
        lacking: weights that it has no numbers of.
        unknown: why it is not known whether there are such.
    """

    path: Path
    checkpoint: SavedCheckpoint | None
    damage: tuple[str, ...] | None
    lacking: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def faults(self) -> list[str]:
        """A line for each file that is not as it was written, and one for all weights that are
        nowhere.
        """
        found = list(self.damage or ())
        if self.lacking:
            if self.lacking[1:]:
                more = f" and {len(self.lacking) - 1} more"
            else:
                more = ""
            found.append(f"weights: no file has the numbers of {self.lacking[0]}{more}")
        return found


def run_inspect(source: str, *, as_json: bool, verify: bool, allow_unverified: bool = False) -> int:
    """Print what is there; returns 0 where it is sound and 74 where something is damaged.

    With `allow_unverified`, what DeepSpeed wrote without a manifest is described by the names of
    its files.

    Raises:
        ConfigError: there is no checkpoint, or one without a manifest that nobody asked for; exit
            code 78.
        StorageError: the folder is there and does not answer.
    """
    try:
        paths = _checkpoints_at(Path(source))
        if not paths:
            lines, stated, is_sound = _raw(Path(source), allowed=allow_unverified)
        else:
            found = _with_lacking([_inspect(path, verify=verify) for path in paths])
            lines = _lines(found[0]) if len(found) == 1 else _table(found)
            stated = map(_as_json, found)
            is_sound = not any(one.faults for one in found)
        if as_json:  # JSON escapes all control characters by itself, but for one
            text = json.dumps(list(stated), indent=2).replace("\x7f", "\\u007f")
        else:
            text = "\n".join(map(printable, lines))
    except OSError as error:
        reason = (
            f"inspect: {show_value(error.filename or source)}: it cannot be read: "
            f"{error.strerror or error}"
        )
        raise StorageError(f"{reason} [checkpoint-not-read]") from error
    print(text)
    return EXIT_OK if is_sound else EXIT_STORAGE


def _raw(path: Path, *, allowed: bool) -> tuple[Iterator[str], Iterator[dict[str, Any]], bool]:
    """Describe a checkpoint by the names of its files; nothing of them is read."""
    folder = find_raw(path)
    assert folder is not None
    if not allowed:
        raise refused_unverified(folder, key="inspect")
    names = read_names(folder)
    damage = list(irregular(folder))
    ranks = f"{names.ranks or 'any number of'} rank{'' if names.ranks == 1 else 's'}"
    stages = f"ZeRO stage {' or '.join(map(str, names.stages))}"
    rows = {
        "checkpoint": str(folder),
        "written by": "DeepSpeed itself, without a manifest",
        "step": f"{names.step:,} (its name)" if names.step is not None else "",
        "layout": f"{ranks}{', pipeline' if names.has_layers else ''}, {stages}",
        "files": f"{names.num_files:,}, {_size(names.num_bytes)}",
        "verified": "no: there are no checksums to hold the files against",
    }
    stated = {"path": str(folder), "verified": False, "damage": damage, **asdict(names)}
    return _lined(rows, damage), iter([stated]), not damage


def _lined(rows: Mapping[str, str], damage: Iterable[str]) -> Iterator[str]:
    yield from (f"{label:<11}{text}" for label, text in rows.items() if text)
    yield from (f"damaged    {line}" for line in damage)


def _checkpoints_at(path: Path) -> list[Path]:
    """Folders with the name of a checkpoint: the path, or those in it, oldest first; none where
    there is a raw one.
    """
    if find_raw(path) and not any(
        next(folder.glob(f"global_step*/{MANIFEST}"), None) for folder in holders(path)
    ):
        return []
    for named in own_names(path):
        if (TAG.match(named.name) or REPLACED.match(named.name)) and named.is_dir():
            return [named]
    for folder in holders(path):
        found = [child for _, child in named_folders(folder) if child.is_dir()]
        if found:
            return found
    if path.exists():
        reason = "there is no checkpoint"
    else:
        reason = "there is no such folder"
    fix = "name a .../global_step<N> folder or a run folder that holds one"
    raise ConfigError.of("checkpoint-not-found", reason, fix, key="inspect", value=str(path))


def _inspect(path: Path, *, verify: bool) -> Inspected:
    try:
        checkpoint = read_checkpoint(path)
    except OSError:
        checkpoint = None
    if checkpoint is None:
        return Inspected(path, None, (diagnose(path),))
    return Inspected(path, checkpoint, tuple(checkpoint.damage()) if verify else None)


def _with_lacking(found: list[Inspected]) -> list[Inspected]:
    """Look for weights that are nowhere, in checkpoints whose manifest does not count what they
    hold.

    Only ZeRO stage 3 writes a weight's numbers apart from its name, and may write none.
    """
    asked = [
        number
        for number, one in enumerate(found)
        if one.checkpoint is not None
        and one.damage == ()
        and one.checkpoint.manifest["config"]["zero"]["stage"] == 3
        and "weights" not in one.checkpoint.manifest
    ]
    if asked:
        answers = _ask_for_lacking([found[number].path for number in asked])
    else:
        answers = []
    result = list(found)
    for number, answer in zip(asked, answers, strict=True):
        if isinstance(answer, str):
            result[number] = replace(found[number], unknown=answer)
        else:
            result[number] = replace(found[number], lacking=tuple(answer))
    return result


def _ask_for_lacking(paths: list[Path]) -> list[list[str] | str]:
    """Ask a process with torch; a text for each where it has no answer."""
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
        return [reason] * len(paths)
    return answers


def _lines(one: Inspected) -> Iterator[str]:
    rows = {"checkpoint": str(one.path)}
    replaced = REPLACED.match(one.path.name)
    if replaced:
        back = (
            f"mv {one.path} {one.path.with_name(replaced['tag'])} brings it back, where "
            "nothing has that name"
        )
        rows["replaced"] = f"set aside by a resume from an earlier step; {back}"
    if one.checkpoint is not None:
        rows |= _rows(one.checkpoint)
    rows["verified"] = "every file is as it was written"
    if one.damage is None:
        rows["verified"] = "no (--no-verify)"
    elif count := len(one.damage):
        rows["verified"] = f"{count} file{'s are' if count > 1 else ' is'} not as written"
    if one.unknown:
        rows["weights"] = f"not looked at: {one.unknown}"
    elif one.lacking:
        rows["weights"] = "not all of them are in its files"
    return _lined(rows, one.faults)


def _rows(checkpoint: SavedCheckpoint) -> dict[str, str]:
    manifest = checkpoint.manifest
    config = manifest["config"]
    sizes = _sizes(checkpoint)
    versions = checkpoint.versions
    parts = " + ".join(f"{name} {_size(size)}" for name, size in sizes.items() if size)
    total_steps = manifest.get("total_steps")
    ema = config.get("training", {}).get("ema")
    return {
        "step": f"{checkpoint.step:,}{f' of {total_steps:,}' if total_steps else ''}{_place(manifest)}",
        "model": _name_of(config["model"]),
        "layout": _layout(manifest),
        "pipeline": _pipeline(manifest.get("pipeline")),
        "optimizer": _optimizer(config["optimizer"]),
        "metrics": _metrics(manifest),
        "best": str(best_in(manifest) or ""),
        "average": f"of the weights, decay {ema['decay']:g}" if ema else "",
        "versions": ", ".join(
            f"{name} {versions[name]}" for name in _PACKAGES if versions.get(name)
        ),
        "written": _written(checkpoint),
        "weights": _weights(manifest.get("weights")),
        "files": f"{len(manifest['files']):,}, {_size(sum(sizes.values()))}: {parts}",
    }


def _weights(weights: Mapping[str, int] | None) -> str:
    """What every save of the run was held against; a checkpoint that lacked some of it was not
    written.
    """
    if weights is None:
        return ""
    return (
        f"{counted(weights['names'], 'tensor')} of {weights['elements']:,} numbers, all in its "
        "files"
    )


def _name_of(section: Mapping[str, Any]) -> str:
    """A section's object: a kind, one's own code's import path, or the type of what was handed over
    from Python.
    """
    return next(str(section[key]) for key in ("kind", "target", "object") if section.get(key))


def _place(manifest: Mapping[str, Any]) -> str:
    words = {"epoch": "epoch {:,}", "step_in_epoch": "step {:,} in it", "samples": "{:,} samples"}
    place = [
        text.format(manifest[name])
        for name, text in words.items()
        if manifest.get(name) is not None
    ]
    if place:
        return f" ({', '.join(place)})"
    return ""


def _layout(manifest: Mapping[str, Any]) -> str:
    config = manifest["config"]
    layout = manifest.get("layout", {})
    ranks = layout.get("world_size")
    if ranks:
        stated = [counted(ranks, "rank")]
    else:
        stated = []
    sizes = [f"{layout[name]} {noun}" for name, noun in _SIZES.items() if layout.get(name, 1) > 1]
    stated += (
        [" x ".join([*sizes, f"{layout['data_parallel_size']} data-parallel"])] if sizes else []
    )
    stated += [f"ZeRO stage {config['zero']['stage']}", str(config["precision"]["dtype"])]
    if layout:
        stated.append(
            f"{layout['global_size']:,} samples per step = {layout['micro_size']} x "
            f"{layout['accumulation_steps']} accumulation x {layout['data_parallel_size']}"
        )
    return ", ".join(stated)


def _pipeline(pipeline: Mapping[str, Any] | None) -> str:
    """First and last layer of every stage."""
    if pipeline is None:
        return ""
    layers = pipeline["layers"]
    bounds = pipeline.get("bounds") or [0, len(pipeline["layers"])]
    spans = (layers[start:stop] for start, stop in itertools.pairwise(bounds))
    return " | ".join(
        f"{span[0]} .. {span[-1]}" if len(span) > 1 else span[0] for span in spans if span
    )


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    lr = optimizer.get("lr")
    return f"{_name_of(optimizer)}{f', lr {lr:g}' if lr is not None else ''}"


def _metrics(manifest: Mapping[str, Any]) -> str:
    """The metrics that rate a checkpoint; one that is not finite is text in the manifest: JSON has
    no number for it.
    """
    found = manifest.get("metrics", {})
    shown = (name for name in found if name == "train/loss" or name.startswith("eval/"))
    return ", ".join(f"{name} {float(found[name]):.4g}" for name in shown)


def _written(checkpoint: SavedCheckpoint) -> str:
    """When it was saved; of an older release, which does not say so, the date of the file, of a
    copy perhaps.
    """
    stated = checkpoint.manifest.get("saved_at")
    if stated:
        when = datetime.fromisoformat(stated)
    else:
        when = datetime.fromtimestamp((checkpoint.path / MANIFEST).stat().st_mtime)
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _sizes(checkpoint: SavedCheckpoint) -> dict[str, int]:
    """Bytes by what the files hold, told by their names."""
    piped = "pipeline" in checkpoint.manifest
    whole = checkpoint.manifest["config"]["zero"]["stage"] == 0 and not piped
    sizes = {"weights": 0, "optimizer": 0, "weights and optimizer": 0, "rest": 0}
    for name, record in checkpoint.manifest["files"].items():
        if OPTIMIZER_FILE.fullmatch(name) or name.startswith(f"{SWAPPED}/"):
            kind = "optimizer"
        elif LAYER_FILE.fullmatch(name):
            kind = "weights"
        elif MODEL_FILE.fullmatch(
            name
        ):  # a pipeline's weights lie in its layers, and its optimizer here
            if whole:
                kind = "weights and optimizer"
            elif piped:
                kind = "optimizer"
            else:
                kind = "weights"
        else:
            kind = "rest"
        sizes[kind] += record["num_bytes"]
    return sizes


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            if unit == "bytes":
                return f"{num_bytes:.0f} {unit}"
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _table(found: list[Inspected]) -> Iterator[str]:
    """A line for each checkpoint of a run, and one more for each damaged file."""
    latest = latest_tag(found[0].path.parent)
    for one in found:
        stated = [f"{one.path.name:<20}"]
        if one.checkpoint is not None:
            size = _size(sum(_sizes(one.checkpoint).values()))
            stated += [f"{size:>10}", _written(one.checkpoint), _metrics(one.checkpoint.manifest)]
        stated.append("latest" if one.path.name == latest else "")
        if one.damage is not None:
            stated.append("damaged" if one.faults else "sound")
        yield "  ".join(filter(None, stated))
        yield from (f"  damaged: {one.path.name}/{line}" for line in one.faults)
    for path in replaced_folders(found[0].path.parent):
        yield (
            f"{path.name:<20}  {_size(size_of(path)):>10}  set aside by a resume from an "
            "earlier step"
        )


def _as_json(one: Inspected) -> dict[str, Any]:
    """The manifest without its list of files, whose sizes are summed up, and the verdict."""
    stated = {"path": str(one.path), "verified": one.damage is not None, "damage": one.faults}
    if one.checkpoint is None:
        return stated
    manifest = dict(one.checkpoint.manifest)
    num_files = len(manifest.pop("files"))
    _ = manifest.pop("sha256", None)
    sums = {
        "num_files": num_files,
        "num_bytes": _sizes(one.checkpoint),
        "written": _written(one.checkpoint),
    }
    return stated | manifest | sums
