"""The command `plan`: one output of plan, memory, time, strategies, losers and knob; what it
writes; bad input.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NoReturn

import jsonschema
import pytest

from framework.cli import main
from framework.commands import plan_question, traced_work
from framework.commands.strategies import write_choice
from framework.commands.torch_child import NoAnswerError
from framework.config.load import load_config
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.search import SearchResult, search
from framework.plan.search_space import ACCUMULATION, MICRO, OFFLOAD, SEQUENCE, TENSOR, Request
from tests.commands.children import answer_here

MODEL = ["ds_configs/gpt_zero3.yaml", "model={kind: gpt, size: llama-3-8b}"]
GPT = [*MODEL, "batch={micro_size: 1}", "--num_gpus", "8", "--nodes", "8"]
# A search on few devices takes a part of the time.
FOUR = [*MODEL, "batch={micro_size: 1}", "--num_gpus", "4"]
Capture = pytest.CaptureFixture[str]
FILE = """\
run:   {name: mine}   # the name
model: {kind: gpt, size: gpt2-xl}
data:  {kind: text, sequence_length: 1024}
task:  {kind: causal_lm}
precision: {dtype: bf16}
# as the paper has it
batch: {global_size: 512, micro_size: 1}
zero:
  stage: 3   # to be safe
training: {max_steps: 10}
"""


@pytest.fixture(autouse=True)
def no_measured_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates measured on this machine would change every answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "1000")  # nothing is folded


def plan(*words: str, capsys: Capture, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


def table(out: str) -> list[dict[str, str]]:
    """Rows of the table of strategies by their titles, from all of its blocks."""
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("best "))
    rows: list[dict[str, str]] = []
    titles: list[str] = []
    for line in lines[start + 1 :]:
        if not line.startswith("          "):
            break
        words = line.replace("*", "").replace(" x ", "x")
        cells = words.replace("step s", "seconds").replace("on host", "host").split()
        if cells[0] == "#":
            titles = cells
        elif titles:  # the line above the table may be folded
            if int(cells[0]) > len(rows):
                rows.append({})
            rows[int(cells[0]) - 1] |= dict(zip(titles, cells, strict=True))
    return rows


@pytest.mark.slow
def test_one_output_has_everything(capsys: Capture) -> None:
    out = plan(*GPT, "zero.stage=1", "--gpu", "a100-80gb", capsys=capsys)
    labels = [line[:10].strip() for line in out.splitlines() if not line.startswith(" ")]
    planned = ["run", "cluster", "batch", "length", "precision", "ZeRO", "memory", "time"]
    assert labels[:10] == [*planned, "costs", "instead"]
    assert re.search(
        r"^instead   .*: [\d.]+ GiB at most, [\d.]+ samples per second.*; --search has the table$",
        out,
        re.MULTILINE,
    )
    assert "cluster   8 hosts x 8 cuda devices = 64 ranks" in out
    assert re.search(
        r"^memory    .* GiB on each rank between steps, .* GiB at most \(in the .*\) "
        r"of 69.[0-9]+ GiB usable \(run.memory_margin: 0.1\)",
        out,
        re.MULTILINE,
    )
    assert re.search(
        r"^time      .* s a step, .* tokens per second and device, .*; estimated for a100-80gb$",
        out,
        re.MULTILINE,
    )
    assert "best" not in labels
    searched = plan(*GPT, "--gpu", "a100-80gb", "--search", capsys=capsys)
    labels = [line[:10].strip() for line in searched.splitlines() if not line.startswith(" ")]
    assert labels[:10] == [*planned, "best", "others"]
    assert searched.count("\n          *") == 1


@pytest.mark.slow
def test_what_is_planned_fits_the_width(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is too wide has blocks with the same rows; every cell is in one of them."""
    words = [*FOUR, "zero.offload_optimizer.device=cpu", "--gpu", "a100-80gb", "--search"]
    words += ["--top", "3"]
    whole = table(plan(*words, capsys=capsys))
    assert len(whole) == 4
    for columns in (None, 80):
        if columns is None:
            monkeypatch.delenv("COLUMNS")
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        lines = plan(*words, capsys=capsys).splitlines()
        lines = [line for line in lines if not line.startswith(("note: ", "warning: "))]
        assert max(map(len, lines)) <= (columns or 100)
        assert table("\n".join(lines)) == whole
        assert not [line for line in lines if re.match(r" *(GiB|MiB|s)\b", line)]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_marked_in_the_table(capsys: Capture) -> None:
    words = [*MODEL, "batch={micro_size: 8}", "zero.stage=1", "--num_gpus", "8"]
    out = plan(*words, "--gpu", "a100-40gb", "--search", "--top", "2", capsys=capsys)
    assert [row["fits"] for row in table(out)] == ["yes", "yes", "no"]
    assert "fits" not in table(plan(*words, "--gpu", "h200-141gb", "--search", capsys=capsys))[0]


JSON_WORDS: dict[str, list[str]] = {
    "no device": [*GPT],
    "a device": [*GPT, "zero.offload_optimizer.device=cpu", "--gpu", "a100-80gb", "--paper"],
    "a search": [*GPT, "--gpu", "a100-40gb", "--search", "--top", "2", "--host_memory", "2TB"],
    "a choice": [*GPT, "zero.stage=auto", "--gpu", "h100-80gb"],
    "images": ["ds_configs/quickstart.yaml", "--num_gpus", "2"],
    "no estimate": [
        *GPT,
        "deepspeed={prescale_gradients: false, wall_clock_breakdown: true}",
    ],
}


@pytest.mark.parametrize(
    "name",
    [*sorted(JSON_WORDS.keys() - {"a search"}), pytest.param("a search", marks=pytest.mark.slow)],
)
def test_what_tools_get_is_what_the_schema_describes(name: str, capsys: Capture) -> None:
    """Keys are the same in every plan; those without a value are null."""
    assert main(["schema", "plan"]) == 0
    schema = json.loads(capsys.readouterr().out)
    found = json.loads(plan(*JSON_WORDS[name], "--json", capsys=capsys))
    jsonschema.validate(found, schema)
    assert found.keys() == schema["properties"].keys()
    without = {"no device": {"fits", "time", "machine"}, "no estimate": {"time", "strategies"}}
    for key in without.get(name, ()):
        assert found[key] is None
    if name == "a device":
        assert found["fits"] is True
        assert found["host"]["memory_bytes"] is None
        rank_bytes = sum(found["memory"]["host_bytes"].values())
        assert found["host"]["taken_bytes"] == 8 * rank_bytes > 0
    if name == "no estimate":
        assert found["memory"]["unknown"] == "not modelled with deepspeed.prescale_gradients"


def test_strategies_beside_a_plan_take_less_or_are_faster(capsys: Capture) -> None:
    for words in (["zero.stage=1", "--gpu", "a100-80gb"], ["zero.stage=2"]):
        found = json.loads(plan(*GPT, *words, "--json", capsys=capsys))
        most = found["memory"]["total_bytes"][found["memory"]["peak"]]
        speed = (found["time"] or {}).get("samples_per_second", float("inf"))
        for each in found["strategies"]["ranked"]:
            memory = each["memory"]
            is_faster = each["time"] is not None and each["time"]["samples_per_second"] > speed
            assert memory["total_bytes"][memory["peak"]] < most or is_faster
            assert not each["settings"].keys() & {"batch.micro_size", "batch.accumulation_steps"}


def test_a_time_that_is_not_known_has_its_reason_and_nothing_slower_beside_it(
    capsys: Capture,
) -> None:
    """Recomputation takes less memory, and is no alternative to a plan that fits."""
    out = plan(
        "ds_configs/bert_pretrain.yaml", "--num_gpus", "8", "--gpu", "v100-32gb", capsys=capsys
    )
    assert "\ntime      not estimated: the peak in bf16 of v100-32gb is not known\n" in out
    assert "\ninstead " not in out


def test_a_small_models_plan_has_no_larger_alternative(capsys: Capture) -> None:
    out = plan("ds_configs/quickstart.yaml", "--num_gpus", "2", capsys=capsys)
    assert "\ninstead " not in out
    found = json.loads(
        plan("ds_configs/quickstart.yaml", "--num_gpus", "2", "--json", capsys=capsys)
    )
    most = found["memory"]["total_bytes"][found["memory"]["peak"]]
    for each in found["strategies"]["ranked"]:
        assert each["memory"]["total_bytes"][each["memory"]["peak"]] < most


@pytest.mark.slow
def test_search_chooses_the_batch_as_well(capsys: Capture) -> None:
    words = [*MODEL, "batch={global_size: 512}", "--num_gpus", "4", "--gpu", "h100-80gb"]
    found = json.loads(plan(*words, "--search", "--top", "3", "--json", capsys=capsys))
    assert len(found["strategies"]["ranked"]) == 3
    assert all("batch.micro_size" in each["settings"] for each in found["strategies"]["ranked"])
    assert {lost["kind"] for lost in found["strategies"]["losers"]} == {"refused", "too-large"}
    fixed = json.loads(plan(*words, "zero.stage=3", "--search", "--json", capsys=capsys))
    assert {each["settings"]["zero.stage"] for each in fixed["strategies"]["ranked"]} == {3}


@pytest.mark.slow
def test_losers_give_the_reason(capsys: Capture) -> None:
    out = plan(*FOUR, "--gpu", "a100-40gb", "--search", "--top", "1", capsys=capsys)
    others = out[out.index("\nothers ") :]
    assert re.search(r"slower: \w+ [\d.]+ s of [\d.]+ s|as fast, and sends or takes more", others)
    losers = json.loads(plan(*GPT, "--gpu", "a100-40gb", "--search", "--json", capsys=capsys))[
        "strategies"
    ]["losers"]
    too_large = [lost for lost in losers if lost["kind"] == "too-large"]
    assert any(lost["settings"]["zero.stage"] == 0 for lost in too_large)
    assert all(
        re.match(r"[\d.,]+ GiB with micro-batches of 1: |too large with any batch$", lost["why"])
        for lost in too_large
    )


def test_what_no_tensor_holds_is_named(capsys: Capture) -> None:
    out = plan(*GPT, "zero.stage=1", "--gpu", "a100-80gb", capsys=capsys)
    assert re.search(
        r"^ {10}beside tensors: margin 7.[0-9]+ GiB, NCCL 1.34 GiB, CUDA context 942.1 MiB",
        out,
        re.MULTILINE,
    )
    assert "beside tensors" not in plan(*GPT, capsys=capsys)


def test_what_offloading_takes_is_held_against_a_host(capsys: Capture) -> None:
    words = [*GPT, "zero.offload_optimizer.device=cpu", "--gpu", "a100-80gb"]
    line = r"^ {10}on hosts: ([\d.]+) (GiB|MiB) on each host, ([\d.]+) (GiB|MiB) a rank(.*)$"
    found = re.search(line, plan(*words, capsys=capsys), re.MULTILINE)
    assert found is not None
    in_mib = {"GiB": 1024, "MiB": 1}
    on_host = float(found[1]) * in_mib[found[2]]
    assert on_host == pytest.approx(8 * float(found[3]) * in_mib[found[4]], rel=0.01)
    assert found[5] == "; not checked, as --host_memory is not given"
    enough = plan(*words, "--host_memory", "1TB", capsys=capsys)
    assert re.search(line[:-5] + ", of 931.32 GiB$", enough, re.MULTILINE)
    assert "memory-too-small" not in enough
    out = plan(*words, "--host_memory", "1GiB", capsys=capsys)
    assert re.search(r"each host would hold [\d.]+ [GM]iB, and has 1.00 GiB; ", out)
    assert main(["plan", *words, "--host_memory", "64"]) == 64
    assert "64 is not a size: write a number and one of GiB, TiB" in capsys.readouterr().err


def test_the_margin_is_a_key_and_decides(capsys: Capture) -> None:
    """A plan that takes 95 % of what is usable fits without a margin only."""
    words = [*GPT, "zero.stage=3", "--gpu", "a100-80gb"]
    planned = json.loads(plan(*words, "--json", capsys=capsys))["memory"]
    most = planned["total_bytes"][planned["peak"]]
    usable = 10 * planned["beside_tensors_bytes"]["margin"]
    share = 1 - most / usable
    for setting, warns in ((share + 0.01, True), (share - 0.01, False)):
        out = plan(*words, f"run.memory_margin={setting:.3f}", capsys=capsys)
        assert ("memory-too-small" in out) == warns


@pytest.mark.slow
def test_without_a_device_the_order_reports_it(capsys: Capture) -> None:
    order = "in the order of a card on PCIe (l4-24gb), speed unknown: no device named (--gpu)"
    assert order in plan(*FOUR, "--search", capsys=capsys)
    out = plan(*FOUR, "--gpu", "t4-16gb", "--search", capsys=capsys)
    assert "speed unknown: not all rates of t4-16gb are listed" in out or "the fastest first" in out


def test_what_does_not_fit_is_reported_with_what_would(capsys: Capture) -> None:
    out = plan(*GPT, "zero.stage=0", "--gpu", "a100-40gb", capsys=capsys)
    warning = out[out.index("warning: ") :]
    assert (
        "and a100-40gb has 33.18 GiB usable (run.memory_margin: 0.1); set zero.stage: " in warning
    )
    assert warning.rstrip().endswith("[memory-too-small]")
    fits = plan(
        *GPT, "zero.stage=3", "training.recompute_every=1", "--gpu", "a100-80gb", capsys=capsys
    )
    assert "memory-too-small" not in fits


@pytest.mark.slow
def test_other_runs_are_named_where_nothing_fits(capsys: Capture) -> None:
    """Each fits with its settings, and none of them is among the strategies."""
    words = ["ds_configs/gpt_zero3.yaml", "model.size=gpt2-xl", "batch.micro_size=1"]
    words += ["--num_gpus", "1", "--gpu", "rtx4090-24gb", "--host_memory", "10GiB"]
    found = json.loads(plan(*words, "--json", capsys=capsys))
    assert found["strategies"]["ranked"] == []
    states, adapters = found["strategies"]["otherwise"]
    assert states["settings"]["precision.states"] == "bf16"
    assert adapters["settings"]["training.lora"] == {"target_modules": "all-linear"}
    for other in (states, adapters):
        without = [word for word in words if word.partition("=")[0] not in other["settings"]]
        given = [f"{key}={json.dumps(value)}" for key, value in other["settings"].items()]
        answer = json.loads(plan(*without, *given, "--json", capsys=capsys))
        assert answer["fits"]
        assert answer["memory"]["total_bytes"][answer["memory"]["peak"]] == other["peak_bytes"]


@pytest.mark.slow
def test_nothing_fits_names_the_constraint_and_the_devices(capsys: Capture) -> None:
    out = plan(
        *MODEL,
        "batch={micro_size: 1}",
        "--num_gpus",
        "1",
        "--gpu",
        "t4-16gb",
        "precision.dtype=fp16",
        "--host_memory",
        "16GiB",
        capsys=capsys,
    )
    assert re.search(
        r"nothing fits: each host would hold [\d.]+ GiB, and has 16.00 GiB; ",
        out,
    )
    assert "zero.offload_optimizer.device: cpu" in out
    assert re.search(r"; use \d+ devices with zero\.stage: \d.* \[memory-too-small\]", out)
    assert (
        main(
            [
                "plan",
                *MODEL,
                "--num_gpus",
                "1",
                "--gpu",
                "t4-16gb",
                "precision.dtype=fp16",
                "--host_memory",
                "16GiB",
                "--apply",
            ]
        )
        == 64
    )
    assert "no strategy that fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nearest", "kind"),
    [
        (
            ["--num_gpus", "7"],
            "nearest   batch.global_size: 119: 119 samples per step",
            "batch-not-divisible",
        ),
        (
            ["--num_gpus", "8", "batch.global_size=4"],
            "nearest   batch.global_size: 8: 8 samples",
            "batch-not-divisible",
        ),
        (
            ["--num_gpus", "8", "parallel.pipe=3"],
            "nearest   parallel.pipe: 2: ",
            "pipe-not-divisible",
        ),
        (
            ["--num_gpus", "13", "parallel.pipe=7", "batch.micro_size=8"],
            "nearest   parallel.pipe: 1, batch.global_size: 117, batch.micro_size: 9: 117 samples per step = 9 x 1",
            "pipe-not-divisible",
        ),
        (
            ["--num_gpus", "40", "parallel.pipe=40"],
            "nearest   parallel.pipe: ",
            "pipe-exceeds-layers",
        ),
    ],
)
def test_bad_input_gets_the_nearest_plan(
    words: list[str], nearest: str, kind: str, capsys: Capture
) -> None:
    assert main(["plan", "ds_configs/quickstart.yaml", *words]) == 78
    stated = capsys.readouterr()
    assert stated.out.startswith(nearest)
    assert stated.err.rstrip().endswith(f"[{kind}]")


def test_a_tool_reads_no_nearest_plan_where_it_expects_json(capsys: Capture) -> None:
    assert main(["plan", "ds_configs/quickstart.yaml", "--num_gpus", "7", "--json"]) == 78
    stated = capsys.readouterr()
    assert stated.out == ""
    assert stated.err.startswith("nearest   batch.global_size: 119: ")


def test_bad_options_are_refused(capsys: Capture) -> None:
    for words, reason in (
        (["--gpu", "h900"], "--gpu h900: not known; known are"),
        (["--gpu", "h100"], "--gpu h100: not known; did you mean h100-80gb? known are"),
        (
            ["--gpu", "h100-80gb", "--network", "infinband-hdr"],
            "not known; did you mean infiniband-hdr? known are",
        ),
        (["--gpu", "h100-80gb", "--network", "string"], "--network string: not known"),
        (["--network", "infiniband-hdr"], "--network goes with --gpu"),
        (["--chart", "memory.png"], "--chart memory.png: what is drawn is SVG; name it .svg"),
        (["--goal", "longest-sequence"], "--gpu"),
        (["--goal", "fewest-devices"], "--gpu"),
    ):
        assert main(["plan", *GPT, *words]) == 64
        assert reason in capsys.readouterr().err
    assert main(["plan", GPT[0], "--nodes", "2"]) == 64
    assert "--nodes: how many devices does each host have?" in capsys.readouterr().err


def test_a_model_of_ones_own_is_not_guessed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(*_: object) -> NoReturn:
        raise NoAnswerError("it is not here")

    monkeypatch.setattr("framework.commands.plan_question.find_own_work", find_nothing)
    words = ["ds_configs/quickstart.yaml", "model={target: 'no_such_module:LeNet'}"]
    out = plan(*words, capsys=capsys)
    assert "\nmemory    not estimated: the model is one of your own (it is not here)\n" in out
    assert "\nbest " not in out
    assert json.loads(plan(*words, "--json", capsys=capsys))["memory"]["unknown"].startswith(
        "the model is one of your"
    )
    assert main(["plan", *words, "zero.stage=auto", "--gpu", "h100-80gb"]) != 0
    reason = "the model is one of your own (it is not here); write the values of the keys"
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_ones_own_is_looked_at(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same net by name and by path, once with and once without keys that are `auto`."""
    monkeypatch.setattr(traced_work, "ask_child", answer_here)
    by_name = json.loads(
        plan("ds_configs/quickstart.yaml", "--num_gpus", "2", "--json", capsys=capsys)
    )["memory"]
    target = "model={target: 'framework.recipes.image_models.small_nets:LeNet'}"
    found = json.loads(
        plan("ds_configs/quickstart.yaml", target, "--num_gpus", "2", "--json", capsys=capsys)
    )
    assert found["memory"]["num_params"] == by_name["num_params"]
    assert found["memory"]["total_bytes"]["between"] == by_name["total_bytes"]["between"]
    assert found["memory"]["total_bytes"]["backward"] == pytest.approx(
        by_name["total_bytes"]["backward"], rel=0.1
    )
    file = tmp_path / "run.yaml"
    text = (
        Path("ds_configs/quickstart.yaml")
        .read_text()
        .replace("{kind: lenet, image_size: 28}", target[6:])
    )
    file.write_text(
        text.replace("global_size: 120", "global_size: 120, micro_size: auto")
        + "zero: {stage: auto}\n"
    )
    plan(str(file), "--num_gpus", "2", "--gpu", "a100-40gb", "--apply", capsys=capsys)
    assert load_config(file).auto == frozenset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("parallel.tensor=2", "parallel.tensor_plan = null: LeNet has no plan of its own"),
        ("parallel.expert=2", "parallel.expert = 2: LeNet has no experts that can be divided"),
        ("training.freeze=[fc9.*]", "training.freeze.0 = fc9.*: no parameter of the model"),
        (
            "optimizer.groups=[{match: fc9.*, lr: 1e-4}]",
            "optimizer.groups.0.match = fc9.*: no trained parameter of the model",
        ),
        ("model.args={x: 1}", "model.args = {x: 1}: got an unexpected keyword argument 'x'"),
        (
            "optimizer={target: 'torch.optim:SGD', args: {rate: 1}}",
            "optimizer.args = {rate: 1}: got an unexpected keyword argument 'rate'",
        ),
    ],
)
def test_a_model_of_ones_own_that_cannot_be_so_is_refused(
    setting: str, line: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_work, "ask_child", answer_here)
    target = "model={target: 'framework.recipes.image_models.small_nets:LeNet'}"
    words = ["ds_configs/quickstart.yaml", target, "zero.stage=1", setting, "--num_gpus", "2"]
    for _ in range(2):  # the second time from what is kept
        assert main(["plan", *words]) == 78
        assert capsys.readouterr().err.startswith(f"command line: {line}")
    if "optimizer" in setting:  # it is no part of what is kept
        words.remove(setting)
        assert main(["plan", *words]) == 0


@pytest.mark.slow
def test_another_plan_is_found_for_groups_that_cannot_divide_a_model(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_work, "ask_child", answer_here)
    file = tmp_path / "run.yaml"
    text = Path("ds_configs/quickstart.yaml").read_text()
    file.write_text(text + "parallel: {tensor: 2}\n")
    target = "model={target: 'framework.recipes.image_models.small_nets:LeNet'}"
    words = [str(file), target, "--num_gpus", "2", "--gpu", "a100-40gb"]
    found = json.loads(plan(*words, "--search", "--json", capsys=capsys))
    assert found["refused"]["kind"] == "tensor-plan"
    assert found["strategies"]["ranked"]


def test_json_has_the_bytes_of_each_moment(capsys: Capture) -> None:
    found = json.loads(plan(*GPT, "--gpu", "h100-80gb", "--json", capsys=capsys))
    memory, time = found["memory"], found["time"]
    assert memory["is_estimate"] is True
    assert memory["total_bytes"]["between"] == sum(memory["bytes"]["between"].values())
    assert memory["peak"] == max(memory["total_bytes"], key=memory["total_bytes"].get)
    assert time["step_seconds"] == pytest.approx(sum(time["seconds"].values()))


@pytest.mark.slow
def test_apply_writes_the_choice_and_keeps_the_text(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    where = ["--num_gpus", "2", "--gpu", "a100-80gb"]
    first = json.loads(plan(str(file), *where, "--search", "--json", capsys=capsys))["strategies"][
        "ranked"
    ][0]["settings"]
    out = plan(str(file), *where, "--apply", capsys=capsys)
    assert f"--- {file}" in out
    after = file.read_text()
    for comment in ("# the name", "# as the paper has it", "# to be safe"):
        assert comment in after
    config = load_config(file)
    layout = make_plan(config, Cluster(devices_per_host=2)).layout
    assert config.zero.stage == first["zero.stage"]
    assert (layout.micro_size, layout.accumulation_steps) == (
        first["batch.micro_size"],
        first["batch.accumulation_steps"],
    )
    assert layout.global_size == 512
    assert f"{file}: it says so already" in plan(str(file), *where, "--apply", capsys=capsys)
    assert file.read_text() == after


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "zero: {stage: auto}\nparallel: auto\n",
        "parallel: {pipe: auto}\n",
        '{"zero": {"stage": "auto"}}',
    ],
)
def test_apply_replaces_auto(text: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / ("run.json" if text.startswith('{"') else "run.yaml")
    file.write_text(text)
    plan(str(file), "--num_gpus", "2", "--gpu", "a100-80gb", "--apply", capsys=capsys)
    assert "auto" not in file.read_text()
    assert load_config(file).auto == frozenset()


def test_apply_writes_a_section_into_a_section_of_several_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE, encoding="utf-8")
    diff = write_choice(str(file), [], {OFFLOAD: "cpu"})
    assert "+  offload_optimizer:\n+    device: cpu\n" in diff
    assert load_config(file).zero.offload_optimizer.device == "cpu"


@pytest.mark.slow
def test_apply_leaves_offloads_other_keys_behind(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        FILE.replace(
            "  stage: 3   # to be safe",
            "  stage: 3\n  offload_optimizer: {device: cpu, pin_memory: false}",
        )
        + "optimizer: {kind: adamw, implementation: deepspeed}\n"
    )
    plan(str(file), "--num_gpus", "2", "--gpu", "a100-80gb", "--apply", capsys=capsys)
    assert load_config(file).zero.offload_optimizer.device == "none"


@pytest.mark.slow
def test_the_chart_is_an_svg_with_a_bar_for_each(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "memory.svg"
    words = ["--gpu", "a100-80gb", "--top", "4", "--chart", str(file), "run.name=a_b"]
    out = plan(*GPT, *words, capsys=capsys)
    root = ET.fromstring(file.read_text())
    space = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{space}rect") if each.find(f"{space}title") is not None]
    assert len(bars) == 4 * 5
    assert [
        each.text
        for each in root.iter(f"{space}text")
        if each.text and each.text.startswith("usable ")
    ]
    assert "prefers-color-scheme:dark" in file.read_text()
    widths = {}
    for bar in bars:
        widths[bar.get("y")] = widths.get(bar.get("y"), 0.0) + float(bar.get("width") or 0)
    sizes = [float(row["GiB"]) for row in table(out)][:4]
    unit = max(widths.values()) / max(sizes)
    assert list(widths.values()) == pytest.approx([size * unit for size in sizes], rel=0.02, abs=1)


def test_paper_has_the_formulas_beside_what_deepspeed_allocates(capsys: Capture) -> None:
    out = plan(*GPT, "--paper", capsys=capsys)
    paper = out[out.index("\npaper ") :]
    assert "8,030,261,248 weights: 29.92 GiB in fp32, 128 GB to train at 16 each" in paper
    assert "DDP, 20 bytes a weight                      149.58 GiB" in paper
    assert "FSDP, 18 bytes a weight over all ranks        2.10 GiB" in paper
    assert [f"DeepSpeed, stage {stage}, as planned here" in paper for stage in range(4)] == [
        True
    ] * 4
    assert "between failures of 64 devices" in paper
    found = json.loads(plan(*GPT, "--paper", "--json", capsys=capsys))["paper"]
    assert found["num_params"] == 8_030_261_248
    assert found["formula_bytes"]["DDP, 20 bytes a weight"] == 20 * found["num_params"]
    assert found["stages"]["3"]["between_bytes"] < found["stages"]["0"]["between_bytes"]
    assert [each["save_seconds"] for each in found["goodput"]] == [10, 60, 300]
    assert json.loads(plan(*GPT, "--json", capsys=capsys))["paper"] is None


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["fewest-devices", "longest-sequence"])
def test_goals(goal: str, capsys: Capture) -> None:
    words = ("--gpu", "a100-40gb", "--goal", goal, "--json", "zero.stage=2")
    found = json.loads(plan(*GPT, *words, capsys=capsys))["strategies"]["ranked"]
    assert {each["settings"]["zero.stage"] for each in found} == {2}, (
        "what the command line sets stays"
    )
    if goal == "fewest-devices":
        assert 1 <= found[0]["devices"] < 64
    else:
        assert found[0]["settings"]["data.sequence_length"] > 1024


@pytest.mark.parametrize(
    ("model", "stage", "tensor"),
    [
        ("gpt, num_kv_heads: 4", 3, {1, 2, 4}),
        ("gpt, mlp_size: 1001", 1, {1}),
        ("gpt", 0, {1, 2, 4}),
        ("bert", 2, {1, 2, 4}),
    ],
)
def test_check_accepts_every_size_that_is_proposed(
    model: str, stage: int, tensor: set[int], tmp_path: Path, capsys: Capture
) -> None:
    """Each is written into the file as --apply does it; what does not divide, or is not right, is
    not among them.
    """
    text = FILE.replace(
        "gpt, size: gpt2-xl", f"{model}, num_layers: 4, num_heads: 12, hidden_size: 96"
    )
    text = text.replace("1024", "128").replace("stage: 3", f"stage: {stage}")
    if model == "bert":
        text = text.replace("kind: text,", "kind: text_pairs,").replace("causal_lm", "masked_lm")
    file, cluster = tmp_path / "run.yaml", Cluster(2, 8)
    file.write_text(text, encoding="utf-8")
    proposed = search(
        Request(load_config(file), cluster, free={TENSOR, SEQUENCE, MICRO, ACCUMULATION})
    ).ranked
    assert {each.choice[TENSOR] for each in proposed} == tensor
    assert {each.choice[SEQUENCE] for each in proposed} == {1, 2, 4, 8}  # 8: teams in a ring
    for each in proposed:
        file.write_text(text, encoding="utf-8")
        write_choice(str(file), [], each.settings)
        assert main(["check", str(file), "--num_gpus", "8", "--nodes", "2"]) == 0, each.settings
        assert make_plan(load_config(file), cluster).layout == each.plan.layout


def test_the_plan_stands_among_the_best_where_it_belongs(capsys: Capture) -> None:
    sections = (
        "model={kind: gpt, size: gpt2}",
        "precision.dtype=bf16",
        "batch={global_size: 32, micro_size: 32}",
    )
    words = (
        "ds_configs/gpt_tiny.yaml",
        *sections,
        "data.sequence_length=1024",
        "--num_gpus",
        "1",
    )
    out = plan(*words, "--gpu", "h200-141gb", "--search", capsys=capsys)
    speeds = [float(row["samples/s"].replace(",", "")) for row in table(out)]
    assert out.count("\n          *") == 1
    assert len(speeds) > 2
    assert speeds == sorted(speeds, reverse=True)
    assert not re.search(r"zero\.stage: 1: ", out[out.index("\nothers ") :])


def test_a_search_does_not_end_with_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """8 samples on 64 devices: the file cannot be, and what is found in its place, by one search,
    is written.
    """
    requests: list[Request] = []

    def counted(request: Request) -> SearchResult:
        requests.append(request)
        return search(request)

    monkeypatch.setitem(plan_question._SEARCHES, None, counted)
    file = tmp_path / "run.yaml"
    file.write_text(FILE.replace("global_size: 512", "global_size: 8").replace("gpt2-xl", "gpt2"))
    # stages would be timed in a process with torch
    words = [str(file), "parallel.pipe=1", "--nodes", "8", "--num_gpus", "8", "--gpu", "h100-80gb"]
    assert main(["plan", *words]) == 78
    assert "nearest   " in capsys.readouterr().out
    answer = json.loads(plan(*words, "--search", "--json", capsys=capsys))
    assert answer["refused"]["kind"] == "batch-not-divisible"
    assert len(requests) == 1
    out = plan(*words, "--apply", "--top", "2", capsys=capsys)
    assert (
        "refused   as it is written, below is the best of the search: batch.global_size: 8" in out
    )
    planned = make_plan(load_config(str(file)), Cluster(8, 8, "cuda"))
    assert planned.layout.global_size == 8
    assert planned.layout.data_parallel_size < 64


@pytest.mark.slow
def test_fixed_keys_that_cost_are_named_the_dearest_first(capsys: Capture) -> None:
    """Each price is that of a plan with the settings that are named."""
    words = ["ds_configs/gpt_zero3.yaml", "model={kind: gpt, size: llama-3-8b}", "zero.stage=3"]
    words += ["--nodes", "8", "--num_gpus", "8", "--gpu", "h100-80gb"]
    words += ["batch={global_size: 256, micro_size: 1}", "parallel={tensor: 8, sequence: auto}"]
    answer = json.loads(plan(*words, "--json", capsys=capsys))
    shares = [cost["share"] for cost in answer["costs"]]
    assert shares == sorted(shares, reverse=True)
    assert {"parallel.tensor", "training.recompute_every"} <= {
        cost["key"] for cost in answer["costs"]
    }
    before = answer["time"]["samples_per_second"]
    for cost in answer["costs"]:
        changed = [f"{key}={value}" for key, value in cost["settings"].items()]
        words_of_cost = [word for word in words if word.partition("=")[0] not in cost["settings"]]
        after = json.loads(plan(*words_of_cost, *changed, "--json", capsys=capsys))
        speed = after["time"]["samples_per_second"]
        assert speed == cost["samples_per_second"]
        assert cost["share"] == pytest.approx(1 - before / speed)
        assert cost["share"] > 0.05
    text = plan(*words, capsys=capsys)
    assert f"costs     {answer['costs'][0]['key']}: " in text
    assert json.loads(plan(*words, "--search", "--json", capsys=capsys))["costs"] is None
