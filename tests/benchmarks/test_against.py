"""Ours against other loops: the same losses on two ranks, rows that are kept, a table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.loops import sides
from benchmarks.loops.cases import CASES, ORDER, TINY
from benchmarks.loops.recorded import Recorded
from benchmarks.loops.sides import SIDES
from benchmarks.loops.turns import Results, _Group, ratios, table
from benchmarks.step_budget import plan_of
from framework.config.load import config_from_values
from framework.engine.attention_kernels import Kernel
from tests.launched import run_ranks
from tests.models.operator_calls import Calls
from tests.places import ROOT


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of all loops on two ranks, and what was printed."""
    pytest.importorskip("transformers", reason="transformers comes with the dev extra")
    folder = tmp_path_factory.mktemp("against")
    out = folder / "results.json"
    printed = run_ranks(ROOT / "tests/jobs/against.py", str(out), num_ranks=2, cwd=folder)
    return json.loads(out.read_text(encoding="utf-8")), printed


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "8b-slice-lora"])
def test_all_loops_have_the_same_losses(model: str, measured: tuple[dict[str, Any], str]) -> None:
    rows = measured[0]["rows"][model]
    assert list(rows) == list(SIDES)
    losses = rows["ours"]["losses"]
    assert list(losses) == ["2", "4", "6"]
    assert losses["2"] != losses["4"]
    for side, row in rows.items():
        assert row["losses"] == pytest.approx(losses, rel=1e-6), side
        assert len(row["blocks_ms"]) == 2
        assert row["ms_per_step"] > 0


@pytest.mark.slow
def test_a_missing_package_is_a_row(measured: tuple[dict[str, Any], str]) -> None:
    rows = measured[0]["rows"]["bert-large"]
    assert rows["accelerate"] == {"failed": "not installed: No module named 'accelerate'"}
    assert {side for side, row in rows.items() if "losses" in row} == set(SIDES) - {"accelerate"}


@pytest.mark.slow
def test_a_second_call_goes_on_with_what_is_missing(
    measured: tuple[dict[str, Any], str],
) -> None:
    """The third call of the job measured nothing, and printed all that is there."""
    results, printed = measured
    expected = "\n".join(table(results, {name: TINY[name] for name in results["rows"]}))
    assert expected in printed
    assert "begun" not in results


def test_a_row_that_ended_the_process_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, {}, writes=True).begin("gpt2", "hf")
    again = Results(path, {}, writes=True)
    assert again.has_failed("gpt2", "hf")
    assert not again.has("gpt2", "ours")


def test_a_row_that_a_signal_ended_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"

    def interrupted() -> None:
        raise KeyboardInterrupt

    group = _Group(Results(path, {}, writes=True), "gpt2", cast(Any, None))
    with pytest.raises(KeyboardInterrupt):
        group._try("hf", interrupted)
    assert not Results(path, {}, writes=True).has("gpt2", "hf")


def test_ours_reads_and_attends_as_a_run_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `framework.fit` does: images as pixels, and the kernel of attention of the run, which the
    loops beside it have not.
    """
    agenda = SimpleNamespace(total_steps=4, steps_per_epoch=4, samples_per_step=1)
    found: list[bool] = []

    class Attends:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def fit(self) -> None:
            query = torch.zeros(1, 1, 2, 8)
            with Calls() as calls:
                scaled_dot_product_attention(query, query, query)
            found.append(any("flash" in name for name in calls.of))

    asked: dict[str, Any] = {}
    for name, value in {
        "assemble_engine": SimpleNamespace(module=None),
        "chosen_kernel": Kernel("math"),
        "make_schedule": agenda,
    }.items():
        monkeypatch.setattr(sides, name, lambda *_, value=value: value)
    monkeypatch.setattr(sides, "make_train_loader", lambda *_, **options: asked.update(options))
    monkeypatch.setattr(sides, "rank", lambda: 0)
    monkeypatch.setattr(sides, "Trainer", Attends)
    parts = SimpleNamespace(splits=SimpleNamespace(train=None))
    plan = SimpleNamespace(layout=SimpleNamespace(accumulation_steps=1), config=None)
    setting: Any = SimpleNamespace(
        folder=tmp_path,
        stop=None,
        log_every=1,
        prepared=SimpleNamespace(plan=plan, parts=parts),
    )
    ours = sides.Ours(setting)
    ours.run(0, 2)
    Attends().fit()
    assert found == [False, True]
    assert asked["for_engine"]


def test_ratios_and_table() -> None:
    rows: dict[str, dict[str, Any]] = {
        "ours": {"blocks_ms": [2.0, 4.0], "ms_per_step": 3.0, "samples_per_second": 10.0},
        "plain": {"blocks_ms": [4.0, 2.0]},
        "hf": {"failed": "RuntimeError: out of memory"},
    }
    in_turn = {side: row | {"together": True} for side, row in rows.items()}
    one_by_one = {side: row | {"together": False} for side, row in rows.items()}
    assert ratios(in_turn, "plain") == (1.25, 0.5, 2.0)
    assert ratios(one_by_one, "plain") == (1.0, 0.5, 2.0)
    assert ratios(in_turn, "hf") is None
    lines = list(table({"rows": {"lenet": in_turn}}, TINY))
    of_lenet = next(line for line in lines if line.startswith("| lenet"))
    assert of_lenet == (
        "| lenet | 3.00 | 10 samples | 1.250 (0.500 - 2.000) | not measured | not measured | "
        "not measured |"
    )
    assert lines[-1] == "lenet, hf: RuntimeError: out of memory"


def test_recorded_batches_are_dealt_out_as_to_ranks() -> None:
    class Loader:
        def stream(self, start: int) -> Any:
            for number in range(start, 100):
                yield [[10 * number, 10 * number + 1], [-number, -number]]

    recorded = Recorded(Loader(), 3, micro_size=2, rank=1, num_ranks=2)
    numbers = [number for number, _ in zip(recorded.indices_of_rank(1), range(4), strict=False)]
    assert numbers == [2, 3, 6, 7]
    samples = recorded.from_step(2)
    assert [samples[number] for number in numbers] == [(20, -2), (21, -2), (0, 0), (1, 0)]
    with pytest.raises(IndexError, match="rank 0"):
        samples[0]


def test_every_row_is_in_the_order_once() -> None:
    rows = [(model, side) for model, sides in ORDER for side in sides]
    assert len(rows) == len(set(rows)) == len(CASES) * len(SIDES)


@pytest.mark.parametrize("name", CASES)
def test_cases_are_run_configs(name: str) -> None:
    case = CASES[name]
    values = {"run": {"name": name}, **case.sections, "optimizer": case.optimizer}
    values["training"] = {**values.get("training", {}), "max_steps": 10}
    assert config_from_values(values).batch.global_size


def test_the_budget_is_of_the_same_models() -> None:
    for name in ("gpt2", "gpt2-xl", "8b-slice", "8b-slice-lora"):
        plan = plan_of(name, zero_stage=1)
        assert plan.layout.global_size == CASES[name].sections["batch"]["global_size"]


def test_the_session_on_a_gpu_names_files_that_are_there() -> None:
    script = (ROOT / "benchmarks/gpu_session.sh").read_text(encoding="utf-8")
    files = re.findall(r"[\w/]+\.(?:py|yaml)\b", script)
    assert len(files) >= 5
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    tests = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert tests <= set(files)


@pytest.mark.slow
def test_a_session_on_a_gpu_goes_on_behind_what_has_passed(tmp_path: Path) -> None:
    """In a process of its own: tests that pass, fail and are never reached."""
    folder = tmp_path / "tests"
    folder.mkdir()
    shutil.copy(ROOT / "tests/gpu/conftest.py", folder)
    (folder / "test_three.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('name', ['as written', 'compiled'])\n"
        "def test_one(name): assert name == 'as written'\n"
        "def test_two(): raise KeyboardInterrupt\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", str(folder), str(folder), "--passed", str(tmp_path / "passed")]
    ends = []
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        ends.append(done.stdout.splitlines()[-1])
    passed = (tmp_path / "passed").read_text(encoding="utf-8")
    assert passed == "test_three.py::test_one[as written]\n"
    assert "1 failed, 1 passed" in ends[0]
    assert "1 failed" in ends[1]
    assert "passed" not in ends[1]
