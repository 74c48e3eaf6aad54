"""The page as a document: its structure, what it escapes, its size, and that it asks no server for
anything.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from random import random
from time import process_time
from typing import Any

import pytest

from framework.report.page import _shapes, page, write_page
from framework.report.records import read_run
from framework.report.run_charts import charts_of
from tests.report.made_runs import CONFIG, EVENTS, PLAN, START, point, points, write_run

VOID = {"meta", "link", "br"}


class Structure(HTMLParser):
    """Elements of a page; fails where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(f"{self.open[-1]} {data}")

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def structure(*folders: Path) -> Structure:
    return Structure(page([read_run(folder) for folder in folders]))


def test_the_page_of_a_run(tmp_path: Path) -> None:
    found = structure(write_run(tmp_path / "made"))
    assert found.headings == [
        "h1 made",
        "h2 Curves",
        "h2 Speed",
        "h2 Memory",
        "h2 Goodput",
        "h2 Other metrics",
        "h2 Evaluation",
        "h2 Events",
        "h2 Config",
        "h2 Environment",
    ]
    text = " ".join(found.words)
    for expected in (
        "compute-bound: forward and backward take 78% of a step, at 35% of the device's peak (MFU).",
        "Try next:",
        "Finished after 100 steps.",
        "0.8333 (best)",
        "a disk is slow",
        "warning: loaders stall [stalls]",
        "Peak memory of a device: plan and run",
        "config.yaml of made, with every default",
    ):
        assert expected in text
    slugs = [attributes["id"] for tag, attributes in found.elements if tag == "figure"]
    assert slugs == [
        f"chart-{name}"
        for name in (
            "loss",
            "train-lr",
            "train-grad_norm",
            "evaluation-0",
            "throughput-tokens_per_sec",
            "throughput-mfu",
            "time-step_ms",
            "step-parts",
            "step-parts-over-time",
            "memory-plan",
            "memory-0",
            "goodput",
            "other-0",
            "other-1",
        )
    ]


def test_the_outcome_and_the_result_stand_before_the_speed(tmp_path: Path) -> None:
    text = page([read_run(write_run(tmp_path / "made"))])
    order = [
        '<span class="badge finished">finished</span>',
        "Finished after 100 steps. eval/accuracy 0.8333, best at step 100.",
        "<b>Speed:</b> compute-bound",
        "<b>Try next:</b>",
        "best eval/accuracy",
        "<dt>duration</dt>",
        "<dt>mean step</dt>",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    failed = [*EVENTS, {"kind": "end", "time_seconds": START + 90, "error": "no space"}]
    text = page([read_run(write_run(tmp_path / "failed", events=failed))])
    assert '<span class="badge failed">failed</span>' in text
    assert text.index("no space") < text.index("<b>Speed:</b>")


@pytest.mark.parametrize("count", range(1, 12))
def test_charts_fill_their_rows(count: int) -> None:
    width_of = {"third": 2, "half": 3, "whole": 6}
    shapes = _shapes(count)
    row = 0
    for shape in shapes:
        row += width_of[shape.partition(" ")[0]]
        assert row <= 6
        row %= 6
    assert row == 0
    # On screens that fit two, only the last one may be alone, and takes the whole row.
    assert [shape.endswith(" last") or shape == "whole" for shape in shapes] == (
        [False] * (count - 1) + [count % 2 == 1]
    )


def test_values_are_shown_under_the_pointer_without_a_script(tmp_path: Path) -> None:
    lines = [point(step, train__loss=1 / step, eval__loss=2 / step) for step in (1, 2, 4)]
    lines[1].pop("eval/loss")
    text = page([read_run(write_run(tmp_path / "run", lines=lines))])
    assert "<title>optimizer step 2\ntrain/loss: 0.5</title>" in text
    assert "<title>optimizer step 4\ntrain/loss: 0.25\neval/loss: 0.5</title>" in text


def test_smoothed_labels_are_named_where_losses_do_not_compare(tmp_path: Path) -> None:
    smoothed = CONFIG | {"task": {"kind": "classification", "label_smoothing": 0.1}}
    text = page([read_run(write_run(tmp_path / "run", config=smoothed))])
    assert "train/loss is of smoothed labels (task.label_smoothing: 0.1)" in text
    assert "smoothed" not in page([read_run(write_run(tmp_path / "other"))])


def test_what_is_known_is_shown_whatever_its_name(tmp_path: Path) -> None:
    config = CONFIG | {"model": {"object": "my.models.Given"}}
    assert "Model my.models.Given." in page(
        [read_run(write_run(tmp_path / "given", config=config))]
    )
    config = CONFIG | {"model": {"target": "my.models:NoneOfThem"}}
    write_run(tmp_path / "run", config=config)
    words = " ".join(structure(tmp_path / "run").words)
    assert " Model my.models:NoneOfThem." in words
    assert "ZeRO None" not in words  # the config lacks the stage


def test_every_chart_has_its_text_and_ids_stand_once(tmp_path: Path) -> None:
    for folders in ([write_run(tmp_path / "a")], [tmp_path / "a", write_run(tmp_path / "b")]):
        found = structure(*folders)
        ids = Counter(attributes["id"] for _, attributes in found.elements if "id" in attributes)
        assert max(ids.values()) == 1
        drawings = [attributes for tag, attributes in found.elements if tag == "svg"]
        assert len(drawings) == found.count("figure") + 1  # the loss has a drawing for wide screens
        for drawing in drawings:
            assert drawing["role"] == "img"
            assert all(ids[name] for name in (drawing["aria-labelledby"] or "").split())
        assert found.count("figure") <= found.count("details")
        links = {(attributes["href"] or "")[1:] for tag, attributes in found.elements if tag == "a"}
        assert links
        assert links <= set(ids)


def test_the_page_loads_nothing_from_a_server(tmp_path: Path) -> None:
    text = page([read_run(write_run(tmp_path / "run"))])
    found = Structure(text)
    assert not {"script", "img", "iframe", "object", "form", "base"} & {
        tag for tag, _ in found.elements
    }
    assert [attributes.get("href") for tag, attributes in found.elements if tag == "link"] == [
        "data:,"
    ]
    assert "default-src 'none'" in text
    assert not re.search(r"(?<!xmlns=\")https?://|url\(|@import", text)
    assert not [
        name for _, attributes in found.elements for name in attributes if name.startswith("on")
    ]


def test_several_runs_stand_over_each_other_with_what_differs(tmp_path: Path) -> None:
    other = CONFIG | {"optimizer": {"kind": "adamw", "lr": 2e-3, "eps": 1e-8}}
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "second", config=other)]
    found = structure(*folders)
    text = "\n".join(found.words)
    assert "h1 2 runs: first, second" in found.headings
    assert "optimizer.lr\n0.001\n0.002\n" in text
    assert "optimizer.eps\n1.0e-08\n" in text or "optimizer.eps\n1e-08\n" in text
    assert "optimizer.kind\n" not in text
    assert text.index("optimizer.lr\n") < text.index("best eval/accuracy\n")
    charts = {
        chart.slug: chart
        for charts in charts_of([read_run(folder) for folder in folders]).values()
        for chart in charts
    }
    assert charts["loss"].columns == [
        "step",
        "first train/loss",
        "first eval/loss",
        "second train/loss",
        "second eval/loss",
    ]
    assert charts["step-parts"].columns == ["part", "first", "second"]
    assert "The configs are equal." in page([read_run(folders[0]), read_run(folders[0])])


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e\ud800{{}}</style></title>--><!--"


def test_anything_in_a_run_is_shown_and_never_read(tmp_path: Path) -> None:
    lines = [
        point(step, train__loss=1.0)
        | {HOSTILE: 1.0, f"eval/{HOSTILE}": 0.5, f"memory/{HOSTILE}": 2.0}
        for step in range(1, 5)
    ]
    events = [
        {"time_seconds": 1e300, "step": HOSTILE, "kind": HOSTILE, HOSTILE: [HOSTILE]},
        {"kind": "save", "step": 2},
    ]
    plan = PLAN | {
        "memory": {"peak": "x", "bytes": {"x": {HOSTILE: 5.0}}},
        "layout": {"pipe_size": HOSTILE, HOSTILE: 1},
    }
    folder = write_run(
        tmp_path / "<img src=x onerror=alert(1)>\x1b",
        lines=lines,
        events=events,
        plan=plan,
        environment={HOSTILE: HOSTILE, "device": HOSTILE},
    )
    (folder / "config.yaml").write_bytes(f"a: '{HOSTILE}'\n".encode("utf-8", "surrogatepass"))
    (folder / "logs/rank0.log").write_text(
        f"x y ERROR dsf-trainer: {HOSTILE}\n", errors="surrogatepass"
    )
    text = page([read_run(folder)])
    found = Structure(text)
    assert found.count("script") == found.count("img") == 0
    assert text.count("<!--") == 0
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\ud800-\udfff]", text)
    assert "\\x1b[31m\\u202e" in text
    text.encode()
    assert page([read_run(folder), read_run(folder)])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_runs_that_ended_early_have_a_page(steps: int, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        point(step + 1, train__loss=None, train__lr=float("inf")) for step in range(steps)
    ]
    folder = write_run(
        tmp_path / "run", lines=lines, events=None, config={}, plan={}, environment={}
    )
    found = structure(folder)
    assert "h1 run" in found.headings
    for name in ("config.yaml", "plan.json", "environment.json", "logs/rank0.log"):
        (folder / name).unlink()
    assert "plan.json is missing" in "".join(structure(folder).words)


def test_plans_of_any_shape_have_a_page(tmp_path: Path) -> None:
    shapes: list[Any] = [None, 1, "x", [], [1], {"x": None}, {"peak": []}, True, 1e400]
    for number, shape in enumerate(shapes):
        plan = dict.fromkeys(("memory", "measured", "layout", "length", "cluster"), shape)
        plan |= {"length": {"total_steps": shape}} if number % 2 else {}
        plan |= {
            "measured": {"device_peak_bytes": shape, "step_seconds": {"estimate": shape}},
            "memory": {"total_bytes": shape, "peak": "x", "bytes": shape},
        }
        config = {"model": shape, "precision": {"dtype": shape}, "zero": shape}
        folder = write_run(
            tmp_path / str(number),
            plan=plan,
            config=json.loads(json.dumps(config)),
            environment={"a": shape},
        )
        assert structure(folder).headings[0] == f"h1 {number}"


def test_a_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", plan=PLAN | {"measured": {"step_seconds": {"estimate": 0.08}}}
    )
    text = " ".join(structure(folder).words)
    assert "plan: 80" in text  # milliseconds of a step
    assert "plan: 3 GiB" in text
    assert "measured: 2.5 GiB" in text


def test_events_of_any_shape_have_a_page(tmp_path: Path) -> None:
    kinds = (
        "start",
        "resume",
        "evaluate",
        "save",
        "warning",
        "stop",
        "end",
        "skip",
        "profile",
        "other",
    )
    values: list[Any] = [None, "x", [], {}, -5, 1.5, 1e300, True, 10**30]
    events = [
        {"kind": kind, "time_seconds": value, "step": value, "seconds": value, "text": value}
        for kind in kinds
        for value in values
    ]
    assert structure(write_run(tmp_path / "run", events=events)).headings[0] == "h1 run"


@pytest.mark.slow
def test_a_hundred_thousand_points_are_a_page_of_less_than_two_megabytes(tmp_path: Path) -> None:
    keys = (
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "time/step_ms",
        "time/data_ms",
        "throughput/tokens_per_sec",
    )
    lines = (
        {"step": step, "time": step} | dict.fromkeys(keys, random()) for step in range(1, 100_001)
    )
    folder = write_run(tmp_path / "long", lines=list(lines))
    runs = [read_run(folder)]
    assert 10_000 <= len(runs[0].metrics["train/loss"].steps) <= 20_000
    assert len(page(runs)) < 500_000
    shorter = [read_run(write_run(tmp_path / "shorter", lines=points(range(1, 5_001))))]
    assert len(page(shorter * 8)) < 2_000_000


@pytest.mark.slow
def test_the_end_of_a_long_run_does_not_wait(tmp_path: Path) -> None:
    """Every n-th point is read; a second is what that may cost, and 0.5 s of processor time is what
    it took.
    """
    folder = write_run(tmp_path / "long", lines=points(range(1, 20_001)))
    begun = process_time()
    write_page(folder, folder / "report.html")
    assert process_time() - begun < 2.5
    text = (folder / "report.html").read_text()
    assert "metrics.jsonl has 20,800 points: one of 3 was read" in text
