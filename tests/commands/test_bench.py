"""The command `bench`: which variants there are, in which order they start, what is kept, and what
is written.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.cli import main
from framework.commands import bench, timed_runs
from framework.commands.timed_runs import INTERRUPTED, NO_TIMES, config_alone
from framework.config.load import config_from_values
from framework.plan.plan import Plan
from framework.report.records import RunRecords, Series
from tests.commands.children import fork_launched
from tests.places import ROOT

Capture = pytest.CaptureFixture[str]
QUICKSTART = str(ROOT / "ds_configs/quickstart.yaml")
Answer = Callable[[int, Plan], tuple[float, str, bool]]


@pytest.fixture(autouse=True)
def on_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[tuple[int, int, int]]:
    """Runs that take as long as `answer` says of the number of the start and its plan: milliseconds
    of a step, why it failed, and whether Ctrl-C ended it. Returns devices, steps and steps of a
    point of each start so far.
    """
    started: list[tuple[int, int, int]] = []

    def run(
        plan: Plan, *, steps: int, log_every: int, hostfile: str | None
    ) -> tuple[RunRecords, str]:
        started.append((plan.cluster.world_size, steps, log_every))
        took, failure, is_interrupted = answer(len(started), plan)
        done = range(log_every, (steps // 2 if is_interrupted else steps) + 1, log_every)
        found = RunRecords(Path("run"), environment={"device": "cpu"})
        found.metrics["time/step_ms"] = Series(
            [*done], [900.0 if step == log_every else took for step in done]
        )
        return found, INTERRUPTED if is_interrupted else failure

    monkeypatch.setattr(bench, "run_alone", run)
    return started


def test_variants_start_in_turn_and_share_the_windows(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    started = answering(
        monkeypatch, lambda number, plan: (10.0 / plan.cluster.world_size, "", False)
    )
    words = [
        "--num_gpus",
        "1,2",
        "--steps",
        "6",
        "--warmup",
        "4",
        "--repeats",
        "5",
        "--starts",
        "2",
        "--json",
    ]
    assert main(["bench", QUICKSTART, *words]) == 0
    # Points of 3 steps, two of them of warm-up; three windows, then two.
    assert started == [(1, 24, 3), (2, 24, 3), (1, 18, 3), (2, 18, 3)]
    found = json.loads(capsys.readouterr().out)
    one, two = found["variants"]
    assert (one["name"], two["name"]) == ("quickstart, 1 device", "quickstart, 2 devices")
    assert one["samples_per_sec"] == [[pytest.approx(12_000)] * 3, [pytest.approx(12_000)] * 2]
    assert found["comparisons"] == [
        {
            "variant": two["name"],
            "over": one["name"],
            "ratio": pytest.approx(2),
            "interval": [pytest.approx(2)] * 2,
            "sentence": "quickstart, 2 devices is 2 times as fast as quickstart, 1 device (95 %: 2 to 2)",
        }
    ]
    assert not list(Path.cwd().iterdir())  # with --json alone nothing is written


def test_a_variant_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    no_memory = "exit code 70: no memory [out-of-memory]"
    started = answering(
        monkeypatch, lambda number, plan: (10.0, no_memory if number == 4 else "", False)
    )
    variants = [
        "--variant",
        "plain",
        "--variant",
        "big",
        "zero.stage=1",
        "--variant",
        "other",
        "run.seed=1",
    ]
    assert main(["bench", QUICKSTART, "run.seed=7", *variants, "--out", "found"]) == 70
    assert len(started) == 8  # three, of which one fails in the second round, then two
    out = capsys.readouterr().out.splitlines()
    assert out[0].split("  ")[0] == ""
    assert f"plain: {no_memory}" in out
    assert "other and big: no difference beyond noise (ratio 1, 95 %: 1 to 1)" in out
    assert out[-1] == "page: found/bench.html"
    assert {path.name for path in Path("found").iterdir()} >= {
        "bench.json",
        "bench.html",
        "bench.svg",
    }
    assert no_memory in Path("found/bench.html").read_text()
    settings = [
        each["settings"] for each in json.loads(Path("found/bench.json").read_text())["variants"]
    ]
    # its own setting wins
    assert settings == ["run.seed=7", "run.seed=7 zero.stage=1", "run.seed=1"]


def test_a_run_without_times_of_steps_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(bench, "run_alone", lambda plan, **_: (RunRecords(Path("run")), ""))
    assert main(["bench", QUICKSTART, "--out", "found"]) == 70
    lines = capsys.readouterr().out.splitlines()
    assert f"quickstart: {NO_TIMES}" in lines
    assert json.loads(Path("found/bench.json").read_text())["variants"][0]["failure"] == NO_TIMES


def test_ctrl_c_keeps_whole_windows(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    started = answering(monkeypatch, lambda number, plan: (10.0, "", number == 3))
    words = [
        "--num_gpus",
        "1,2",
        "--steps",
        "2",
        "--warmup",
        "2",
        "--repeats",
        "8",
        "--starts",
        "2",
        "--json",
    ]
    assert main(["bench", QUICKSTART, *words]) == 130
    assert len(started) == 3
    one, two = json.loads(capsys.readouterr().out)["variants"]
    # of 10 steps 5 were taken, 2 of warm-up
    assert [len(start) for start in one["samples_per_sec"]] == [4, 1]
    assert [len(start) for start in two["samples_per_sec"]] == [4]


def test_other_work_and_unequal_batches_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    answering(monkeypatch, lambda number, plan: (10.0, "", False))
    clock = iter(range(100))

    def clocks() -> tuple[float, float, float]:
        seconds = next(clock)
        return seconds, 1.8 * seconds, 0.3 * seconds

    monkeypatch.setattr(bench, "_clocks", clocks)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = [
        "batch.global_size=null",
        "batch.micro_size=8",
        "--num_gpus",
        "1,2",
        "--starts",
        "1",
        "--json",
    ]
    assert main(["bench", QUICKSTART, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["variants"][0]["busy_cores"] == [pytest.approx(1.5)]
    assert found["notes"][:3] == [
        "Other work took up to 1.5 of 2 cores: all was slower, and is less certain",
        "Fewer ranks had more threads each; OMP_NUM_THREADS=1 makes every device one core",
        "Steps have different numbers of samples; samples per second are compared",
    ]
    assert found["comparisons"][0]["sentence"].endswith("noise is not known from one start")


def test_the_work_of_this_process_is_not_that_of_others() -> None:
    before = bench._clocks()
    sum(n * n for n in range(3_000_000))
    _, busy, own = (after - b for after, b in zip(bench._clocks(), before, strict=True))
    assert own > 0.05
    assert busy > own - 0.05  # ticks of a hundredth of a second


@pytest.mark.parametrize(
    ("words", "code", "stated"),
    [
        ([], 64, "bench: name a run config"),
        (["absent.yaml"], 78, "absent.yaml: there is no such file"),
        ([QUICKSTART, "--repeats", "0"], 64, "argument --repeats: 0 is no number from 1 on"),
        ([QUICKSTART, "--steps", "0"], 64, "argument --steps"),
        ([QUICKSTART, "--num_gpus", "1,,2"], 64, "argument --num_gpus"),
        (
            [QUICKSTART, "--num_gpus", "1", "-H", "hosts"],
            64,
            "--num_gpus and --hostfile exclude each other",
        ),
        ([QUICKSTART, "-H", "absent"], 78, "absent: there is no such file"),
        (
            [QUICKSTART, "--variant", "a=1"],
            64,
            "a name and its key=value settings follow --variant",
        ),
        (["--variant", "a", QUICKSTART], 64, "configs stand before it"),
        (
            [QUICKSTART, "--num_gpus", "2,64"],
            78,
            "over 64 devices (variant quickstart, 64 devices)",
        ),
        ([QUICKSTART, "precision={dtype: fp16}"], 78, "[fp16-on-cpu]"),
        ([QUICKSTART, "--out", QUICKSTART], 74, "[file-not-written]"),
        (
            [
                QUICKSTART,
                "--variant",
                "a",
                "batch.micro_size=7",
                "--variant",
                "b",
                "--variant",
                "c",
                "zero.stage=9",
            ],
            78,
            "too large (variant c)",
        ),
    ],
)
def test_what_cannot_work_starts_nothing(
    words: list[str], code: int, stated: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    started = answering(monkeypatch, lambda number, plan: (10.0, "", False))
    assert main(["bench", *words]) == code
    assert stated in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("steps", "warmup", "found"),
    [
        (50, 10, (10, 1)),
        (50, 7, (5, 2)),
        (7, 3, (1, 3)),
        (3, 10, (3, 4)),
        (20, 0, (20, 0)),
        (1, 0, (1, 0)),
    ],
)
def test_points_divide_a_window_and_the_warm_up(
    steps: int, warmup: int, found: tuple[int, int]
) -> None:
    assert bench.points_of(steps, warmup) == found


def test_nothing_runs_beside_the_steps() -> None:
    values: dict[str, Any] = {
        "checkpoint": {
            "every_steps": 5,
            "resume": "auto",
            "keep_best": "eval/accuracy",
            "init_weights": "w.pt",
        },
        "evaluation": {"every_steps": 5},
        "monitors": {"wandb": True, "others": [{"target": "pkg:Sink"}]},
    }
    config = config_alone(config_from_values(values), steps=30, log_every=10)
    assert (config.training.max_steps, config.training.log_every, config.monitors.report) == (
        30,
        10,
        False,
    )
    assert (config.monitors.sinks(), config.monitors.others) == ({}, [])
    assert (config.evaluation.every_steps, config.evaluation.at_end) == (None, False)
    assert (config.checkpoint.every_steps, config.checkpoint.at_end, config.checkpoint.resume) == (
        None,
        False,
        "never",
    )
    assert (config.checkpoint.keep_best, config.checkpoint.init_weights) == (None, "w.pt")


@pytest.mark.slow
def test_variants_are_trained_for_real(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them as `bench` starts it, the one of two ranks on forked ones."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run, stated = timed_runs.run_child, tmp_path_factory.mktemp("said")

    def fork_pairs(words: list[str], *rest: Any, **limits: Any) -> subprocess.CompletedProcess[str]:
        return (
            run(words, *rest, **limits)
            if words[-1] == "1"
            else fork_launched(words, folder=stated, **limits)
        )

    monkeypatch.setattr(timed_runs, "run_child", fork_pairs)
    variants = [
        "--variant",
        "one",
        "run.world_size=1",
        "--variant",
        "pipelined",
        "run.world_size=2",
    ]
    variants += ["parallel.pipe=2", "batch.micro_size=30"]
    words = [
        "--steps",
        "3",
        "--warmup",
        "2",
        "--repeats",
        "2",
        "--starts",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    images = "{kind: synthetic_images, image_size: 28, channels: 1, num_classes: 10}"
    assert main(["bench", QUICKSTART, f"data={images}", *variants, *words]) == 0
    found = json.loads((tmp_path / "out/bench.json").read_text())
    for each in found["variants"]:
        ((first, second),) = each["rounds"]
        assert first != second
        assert {
            "time/forward_ms",
            "time/backward_ms",
            "throughput/samples_per_sec",
            "memory/host_peak_bytes",
        } <= set(first)
        parts = sum(
            value
            for name, value in first.items()
            if name.startswith("time/") and name != "time/step_ms"
        )
        assert parts == pytest.approx(first["time/step_ms"], rel=0.02)
    assert "time/bubble_ms" in found["variants"][1]["rounds"][0][0]
    assert [each["variant"] for each in found["comparisons"]] == ["pipelined"]
    assert found["environment"]["device"]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}  # and nothing of the runs is left


def test_the_example_of_the_page_has_equal_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    page = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
    words = shlex.split(page[page.index("DS_ACCELERATOR=cpu") :].split("\n```")[0])
    answering(monkeypatch, lambda number, plan: (10.0, "", False))
    config = str(ROOT / words[words.index("bench") + 1])
    assert main(["bench", config, *words[words.index("bench") + 2 :], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["plan"]["samples"].partition(" samples")[0] for each in found["variants"]] == [
        "16"
    ] * 4
    assert not [note for note in found["notes"] if "different numbers" in note]
