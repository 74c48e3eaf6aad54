"""DeepSpeed itself judges the cases: it refuses every broken config at the place that the case
names, takes every near miss, and shows the effect.

Two processes on CPU, forked from one that has imported it, answer everything; the first run on a
machine compiles DeepSpeed's Adam for CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.facts import Facts
from deepspeed_lint.rules import apply_rules
from deepspeed_lint.topology import Topology
from tests.deepspeed_lint.rules.cases import (
    BF16,
    CASES,
    CURRICULUM,
    DECAY,
    GONE,
    Case,
    merged,
    offload,
    optimizer,
    sampling,
    scheduler,
    zenflow,
    zero,
)
from tests.deepspeed_lint.rules.fixes import alternatives, mended
from tests.launched import TIMEOUT_SECONDS
from tests.warm_ranks import Job, session_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs an installed DeepSpeed"),
]
RELEASE = "0.19.8"
ASK = Path(__file__).with_name("ask_deepspeed.py")
NUM_PROCESSES = 2
# Text of DeepSpeed's refusal, where another reason could be taken for it.
WORDS: Mapping[str, str] = {
    "batch-size-missing": "needs to be provided",
    "sequence-parallel-mesh": "Mesh",
    "optimizer-unknown": "not a supported",
    "optimizer-untested": "untested ZeRO Optimizer",
    "lamb-with-fixed-loss-scale": "dynamic loss scaling",
    "muon-with-reduce-scatter": "reduce scatter",
    "muon-with-quantized-gradients": "all2all",
    "scheduler-unknown": "recognize",
    "amsgrad-needs-torch-adam": "AMSGrad",
    "torch-scheduler-with-wrapper": "is not an Optimizer",
    "fp16-with-bf16": "simultan",
    "fp16-unsupported": "not supported on your device",
    "grad-accum-dtype": "unsupported mix",
    "param-dtype": "param_dtype",
    "master-weights-need-zero": "ZeRO Stage 1, 2, or 3",
    "bf16-states-need-bf16-master": "requires bf16_master",
    "two-master-dtypes": "mutually exclusive",
    "master-weights-need-cpu-adam": "DeepSpeedCPUAdam",
    "autocast-with-quantized-weights": "quantized weights",
    "grad-norm-off-with-clipping": "gradient_clipping=0",
    "grad-norm-needed": "compute_grad_norm=false",
    "prescale-with-reduce-scatter": "reduce scatter enabled",
    "unmanaged-with-overlap": "overlap_comm",
    "unmanaged-with-deepcompile": "DeepCompile",
    "sum-of-gradients": "'sum'",
    "quantized-gradients-need-reduce-scatter": "reduce_scatter",
    "deprecated-with-its-heir": "together",
    "partial-offload-needs-cpu-adam": "DeepSpeedCPUAdam",
    "zenflow-needs-offload": "cpu offload",
    "zenflow-needs-overlap": "overlap_comm",
    "zenflow-params": "argument",
    "expert-tensor-parallel": "reserved",
    "presets-differ": "must match",
    "compile-around-experts": "autoep_non_moe",
    "needs-cuda": "CPU backend|CUDA|NVIDIA|capturable=True",
    "warmup-without-steps": "positive integer",
    "legacy-stage1": "deprecated version",
    "odd-allgather-bucket": "must be a multiple",
    "compile-pass-unknown": "passes.0",
    "keep-in-fp32-text": "name patterns",
    "autotuning-folder-empty": "cannot be empty",
    "autocast-in-int8": "output type Char",
    "dynamic-loss-scale": "must be > 0",
    "loss-scale-boolean": "not bool",
    "zenflow-needs-adam": "step_id",
    "random-ltd-needs": "KeyError",
    "bucket-too-large": "Overflow",
    "autocast-module-path": "safe module",
    "contiguous-checkpoints": "ontiguous",
    "curriculum-needs-metrics": "curriculum_metrics",
    "dynamic-batching-needs-tokens": "max_tokens",
}
QUESTIONS = [
    (kind, is_broken, case)
    for kind, sides in CASES.items()
    for is_broken, cases in ((True, sides[0]), (False, sides[1]))
    for case in cases
    if case.asked and case.release == RELEASE
]
# Ways out that lead to what a CPU does not run.
NOT_ON_CPU = ("not been implemented on CPU", "Type fp16 is not supported", "aio_handle")
MENDED = [
    (kind, changes, mended(case, changes))
    for kind, is_broken, case in QUESTIONS
    if is_broken and case.asked in ("parse", "init", "step") and case.world in (None, 1)
    for problem in apply_rules(case.facts())
    for changes in alternatives(problem.fix)
    if problem.severity == "error"
]

LR = 5e-5
HALF = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}


def peak(saw: Mapping[str, Any]) -> float:
    return max(saw["rates"])


# kind of a silent rule -> (change, steps, what the engine reports of itself). The config alone does
# not show it.
EFFECTS: Mapping[str, tuple[Mapping[str, Any], int, Callable[[Mapping[str, Any]], bool]]] = {
    "clipping-left-out": ({"gradient_clipping": GONE}, 1, lambda saw: saw["clipping"] == 1.0),
    "zero-stage-left-out": (
        {"zero_optimization": {"overlap_comm": True}},
        1,
        lambda saw: saw["stage"] == 0,
    ),
    "adam-is-adamw": (
        optimizer("Adam", weight_decay=0.1, torch_adam=True),
        1,
        lambda saw: saw["optimizer"].endswith(".AdamW"),
    ),
    "adamw-mode-ignored": (
        optimizer("AdamW", adam_w_mode=False),
        1,
        lambda saw: saw["adam_w_mode"] in (True, 1),
    ),
    "amsgrad-ignored": (
        optimizer("Adagrad", amsgrad=True) | offload(2),
        1,
        lambda saw: saw["amsgrad"] is True and "max_exp_avg_sq" not in saw["state"],
    ),
    "warmup-decay-peak": (
        scheduler("WarmupDecayLR", **DECAY) | optimizer("AdamW", lr=LR, torch_adam=True),
        4,
        lambda saw: peak(saw) == 0.001,
    ),
    "warmup-falls": (
        scheduler("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.01),
        2,
        lambda saw: saw["rates"][1] < saw["rates"][0],
    ),
    "zero-as-switch": ({"zero_optimization": True}, 1, lambda saw: saw["stage"] == 1),
    "warmup-too-long": (
        scheduler("WarmupCosineLR", total_num_steps=5),
        10,
        lambda saw: peak(saw) < 0.0005,
    ),
    "plateau-without-metric": (
        scheduler("ReduceLROnPlateau", patience=0),
        4,
        lambda saw: saw["rates"][-1] < 0.0001,
    ),
    "autocast-without-dtype": (
        {"torch_autocast": {"enabled": True}},
        1,
        lambda saw: saw["autocast_dtype"] == "None",
    ),
    "autocast-of-half-weights": (
        HALF | BF16,
        1,
        lambda saw: saw["dtype"] == "torch.bfloat16" and saw["autocast"],
    ),
    "section-not-enabled": ({"fp16": {"loss_scale": 0}}, 1, lambda saw: not saw["fp16"]),
    "auto-value": ({"fp16": {"enabled": "auto"}}, 1, lambda saw: not saw["fp16"]),
    "two-bf16-sections": (
        {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
        1,
        lambda saw: saw["dtype"] == "torch.float32",
    ),
    "param-offload-ignored": (
        zero(2, offload_param={"device": "cpu"}),
        1,
        lambda saw: not saw["offloaded"],
    ),
    "nvme-optimizer-in-memory": (
        offload(2, "nvme", nvme_path="/nowhere/at/all"),
        1,
        lambda saw: saw["offloaded"],
    ),
    "contiguous-gradients-forced": (
        zero(2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}),
        1,
        lambda saw: saw["contiguous"] is True,
    ),
    "zenflow-replaces-accumulation": (
        zenflow(2, select_strategy="step", select_interval=2, update_interval=2)
        | {"gradient_accumulation_steps": 4},
        0,
        lambda saw: saw["accumulation"] == 2,
    ),
    "data-efficiency-half-enabled": (
        sampling(enabled=False, curriculum_learning=CURRICULUM),
        0,
        lambda saw: saw["curriculum"],
    ),
    "hpz-larger-than-world": (zero(3, zero_hpz_partition_size=3), 1, lambda saw: saw["steps"] == 1),
    "inert-at-stage": (
        zero(2, zero_quantized_weights=True),
        1,
        lambda saw: saw["finite"],
    ),  # there is no CPU form of it
    "offload-without-zero": (
        offload(0) | optimizer("AdamW"),
        1,
        lambda saw: not saw["offloaded"] and saw["optimizer"].endswith("DeepSpeedCPUAdam"),
    ),
    "comms-logger-always-on": (
        {"comms_logger": {"enabled": False}},
        1,
        lambda saw: saw["counts_collectives"],
    ),
    "elastic-checkpoint": (zero(2, elastic_checkpoint=True), 1, lambda saw: saw["steps"] == 1),
    "data-parallel-size-alone": ({"data_parallel_size": 3}, 1, lambda saw: saw["steps"] == 1),
    "tensor-parallel-below-0": (
        {"tensor_parallel": {"autotp_size": -2}},
        1,
        lambda saw: saw["steps"] == 1,
    ),
    "tensor-parallel-preset": (
        {"tensor_parallel": {"preset_model": "lama"}},
        1,
        lambda saw: saw["steps"] == 1,
    ),
}
# Silent rules that one process on CPU cannot show, or with an effect on disk or in the pipeline
# engine.
NOT_SHOWN = {
    "warmup-without-steps",
    "autosp-at-stage",
    # the cases show what breaks: positional inputs, like the inputs of the tests' engine
    "auto-cast-without-fp16",
    "batch-with-tensor-parallel",
    "sequence-parallel-fraction",
    "sequence-parallel-gradients",
    "warmup-peak",
    "bf16-emulated",
    # a device that is not the host
    "partial-offload-without-schedule",
    "super-offload-ignored",
    "pipeline-with-zero",
    "pipeline-with-tensor-parallel",
    "pipeline-needs-steps-per-print",
    "pipeline-unmanaged",
    "pipeline-overlap",
    "pipeline-bf16-checkpoint",
    "deepcompile-without-zero",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return DeepSpeed's answers to all questions, then to the effects."""
    folder = tmp_path_factory.mktemp("ask")
    asked = [
        {"config": case.config, "asked": case.asked, "world": case.world}
        for _, _, case in QUESTIONS
    ]
    asked += [{"config": config, "asked": "step", "world": 1} for _, _, config in MENDED]
    asked += [
        {
            "config": Case(change).config,
            "asked": "step" if steps else "init",
            "world": 1,
            "steps": steps,
        }
        for change, steps, _ in EFFECTS.values()
    ]
    jobs = [
        ask(asked[number::NUM_PROCESSES], folder / str(number)) for number in range(NUM_PROCESSES)
    ]
    found: list[dict[str, Any]] = [{}] * len(asked)
    for number, job in enumerate(jobs):
        assert job.wait(TIMEOUT_SECONDS) == [0], job.stated()[-4000:]
        found[number::NUM_PROCESSES] = json.loads(
            (folder / str(number) / "answers.json").read_text(encoding="utf-8")
        )
    return found


def ask(questions: list[dict[str, Any]], folder: Path) -> Job:
    """Start one process of DeepSpeed, which writes its answers into the folder."""
    folder.mkdir()
    (folder / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    return session_ranks().start(
        ["questions.json", "answers.json"], num_ranks=1, folder=folder, script=ASK
    )


@pytest.mark.skipif(
    find_spec("deepspeed") is not None and version("deepspeed") != RELEASE, reason=f"asks {RELEASE}"
)
def test_deepspeed_refuses_what_breaks_and_takes_near_misses(answers: list[dict[str, Any]]) -> None:
    wrong = []
    for (kind, is_broken, case), answer in zip(QUESTIONS, answers, strict=False):
        stated = (
            f"{kind}: {dict(case.change)}: asked to {case.asked}, "
            f"refused at {answer['refused']!r}: {answer['error']}"
        )
        expected = case.asked if is_broken else ""
        words = WORDS.get(kind, "")
        if answer["refused"] != expected or (
            is_broken and not any(word in answer["error"] for word in words.split("|"))
        ):
            wrong.append(stated)
    assert wrong == []
    assert len(QUESTIONS) > 190


@pytest.mark.skipif(
    find_spec("deepspeed") is not None and version("deepspeed") != RELEASE, reason=f"asks {RELEASE}"
)
def test_deepspeed_takes_every_fixed_config(answers: list[dict[str, Any]]) -> None:
    refused = [
        f"{kind}: after {changes}: {answer['error']}"
        for (kind, changes, _), answer in zip(MENDED, answers[len(QUESTIONS) :], strict=False)
        if answer["refused"] and not any(words in answer["error"] for words in NOT_ON_CPU)
    ]
    assert refused == []
    assert len(MENDED) > 110


@pytest.mark.skipif(
    find_spec("deepspeed") is not None and version("deepspeed") != RELEASE, reason=f"asks {RELEASE}"
)
@pytest.mark.parametrize("kind", EFFECTS)
def test_deepspeed_takes_it_and_does_otherwise(kind: str, answers: list[dict[str, Any]]) -> None:
    change, _, holds = EFFECTS[kind]
    answer = answers[len(QUESTIONS) + len(MENDED) + list(EFFECTS).index(kind)]
    assert answer["refused"] == "", answer
    assert holds(answer["saw"]), answer["saw"]
    found = apply_rules(Facts(Case(change).config, topology=Topology(world_size=1, device="cpu")))
    assert kind in {problem.kind for problem in found if problem.severity == "warning"}


def test_every_silent_rule_is_shown_or_listed() -> None:
    silent = {
        problem.kind
        for breaks, _ in CASES.values()
        for case in breaks
        for problem in apply_rules(case.facts())
        if problem.severity == "warning"
    }
    assert silent == set(EFFECTS) | NOT_SHOWN
    assert not set(EFFECTS) & NOT_SHOWN


def test_merging_leaves_the_base_alone() -> None:
    assert merged({"a": {"b": 1}}, {"a": {"b": GONE, "c": 2}}) == {"a": {"c": 2}}
