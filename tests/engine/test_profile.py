"""Profiled steps: their traces and tables against clocks, formulas and layouts, of plain runs and
of pipelines.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from framework import RunConfig
from framework.engine import profile
from framework.engine.phases import EventPhases, Phases
from framework.engine.profile import ModuleWatch, operations_of
from tests.engine.test_phases import Device, step
from tests.launched import series, train_cases

LENET = {"kind": "lenet", "image_size": 28}
DIGITS = {"kind": "digits", "image_size": 28}
ALL = {"modules": True, "deepspeed_timers": True, "communication": True}
BASE: dict[str, Any] = {
    "model": LENET,
    "data": DIGITS,
    "training": {"max_steps": 9, "log_every": 3},
}
# Ranks look for a request four times a second: steps are slow enough for it to come before the end,
# and the resumed run has fewer.
STOPS = {
    "task": {"target": "tests.jobs.parts:StopsItself", "args": {"in_step": 14, "seconds": 0.1}},
    "training": {"max_steps": 25, "log_every": 5},
    "batch": {"micro_size": 8},
}


def case(folder: Path, name: str, steps: str | None, **sections: Any) -> dict[str, Any]:
    profile = {} if steps is None else {"profile": {"steps": steps, **sections.pop("profile", {})}}
    return BASE | {"run": {"name": name, "output_dir": str(folder)}} | profile | sections


@dataclass
class Profiled:
    """What a run has written."""

    folder: Path

    def trace(self, rank: int = 0) -> list[dict[str, Any]]:
        with gzip.open(
            self.folder / f"profile/rank{rank}.json.gz", "rt", encoding="utf-8"
        ) as stream:
            events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
        return [
            event
            for event in events
            if event.get("cat") == "user_annotation" and event["ph"] == "X"
        ]

    def steps(self, rank: int = 0) -> dict[int, float]:
        """Milliseconds of each traced step."""
        named = (
            (*event["name"].partition("ProfilerStep#"), event["dur"]) for event in self.trace(rank)
        )
        return {int(number): microseconds / 1000 for _, word, number, microseconds in named if word}

    def tables(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.folder / f"profile/tables{rank}.json").read_text(encoding="utf-8")
        )
        return found

    def row(self, table: str, name: str, rank: int = 0) -> dict[str, Any]:
        (found,) = [row for row in self.tables(rank)[table] if row["name"] == name]
        return dict(found)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Profiled]:
    folder = tmp_path_factory.mktemp("profiled")
    batch = {"global_size": 32, "micro_size": 8}
    saves = {"every_steps": 5, "mode": "async"}
    resumes = {"resume": str(folder / "stopped")}
    cases = [
        case(
            folder, "stage2", "4-7", zero={"stage": 2}, batch=batch, checkpoint=saves, profile=ALL
        ),
        case(folder, "stage3", "2-3", zero={"stage": 3}, batch=batch, profile={"modules": True}),
        case(folder, "stopped", "4-25", **STOPS),
        case(folder, "resumed", "4-25", **STOPS, checkpoint=resumes),
        case(folder, "without", None, batch={"micro_size": 8}),
    ]
    train_cases(cases, num_ranks=2, folder=folder)
    return lambda name: Profiled(folder / name)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("profiled-pipeline")
    sections = {
        "parallel": {"pipe": 2},
        "zero": {"stage": 1},
        "batch": {"global_size": 32, "micro_size": 8},
    }
    train_cases([case(folder, "pipe", "3-5", profile=ALL, **sections)], num_ranks=2, folder=folder)
    series(folder / "pipe", "train/loss")
    return Profiled(folder / "pipe")


def flops_of_lenet(samples: int) -> int:
    """Of a forward pass, by torch's counter."""
    factory = RunConfig.model_validate({"model": LENET}).model.factory()
    module, _, name = factory.path.partition(":")
    build: Any = importlib.import_module(module)
    for part in name.split("."):
        build = getattr(build, part)
    with FlopCounterMode(display=False) as counter:
        build(**factory.kwargs)(torch.zeros(samples, 1, 28, 28))
    return int(counter.get_total_flops())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_phases_of_a_trace_add_up_to_its_steps(plain: Any, pipeline: Profiled, rank: int) -> None:
    for run, expected in ((plain("stage2"), {4, 5, 6}), (pipeline, {3, 4})):
        whole, names = run.steps(rank), {part["phase"] for part in run.tables(rank)["timeline"]}
        assert set(whole) == expected == set(run.tables(rank)["steps"])
        parts = sum(event["dur"] for event in run.trace(rank) if event["name"] in names) / 1000
        # Less is between them on a quiet machine: 5 %; a process that waits for a processor may
        # wait there.
        assert parts == pytest.approx(sum(whole.values()), rel=0.15)
        by_clock = sum(part["ms"] for part in run.tables(rank)["timeline"])
        assert by_clock == pytest.approx(sum(whole.values()), rel=0.15)
        assert {"data", "copy", "forward", "backward", "communication", "optimizer"} <= names | {
            "data",
            "copy",
        }


@pytest.mark.slow
def test_flops_are_those_of_torchs_counter_at_each_stage_and_over_the_stages_of_a_pipeline(
    plain: Any, pipeline: Profiled
) -> None:
    expected = flops_of_lenet(8)
    for name in ("stage2", "stage3"):
        assert plain(name).row("modules", "")["flops"] == pytest.approx(expected, rel=0.02)
    stages = [pipeline.row("modules", "", rank) for rank in (0, 1)]
    assert sum(stage["flops"] for stage in stages) == pytest.approx(expected, rel=0.02)
    assert sum(stage["params"] for stage in stages) == plain("stage3").row("modules", "")["params"]
    names = [{row["name"] for row in pipeline.tables(rank)["modules"]} for rank in (0, 1)]
    assert not (names[0] & names[1]) - {""}
    assert names[0] | names[1] <= {row["name"] for row in plain("stage2").tables()["modules"]}


@pytest.mark.slow
def test_what_is_sent_is_what_the_layout_implies(plain: Any, pipeline: Profiled) -> None:
    run = plain("stage2")
    num_params = run.row("modules", "")["params"]
    # Stage 2 sums gradients after each of two micro-batches, in one message, and the norm, with
    # which the count of the loss travels.
    traced = run.row("collectives", "all_reduce")
    assert traced["count"] == 2 + 1
    assert traced["bytes"] == pytest.approx(2 * 4 * num_params, rel=0.01)
    assert run.row("collectives", "all_gather")["bytes"] == pytest.approx(4 * num_params, rel=0.01)
    assert traced["bytes_per_second"] == pytest.approx(traced["bytes"] / traced["ms"] * 1000)
    for rank in (0, 1):  # four micro-batches
        assert pipeline.row("communication", "send", rank)["count"] == 4
        assert pipeline.row("communication", "recv", rank)["count"] == 4


@pytest.mark.slow
def test_deepspeeds_timers_are_read_and_put_back(plain: Any, pipeline: Profiled) -> None:
    names = {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"}
    assert names <= plain("stage2").tables()["timers"].keys()
    assert {"train_batch", "fwd", "pipe_send_output", "step"} <= pipeline.tables()["timers"].keys()
    assert all(value > 0 for value in plain("stage2").tables()["timers"].values())


@pytest.mark.slow
def test_a_stop_leaves_a_whole_file_and_a_resumed_run_counts_on(plain: Any) -> None:
    stopped, resumed = plain("stopped"), plain("resumed")
    stated = stopped.folder.with_name("stopped.error").read_text(encoding="utf-8")
    (last,) = map(int, re.findall(r"stopped after step (\d+) of 25", stated))
    assert 13 <= last < 25  # the first of its 14 passes is that of the evaluation's trial
    for rank in (0, 1):
        assert (
            set(stopped.steps(rank))
            == set(range(4, last + 1))
            == set(stopped.tables(rank)["steps"])
        )
        assert (
            set(resumed.steps(rank))
            == set(range(last + 1, 26))
            == set(resumed.tables(rank)["steps"])
        )
    assert not (plain("without").folder / "profile").exists()


@pytest.mark.slow
def test_a_profile_is_an_event_and_no_part_of_a_step(plain: Any) -> None:
    events = [
        json.loads(line)
        for line in (plain("stage2").folder / "events.jsonl").read_text("utf-8").splitlines()
    ]
    (profiled,) = [event for event in events if event["kind"] == "profile"]
    assert profiled["step"] == 7
    assert {event["step"] for event in events if event["kind"] == "save"} == {5, 9}
    assert series(plain("stage2").folder, "train/loss").keys() == {3, 5, 6, 9}
    assert series(plain("stage2").folder, "time/step_ms")[9] < 1000 * profiled["seconds"] + 1000


@pytest.mark.slow
def test_a_timeline_shows_each_micro_batch_in_its_order(pipeline: Profiled) -> None:
    found: dict[tuple[int, str, int], tuple[float, float]] = {}
    for rank in (0, 1):
        tables = pipeline.tables(rank)
        for part in tables["timeline"]:
            if part["step"] == 4:
                begin = 1000 * tables["began_seconds"] + part["at_ms"]
                found.setdefault(
                    (rank, part["phase"], part["micro_batch"]), (begin, begin + part["ms"])
                )
    for phase in ("forward", "backward"):
        assert [{key[2] for key in found if key[:2] == (rank, phase)} for rank in (0, 1)] == [
            set(range(4))
        ] * 2
    # down the pipeline, and up again, by clocks that agree within a millisecond
    for number in range(4):
        assert found[1, "forward", number][0] > found[0, "forward", number][1] - 1
        assert found[0, "backward", number][0] > found[1, "backward", number][1] - 1


class Event:
    """One of kineto's, of the host unless it is named."""

    def __init__(
        self,
        name: str,
        start: int,
        end: int,
        *,
        thread: int = 1,
        on_gpu: bool = False,
        **marks: bool,
    ) -> None:
        self.name, self.start_ns, self.end_ns = lambda: name, lambda: start, lambda: end
        self.start_thread_id = self.end_thread_id = lambda: thread
        self.is_async = lambda: marks.get("is_async", False)
        self.is_user_annotation = lambda: marks.get("is_annotation", False)
        self.device_type = lambda: DeviceType.CUDA if on_gpu else DeviceType.CPU


def test_the_own_time_of_operations_adds_up_to_the_steps() -> None:
    ms = 1_000_000
    events = [
        Event("aten::mm", 30 * ms, 50 * ms),  # in any order
        Event("ProfilerStep#3", 0, 100 * ms),
        Event("forward", 0, 60 * ms),
        Event("aten::linear", 20 * ms, 55 * ms),
        Event("backward", 60 * ms, 100 * ms),
        Event("aten::mm", 70 * ms, 90 * ms),
        Event("aten::mul", 10 * ms, 30 * ms, thread=2),
        Event("gloo:all_reduce", 10 * ms, 90 * ms, is_async=True),
        Event("sm90_gemm", 25 * ms, 75 * ms, on_gpu=True),
        Event("forward", 25 * ms, 75 * ms, on_gpu=True, is_annotation=True),
    ]
    rows = operations_of(events, {"forward", "backward"}, num_steps=2)
    assert {(row["name"], row["place"]): (row["count"], row["ms"]) for row in rows} == {
        ("forward: Python and waiting", "host"): (0.5, 12.5),
        ("backward: Python and waiting", "host"): (0.5, 10.0),
        ("aten::linear", "host"): (0.5, 7.5),
        ("aten::mm", "host"): (1.0, 20.0),
        ("aten::mul", "host"): (0.5, 10.0),
        ("sm90_gemm", "device"): (0.5, 25.0),
    }


class ByName(torch.nn.Module):
    """Calls a function that DeepSpeed's profiler does not see, twice, and takes 10 ms."""

    def __init__(self, clock: Device) -> None:
        super().__init__()
        self._clock = clock
        self.first, self.act, self.weight = (
            torch.nn.Linear(16, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 32).weight,
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._clock.now += 10
        hidden = self.act(self.first(value))
        return linear(linear(hidden, self.weight), self.weight)


def test_modules_are_counted_in_the_first_pass_and_timed_in_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Device()
    monkeypatch.setattr(profile.time, "perf_counter", lambda: clock.now / 1000)
    model, phases = ByName(clock), Phases()
    watch = ModuleWatch(model, phases)
    with watch:
        phases.begin()
        for _ in range(3):
            phases.enter("forward")
            model(torch.ones(8, 16))
            phases.enter("backward")
            model(torch.ones(8, 16))  # computed again
        phases.end()
    rows = {row["name"]: row for row in watch.rows(lambda name: name)}
    assert rows.keys() == {"", "first", "act"}
    assert rows["first"]["flops"] == 2 * 8 * 16 * 32
    assert rows[""]["flops"] == 2 * 8 * (16 * 32 + 2 * 32 * 32)
    kept = {"first": 8 * 16 * 4, "act": 8 * 32 * 4}
    assert {name: rows[name]["kept_bytes"] for name in kept} == kept
    assert rows[""]["kept_bytes"] == sum(kept.values()) + 8 * 32 * 4  # what lies between the two
    assert rows[""]["params"] == 16 * 32 + 32 + 32 * 32
    assert (rows[""]["ms"], rows["first"]["ms"]) == (pytest.approx(10), 0)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_watched_step_has_the_same_phases_by_clock_and_by_events() -> None:
    for by_clock in (True, False):
        device = Device()
        phases = Phases(lambda d=device: d.now / 1000) if by_clock else EventPhases(device.event)
        step(phases, device)
        seen: list[tuple[str, Any]] = []
        phases.watch(lambda phase, p=phases, s=seen: s.append((phase, p.moment())))
        step(phases, device)
        phases.unwatch()
        step(phases, device)
        assert [phase for phase, _ in seen][:4] == ["other", "data", "copy", "forward"]
        assert seen[-1][0] == ""
        length = defaultdict[str, float](float)
        for (phase, begin), (_, end) in pairwise(seen):
            length[phase] += 1000 * phases.between(begin, end)
        read = phases.read()
        assert {
            f"time/{name}_ms": value for name, value in length.items() if name != "other"
        } == pytest.approx(read)
        assert Counter(phase for phase, _ in seen)["communication"] == 1
