"""What a run prints before and after, word for word."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.launch.options import parse
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate
from framework.plan.plan import Plan, make_plan
from framework.report.end_summary import print_end, print_next, write_report
from framework.report.run_result import RunResult
from framework.report.start_summary import print_start
from framework.train.best import Best
from tests.report.made_runs import write_run

HERE = {"PATH": str(Path(sys.executable).parent)}  # an activated environment


def plan(num_train_samples: int | None = None, **sections: Any) -> Plan:
    values = {"run": {"name": "night"}, "batch": {"global_size": 120}} | sections
    return make_plan(
        config_from_values(values), Cluster(devices_per_host=2), num_train_samples=num_train_samples
    )


def result(**changes: Any) -> RunResult:
    values: dict[str, Any] = {
        "folder": Path("runs/night"),
        "step": 110,
        "samples_per_sec": 12345.678,
        "metrics": {
            "train/loss": 0.51239,
            "eval/loss": 0.25,
            "eval/accuracy": 0.98765,
            "time/step_ms": 3.0,
        },
    }
    return RunResult(**(values | changes))


def test_the_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_start(plan(training={"max_epochs": 10}), Path("runs/night"), start_step=0)
    assert capsys.readouterr().out == (
        "training night on 2 devices: 110 steps, 120 samples per step = 60 x 1 accumulation x 2 data-parallel, "
        "ZeRO 0, fp32 -> runs/night\n"
    )


def test_the_first_screen_has_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    monitors = {"wandb": True, "csv": False, "others": [{"target": "a.b:C"}]}
    planned = plan(
        1437, training={"max_steps": 22}, monitors=monitors, checkpoint={"every_steps": 5}
    )
    print_start(planned, Path("runs/night"), start_step=0, num_params=61706)
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows == [
        "  model        lenet, 61,706 parameters",
        "  length       22 steps = 2 epochs of 11, 117 samples dropped per epoch",
        f"  estimate     {estimate(planned).total(estimate(planned).peak) / 1e6:.1f} MB of device memory per rank",
        "  checkpoints  every 5 steps, at the end",
        "  metrics      metrics.jsonl, tensorboard, wandb, a.b:C",
    ]


def test_an_estimate_without_activations_names_what_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = {"target": "a.b:images"}
    model = {"kind": "resnet18", "num_classes": 10}
    planned = plan(model=model, data=data, training={"max_steps": 22})
    assert estimate(planned).lacks
    print_start(planned, Path("runs/night"), start_step=0, num_params=61706)
    assert " MB of device memory per rank, without activations\n" in capsys.readouterr().out


def test_the_end_states_what_the_time_went_into(capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "time/step_ms": 20.0,
        "time/data_ms": 12.0,
        "time/forward_ms": 3.0,
        "time/backward_ms": 4.8,
    }
    print_end(
        result(metrics=times | {"time/copy_ms": 0.1, "memory/device_peak_bytes": 2.5e9}),
        plan(),
        environment=HERE,
    )
    lines = capsys.readouterr().out.splitlines()
    assert "  step         20.0 ms: data 60%, backward 24%, forward 15%" in lines
    assert "  peak memory  2.5 GB on this rank's device" in lines
    print_end(result(metrics={"time/step_ms": 20.0, "time/data_ms": 5.0}), plan(), environment=HERE)
    assert "  step         20.0 ms: data 25%, computing 75%" in capsys.readouterr().out.splitlines()


def test_a_resumed_start_states_from_where(capsys: pytest.CaptureFixture[str]) -> None:
    print_start(plan(training={"max_steps": 1}), Path("runs/night"), start_step=1)
    assert "training night from step 1 on 2 devices: 1 step, " in capsys.readouterr().out


def test_warnings_and_another_size_of_the_data_come_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheduler = {"kind": "cosine", "warmup_steps": 500}
    print_start(plan(1200, scheduler=scheduler), Path("runs/night"), start_step=0)
    warning, note, start = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: scheduler.warmup_steps = 500: ")
    assert warning.endswith("[warmup-too-long]")
    assert (
        note
        == "note: 1,200 training samples found (1,437 expected); steps and schedule follow what was found"
    )
    assert start.startswith("training night on ")


@pytest.mark.parametrize(
    ("sections", "lines"),
    [
        ({}, []),  # to evaluate after the last step is a default
        (
            {"evaluation": {"every_steps": 7}},
            ["note: evaluation.every_steps = 7: there is no evaluation data [no-evaluation-data]"],
        ),
        ({"checkpoint": {"keep_best": "train/lr"}}, []),
        (
            {"checkpoint": {"keep_best": "eval/accuracy"}},
            [
                "warning: checkpoint.keep_best = eval/accuracy: there is no evaluation data, so it is never measured, "
                "and no checkpoint is deleted [no-evaluation-data]"
            ],
        ),
    ],
)
def test_what_needs_evaluation_data_that_is_not_there_is_reported(
    sections: dict[str, Any], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_start(plan(**sections), Path("runs/night"), start_step=0, evaluates=False)
    assert capsys.readouterr().out.splitlines()[:-1] == lines
    print_start(plan(**sections), Path("runs/night"), start_step=0, evaluates=True)
    assert capsys.readouterr().out.count("\n") == 1


def test_the_end_shows_results_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    print_end(result(), plan(), environment=HERE)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "night: finished after 110 steps",
        "  final eval/accuracy  0.9877",
        "  final eval/loss      0.2500",
        "  final train/loss     0.5124",
        "  throughput           12,346 samples/s",
        "  run folder           runs/night",
        "  TensorBoard          tensorboard --logdir runs",
    ]


def test_the_best_so_far_is_reported_with_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = result(best=Best("eval/accuracy", 0.99, 77), folder=tmp_path)
    print_end(best, plan(), environment=HERE)
    shown = capsys.readouterr().out
    assert "  best eval/accuracy   0.9900 at step 77\n" in shown
    assert "best checkpoint      none was saved at that step\n" in shown
    (tmp_path / "checkpoints/global_step77").mkdir(parents=True)
    print_end(best, plan(), environment=HERE)
    shown = capsys.readouterr().out
    assert f"best checkpoint      {tmp_path}/checkpoints/global_step77\n" in shown
    assert f"dsf export {tmp_path} OUT --step best\n" in shown


DOOR = {"DSF_DOOR": "./launch.sh", "PATH": ""}
SECOND = "precision.dtype=autocast run.name=second"


@pytest.mark.parametrize(
    ("words", "sections", "device", "environment", "reported"),
    [
        (["a.yaml"], {}, "cpu", DOOR, f"./launch.sh train a.yaml {SECOND}"),
        (
            ["my run.yaml", "optimizer.lr=0.1"],
            {},
            "cpu",
            DOOR,
            f"./launch.sh train 'my run.yaml' optimizer.lr=0.1 {SECOND}",
        ),
        (["a.yaml"], {}, "cuda", DOOR, f"./launch.sh train a.yaml --num_gpus 2 {SECOND}"),
        (
            ["a.yaml"],
            {"run": {"world_size": 2}},
            "cuda",
            DOOR,
            f"./launch.sh train a.yaml {SECOND}",
        ),
        (
            ["a.yaml"],
            {"precision": {"dtype": "bf16"}, "run": {"seed": 7}},
            "cpu",
            DOOR,
            "./launch.sh train a.yaml run.seed=8 run.name=second",
        ),
        (
            ["a.yaml"],
            {"precision": {"dtype": "fp32", "matmul": "high"}},
            "cpu",
            DOOR,  # autocast has no such key
            "./launch.sh train a.yaml run.seed=1 run.name=second",
        ),
        (
            ["a.yaml"],
            {},
            "cpu",
            {"PATH": ""},
            f"{Path(sys.executable).parent}/dsf train a.yaml {SECOND}",
        ),
        (
            ["a.yaml"],
            {},
            "cpu",
            {"PATH": str(Path(sys.executable).parent)},
            f"dsf train a.yaml {SECOND}",
        ),
    ],
)
def test_what_to_try_next_can_be_pasted(
    words: list[str],
    sections: dict[str, Any],
    device: Any,
    environment: dict[str, str],
    reported: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"batch": {"global_size": 120}} | sections
    made = make_plan(config_from_values(values), Cluster(devices_per_host=2, device=device))
    print_next(made, words, environment=environment)
    assert capsys.readouterr().out == f"try next: {reported}\n"
    request = parse(shlex.split(reported)[2:])
    assert [request.config, *request.overrides] == [*words, *reported.split()[-2:]]


def test_of_several_hosts_only_the_settings_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    made = make_plan(config_from_values({}), Cluster(num_hosts=2, devices_per_host=2))
    print_next(made, ["a.yaml"], environment=DOOR)
    assert capsys.readouterr().out == f"try next: the same command with {SECOND}\n"


def test_tensorboard_is_named_as_the_shell_finds_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launch.sh, and the launcher, put the environment's programs in front of a PATH that has none
    of them.
    """
    programs = Path(sys.executable).parent
    monkeypatch.chdir(tmp_path)
    for shell, name in ((str(tmp_path), f"{programs}/tensorboard"), (str(programs), "tensorboard")):
        print_end(result(), plan(), environment={"DSF_SHELL_PATH": shell, "PATH": str(programs)})
        assert f"  TensorBoard          {name} --logdir runs\n" in capsys.readouterr().out
    monkeypatch.chdir(programs.parent)
    print_end(result(), plan(), environment={"PATH": ""})
    assert (
        f"  TensorBoard          {programs.name}/tensorboard --logdir runs\n"
        in capsys.readouterr().out
    )


def test_a_run_that_was_over_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_end(
        result(step=9, start_step=9, metrics={}, samples_per_sec=0.0),
        plan(monitors={"tensorboard": False}),
        environment=HERE,
    )
    assert capsys.readouterr().out.splitlines()[:3] == [
        "",
        "night: nothing left to do, step 9 was reached before",
        "  run folder  runs/night",
    ]


def test_the_throughput_of_text_is_reported_in_tokens_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_end(result(tokens_per_sec=3160493.8), plan(), environment=HERE)
    assert (
        "  throughput           12,346 samples/s = 3,160,494 tokens/s\n" in capsys.readouterr().out
    )


def test_the_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    print_end(result(folder=Path("my runs/night")), plan(), environment=HERE)
    assert "tensorboard --logdir 'my runs'\n" in capsys.readouterr().out


def test_output_is_closed() -> None:
    """As after `| head`: the reader is gone, and neither a line nor the flush at exit may fail the
    run.
    """
    code = (
        "from framework.system.log import print_line\n"
        "for _ in range(9): print_line('x' * 9999)\n"
        "import sys; sys.stdout.flush()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_what_to_try_next_sets_each_key_once_and_resumes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_plan(
        config_from_values({"run": {"name": "second"}}), Cluster(devices_per_host=1, device="cpu")
    )
    print_next(
        made,
        ["a.yaml", "run.name=second", "checkpoint.resume=auto", "optimizer.lr=0.1"],
        environment=DOOR,
    )
    stated = capsys.readouterr().out
    assert stated.count("run.name=") == 1
    assert "run.name=third" in stated
    assert "checkpoint.resume" not in stated
    assert "optimizer.lr=0.1" in stated


def test_the_end_names_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    print_end(result(), plan(), environment=HERE, report=Path("runs/night/report.html"))
    assert "  report               runs/night/report.html\n" in capsys.readouterr().out


def test_the_page_of_very_many_points_is_left_to_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "my run")
    with (folder / "metrics.jsonl").open("r+b") as stream:
        stream.truncate(300 << 20)  # a hole, which takes no space
    assert write_report(folder) is None
    place = f"dsf report '{folder}'"
    assert capsys.readouterr().out == f"note: metrics.jsonl is large; for its page: {place}\n"


def test_a_page_that_cannot_be_written_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert write_report(folder) == folder / "report.html"
    assert capsys.readouterr().err == ""
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    for place in (folder, tmp_path / "gone"):
        assert write_report(place) is None
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("warning: report.html was not written (")
        assert err.endswith("the run is not affected [report-not-written]\n")
        assert err.count("\n") == 1
