"""What `inspect` reports of sound, damaged and missing checkpoints."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.manifest import SavedCheckpoint, seal
from framework.checkpoint.resume_point import set_aside_later
from framework.cli import main
from tests.checkpoint.small_checkpoints import make_checkpointer, write
from tests.checkpoint.test_damage import refuse_to_open

MANIFEST_KEYS = {"step", "epoch", "config", "layout", "steps_per_epoch", "format"}


def inspect(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    code = main(["inspect", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_sound_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint,) = write(tmp_path, 1200)
    code, stated = inspect(capsys, checkpoint.path)
    assert code == 0
    assert "step       1,200" in stated
    assert "ZeRO stage 0, fp32" in stated
    assert "files      1, 4 bytes: rest 4 bytes" in stated
    assert stated.endswith("verified   every file is as it was written\n")


def test_a_run_that_failed_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = tmp_path / "checkpoints"
    write(checkpoints, 100, 200)
    start = {"kind": "start", "step": 0}
    failed = {"kind": "end", "step": 200, "error": "callback Bad 1: boom"}
    for events, line in (
        ([start, failed], "run        failed after step 200: callback Bad 1: boom\n"),
        ([start, failed, {"kind": "resume", "step": 100}], ""),
    ):
        (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
        code, stated = inspect(capsys, tmp_path)
        assert code == 0
        assert ("failed" in stated) == bool(line)
        assert stated.endswith(line)


def reseal(checkpoint: SavedCheckpoint, **change: Any) -> None:
    """Write another manifest, with its hash."""
    own = {name: value for name, value in checkpoint.manifest.items() if name != "sha256"}
    (checkpoint.path / "manifest.json").write_text(seal(own | change), encoding="utf-8")


def test_the_best_so_far_and_the_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 1200)
    assert "best " not in inspect(capsys, checkpoint.path)[1]
    config = checkpoint.manifest["config"]
    reseal(
        checkpoint,
        best={"metric": "eval/loss", "value": 0.25, "step": 900, "best_is": "min"},
        config=config | {"training": {"ema": {"decay": 0.999}}},
    )
    code, stated = inspect(capsys, checkpoint.path)
    assert code == 0
    assert (
        "best       eval/loss 0.2500 at step 900\naverage    of the weights, decay 0.999\n"
        in stated
    )


def test_the_ranks_that_share_weights_and_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 10)
    sizes = {"world_size": 8, "data_parallel_size": 2, "tensor_size": 2, "sequence_size": 2}
    reseal(checkpoint, layout=checkpoint.manifest["layout"] | sizes, tensor={"weight": [0, [4]]})
    code, stated = inspect(capsys, checkpoint.path)
    assert code == 0
    assert (
        "layout     8 ranks, 2 tensor-parallel x 2 sequence-parallel x 2 data-parallel, ZeRO stage 0"
        in stated
    )


def test_metrics_that_are_not_finite_are_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpointer(tmp_path).save(
        10, {"train/loss": 0.5, "eval/perplexity": math.inf, "eval/loss": math.nan}
    )
    expected = "train/loss 0.5, eval/perplexity inf, eval/loss nan"
    code, stated = inspect(capsys, tmp_path / "global_step10")
    assert (code, f"metrics    {expected}\n" in stated) == (0, True)
    write(tmp_path, 20)
    code, stated = inspect(capsys, tmp_path)  # as a table
    assert (code, f"  {expected}  sound\n" in stated) == (0, True)


def test_when_it_was_saved_is_reported_by_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 10)
    saved_at = datetime.fromisoformat(checkpoint.manifest["saved_at"])
    assert abs(saved_at.timestamp() - time.time()) < 600
    os.utime(checkpoint.path / "manifest.json", (1, 1))  # as in a copy
    assert (
        f"written    {saved_at.astimezone():%Y-%m-%d %H:%M:%S}"
        in inspect(capsys, checkpoint.path)[1]
    )
    before = {
        name: value
        for name, value in checkpoint.manifest.items()
        if name not in ("sha256", "saved_at")
    }
    (checkpoint.path / "manifest.json").write_text(seal(before), encoding="utf-8")
    os.utime(checkpoint.path / "manifest.json", (86400, 86400))
    assert "written    1970-01-0" in inspect(capsys, checkpoint.path)[1]  # of an earlier release


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint,) = write(tmp_path, 10)
    (checkpoint.path / "weights").write_text("11", encoding="utf-8")
    code, stated = inspect(capsys, checkpoint.path)
    assert code == 74
    assert "verified   1 file is not as written" in stated
    assert "damaged    weights: its content has changed since it was written" in stated
    code, stated = inspect(capsys, checkpoint.path, "--no-verify")
    assert (code, "verified   no (--no-verify)" in stated) == (0, True)


def test_a_run_lists_its_checkpoints_oldest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = write(tmp_path / "checkpoints", 9, 20, 100)
    (checkpoints[1].path / "weights").unlink()
    (tmp_path / "checkpoints" / "global_step30").mkdir()
    (tmp_path / "checkpoints" / "global_step20.replaced").mkdir()
    code, stated = inspect(capsys, tmp_path)
    assert code == 74
    lines = stated.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("global")] == [
        "global_step9",
        "global_step20",
        "global_step30",
        "global_step100",
        "global_step20.replaced",
    ]
    assert lines[0].endswith("sound")
    assert lines[1].endswith("damaged")
    assert lines[2] == "  damaged: global_step20/weights: No such file or directory"
    assert lines[4] == "  damaged: global_step30/manifest.json: it is missing"
    assert lines[5].endswith("latest  sound")


@pytest.mark.parametrize(
    "change", ["", "{}", "[" * 100_000, '{"format": 2, "step": 10}', "changed"]
)
def test_a_manifest_that_was_changed_is_damage(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 10)
    file = checkpoint.path / "manifest.json"
    text = (
        file.read_text(encoding="utf-8").replace('"epoch": 2', '"epoch": 3')
        if change == "changed"
        else change
    )
    file.write_text(text, encoding="utf-8")
    code, stated = inspect(capsys, tmp_path)
    assert code == 74
    assert (
        "damaged    manifest.json: it has changed since it was written, or is of another release"
        in stated
    )


@pytest.mark.parametrize(
    "change",
    [
        {"config": 3},
        {"config": {}},
        {"total_steps": "x"},
        {"versions": 3},
        {"layout": {"world_size": []}},
        {"files": {"weights": 3}},
        {"pipeline": {}},
        {"metrics": {"eval/x": "y"}},
        {"best": 3},
        {"best": {"value": []}},
        {"saved_at": "soon"},
        {"saved_at": 3},
    ],
)
def test_a_manifest_that_was_sealed_anew_is_one_line(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = write(tmp_path, 10)
    reseal(checkpoint, **change)
    for words in ([], ["--json"], ["--no-verify"]):
        code, stated = inspect(capsys, checkpoint.path, *words)
        assert code == 74
        assert "manifest.json: " in stated
        assert "Traceback" not in stated


def test_json_for_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 9, 20)
    (tmp_path / "global_step9" / "manifest.json").unlink()
    code, stated = inspect(capsys, tmp_path, "--json")
    first, second = json.loads(stated)
    assert code == 74
    assert first == {
        "path": str(tmp_path / "global_step9"),
        "verified": True,
        "damage": ["manifest.json: it is missing"],
    }
    assert second.keys() >= MANIFEST_KEYS
    assert (second["step"], second["num_files"], second["damage"]) == (20, 1, [])
    assert not second.keys() & {"files", "sha256"}


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, reason in (
        (tmp_path, "there is no checkpoint"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        code, stated = inspect(capsys, path)
        assert code == 78
        assert stated.startswith(f"inspect = {path}: {reason}; name a")
        assert stated.endswith("[checkpoint-not-found]\n")


@pytest.mark.slow
def test_it_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, 5)
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'deepspeed', 'numpy')));"
        f"from framework.cli import main; sys.exit(main(['inspect', {str(tmp_path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "every file is as it was written" in done.stdout


def test_one_that_was_set_aside_is_read_and_states_how_to_get_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = write(tmp_path, 10, 20)[0]
    (aside,) = set_aside_later(start)
    code, stated = inspect(capsys, aside)
    assert code == 0
    assert "step       20" in stated
    assert (
        f"replaced   set aside by a resume from an earlier step; mv {aside} {tmp_path}/global_step20 brings it back"
        in stated
    )
    assert stated.endswith("verified   every file is as it was written\n")
    write(tmp_path, 30)
    assert "\nglobal_step20.replaced  " in inspect(capsys, tmp_path)[1]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_manifest_that_storage_does_not_give_out_hides_no_other(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = write(tmp_path, 10, 20)
    refuse_to_open(monkeypatch, old.path / "manifest.json", number)
    code, stated = inspect(capsys, tmp_path)
    assert code == 74
    assert (
        f"  damaged: global_step10/manifest.json: it cannot be read: {os.strerror(number)}\n"
        in stated
    )
    assert "sound" in stated.splitlines()[-1]


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_a_name_that_no_file_can_have_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = str(tmp_path / ("x" * 300))
    assert main([command, long]) == 74
    stated = capsys.readouterr()
    assert (stated.out, stated.err.count("\n")) == ("", 1)
    assert "File name too long" in stated.err
    assert stated.err.endswith("[checkpoint-not-read]\n")
