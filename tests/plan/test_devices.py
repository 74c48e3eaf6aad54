"""The tables of devices and networks, and machines made of them or of measured values."""

from __future__ import annotations

import pytest

from deepspeed_lint.topology import gpu_kinds
from framework.errors import UsageError
from framework.plan.devices import Device, Machine, find_device, find_network, tables, value_of

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
RANGES = {
    "memory_bytes": (11e9, 200e9),
    "memory_bytes_per_second": (3e11, 8e12),
    "link_bytes_per_second": (3e10, 9e11),
    "collective_bytes_per_second": (2e10, 8e11),
    "host_bytes_per_second": (1e10, 5e11),
    "host_memory_bytes_per_second": (1e11, 1e12),
    "matmul_tflops_bf16": (100, 2000),
    **{f"tflops_{dtype}": (15, 5000) for dtype in DTYPES},
}


def test_each_figure_has_a_source() -> None:
    sources = set(tables()["sources"])
    assert len(tables()["devices"]) >= 20
    for name, listed in {**tables()["devices"], **tables()["networks"]}.items():
        figures = [figure for figure in listed.values() if isinstance(figure, dict)]
        if "disputed" in listed:
            assert listed["disputed"] == any("others" in figure for figure in figures), name
        for figure in figures:
            assert figure["value"] > 0
            assert figure["sources"]
            assert {*figure["sources"], *figure.get("others", {})} <= sources, name


def test_figures_are_of_sane_size() -> None:
    for name, listed in tables()["devices"].items():
        assert set(listed) == {*RANGES, "capability", "kind", "memory_gib", "network", "disputed"}
        for key, (low, high) in RANGES.items():
            value = value_of(listed[key])
            assert value is None or low <= value <= high, (name, key)
        peaks = [value_of(listed[f"tflops_{dtype}"]) for dtype in ("fp32", "tf32", "fp16", "fp8")]
        known = [peak for peak in peaks if peak is not None]
        assert known == sorted(known), name
        assert find_device(name).memory_bytes == pytest.approx(
            listed["memory_gib"] * 2**30, rel=0.08
        )
        assert listed["network"] is None or find_network(listed["network"])


def test_the_kinds_of_the_command_are_those_of_the_table() -> None:
    assert list(gpu_kinds()) == list(tables()["devices"])
    assert {name.rpartition("-")[2] for name in gpu_kinds()} >= {"16gb", "80gb", "141gb", "192gb"}
    v100, h100, ascend = (
        gpu_kinds()[name] for name in ("v100-32gb", "h100-80gb", "ascend910-32gb")
    )
    assert (v100.bf16, h100.bf16, ascend.device) == (False, True, "npu")
    assert [name for name, kind in gpu_kinds().items() if not kind.fp16] == ["p100-16gb"]


def test_what_is_not_known_is_not_guessed() -> None:
    with pytest.raises(
        UsageError, match=r"h100-81gb: not known; did you mean h100-80gb\? known are .*h100-80gb"
    ):
        find_device("h100-81gb")
    with pytest.raises(UsageError, match=r"--network tin-can: not known"):
        Machine.listed("h100-80gb", network="tin-can")
    ascend = find_device("ascend910-32gb")
    assert "bf16" not in ascend.flops_per_second
    assert ascend.memory_bytes_per_second is None


def test_a_machine_of_the_tables() -> None:
    machine = Machine.listed("H100-80GB")
    assert machine.device.flops_per_second["bf16"] == 989e12
    assert machine.network is not None
    assert machine.network.bytes_per_second == 50e9
    assert {figure["origin"] for figure in machine.to_dict()["figures"].values()} == {"listed"}


def test_measured_values_replace_listed_ones() -> None:
    found = {
        "flops_per_second": {"fp32": 4e13, "bf16": 6e14, "fp16": None},
        "memory_bytes_per_second": 2.5e12,
        "all_reduce_bytes_per_second": None,
        "per_step_overhead_seconds": 0.002,
    }
    machine = Machine.from_measured(found, Machine.listed("h100-80gb", devices_per_host=4))
    assert machine.device.flops_per_second["bf16"] == 6e14
    assert machine.device.flops_per_second["fp16"] == 989e12
    assert machine.device.collective_bytes_per_second == 370e9
    assert (machine.devices_per_host, machine.step_overhead_seconds) == (4, 0.002)
    figures = machine.to_dict()["figures"]
    measured = {name for name, figure in figures.items() if figure["origin"] == "measured"}
    assert measured == {
        *("flops_per_second.fp32", "flops_per_second.bf16", "matmul_flops_per_second"),
        *("memory_bytes_per_second", "step_overhead_seconds"),
    }


def test_measured_values_alone_leave_the_rest_unknown() -> None:
    machine = Machine.from_measured({"flops_per_second": {"fp32": 1e11}}, devices_per_host=2)
    assert machine.device == Device("measured", flops_per_second={"fp32": 1e11})
    assert (machine.devices_per_host, machine.network) == (2, None)
