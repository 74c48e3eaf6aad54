"""Checkpoints on disk: their manifest, and `SavedCheckpoint`, a checkpoint that was read through it.

Reading a manifest: text to values of the types that every reader relies on, so that all of them judge it alike.

Its seal says that nothing was changed by chance. Who changes it on purpose computes the seal anew, and can write
anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.names import MANIFEST, REPLACED, TAG, named_folders
from framework.checkpoint.unverified import irregular
from framework.checkpoint.verification import Verification
from framework.system.files import FileRecord, read_regular

FORMAT: Final = 2
SEAL: Final = "sha256"
# A line for each file and one for each metric: a checkpoint of a thousand ranks needs about 300 KB.
LONGEST_BYTES: Final = 8 << 20
_LONGEST_NUMBER: Final = 40
_LARGEST_COUNT: Final = 1 << 63
_NAMES: Final = ("kind", "target", "object")
_COUNTS: Final = ("steps_per_epoch", "total_steps", "num_train_samples", "epoch", "step_in_epoch", "samples")
_LAYOUT: Final = frozenset(
    {"world_size", "data_parallel_size", "pipe_size", "global_size", "micro_size", "accumulation_steps"}
)


def read_manifest(text: bytes, *, step: int) -> dict[str, Any] | None:
    """The manifest of the checkpoint of a step; None where the text is not whole, was changed, or holds other types."""
    if len(text) > LONGEST_BYTES or not text.endswith(b"\n"):
        return None
    try:
        manifest: Any = json.loads(text, parse_constant=_refuse, parse_int=_whole, parse_float=_finite)
        is_ours = (
            isinstance(manifest, dict) and manifest.get(SEAL) == hash_of(manifest) and _is_well_formed(manifest, step)
        )
    except (ValueError, RecursionError, OverflowError):
        return None
    return manifest if is_ours else None


def hash_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the seal."""
    own = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _whole(text: str) -> int:
    return int(text) if len(text) <= _LONGEST_NUMBER else int(_refuse(text))


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _is_well_formed(manifest: Mapping[str, Any], step: int) -> bool:
    files, layout = manifest.get("files"), manifest.get("layout")
    return (
        _is_count(manifest.get("format"))
        and manifest["format"] == FORMAT
        and _is_count(manifest.get("step"))
        and manifest["step"] == step
        and all(manifest.get(name) is None or _is_count(manifest[name]) for name in _COUNTS)
        and isinstance(files, dict)
        and all(_is_inside(name) and _is_record(record) for name, record in files.items())
        and isinstance(layout, dict)
        and layout.keys() >= _LAYOUT
        and all(_is_count(value) and value > 0 for value in layout.values())
        and _is_config(manifest.get("config"))
        and _is_pipeline(manifest.get("pipeline", {"layers": []}))
        and _is_measured(manifest)
        and _is_about_its_writer(manifest)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_config(config: Any) -> bool:
    """Every section is one; those that every reader looks into are there."""
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        return False
    run, zero, precision, optimizer, model, training, parallel = (
        config.get(name, {}) for name in ("run", "zero", "precision", "optimizer", "model", "training", "parallel")
    )
    ema = training.get("ema")
    return (
        isinstance(run.get("name"), str)
        and type(zero.get("stage")) is int
        and 0 <= zero["stage"] <= 3
        and all(isinstance(zero.get(name), (dict, type(None))) for name in ("offload_optimizer", "offload_param"))
        and isinstance(precision.get("dtype"), str)
        and all(
            isinstance(one, str) for one in (*map(model.get, _NAMES), *map(optimizer.get, _NAMES)) if one is not None
        )
        and any(map(model.get, _NAMES))
        and any(map(optimizer.get, _NAMES))
        and (optimizer.get("lr") is None or _is_number(optimizer["lr"]))
        and (ema is None or (isinstance(ema, dict) and _is_number(ema.get("decay"))))
        and isinstance(parallel.get("partition"), (str, type(None)))
    )


def _is_pipeline(pipeline: Any) -> bool:
    if not isinstance(pipeline, dict) or not isinstance(pipeline.get("layers"), list):
        return False
    layers, bounds = pipeline["layers"], pipeline.get("bounds")
    return all(isinstance(layer, str) for layer in layers) and (
        bounds is None
        or (
            isinstance(bounds, list)
            and all(map(_is_count, bounds))
            and all(start < stop for start, stop in pairwise(bounds))
            and (bounds[:1], bounds[-1:]) == ([0], [len(layers)])
        )
    )


def _is_measured(manifest: Mapping[str, Any]) -> bool:
    """Metrics are numbers, or texts for what JSON has no number for."""
    metrics, best = manifest.get("metrics", {}), manifest.get("best")
    is_best = best is None or (
        isinstance(best, dict)
        and isinstance(best.get("metric"), str)
        and _is_number(best.get("value"))
        and _is_count(best.get("step"))
    )
    return (
        is_best
        and isinstance(metrics, dict)
        and all(_is_number(value) or value in ("inf", "-inf", "nan") for value in metrics.values())
    )


def _is_about_its_writer(manifest: Mapping[str, Any]) -> bool:
    versions, saved_at = manifest.get("versions", {}), manifest.get("saved_at")
    if saved_at is not None:
        if not isinstance(saved_at, str):
            return False
        datetime.fromisoformat(saved_at).astimezone()
    is_known = isinstance(versions, dict) and all(isinstance(each, (str, type(None))) for each in versions.values())
    return is_known and isinstance(manifest.get("data_sha256"), (str, type(None)))


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and record.keys() == {"num_bytes", "sha256"}
        and _is_count(record["num_bytes"])
        and isinstance(record["sha256"], str)
    )


def _is_inside(name: str) -> bool:
    """Check that a name stays inside the checkpoint: a manifest that somebody sealed anew must not point at files
    elsewhere.
    """
    path = Path(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts


# Checkpoints on disk: which there are, and whether the bytes of one are those that were written. It is DeepSpeed's
# layout, ``checkpoints/global_step<N>/`` and ``checkpoints/latest``, plus ``manifest.json`` in each checkpoint, which
# says what is in it: files, sizes and SHA-256, step, topology, versions and the resolved config. A checkpoint gets
# its name only when it is complete and on disk (`checkpointer`), so that one with a name is finished.


_FORMER_NAME: Final = "dsframework"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A finished checkpoint: ``folder/tag``, and what its manifest says.

    One without a manifest, which DeepSpeed wrote by itself, is not `verified`; what its manifest would say has still to
    be read out of its files.
    """

    folder: Path
    tag: str
    manifest: Mapping[str, Any]
    verified: bool = True

    @property
    def step(self) -> int:
        """Optimizer steps taken when it was written."""
        return int(self.manifest["step"])

    @property
    def path(self) -> Path:
        """The checkpoint's own folder."""
        return self.folder / self.tag

    @property
    def versions(self) -> Mapping[str, Any]:
        """Releases that wrote it, by package; empty where unknown. Older ones noted the project under its former
        name.
        """
        found = self.manifest.get("versions")
        if not isinstance(found, Mapping):
            return {}
        return {"dsf-trainer" if name == _FORMER_NAME else name: version for name, version in found.items()}

    def damage(self) -> list[str]:
        """Find files that are not as they were written, a line for each; reads every byte.

        Nothing of a checkpoint is deserialised before this has found nothing: a flipped bit would load silently, and a
        file that somebody put in its place could run code. Without a manifest only links and the like can be told.
        """
        if not self.verified:
            return sorted(irregular(self.path))
        work = Verification(self.path, self.records)
        try:
            return sorted([*self.unexpected_files(), *work.damage()])
        finally:
            work.close()

    @property
    def records(self) -> dict[str, FileRecord]:
        """Its files, as they were written."""
        return {name: FileRecord(**record) for name, record in self.manifest["files"].items()}

    def unexpected_files(self) -> list[str]:
        """A line for each file too many: DeepSpeed finds some of its files by pattern, so that it would be read as
        well.
        """
        return sorted(self._unexpected_files())

    def _unexpected_files(self) -> Iterator[str]:
        expected = {*self.manifest["files"], MANIFEST}
        for place, folders, names in os.walk(self.path):
            for name in (*folders, *names):
                path = Path(place, name)
                relative = path.relative_to(self.path).as_posix()
                if path.is_symlink():
                    yield f"{relative}: it is a symbolic link"
                elif not path.is_dir() and relative not in expected:
                    yield f"{relative}: it was not there when the checkpoint was written"


def seal(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, with a hash over itself."""
    return json.dumps({**manifest, SEAL: hash_of(manifest)}, indent=2) + "\n"


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Finished checkpoints in a ``checkpoints`` folder, oldest first; without those that the file system does not give
    out.

    Raises:
        OSError: the folder is there and does not answer.
    """
    found = []
    for _, path in named_folders(folder):
        with contextlib.suppress(OSError):  # `diagnose` tells it
            found.append(read_checkpoint(path))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def read_checkpoint(path: Path) -> SavedCheckpoint | None:
    """The checkpoint in a folder; None where there is none of this format, or its manifest is not as it was written.

    Raises:
        OSError: the file system does not give it out now: it may next time, and this is not a checkpoint to start
        without.
    """
    name = TAG.match(path.name) or REPLACED.match(path.name)
    if name is None or path.is_symlink():
        return None
    try:
        text = read_regular(path / MANIFEST, num_bytes=LONGEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = read_manifest(text, step=int(name["step"])) if text is not None else None
    return SavedCheckpoint(path.parent, path.name, manifest) if manifest is not None else None


def diagnose(path: Path) -> str:
    """Why a folder with the name of a checkpoint is none that can be read: what of it, and the reason."""
    try:
        if path.is_symlink():
            return "it is a symbolic link"
        text = read_regular(path / MANIFEST, num_bytes=LONGEST_BYTES + 1)
    except FileNotFoundError:
        return f"{MANIFEST}: it is missing"
    except OSError as error:
        return f"{MANIFEST}: it cannot be read: {error.strerror or error}"
    if text is None:
        return f"{MANIFEST}: it is not a regular file"
    if len(text) > LONGEST_BYTES:
        return f"{MANIFEST}: it is larger than {LONGEST_BYTES >> 20} MiB, which no checkpoint needs"
    return f"{MANIFEST}: it has changed since it was written, or is of another release"
