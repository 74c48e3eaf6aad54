"""The figures of docs/benchmarks.md are those that the programs wrote."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.loader_rate import TARGET, distinct
from tests.places import ROOT

PAGE = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def rows(section: str) -> list[list[str]]:
    """The cells of the section's tables, without their heads."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    tables = [
        line.strip("|").split("|")
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    return [[cell.strip() for cell in cells] for cells in tables[1:]]


def test_every_program_has_its_section() -> None:
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "records"}
    named = {
        name for name in programs if f"benchmarks.{name}" in PAGE or f"benchmarks/{name}.py" in PAGE
    }
    assert named == programs


def test_speed_of_check() -> None:
    found = results("check_speed")
    starts = [
        found[name]
        for name in ("one_run_config", "one_deepspeed_json", "python_alone", "python_with_pydantic")
    ]
    one = [
        [
            f"{row['median_seconds']:.3f}",
            f"{row['fastest_seconds']:.3f} - {row['slowest_seconds']:.3f}",
        ]
        for row in starts
    ]
    many = [
        f"{found['many_files']['median_seconds']:.2f}",
        f"up to {found['many_files']['slowest_seconds']:.2f}",
    ]
    assert [row[1:3] for row in rows("Speed of `check`")] == [*one[:2], many, *one[2:]]


def test_a_start_to_its_first_step() -> None:
    found = results("start_to_step")
    shown = []
    for side in ("train.py", "bare DeepSpeed"):
        least, most = found[side]["processor_seconds"]
        median = found[side]["median_processor_seconds"]
        shown.append([side, f"{median:.2f}", f"{least:.2f} - {most:.2f}"])
    assert rows("A start to its first step") == shown


def test_the_trainer_over_other_loops() -> None:
    def shown(found: Any, digits: int) -> list[list[str]]:
        steps, ratios, blocks = (
            found["ms_per_step"],
            found["ratio_of_medians"],
            found["block_ratios"],
        )
        return [
            [
                f"{steps[name]:.2f} ms",
                f"{ratios[name]:.{digits}f}",
                " - ".join(f"{blocks[name][end]:.{digits}f}" for end in (0, -1)),
            ]
            for name in ("bare", "ddp", "accelerate", "hf")
        ]

    found, on_gpu = results("trainer_tax"), results("trainer_tax_h200")
    section = rows("The Trainer over other loops")
    loops = [row[1:] for row in section if len(row) == 4 and row[0] != "other loop"]
    assert loops == [*shown(found, 3), *shown(on_gpu, 2)]
    stages = [row for row in section if row[0].split(",")[0].isdecimal()]
    assert stages == [_of_stage(stage) for stage in range(4)]
    steps = found["ms_per_step"]
    assert f"({steps['trainer']:.2f} ms per step)" in PAGE
    assert f"{found['num_losses_compared']} losses" in PAGE
    assert f"differ by {found['largest_difference_of_losses']:.1e} at most" in PAGE


def test_loaders_alone() -> None:
    """Every shipped config whose loader does other work than another's has its row, and delivers
    five times what the model takes.
    """
    found = results("loader_rate")["rows"]
    shipped = sorted((ROOT / "ds_configs").glob("*.yaml"))
    assert {path.name for path in distinct(shipped)} <= set(found)
    assert set(found) <= {path.name for path in shipped}
    shown = []
    for name, row in found.items():
        cells = [name, f"{row['loader_for_device']:,}", f"{row['step_on_device']:,}"]
        cells.append(f"{row['times_step_on_device']:.1f}")
        if "step_here" in row:
            cells += [f"{row['step_here']:,}", f"{row['times_step_here']:,.1f}"]
        else:
            cells += ["", ""]
        shown.append(cells)
    assert rows("Loaders alone") == shown
    assert min(row["times_step_on_device"] for row in found.values()) >= TARGET


def _of_stage(stage: int) -> list[str]:
    """Return the row of a ZeRO stage beside its target."""
    name, words, target = "bare", "bare DeepSpeed", (1.0, 0.95, 0.95, 1.0)[stage]
    if stage == 0:
        name, words = "ddp", "DDP"
    found = results(f"trainer_tax_z{stage}" if stage else "trainer_tax")
    steps = found["ms_per_step"]
    cells = [f"{stage}, {words}", f"{target:.2f}", f"{steps['trainer']:.2f} ms"]
    cells.append(f"{steps[name]:.2f} ms")
    for of in ("", "processor_"):
        ratios = found[f"{of}block_ratios"][name]
        cells.append(f"{found[f'{of}ratio_of_medians'][name]:.3f}")
        cells.append(f"{ratios[0]:.3f} - {ratios[-1]:.3f}")
    return cells


def test_gpt_2_on_one_gpu() -> None:
    found = results("one_gpu")["cases"]
    assert [[row[1], *row[3:6]] for row in rows("GPT-2 on one GPU")] == [
        [
            f"{case['step_ms']:.0f}",
            f"{round(case['tokens_per_second'], -3):,}",
            f"{case['mfu']:.0%}".replace("%", " %") + " of fp32" * (name == "fp32"),
            f"{case['peak_gib']:.2f}",
        ]
        for name, case in found.items()
    ]


def test_cost_of_sinks() -> None:
    def shown(found: Any) -> str:
        low, high = found["interval_95"]
        return f"{found['median']:.0f} µs ({low:.0f} to {high:.0f})"

    assert rows("Cost of sinks") == [
        [
            sinks,
            f"{found['step_ms']:.1f} ms",
            shown(found["microseconds_per_step"]),
            shown(found["processor_microseconds_per_step"]),
        ]
        for sinks, found in results("sink_cost").items()
    ]


def test_memory_of_export() -> None:
    reported = [
        [
            name,
            *(
                f"{round(case[key] / 1e6)} MB"
                for key in ("exported_bytes", "peak_bytes", "peak_bytes_without_mapped_files")
            ),
            f"{case['seconds']:.1f}",
        ]
        for name, case in results("export_memory")["cases"].items()
    ]
    assert [[row[0].replace("`", ""), *row[1:]] for row in rows("Memory of `export`")] == reported


def test_resnet50_on_two_devices() -> None:
    shown = [row[:2] for row in rows("ResNet-50 on two devices")]
    middles = [(each["name"], each["quartiles"]) for each in results("resnet50_bench")["variants"]]
    assert shown == [
        [name, f"{middle:.1f} ({low:.1f} - {high:.1f})"] for name, (low, middle, high) in middles
    ]
