"""A manifest forged together with its hash: with any content, it is refused without
a traceback.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.manifest import list_checkpoints, seal
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.config.load import config_from_values
from framework.errors import ConfigError
from tests.checkpoint.test_every_fault import LAYOUT, before


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    before(tmp_path / "run")
    return tmp_path / "run"


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "global_step20" / "manifest.json").read_text())
    manifest.pop("sha256")
    return manifest


RECORD = {"num_bytes": 2700, "sha256": "0" * 64}
FORGED: dict[str, dict[str, Any]] = {
    "files-is-a-list": {"files": ["weights.pt"]},
    "files-is-null": {"files": None},
    "files-is-a-number": {"files": 3},
    "record-is-a-list": {"files": {"weights.pt": [2700, "0"]}},
    "record-is-null": {"files": {"weights.pt": None}},
    "record-lacks-size": {"files": {"weights.pt": {"sha256": "0" * 64}}},
    "record-has-more": {"files": {"weights.pt": RECORD | {"mode": 0o777}}},
    "size-is-nan": {"files": {"weights.pt": RECORD | {"num_bytes": float("nan")}}},
    "size-is-infinite": {"files": {"weights.pt": RECORD | {"num_bytes": float("inf")}}},
    "size-is-negative": {"files": {"weights.pt": RECORD | {"num_bytes": -1}}},
    "size-is-text": {"files": {"weights.pt": RECORD | {"num_bytes": "2700"}}},
    "size-is-true": {"files": {"weights.pt": RECORD | {"num_bytes": True}}},
    "hash-is-a-number": {"files": {"weights.pt": RECORD | {"sha256": 0}}},
    "name-with-a-null": {"files": {"weights\0.pt": RECORD}},
    "name-leads-out": {"files": {"a/../../../victim": RECORD}},
    "name-is-absolute": {"files": {"/etc/passwd": RECORD}},
    "config-is-a-list": {"config": []},
    "config-is-null": {"config": None},
    "world-size-is-text": {"layout": {"world_size": "2"}},
    "world-size-is-true": {"layout": {"world_size": True}},
    "world-size-is-zero": {"layout": {"world_size": 0}},
    "steps-per-epoch-is-text": {"steps_per_epoch": "11"},
    "total-steps-is-a-list": {"total_steps": [60]},
    "number-of-samples-is-text": {"num_train_samples": "1437"},
    "order-is-text": {"order": "computed"},
    "order-is-null": {"order": None},
    "pipeline-is-text": {"pipeline": "2"},
    "pipeline-without-layers": {"pipeline": {}},
    "splits-are-a-list": {"tensor": [0, [4]]},
    "split-is-null": {"tensor": {"weight": None}},
    "split-lacks-its-sections": {"tensor": {"weight": [0]}},
    "split-along-a-text": {"tensor": {"weight": ["0", [4]]}},
    "sections-are-a-number": {"tensor": {"weight": [0, 4]}},
    "section-is-negative": {"tensor": {"weight": [0, [4, -4]]}},
    "tensor-size-is-zero": {"layout": LAYOUT | {"tensor_size": 0}},
    "layout-is-text": {"layout": "2x2"},
    "layout-is-null": {"layout": None},
    "layout-lacks-its-size": {"layout": {"world_size": 1, "pipe_size": 1}},
    "layout-holds-nan": {"layout": {"global_size": float("nan")}},
    "step-is-text": {"step": "20"},
    "step-is-another": {"step": 30},
    "step-is-nan": {"step": float("nan")},
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_is_no_checkpoint(forged: Path, case: str) -> None:
    (forged / "global_step20" / "manifest.json").write_text(
        seal(manifest_of(forged) | FORGED[case])
    )
    found, _ = find_sound_checkpoint("auto", run_checkpoints=forged)
    assert found is not None
    assert found.step == 10
    with pytest.raises(
        ConfigError, match=r"there is no finished checkpoint.*\[checkpoint-not-found\]"
    ):
        find_sound_checkpoint(str(forged / "global_step20"), run_checkpoints=forged)


def test_the_same_manifest_unforged_is_one(forged: Path) -> None:
    tensor = {"layout": LAYOUT | {"tensor_size": 2}, "tensor": {"weight": [1, [8, 8, 16]]}}
    (forged / "global_step20" / "manifest.json").write_text(seal(manifest_of(forged) | tensor))
    assert [checkpoint.step for checkpoint in list_checkpoints(forged)] == [10, 20]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"text"',
        "{",
        "\x00" * 100,
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format": 2}',
        "1" * 100_000,
        '{"format": 2, "step": 1' + "0" * 10_000 + "}",
    ],
)
def test_a_text_that_is_no_manifest_is_no_checkpoint(forged: Path, text: str) -> None:
    (forged / "global_step20" / "manifest.json").write_text(text)
    began = time.process_time()
    assert [checkpoint.step for checkpoint in list_checkpoints(forged)] == [10]
    assert time.process_time() - began < 5


def test_deep_nesting_under_a_right_hash_is_no_checkpoint(forged: Path) -> None:
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    shallow = manifest_of(forged)
    (forged / "global_step20" / "manifest.json").write_text(seal(shallow | {"files": deep}))
    assert [checkpoint.step for checkpoint in list_checkpoints(forged)] == [10]


def test_bytes_that_are_no_text_are_no_checkpoint(forged: Path) -> None:
    (forged / "global_step20" / "manifest.json").write_bytes(b"\xff\xfe{}\x80")
    assert [checkpoint.step for checkpoint in list_checkpoints(forged)] == [10]


def test_a_manifest_without_end_is_not_read_to_its_end(forged: Path) -> None:
    """A sparse file of a terabyte, which costs its author nothing."""
    with (forged / "global_step20" / "manifest.json").open("wb") as stream:
        stream.truncate(1 << 40)
    began = time.process_time()
    assert [checkpoint.step for checkpoint in list_checkpoints(forged)] == [10]
    assert time.process_time() - began < 10


def test_a_file_without_end_is_damage_before_it_is_read(forged: Path) -> None:
    with (forged / "global_step20" / "weights.pt").open("r+b") as stream:
        stream.truncate(1 << 40)
    began = time.process_time()
    found, refused = find_sound_checkpoint("auto", run_checkpoints=forged)
    assert time.process_time() - began < 10
    assert found is not None
    assert found.step == 10
    assert "global_step20/weights.pt: 1,099,511,627,776 bytes where" in refused[0]


def test_a_config_of_another_program_is_no_reason_for_a_traceback(forged: Path) -> None:
    from framework.checkpoint import resumable

    manifest = manifest_of(forged)
    odd = {
        "model": {"kind": "another"},
        "": {"": [{}]},
        "zero": {"stage": 3, "sub_group_size": [{}]},
    }
    changes = {"config": manifest["config"] | odd, "layout": LAYOUT | {"global_size": 32}}
    (forged / "global_step20" / "manifest.json").write_text(seal(manifest | changes))
    checkpoint = list_checkpoints(forged)[-1]
    with pytest.raises(ConfigError, match=r"\[resume-config-differs\]"):
        resumable.check_resumable(
            checkpoint,
            config=config_from_values({}).to_dict(),
            global_size=32,
            steps_per_epoch=1,
            data={},
        )
    shutil.rmtree(forged)
