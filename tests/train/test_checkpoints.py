"""Which checkpoints there are, which one is chosen, what is kept, what a failure leaves: with an engine of one file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.config.load import config_from_values
from framework.errors import ConfigError, StorageError
from framework.files import FileRecord
from framework.train import publication
from framework.train.checkpointer import Checkpointer
from framework.train.choice import find_checkpoint, set_aside_later
from framework.train.layout_change import has_moved, told_move
from framework.train.resumable import check_resumable
from framework.train.retention import Retention
from framework.train.saved import SavedCheckpoint, list_checkpoints, seal

CONFIG = config_from_values({"run": {"name": "x"}}).to_dict()
LAYOUT = {"world_size": 2, "data_parallel_size": 2, "global_size": 8, "micro_size": 4, "accumulation_steps": 1, "pipe_size": 1}


class OneFileEngine:
    """Saves its step in one file; may fail, and notes what it finds where it writes."""

    def __init__(self, *, fails: BaseException | None = None) -> None:
        self.fails = fails
        self.found: list[list[str]] = []

    def save(self, folder: Path, tag: str, state: Mapping[str, Any]) -> Mapping[str, FileRecord]:
        place = folder / tag
        self.found.append(sorted(path.name for path in place.iterdir()) if place.exists() else [])
        place.mkdir(parents=True, exist_ok=True)
        (place / "weights").write_text("half", encoding="utf-8")
        if self.fails is not None:
            raise self.fails
        (place / "weights").write_text(str(state["step"]), encoding="utf-8")
        return {}

    def train_step(self, micro_batches: Iterator[Any]) -> Any: ...
    def evaluate(self, batches: Iterable[tuple[Any, bool]]) -> Any: ...
    def load(self, folder: Path, tag: str) -> Any: ...
    def close(self) -> None: ...


def make_checkpointer(
    folder: Path, *, engine: OneFileEngine | None = None, keep_last: int = 100, is_main: bool = True,
    last_step: int | None = None,
) -> Checkpointer:
    return Checkpointer(
        engine or OneFileEngine(), folder, retention=Retention(keep_last), is_main=is_main, gather=lambda value: [value],
        last_step=last_step, position=lambda step: {"epoch": step // 4},
        description={"layout": LAYOUT, "config": CONFIG, "steps_per_epoch": 4},
    )  # fmt: skip


def write(folder: Path, *steps: int) -> list[SavedCheckpoint]:
    checkpointer = make_checkpointer(folder)
    for step in steps:
        checkpointer.save(step)
    return list_checkpoints(folder)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def find(resume: str | Path, run_checkpoints: Path) -> int | None:
    found = find_checkpoint(str(resume), run_checkpoints=run_checkpoints)
    return None if found is None else found.step


class TestWriting:
    def test_the_manifest_says_what_it_is_and_latest_names_it(self, tmp_path: Path) -> None:
        (checkpoint,) = write(tmp_path, 10)
        assert names(tmp_path) == ["global_step10", "latest"]
        assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step10"
        manifest = json.loads((checkpoint.path / "manifest.json").read_text(encoding="utf-8"))
        own = manifest.pop("sha256")
        assert manifest == {
            "format": 2,
            "saved_at": manifest["saved_at"],
            "step": 10,
            "layout": LAYOUT,
            "config": CONFIG,
            "epoch": 2,
            "steps_per_epoch": 4,
            "metrics": {},
            "files": {"weights": {"num_bytes": 2, "sha256": hashlib.sha256(b"10").hexdigest()}},
        }
        assert own == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        assert checkpoint.damage() == []

    def test_other_ranks_name_nothing(self, tmp_path: Path) -> None:
        make_checkpointer(tmp_path, is_main=False).save(1)
        assert names(tmp_path) == [".saving"]
        assert names(tmp_path / ".saving" / "global_step1") == ["weights"]

    def test_what_an_earlier_process_left_half_done_is_removed_first(self, tmp_path: Path) -> None:
        left = tmp_path / ".saving" / "global_step5"
        left.mkdir(parents=True)
        (left / "old_optimizer_state").touch()
        engine = OneFileEngine()
        make_checkpointer(tmp_path, engine=engine).save(5)
        assert engine.found == [[]]
        assert names(tmp_path / "global_step5") == ["manifest.json", "weights"]
        assert names(tmp_path) == ["global_step5", "latest"]

    def test_the_same_step_may_be_saved_again(self, tmp_path: Path) -> None:
        first, second = write(tmp_path, 5), write(tmp_path, 5)
        assert [len(first), len(second), second[0].damage()] == [1, 1, []]
        assert names(tmp_path) == ["global_step5", "latest"]

    @pytest.mark.parametrize(("keep_last", "kept"), [(1, [30]), (2, [20, 30]), (3, [9, 20, 30]), (9, [3, 9, 20, 30])])
    def test_the_newest_are_kept_by_number_not_by_name(self, tmp_path: Path, keep_last: int, kept: list[int]) -> None:
        checkpointer = make_checkpointer(tmp_path, keep_last=keep_last)
        for step in (3, 9, 20, 30):
            checkpointer.save(step)
        assert steps(tmp_path) == kept
        assert names(tmp_path) == sorted([*(f"global_step{step}" for step in kept), "latest"])

    def test_a_later_checkpoint_of_another_past_never_costs_the_new_one(self, tmp_path: Path) -> None:
        write(tmp_path, 10, 90)
        make_checkpointer(tmp_path, keep_last=1).save(20)
        assert steps(tmp_path) == [20, 90]

    def test_other_things_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        for name in ("best", "global_step1.replaced", "global_step_notes", "global_stepX"):
            (tmp_path / name).mkdir()
        (tmp_path / "global_step2").touch()
        make_checkpointer(tmp_path, keep_last=1).save(7)
        assert names(tmp_path) == [
            "best", "global_step1.replaced", "global_step2", "global_step7", "global_stepX", "global_step_notes", "latest",
        ]  # fmt: skip

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("torch says: full")])
    def test_a_failed_write_is_warned_of_and_leaves_the_last_good_one(
        self, tmp_path: Path, error: OSError, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path, 1)
        text = error.strerror or str(error)
        engine = OneFileEngine(fails=error)
        checkpointer = make_checkpointer(tmp_path, engine=engine)
        assert checkpointer.save(2) is False
        assert f"{tmp_path}/global_step2: the checkpoint cannot be written ({text})" in capsys.readouterr().err
        assert names(tmp_path) == ["global_step1", "latest"]
        assert find("auto", tmp_path) == 1
        engine.fails = None
        assert checkpointer.save(3) is True
        assert steps(tmp_path) == [1, 3]

    def test_the_last_save_of_a_run_must_succeed(self, tmp_path: Path) -> None:
        full = OSError(errno.ENOSPC, "No space left on device")
        checkpointer = make_checkpointer(tmp_path, engine=OneFileEngine(fails=full), last_step=2)
        assert checkpointer.save(1) is False
        with pytest.raises(StorageError, match=r"global_step2: .* \(No space left on device\).*\[checkpoint-not-written\]"):
            checkpointer.save(2)

    def test_another_ranks_failure_is_everybodys(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write(tmp_path, 1)
        checkpointer = make_checkpointer(tmp_path)
        answers = iter([["", ""], ["", "No space left on device"]])
        checkpointer._gather = lambda value: next(answers)
        assert checkpointer.save(2) is False
        assert "No space left on device" in capsys.readouterr().err
        assert names(tmp_path) == ["global_step1", "latest"]

    @pytest.mark.parametrize("num_bytes", [5, 1])
    def test_a_file_that_rank_0_does_not_see_is_a_failed_write(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int
    ) -> None:
        """Two hosts without a shared run folder: each writes on its own disk."""
        write(tmp_path, 1)
        checkpointer = make_checkpointer(tmp_path)
        elsewhere = {"weights" if num_bytes == 1 else "of_host_b": FileRecord(num_bytes, "0" * 64)}
        checkpointer._gather = lambda value: [value, elsewhere if isinstance(value, dict) else value]
        assert checkpointer.save(20) is False
        assert "is not whole where rank 0 looks: all hosts must share the run folder)" in capsys.readouterr().err
        assert names(tmp_path) == ["global_step1", "latest"]

    def test_an_error_that_is_not_about_storage_is_left_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="NCCL"):
            make_checkpointer(tmp_path, engine=OneFileEngine(fails=RuntimeError("NCCL"))).save(2)

    @pytest.mark.parametrize("name", ["manifest.json", "latest"])
    def test_a_manifest_that_cannot_be_written_is_a_failed_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        write(tmp_path, 1)
        real = publication.replace_text

        def full(path: Path, text: str) -> None:
            if path.name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, text)

        monkeypatch.setattr(publication, "replace_text", full)
        assert make_checkpointer(tmp_path).save(2) is False
        assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step1"

    def test_an_old_checkpoint_that_cannot_be_deleted_is_warned_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path, 1, 2)

        def forbidden(path: Path, **_: object) -> None:
            if path.name == ".leaving-global_step1":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(shutil, "rmtree", forbidden)
        make_checkpointer(tmp_path, keep_last=1).save(3)
        warning = capsys.readouterr().err
        assert warning.startswith(f"warning: {tmp_path}: an old checkpoint cannot be deleted (")
        assert "Permission denied" in warning
        assert warning.endswith("[checkpoint-not-deleted]\n")
        assert steps(tmp_path) == [2, 3], "what cannot be deleted is at least no longer resumed from"


class TestFinding:
    def test_never_and_auto(self, tmp_path: Path) -> None:
        assert find("never", tmp_path) is None
        assert find("auto", tmp_path / "nowhere") is None
        assert find("auto", tmp_path) is None
        write(tmp_path, 10, 9)
        assert find("never", tmp_path) is None
        assert find("auto", tmp_path) == 10

    @pytest.mark.parametrize(
        "manifest",
        [None, "", "{", "[]", "3", "null", '"text"', "\x00" * 20, '{"format": 2}', "[" * 100_000,
         '{"format": 1, "step": 9, "world_size": 2, "config": {}}', seal({"format": 1, "step": 9, "files": {}}),
         seal({"format": 2, "step": 8, "files": {}}), seal({"format": 2, "step": 9, "files": {"../x": {}}}),
         seal({"format": 2, "step": 9, "files": {"/x": {}}}), seal({"format": 2, "step": 9, "files": {}})[:-9] + '"}']
    )  # fmt: skip
    def test_an_unfinished_or_foreign_checkpoint_is_passed_over(self, tmp_path: Path, manifest: str | None) -> None:
        write(tmp_path, 4)
        unfinished = tmp_path / "global_step9"
        unfinished.mkdir()
        if manifest is not None:
            (unfinished / "manifest.json").write_text(manifest, encoding="utf-8")
        assert find("auto", tmp_path) == 4
        with pytest.raises(ConfigError, match="there is no finished checkpoint"):
            find(unfinished, tmp_path)

    @pytest.mark.parametrize(
        "tag", ["global_stepX", "global_step", "global_step-1", "global_step9.replaced", "step9", "global_step\uff19"]
    )
    def test_other_names_are_no_checkpoints(self, tmp_path: Path, tag: str) -> None:
        write(tmp_path, 4, 9)
        (tmp_path / "global_step9").rename(tmp_path / tag)
        assert find("auto", tmp_path) == 4

    def test_zeros_in_front_do_not_matter(self, tmp_path: Path) -> None:
        write(tmp_path, 4, 9)
        (tmp_path / "global_step9").rename(tmp_path / "global_step009")
        assert find("auto", tmp_path) == 9
        assert find(tmp_path / "global_step009", tmp_path) == 9

    @pytest.mark.parametrize(
        ("path", "step"),
        [("", 9), ("/", 9), ("/checkpoints", 9), ("/checkpoints/", 9), ("/checkpoints/global_step4", 4),
         ("/checkpoints/global_step4/", 4), ("/checkpoints/../checkpoints/global_step4", 4), ("/best", 4)],
    )  # fmt: skip
    def test_a_path_may_be_the_run_its_checkpoints_or_one_of_them(self, tmp_path: Path, path: str, step: int) -> None:
        run = tmp_path / "global_step_run"
        write(run / "checkpoints", 4, 9)
        (run / "best").symlink_to("checkpoints/global_step4")
        assert find(f"{run}{path}", tmp_path / "another") == step

    def test_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "checkpoints", 4, 9)
        monkeypatch.chdir(tmp_path)
        assert find(".", tmp_path) == 9
        monkeypatch.chdir(tmp_path / "checkpoints" / "global_step4")
        assert find(".", tmp_path) == 4

    @pytest.mark.parametrize(
        ("path", "reason"),
        [("nowhere", "there is no such folder"), ("empty", "there is no finished checkpoint"),
         ("file", "there is no finished checkpoint"), ("empty/../file", "there is no finished checkpoint"),
         ("file/checkpoints", "there is no such folder")],
    )  # fmt: skip
    def test_a_path_without_a_checkpoint_is_refused(self, tmp_path: Path, path: str, reason: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError) as caught:
            find(tmp_path / path, tmp_path)
        (problem,) = caught.value.problems
        assert (problem.kind, problem.key, problem.reason) == ("checkpoint-not-found", "checkpoint.resume", reason)

    def test_a_file_system_that_does_not_answer_is_not_an_empty_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 4)

        def stale(*_: object, **__: object) -> int:
            raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(os, "open", stale)
        with pytest.raises(StorageError, match=r"no checkpoint is sound: .*manifest.json: it cannot be read: Stale file"):
            find("auto", tmp_path)


class TestGoingBack:
    def test_later_checkpoints_are_set_aside_not_deleted(self, tmp_path: Path) -> None:
        start = write(tmp_path, 10, 20, 30)[0]
        assert [path.name for path in set_aside_later(start)] == ["global_step20.replaced", "global_step30.replaced"]
        assert steps(tmp_path) == [10]
        assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step10"
        assert (tmp_path / "global_step30.replaced" / "weights").read_text(encoding="utf-8") == "30"

    def test_twice(self, tmp_path: Path) -> None:
        start = write(tmp_path, 10, 20)[0]
        set_aside_later(start)
        write(tmp_path, 20)
        assert [path.name for path in set_aside_later(start)] == ["global_step20.replaced-1"]

    def test_nothing_is_later_than_the_newest(self, tmp_path: Path) -> None:
        start = write(tmp_path, 10, 20)[-1]
        before = names(tmp_path)
        assert set_aside_later(start) == []
        assert names(tmp_path) == before




def saved(config: Mapping[str, Any], **changes: Any) -> SavedCheckpoint:
    manifest = {"format": 2, "step": 10, "layout": LAYOUT, "steps_per_epoch": 4, "config": dict(config)} | changes
    return SavedCheckpoint(Path("runs/x/checkpoints"), "global_step10", json.loads(json.dumps(manifest)))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The text of every problem, for configs that are given as nested dicts or in full."""
    try:
        check_resumable(saved(before), config=now, global_size=8, steps_per_epoch=4)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def full(**sections: Any) -> dict[str, Any]:
    return config_from_values(sections).to_dict()


class TestResumable:
    def test_the_same_config_is(self) -> None:
        values: dict[str, Any] = {
            "optimizer": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]}, "zero": {"stage": 2, "reduce_bucket_size": 5e8},
            "model": {"target": "a:b", "args": {"sizes": [1, 2, {"deep": None}], "name": "x", "rate": 1e-8}},
            "deepspeed": {"aio": {"block_size": 1048576}},
        }  # fmt: skip
        assert differences(full(**values), full(**values)) == []

    @pytest.mark.parametrize(
        "sections",
        [{"training": {"max_epochs": 50}}, {"training": {"max_steps": 50, "log_every": 1}}, {"monitors": {"csv": False}},
         {"run": {"name": "other", "output_dir": "/data"}}, {"evaluation": {"every_steps": 5, "batch_size": 7}},
         {"checkpoint": {"every_steps": 5, "resume": "auto"}}, {"data": {"kind": "digits", "num_workers": 4}},
         {"zero": {"stage": 3}}, {"parallel": {"pipe": 2}}, {"precision": {"dtype": "bf16"}},
         {"batch": {"micro_size": 2, "accumulation_steps": 2}}],
    )  # fmt: skip
    def test_what_does_not_change_a_step_may_differ(self, sections: dict[str, Any]) -> None:
        assert differences(full(), full(**sections)) == []

    @pytest.mark.parametrize(
        ("sections", "line"),
        [
            ({"training": {"clip_grad_norm": 0.5}}, "training.clip_grad_norm = 0.5: the checkpoint PATH was trained with 1.0; "),
            ({"run": {"seed": 7}}, "run.seed = 7: the checkpoint PATH was trained with 0; "),
            ({"data": {"kind": "digits", "shuffle": False}}, "data.shuffle = false: the checkpoint PATH was trained with true; "),
            ({"optimizer": {"kind": "adamw", "betas": [0.9, 0.95]}},
             "optimizer.betas = [0.9, 0.95]: the checkpoint PATH was trained with [0.9, 0.999]; "),
            ({"deepspeed": {"prescale_gradients": True}},
             "deepspeed.prescale_gradients = true: the checkpoint PATH was trained without it; "),
        ],
    )  # fmt: skip
    def test_what_changes_a_step_may_not(self, sections: dict[str, Any], line: str) -> None:
        found = differences(full(), full(**sections))
        expected = line.replace("PATH", "runs/x/checkpoints/global_step10")
        assert any(text.startswith(expected) for text in found), found
        assert all(text.endswith("[resume-config-differs]") for text in found)

    def test_a_key_that_is_gone_has_no_value(self) -> None:
        (text,) = differences(full(deepspeed={"prescale_gradients": True}), full())
        assert text.startswith(
            "deepspeed.prescale_gradients: the checkpoint runs/x/checkpoints/global_step10 was trained with true"
        )

    def test_another_kind_shows_every_key_of_both(self) -> None:
        found = differences(full(), full(optimizer={"kind": "sgd"}))
        keys = [text.split(":")[0].split(" ")[0] for text in found]
        assert {"optimizer.kind", "optimizer.betas", "optimizer.momentum"} <= set(keys)
        assert keys == sorted(keys)

    def test_a_value_that_became_a_section(self) -> None:
        before = {"model": {"args": {"norm": "batch"}}}
        now = {"model": {"args": {"norm": {"kind": "batch"}}}}
        assert [text.split(":")[0] for text in differences(before, now)] == [
            "model.args.norm",
            "model.args.norm.kind = batch",
        ]

    def test_left_out_and_null_are_the_same(self) -> None:
        assert differences({"zero": {"new_key": None, "empty": {}}}, {"zero": {}}) == []

    @pytest.mark.parametrize(("before", "now"), [(1, 1.0), (1e-3, 0.001), (5e8, 500_000_000), (1e16, 10**16)])
    def test_numbers_are_compared_as_numbers(self, before: float, now: float) -> None:
        assert differences({"optimizer": {"x": before, "y": [before]}}, {"optimizer": {"x": now, "y": [now]}}) == []

    def test_data_of_another_size_is_refused(self) -> None:
        with pytest.raises(ConfigError) as caught:
            check_resumable(saved(full()), config=full(), global_size=8, steps_per_epoch=5)
        assert [problem.kind for problem in caught.value.problems] == ["resume-data-differs"]
        assert "its epochs had 4 steps and now they have 5" in str(caught.value)

    def test_other_steps_are_refused_together_with_what_else_differs(self) -> None:
        with pytest.raises(ConfigError) as caught:
            check_resumable(saved(full()), config=full(run={"seed": 1}), global_size=16, steps_per_epoch=2)
        assert [problem.kind for problem in caught.value.problems] == ["resume-global-size", "resume-config-differs"]
        assert "was trained with 8 samples per step" in str(caught.value)
        assert "set batch.global_size: 8" in str(caught.value)


class TestMoving:
    PIPELINE: ClassVar[dict[str, Any]] = {"bounds": [0, 2, 4], "layers": []}

    @pytest.mark.parametrize(
        ("layout", "sections", "pipeline", "moved"),
        [
            ({}, {}, None, False),
            ({"micro_size": 2, "accumulation_steps": 2}, {"training": {"max_steps": 9}}, None, False),
            ({"world_size": 4, "data_parallel_size": 4}, {}, None, True),
            ({}, {"zero": {"stage": 2}}, None, True),
            ({}, {"zero": {"stage": 0, "reduce_bucket_size": 1000}}, None, False),
            ({}, {"precision": {"dtype": "autocast"}}, None, True),
            ({"pipe_size": 2, "data_parallel_size": 1}, {}, PIPELINE, True),
        ],
    )
    def test_a_checkpoint_of_another_layout_has_moved(
        self, layout: dict[str, Any], sections: dict[str, Any], pipeline: dict[str, Any] | None, moved: bool
    ) -> None:
        now = {"layout": LAYOUT | layout, "config": full(**sections), "pipeline": pipeline}
        assert has_moved(saved(full()), description=now) is moved

    @pytest.mark.parametrize(
        ("stage", "changed", "said"),
        [
            (1, {"round_robin_gradients": True}, "zero.round_robin_gradients: false -> true"),
            (2, {"offload_optimizer": {"device": "cpu"}}, "zero.offload_optimizer.device: none -> cpu"),
            (3, {"sub_group_size": 5}, "zero.sub_group_size: 1000000000 -> 5"),
            (3, {"offload_param": {"device": "cpu"}}, "zero.offload_param.device: none -> cpu"),
            *((stage, change, "") for stage in (0, 1, 2, 3) for change in (
                {"reduce_bucket_size": 7, "allgather_bucket_size": 8, "overlap_comm": True, "contiguous_gradients": False},
                {"stage3_prefetch_bucket_size": 9, "stage3_param_persistence_threshold": 3, "reduce_scatter": False},
            )),
            (0, {"round_robin_gradients": True, "sub_group_size": 5}, ""),
            (1, {"sub_group_size": 5}, ""),
            (3, {"round_robin_gradients": True}, ""),
        ],
    )  # fmt: skip
    def test_only_what_decides_where_numbers_lie_is_a_move(self, stage: int, changed: dict[str, Any], said: str) -> None:
        before = saved(full(zero={"stage": stage}))
        now = {"layout": LAYOUT, "config": full(zero={"stage": stage} | changed)}
        assert has_moved(before, description=now) is bool(said)
        assert told_move(before, description=now) == said

    def test_what_is_different_is_told(self) -> None:
        now = {"layout": LAYOUT | {"world_size": 4}, "config": full(zero={"stage": 2}, precision={"dtype": "bf16"})}
        told = told_move(saved(full()), description=now)
        assert told == "ranks: 2 -> 4, precision.dtype: fp32 -> bf16, zero.stage: 0 -> 2"

    def test_so_has_a_pipeline_that_is_cut_elsewhere(self) -> None:
        before = saved(full(), pipeline=self.PIPELINE)
        here = {"layout": LAYOUT, "config": full(), "pipeline": {**self.PIPELINE, "bounds": (0, 2, 4)}}
        assert not has_moved(before, description=here)
        assert has_moved(before, description={**here, "pipeline": {**self.PIPELINE, "bounds": (0, 1, 4)}})


def test_what_rank_0_finds_travels_to_the_other_ranks() -> None:
    """`from_rank0` pickles the checkpoint to start from, or the reason why there is none."""
    start = saved(full())
    assert pickle.loads(pickle.dumps(start)) == start
    with pytest.raises(ConfigError) as caught:
        check_resumable(start, config=full(run={"seed": 3}), global_size=16, steps_per_epoch=11)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems, copy.exit_code) == (str(caught.value), caught.value.problems, 78)
    storage = pickle.loads(pickle.dumps(StorageError("no space [checkpoint-not-written]")))
    assert (str(storage), storage.exit_code) == ("no space [checkpoint-not-written]", 74)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc.", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(args=st.dictionaries(st.text("ab", min_size=1, max_size=2), VALUES, max_size=3))
def test_whatever_is_saved_equals_itself_when_it_is_read_back(args: dict[str, Any]) -> None:
    assert differences({"model": {"args": args}}, {"model": {"args": args}}) == []
