"""One reading of a manifest: `inspect` and `resume` judge every one alike, whatever types it holds,
and none costs long.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.manifest import read_checkpoint, seal
from framework.checkpoint.resumable import (
    check_movable,
    check_resumable,
    describe_changes,
    describe_versions,
    needs_resharding,
)
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.commands.inspect import run_inspect
from framework.config.load import config_from_values
from framework.errors import ConfigError, StorageError
from tests.checkpoint.small_checkpoints import CONFIG, LAYOUT, write

ODD: tuple[Any, ...] = (
    None,
    [],
    [[0]],
    {},
    {"": None},
    "",
    "x\x1b[2J",
    0,
    -1,
    1.5,
    True,
    10**30,
    10**4000,
    float("nan"),
    float("inf"),
    1e300,
)
FULL = {
    "epoch": 2,
    "step_in_epoch": 0,
    "samples": 80,
    "total_steps": 60,
    "num_train_samples": 1437,
    "data_sha256": "0" * 64,
    "metrics": {"train/loss": 0.5, "eval/loss": "nan"},
    "saved_at": "2026-11-21T19:38:16+00:00",
    "best": {"metric": "eval/loss", "value": 0.25, "step": 9, "best_is": "min"},
    "versions": {"dsf-trainer": "0.1.0", "torch": "2.15.0"},
    "pipeline": {"layers": ["a", "b"], "bounds": [0, 1, 2]},
    "config": config_from_values(
        {"run": {"name": "x"}, "training": {"ema": {"decay": 0.9}}}
    ).to_dict(),
}


def places(manifest: Mapping[str, Any], *, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Every key, sections of the config and their keys included."""
    for key, value in manifest.items():
        yield (key,)
        if isinstance(value, Mapping) and depth < 2:
            yield from ((key, *rest) for rest in places(value, depth=depth + 1))


def changed(manifest: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    found: Any = copy.deepcopy(dict(manifest))
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return dict(found)


def resumes(folder: Path) -> bool:
    """Whether a run would go on from it, or refuse it for what it is, in a line."""
    try:
        checkpoint, _ = find_sound_checkpoint("auto", run_checkpoints=folder)
    except StorageError:
        return False
    assert checkpoint is not None
    description = {
        "layout": LAYOUT,
        "config": CONFIG,
        "num_train_samples": 1437,
        "data_sha256": None,
    }
    for judge in (
        lambda: check_resumable(
            checkpoint, config=CONFIG, global_size=8, steps_per_epoch=4, data=description
        ),
        lambda: check_movable(checkpoint, description=description),
    ):
        try:
            judge()
        except ConfigError:
            continue
    needs_resharding(checkpoint, description=description)
    describe_changes(checkpoint, config=CONFIG)
    describe_versions(checkpoint, versions={})
    return True


@pytest.mark.slow
def test_inspect_and_resume_judge_any_type_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 10)
    whole = {
        name: value
        for name, value in (dict(checkpoint.manifest) | FULL).items()
        if name != "sha256"
    }
    file, refused = checkpoint.path / "manifest.json", 0
    file.write_text(seal(whole))
    assert (run_inspect(str(tmp_path), as_json=False, verify=True), resumes(tmp_path)) == (0, True)
    keys = list(places(whole))
    assert len(keys) > 80
    for number, place in enumerate(keys):
        # Every value at the keys that readers look at, and of the many keys of the config a part of
        # the values at each.
        few = len(place) > 2 and place[1] not in ("zero", "precision", "optimizer", "model")
        for value in ODD[number % 4 :: 4] if few else ODD:
            try:
                file.write_text(seal(changed(whole, place, value)))
            except ValueError:  # Python itself writes no number as long
                continue
            code = run_inspect(str(checkpoint.path), as_json=bool(number % 2), verify=True)
            assert (code == 0) == resumes(tmp_path), (place, value)
            assert code in (0, 74)
            assert "\x1b" not in capsys.readouterr().out
            refused += code != 0
    assert refused > 300


@pytest.mark.parametrize("end", ["", " ", "\n "])
def test_without_its_last_newline_it_is_not_whole(end: str, tmp_path: Path) -> None:
    (checkpoint,) = write(tmp_path, 10)
    file = checkpoint.path / "manifest.json"
    file.write_text(file.read_text().removesuffix("\n") + end)
    assert read_checkpoint(checkpoint.path) is None
    assert not resumes(tmp_path)


def test_a_manifest_that_is_too_large_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 10)
    files = {f"f{number}": {"num_bytes": 3, "sha256": "0" * 64} for number in range(80_000)}
    own = {name: value for name, value in checkpoint.manifest.items() if name != "sha256"} | {
        "files": files
    }
    (checkpoint.path / "manifest.json").write_text(json.dumps(own))
    began = time.process_time()
    assert run_inspect(str(tmp_path), as_json=False, verify=True) == 74
    assert time.process_time() - began < 3
    assert "manifest.json: it is larger than 8 MiB" in capsys.readouterr().out
    assert not resumes(tmp_path)


def test_a_model_of_ones_own_has_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint,) = write(tmp_path, 10)
    own = {name: value for name, value in checkpoint.manifest.items() if name != "sha256"}
    for model in ({"target": "my.nets:Net", "args": {}}, {"object": "my.nets.Net"}):
        (checkpoint.path / "manifest.json").write_text(
            seal(own | {"config": own["config"] | {"model": model}})
        )
        run_inspect(str(tmp_path), as_json=False, verify=True)
        assert (
            f"model      {model.get('target') or model.get('object')}\n" in capsys.readouterr().out
        )
