"""Checkpoints that plain DeepSpeed wrote, in a job that knows nothing of this framework: read on
request, and refused otherwise.

The weights and moments are held against what DeepSpeed's own functions gathered from the engines
that wrote them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from framework.checkpoint.resume_point import find_checkpoint
from framework.cli import main as cli
from framework.commands.export import export
from framework.errors import ConfigError, StorageError
from tests.engine.saved_runs import read_weights
from tests.engine.test_weights import Gadget
from tests.jobs.raw_deepspeed import CASES, PIPES, SAMPLES, STEPS
from tests.launched import ROOT, read_metrics, run_ranks, series, train_cases
from tests.warm_ranks import WarmRanks

pytestmark = pytest.mark.slow

MLPS = [
    name
    for name, (_, _, optimizer, model) in CASES.items()
    if optimizer == "AdamW" and model == "mlp"
]
TARGETS = {"z0": (0, "fp32"), "z3": (3, "fp32"), "z2-bf16": (2, "bf16"), "z0-fp16": (0, "fp16")}


def config(
    name: str, folder: Path, *, stage: int = 0, dtype: str = "fp32", **sections: Any
) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "image_size": 8, "hidden_sizes": [24]},
        "data": {"kind": "digits", "image_size": 8},
        "batch": {"global_size": SAMPLES},
        "zero": {"stage": stage},
        "precision": {"dtype": dtype},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "scheduler": {"kind": "warmup", "warmup_steps": 6, "curve": "linear"},
        "training": {"max_steps": STEPS + 2, "log_every": 1},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    } | sections


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    run_ranks(ROOT / "tests/jobs/raw_deepspeed.py", str(folder), num_ranks=2, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def moved(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two ranks, moved into engines of one."""
    folder = tmp_path_factory.mktemp("moved")
    cases = [
        {
            "config": config(target, folder, stage=stage, dtype=dtype),
            "loads": [(str(raw / name), str(folder / f"{name}-{target}.pt")) for name in MLPS],
        }
        for target, (stage, dtype) in TARGETS.items()
    ]
    file = folder / "cases.json"
    file.write_text(json.dumps(cases), encoding="utf-8")
    run_ranks(ROOT / "tests/jobs/move_cases.py", str(file), num_ranks=1, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def gone_on(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of this framework that start from the checkpoints; some must not."""
    folder = tmp_path_factory.mktemp("gone-on")

    def checkpoint(name: str, **more: Any) -> dict[str, Any]:
        return {
            "checkpoint": {"resume": str(raw / name), "allow_unverified": True, "at_end": False}
            | more
        }

    train_cases(
        [
            config("resumed", folder, stage=1, **checkpoint("z3")),
            config(
                "own-tag",
                folder,
                model={"target": "tests.jobs.tied_net:TiedNet"},
                data={"kind": "digits", "image_size": 28},
                **checkpoint("z0-tied"),
            ),
            config(
                "weights",
                folder,
                **checkpoint("x", resume="never", init_weights=str(raw / "z1-sgd")),
            ),
            config("unasked", folder, **checkpoint("z3", allow_unverified=False)),
            config(
                "weights-unasked",
                folder,
                **checkpoint(
                    "x", resume="never", init_weights=str(raw / "z3"), allow_unverified=False
                ),
            ),
            config("pipe", folder, **checkpoint("pipe-z0")),
            config("other-optimizer", folder, stage=1, **checkpoint("z1-sgd")),
            config("other-batch", folder, batch={"global_size": 2 * SAMPLES}, **checkpoint("z3")),
        ],
        num_ranks=1,
        folder=folder,
    )
    return folder


def weights_in(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in truth.items() if " " not in name}


@pytest.mark.parametrize("name", [*CASES, *PIPES])
def test_weights_are_those_that_the_engines_held(
    name: str, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = weights_in(torch.load(raw / f"{name}.pt", weights_only=True))
    assert cli(["export", str(raw / name), str(tmp_path / "out"), "--allow-unverified"]) == 0
    assert capsys.readouterr().err.count("[checkpoint-unverified]") == 1
    found = read_weights(str(tmp_path / "out"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor.float() if tensor.is_floating_point() else tensor), (
            key
        )


@pytest.mark.parametrize("name", [name for name, (stage, *_) in CASES.items() if stage])
def test_weights_are_those_of_deepspeeds_own_reader(name: str, raw: Path) -> None:
    expected = get_fp32_state_dict_from_zero_checkpoint(str(raw / name))
    held = weights_in(torch.load(raw / f"{name}.pt", weights_only=True))
    assert held.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(held[key].float(), tensor.float()), key


def test_a_pipeline_without_a_file_is_refused(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a layer, by what its optimizer steps; of a tied one; and with the parts of two tensor
    ranks.
    """

    def refused(change: Callable[[Path], object]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "global_step3"
        shutil.copytree(raw / "pipe-z1-bf16/global_step3", folder)
        change(folder)
        assert cli(["export", str(folder), str(tmp_path / "out"), "--allow-unverified"]) == 74
        return capsys.readouterr().err

    layer = "layer_04-model_states.pt"
    assert "there is no file of layer 4" in refused(lambda folder: (folder / layer).unlink())
    tied = "layer_00-model_states.pt"
    found = refused(lambda folder: (folder / tied).unlink())
    assert "no file has the weights tied as words" in found
    part = "layer_04-model_01-model_states.pt"
    found = refused(lambda folder: shutil.copy(folder / layer, folder / part))
    assert "tensor ranks share layer 4" in found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MLPS)
def test_the_whole_state_arrives(name: str, target: str, raw: Path, moved: Path) -> None:
    truth, found = (
        torch.load(path, weights_only=True)
        for path in (raw / f"{name}.pt", moved / f"{name}-{target}.pt")
    )
    assert found["step"] == STEPS
    states = [key for key in found["state"] if not key.endswith(" model")]
    assert sorted(states) == sorted(key if " " in key else f"{key} fp32" for key in truth)
    for key in states:
        assert torch.equal(found["state"][key], truth[key.removesuffix(" fp32")]), key


def test_a_run_goes_on_where_it_stopped(gone_on: Path) -> None:
    rates = series(gone_on / "weights", "train/lr")  # a fresh start, with the same schedule
    for name in ("resumed", "own-tag"):
        rows = read_metrics(gone_on / name)
        assert [row["step"] for row in rows] == [STEPS + 1, STEPS + 2]
        assert [row["train/lr"] for row in rows] == [rates[STEPS + 1], rates[STEPS + 2]]
    assert len(set(rates.values())) > STEPS


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        (
            "unasked",
            "checkpoint.allow_unverified: true reads it nevertheless, as weights only [checkpoint-unverified]",
        ),
        (
            "weights-unasked",
            "checkpoint.allow_unverified: true reads it nevertheless, as weights only [checkpoint-unverified]",
        ),
        (
            "other-optimizer",
            "its optimizer's state is momentum_buffer, and this run's optimizer has exp_avg, exp_avg_sq",
        ),
        ("pipe", "brings its weights alone: its optimizer only numbers what it steps"),
        ("other-batch", f"was trained with {SAMPLES} samples per step"),
    ],
)
def test_what_cannot_be_right_is_refused(name: str, stated: str, gone_on: Path) -> None:
    error = (gone_on / f"{name}.error").read_text(encoding="utf-8")
    assert stated in error
    assert "\n" not in error


def test_what_all_ranks_meet_is_reported_once(warm: WarmRanks, raw: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    resumed = {"resume": str(raw / "z1-sgd"), "allow_unverified": True}
    file.write_text(
        json.dumps(config("said", tmp_path, stage=2, checkpoint=resumed)), encoding="utf-8"
    )
    job = warm.start(["--config", str(file)], num_ranks=2, folder=tmp_path)
    assert 0 not in job.wait(120)
    assert job.stated().count("[checkpoint-not-loaded]") == 1, job.stated()[-4000:]
    assert "other settings are those of this run [checkpoint-unverified]" in job.stated()


def test_commands_ask_for_the_flag(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["export", str(raw / "z2"), str(tmp_path / "out")],
        ["inspect", str(raw / "z2")],
        ["generate", str(raw / "z2")],
    ):
        assert cli(words) == 78
        stated = capsys.readouterr().err
        assert (
            "--allow-unverified reads it nevertheless, as weights only [checkpoint-unverified]"
            in stated
        )
        assert stated.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert cli(["generate", str(raw / "z2"), "--allow-unverified"]) == 78
    assert "give --config FILE" in capsys.readouterr().err


def test_inspect_reports_what_the_names_hold(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["inspect", str(raw / "z2" / f"global_step{STEPS}"), "--allow-unverified"]) == 0
    stated = capsys.readouterr().out
    assert "layout     2 ranks, ZeRO stage 1 or 2\n" in stated
    assert f"step       {STEPS} (its name)\n" in stated
    assert "verified   no: " in stated
    assert cli(["inspect", str(raw / "z0-tied"), "--allow-unverified", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["stages"], found["step"], found["verified"]) == ([0], None, False)


def drop_a_rank(folder: Path) -> Path:
    next(folder.glob("*rank_1_*optim_states.pt")).unlink()
    return folder


def rename(folder: Path) -> Path:
    return folder.rename(folder.with_name("global_step7"))


def cut_off(folder: Path) -> Path:
    file = folder / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-300])
    return folder


def link_a_file(folder: Path) -> Path:
    file = folder / "mp_rank_00_model_states.pt"
    file.rename(folder.parent / "elsewhere.pt")
    file.symlink_to(folder.parent / "elsewhere.pt")
    return folder


def plant_a_program(folder: Path) -> Path:
    torch.save({"module": Gadget(folder.parent / "trace")}, folder / "mp_rank_00_model_states.pt")
    return folder


def add_a_layer(folder: Path) -> Path:
    (folder / "layer_00-model_states.pt").touch()
    return folder


@pytest.mark.parametrize(
    ("damage", "stated"),
    [
        (drop_a_rank, "2 ranks wrote it, and there is no optimizer file of rank 1"),
        (rename, "its name says step 7 and its files say step 3"),
        (cut_off, "mp_rank_00_model_states.pt cannot be read"),
        (link_a_file, "mp_rank_00_model_states.pt: it is a symbolic link"),
        (plant_a_program, "it holds? Python objects|holds Python objects"),
        (add_a_layer, "it has files of layers, and a module of its own beside them"),
    ],
)
def test_damage_that_can_be_found_is_reported(
    damage: Callable[[Path], Path], stated: str, raw: Path, tmp_path: Path
) -> None:
    shutil.copytree(raw / "z2", tmp_path / "copy")
    folder = damage(tmp_path / "copy" / f"global_step{STEPS}")
    with pytest.raises((StorageError, ConfigError), match=stated) as caught:
        export(str(folder), tmp_path / "out", allow_unverified=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "copy" / "trace").exists()


def test_a_parameter_without_numbers_is_reported(raw: Path, tmp_path: Path) -> None:
    shutil.copytree(raw / "z3", tmp_path / "copy")
    folder = tmp_path / "copy" / f"global_step{STEPS}"
    for file in folder.glob("*model_states.pt"):
        content = torch.load(file, weights_only=False)
        content["param_shapes"][-1]["more.weight"] = torch.Size((3, 2))
        torch.save(content, file)
    with pytest.raises(StorageError, match="holds fewer numbers than the parameters have"):
        export(str(folder), tmp_path / "out", allow_unverified=True)


@pytest.mark.parametrize("tag", ["../z2/global_step3", "/etc", "", ".", "a/b", "x" * 300])
def test_a_tag_names_no_other_place(tag: str, raw: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(ConfigError, match=r"\[checkpoint-not-found\]"):
        find_checkpoint(str(tmp_path), run_checkpoints=tmp_path, allow_unverified=True)
    (tmp_path / "linked").symlink_to(raw / "z2" / f"global_step{STEPS}")
    (tmp_path / "latest").write_text("linked")
    with pytest.raises(ConfigError, match=r"\[checkpoint-not-found\]"):
        find_checkpoint(str(tmp_path), run_checkpoints=tmp_path, allow_unverified=True)
