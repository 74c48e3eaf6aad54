"""A run that is stopped and resumed in fresh processes is the unbroken run, bit for bit: losses,
weights, optimizer state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.names import STATE_KEY
from framework.checkpoint.state.checkpoint_engine import read_file
from framework.checkpoint.state.reader import StoredState
from tests.launched import read_metrics, series, train_cases

pytestmark = pytest.mark.slow

TOTAL, STOP = 20, 13  # 11 steps make an epoch: the stop is within the second


def config(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [64], "dropout": 0.3},
        "batch": {"global_size": 120},
        "scheduler": {"kind": "warmup_cosine", "warmup_steps": 5, "total_steps": TOTAL},
        "training": {"max_steps": TOTAL, "log_every": 1},
        "evaluation": {"every_steps": 10},
        "checkpoint": {"keep_best": "train/lr"},  # its largest value comes before the stop
        "monitors": {"tensorboard": False, "progress": "off", "report": False},
    }
    replaced = ("data", "scheduler")  # another kind has other keys
    return base | {
        name: section if name in replaced else base.get(name, {}) | section
        for name, section in sections.items()
    }


# overflows again and again
FP16 = {"dtype": "fp16", "initial_scale_power": 14, "loss_scale_window": 2}
ACCUMULATING = {"accumulation_steps": 2}
BF16 = {"dtype": "bf16"}
OWN = {
    "target": "torch.optim.lr_scheduler:OneCycleLR",
    "args": {"max_lr": 5e-3, "total_steps": TOTAL + 1},
}
CASES: dict[str, dict[str, Any]] = {
    "fp32-z0": {"scheduler": {"kind": "lr_range_test", "min_lr": 1e-5, "step_size": 5}},
    "fp32-z1": {
        "zero": {"stage": 1},
        "scheduler": {"kind": "warmup", "warmup_steps": 20},
        "batch": ACCUMULATING,
    },
    "fp32-z2": {"zero": {"stage": 2}},
    "coalesced": {"zero": {"stage": 2, "coalesce": True}, "batch": ACCUMULATING},
    "fp32-z3": {
        "scheduler": {
            "kind": "one_cycle",
            "min_lr": 1e-4,
            "max_lr": 5e-3,
            "first_steps": 10,
            "cycle_momentum": True,
        },
        "zero": {"stage": 3},
        "batch": ACCUMULATING,
    },
    "bf16-z1": {
        "scheduler": {"kind": "warmup_decay", "warmup_steps": 5, "total_steps": TOTAL},
        "zero": {"stage": 1},
        "precision": BF16,
        "batch": ACCUMULATING,
    },
    "bf16-z3": {
        "zero": {"stage": 3},
        "precision": BF16,
        "scheduler": {"kind": "wsd", "decay_steps": 15, "total_steps": TOTAL},
    },
    "autocast-z2": {
        "scheduler": {"kind": "cosine", "warmup_steps": 5, "total_steps": TOTAL},
        "zero": {"stage": 2},
        "precision": {"dtype": "autocast"},
        "batch": ACCUMULATING,
    },
    "random-samples": {
        "scheduler": OWN,
        "data": {
            "target": "tests.jobs.parts:noisy_digits",
            "args": {"strength": 0.7},
            "num_workers": 2,
        },
        "zero": {"stage": 1},
    },
    "fp16-z0": {"precision": FP16},
    "muon-bf16": {"optimizer": {"kind": "muon", "matrices": [r"fc1\.weight"]}, "precision": BF16},
    "muon-bf16-z2": {
        "optimizer": {"kind": "muon", "matrices": [r"fc[12]\.weight"]},
        "zero": {"stage": 2},
        "precision": BF16,
        "batch": ACCUMULATING,
    },
    "muon-z3": {
        "optimizer": {"kind": "muon", "matrices": [r"fc[12]\.weight"]},
        "zero": {"stage": 3},
    },
    "adafactor-bf16": {"optimizer": {"kind": "adafactor"}, "precision": BF16},
    "fp16-z2": {"zero": {"stage": 2}, "precision": FP16},
    # The loss scale of torch's GradScaler falls for some steps, and would fall again.
    "autocast-fp16": {
        "precision": {"dtype": "autocast", "compute_dtype": "fp16"},
        "task": {"target": "tests.jobs.parts:steep_cross_entropy"},
    },
}
BUFFERED = ("fp32-z1-broken", "fp32-z2-broken", "fp32-z3-broken", "bf16-z3-broken")
# Sizes of buffers and of what is sent at once: no move, and not a bit of a difference.
BUFFERS = {
    "reduce_bucket_size": 5_000,
    "allgather_bucket_size": 6_000,
    "contiguous_gradients": False,
    "reduce_scatter": False,
    "stage3_prefetch_bucket_size": 3_000,
    "stage3_param_persistence_threshold": 10,
    "stage3_max_live_parameters": 50_000,
}
CALM = {"model": {"kind": "mlp", "hidden_sizes": [64]}, "zero": {"stage": 1}}  # without dropout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    saved = {"every_steps": STOP}
    whole = [config(f"{case}-whole", folder, **CASES[case], checkpoint=saved) for case in CASES]
    fresh = config(
        "auto-without-checkpoint", folder, training={"max_steps": 2}, checkpoint={"resume": "auto"}
    )
    calm = [
        config("calm-whole", folder, **CALM),
        config("calm-broken", folder, **CALM, training={"max_steps": STOP}),
    ]
    train_cases([*whole, fresh, *calm], num_ranks=2, folder=folder, allow_fp16=True)
    for case in CASES:  # as if it had been killed before its last checkpoint
        shutil.copytree(folder / f"{case}-whole", folder / f"{case}-broken")
        shutil.rmtree(folder / f"{case}-broken" / "checkpoints" / f"global_step{TOTAL}")
    second = [
        config(f"{case}-broken", folder, **CASES[case], checkpoint={"resume": "auto"})
        for case in CASES
    ]
    for case in second:
        if case["run"]["name"].startswith("random-samples"):
            case["data"] = case["data"] | {"num_workers": 0}
        if case["run"]["name"] in BUFFERED:
            case["zero"] = case["zero"] | BUFFERS
    smaller = config(
        "calm-broken", folder, **CALM, batch={"micro_size": 20}, checkpoint={"resume": "auto"}
    )
    base = "fp32-z2-broken"
    again = config(base, folder, **CASES["fp32-z2"], checkpoint={"resume": "auto"})
    elsewhere = config(
        "continued-elsewhere",
        folder,
        **CASES["fp32-z2"],
        checkpoint={"resume": str(folder / base / "checkpoints" / f"global_step{STOP}")},
    )
    changed = config(
        "changed",
        folder,
        **CASES["fp32-z2"],
        optimizer={"kind": "adamw", "lr": 5e-3},
        checkpoint={"resume": str(folder / base)},
    )
    missing = config("missing", folder, checkpoint={"resume": str(folder / "nowhere")})
    over = config("auto-without-checkpoint", folder, training={"max_steps": 2})
    stage = config("other-stage", folder, zero={"stage": 1}, checkpoint=elsewhere["checkpoint"])
    coalesced = folder / "coalesced-broken" / "checkpoints" / f"global_step{STOP}"
    apart = config(
        "uncoalesced",
        folder,
        **CASES["coalesced"] | {"zero": {"stage": 2}},
        checkpoint={"resume": str(coalesced)},
    )
    train_cases(
        [*second, again, elsewhere, changed, missing, over, smaller, stage, apart],
        num_ranks=2,
        folder=folder,
        allow_fp16=True,
    )
    other = config("other-world", folder, **CASES["fp32-z2"], checkpoint=elsewhere["checkpoint"])
    train_cases([other], num_ranks=1, folder=folder)
    return folder


def bits(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's files, by file and path within it."""
    checkpoint = run_folder / "checkpoints" / f"global_step{step}"
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(item, f"{path}/{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                collect(item, f"{path}/{index}")

    for file in sorted(checkpoint.glob("*.pt")):
        collect(torch.load(file, map_location="cpu", weights_only=False), file.name)
    return found


METRICS = ("train/loss", "train/lr", "train/grad_norm", "eval/loss", "eval/accuracy")


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_the_unbroken_one(runs: Path, case: str) -> None:
    whole, broken = read_metrics(runs / f"{case}-whole"), read_metrics(runs / f"{case}-broken")
    # The text of a number: a norm after an overflow may be no number.
    found, expected = (
        [
            {name: str(row.get(name)) for name in ("step", *METRICS)}
            for row in rows
            if row["step"] != STOP
        ]
        for rows in (broken, whole)
    )
    assert found == expected
    left, right = bits(runs / f"{case}-whole", TOTAL), bits(runs / f"{case}-broken", TOTAL)
    assert left.keys() == right.keys()
    assert len(left) > 10
    different = [path for path, tensor in left.items() if not torch.equal(tensor, right[path])]
    assert not different


def test_the_loss_scales_have_moved(runs: Path) -> None:
    """Otherwise nothing would have been resumed of them."""
    for case in ("fp16-z0", "fp16-z2"):
        assert len(set(series(runs / f"{case}-whole", "train/loss_scale").values())) > 2
        skipped = series(runs / f"{case}-whole", "train/skipped_steps")
        assert 0 < skipped[STOP] < skipped[TOTAL]
    saved = torch.load(
        runs / f"autocast-fp16-broken/checkpoints/global_step{STOP}/mp_rank_00_model_states.pt",
        weights_only=False,
    )
    assert all(state["scale"] < 2.0**16 for state in saved[STATE_KEY]["grad_scalers"])


def test_fp16_scales_its_loss_at_every_stage(runs: Path) -> None:
    """DeepSpeed does not at stage 0, and divides by the scale all the same: no step ever overflows,
    and little is learnt.
    """
    plain, zero = (series(runs / f"{case}-whole", "train/loss") for case in ("fp16-z0", "fp16-z2"))
    # other steps are skipped
    assert plain == {step: pytest.approx(loss, abs=0.25) for step, loss in zero.items()}


def test_smaller_micro_batches_on_the_same_ranks_go_on(runs: Path) -> None:
    whole, broken = (series(runs / f"calm-{kind}", "train/loss") for kind in ("whole", "broken"))
    assert broken == {step: pytest.approx(loss, abs=1e-4) for step, loss in whole.items()}


def test_another_stage_on_the_same_ranks_draws_the_same_masks(runs: Path) -> None:
    """A move, but not of the ranks: their random states are theirs still."""
    whole, moved = (
        series(runs / "fp32-z2-whole", "train/loss"),
        series(runs / "other-stage", "train/loss"),
    )
    assert sorted(moved) == list(range(STOP + 1, TOTAL + 1))
    assert moved == {step: pytest.approx(whole[step], abs=1e-4) for step in moved}


def test_sums_after_each_micro_batch_go_on_after_coalesced_ones(runs: Path) -> None:
    whole = series(runs / "coalesced-whole", "train/loss")
    apart = series(runs / "uncoalesced", "train/loss")
    assert sorted(apart) == list(range(STOP + 1, TOTAL + 1))
    assert apart == {step: pytest.approx(whole[step], abs=1e-4) for step in apart}


def test_steps_after_the_checkpoint_are_not_logged_twice(runs: Path) -> None:
    steps = [row["step"] for row in read_metrics(runs / "fp32-z0-broken") if "train/loss" in row]
    assert steps == list(range(1, TOTAL + 1))
    rows = (runs / "fp32-z0-broken" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, TOTAL + 1))]


def test_latest_and_manifest_name_the_last_step(runs: Path) -> None:
    checkpoints = runs / "fp32-z3-broken" / "checkpoints"
    assert (checkpoints / "latest").read_text(encoding="utf-8") == f"global_step{TOTAL}"
    manifest = json.loads(
        (checkpoints / f"global_step{TOTAL}" / "manifest.json").read_text(encoding="utf-8")
    )
    assert (manifest["step"], manifest["epoch"], manifest["step_in_epoch"]) == (20, 1, 9)
    assert manifest["layout"]["world_size"] == 2
    assert manifest["config"]["zero"]["stage"] == 3


def test_the_best_so_far_is_that_of_the_whole_run(runs: Path) -> None:
    found = []
    for case in CASES:
        rates = series(runs / f"{case}-whole", "train/lr")
        step = max(step for step, rate in rates.items() if rate == max(rates.values()))
        found.append(step)
        expected = {"metric": "train/lr", "value": rates[step], "step": step, "best_is": "max"}
        for name in ("whole", "broken"):
            path = runs / f"{case}-{name}" / "checkpoints" / f"global_step{TOTAL}" / "manifest.json"
            assert json.loads(path.read_text(encoding="utf-8"))["best"] == expected
    assert min(found) < STOP < max(found)


@pytest.mark.parametrize(("case", "in_each_file"), [("fp32-z3", 1), ("fp32-z1", 2)])
def test_a_file_holds_the_random_states_of_the_ranks_that_read_it(
    runs: Path, case: str, in_each_file: int
) -> None:
    """All in each would be 15 MB more in every file of a thousand ranks; a move with as many ranks
    finds them all.
    """
    checkpoint = list_checkpoints(runs / f"{case}-whole" / "checkpoints")[-1]
    files = [
        read_file(path)[STATE_KEY]["random_states"]
        for path in sorted(checkpoint.path.glob("*model_states.pt"))
    ]
    assert [len(states) for states in files] == [in_each_file] * (2 // in_each_file)
    stored = StoredState(checkpoint)
    expected = [(files[rank] if in_each_file == 1 else files[0])[rank] for rank in (0, 1)]
    assert [torch.equal(stored.random_state(rank), expected[rank]) for rank in (0, 1)] == [
        True,
        True,
    ]
    assert not torch.equal(*expected)


def test_a_path_continues_in_another_folder(runs: Path) -> None:
    steps = [
        row["step"] for row in read_metrics(runs / "continued-elsewhere") if "train/loss" in row
    ]
    assert steps == list(range(STOP + 1, TOTAL + 1))
    left, right = bits(runs / "fp32-z2-whole", TOTAL), bits(runs / "continued-elsewhere", TOTAL)
    assert all(torch.equal(tensor, right[path]) for path, tensor in left.items())


def test_changed_arithmetic_is_refused(runs: Path) -> None:
    text = (runs / "changed.error").read_text(encoding="utf-8")
    assert "optimizer.lr = 0.005" in text
    assert "0.001" in text
    assert "[resume-config-differs]" in text
    assert not (runs / "changed").exists()


def test_another_world_size_goes_on(runs: Path) -> None:
    """With the same samples per step; how exactly is tested where runs move."""
    steps = [row["step"] for row in read_metrics(runs / "other-world") if "train/loss" in row]
    assert steps == list(range(STOP + 1, TOTAL + 1))


def test_a_missing_checkpoint_is_refused(runs: Path) -> None:
    assert "[checkpoint-not-found]" in (runs / "missing.error").read_text(encoding="utf-8")
    assert not (runs / "missing").exists()


def test_a_fresh_start_moves_the_earlier_run_aside(runs: Path) -> None:
    folders = sorted(path.name for path in runs.glob("auto-without-checkpoint*"))
    assert len(folders) == 2
    assert folders[0] == "auto-without-checkpoint"
    assert all((runs / name / "checkpoints" / "latest").exists() for name in folders)
