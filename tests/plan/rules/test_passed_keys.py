"""Every key of DeepSpeed that passes through changes what a run computes or costs, or is refused,
or is known to have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pytest

from deepspeed_lint.errors import MISSING
from deepspeed_lint.key_files import without_variant
from deepspeed_lint.keys import Key, load_table
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH, SHARED, TYPED
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.judge_passed import judge_rendered
from framework.plan.plan import make_plan
from tests import launched
from tests.dotted_keys import nested
from tests.launched import run_ranks
from tests.places import ROOT

ON_HOSTS: Final = Cluster(num_hosts=2, devices_per_host=4, device="cuda")
BF16: Final = {"precision": {"dtype": "bf16"}}
PIPELINE: Final = {"parallel": {"pipe": 2}}


def at_stage(number: int) -> dict[str, Any]:
    return {"zero": {"stage": number}}


@dataclass(frozen=True)
class Effect:
    """A run in which a key has an effect: what it is set to, sections of the run, and further keys
    under `deepspeed:`.
    """

    value: Any
    sections: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""  # of tests/jobs/observe_keys.py
    resumes: bool = False
    saves: bool = False


ADAGRAD: Final = {"optimizer": {"kind": "adagrad"}}
ONE_CYCLE: Final = {
    "scheduler": {
        "kind": "one_cycle",
        "min_lr": 0.001,
        "max_lr": 0.1,
        "first_steps": 2,
        "second_steps": 2,
        "decay_steps": 1,
        "cycle_momentum": True,
    },
    "training": {"max_steps": 7},
}
LOGGED: Final = {"comms_logger.enabled": True, "comms_logger.verbose": True}
PROFILED: Final = {"flops_profiler.enabled": True, "flops_profiler.profile_step": 2}
EFFECTS: Final[Mapping[str, list[Effect]]] = {
    "checkpoint.tag_validation": [Effect("IGNORE", saves=True)],
    "comms_logger.debug": [Effect(True, at_stage(1), LOGGED)],
    "comms_logger.enabled": [Effect(True, at_stage(1), {"comms_logger.verbose": True})],
    "comms_logger.prof_all": [Effect(False, at_stage(1), LOGGED)],
    "comms_logger.prof_ops": [
        Effect(["all_reduce"], at_stage(1), {**LOGGED, "comms_logger.prof_all": False}, saves=True)
    ],
    "comms_logger.verbose": [Effect(True, at_stage(1), {"comms_logger.enabled": True})],
    "communication_data_type": [
        *(Effect("bf16", at_stage(stage)) for stage in range(4)),
        Effect("bf16", PIPELINE, model="layers"),
    ],
    "data_types.buffer_dtype": [Effect("bf16", {**at_stage(stage), **BF16}) for stage in range(4)],
    "data_types.grad_accum_dtype": [
        Effect("fp32", {**at_stage(stage), **BF16}) for stage in (1, 2, 3)
    ],
    "data_types.keep_in_fp32_modules": [
        Effect(["scale"], {**at_stage(2), **BF16}, {"data_types.buffer_dtype": "bf16"})
    ],
    "disable_python_gc": [Effect(True)],
    "dump_state": [Effect(True)],
    "flops_profiler.detailed": [Effect(False, beside=PROFILED)],
    "flops_profiler.enabled": [Effect(True)],
    "flops_profiler.module_depth": [Effect(1, beside=PROFILED)],
    "flops_profiler.output_file": [Effect("flops.txt", beside=PROFILED)],
    "flops_profiler.profile_step": [Effect(3, beside=PROFILED)],
    "flops_profiler.recompute_fwd_factor": [Effect(0.5, beside=PROFILED)],
    "flops_profiler.top_modules": [Effect(3, beside=PROFILED)],
    "gradient_predivide_factor": [
        Effect(4.0),
        Effect(4.0, {"zero": {"stage": 2, "reduce_scatter": False}}),
    ],
    "log_level": [Effect("debug")],
    "memory_breakdown": [Effect(True)],
    "optimizer.params.foreach": [Effect(True)],
    "optimizer.params.fused": [Effect(True)],
    "optimizer.params.initial_accumulator_value": [Effect(0.5, ADAGRAD)],
    "optimizer.params.lr_decay": [Effect(0.5, ADAGRAD)],
    "optimizer.params.maximize": [Effect(True)],
    "pipeline.use_reentrant": [
        Effect(False, {**PIPELINE, "training": {"recompute_every": 1}}, model="layers")
    ],
    "prescale_gradients": [
        Effect(True),
        Effect(True, {"zero": {"stage": 1, "reduce_scatter": False}}),
    ],
    "scheduler.params.cycle_first_stair_count": [Effect(1, ONE_CYCLE)],
    "scheduler.params.cycle_second_stair_count": [Effect(1, ONE_CYCLE)],
    "scheduler.params.decay_mom_rate": [Effect(0.5, ONE_CYCLE)],
    "scheduler.params.last_batch_iteration": [
        Effect(1, {"scheduler": {"kind": "warmup", "warmup_steps": 2}})
    ],
    "timers.throughput.enabled": [Effect(True)],
    "timers.throughput.synchronized": [Effect(False, beside={"timers.throughput.enabled": True})],
    "use_data_before_expert_parallelism": [Effect(True)],
    "vocabulary_size": [Effect(50257)],
    "wall_clock_breakdown": [Effect(True)],
    "zero_optimization.compute_grad_norm": [
        Effect(False, {**at_stage(stage), "training": {"clip_grad_norm": 0}}) for stage in (1, 2)
    ],
    "zero_optimization.enable_sanity_checks": [Effect(True, at_stage(3))],
    "zero_optimization.memory_efficient_linear": [Effect(False, at_stage(3))],
    "zero_optimization.pipeline_loading_checkpoint": [Effect(True, at_stage(3), resumes=True)],
    "zero_optimization.stage3_allgather_sequential": [Effect(True, at_stage(3))],
    "zero_optimization.stage3_model_persistence_threshold": [Effect(10, at_stage(3))],
    "zero_optimization.stage3_module_granularity_threshold": [
        Effect(1000, at_stage(3), model="wide")
    ],
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": [Effect(True, at_stage(3))],
    "zero_optimization.use_multi_rank_bucket_allreduce": [
        Effect(False, at_stage(stage)) for stage in (1, 2)
    ],
    "zero_optimization.zero_hpz_partition_size": [Effect(2, at_stage(3))],
}
# Keys with an effect that two CPU processes cannot show, and what it takes.
NOT_SHOWN_HERE: Final[Mapping[str, str]] = {
    "aio.*": "NVMe: tests/engine/test_nvme.py trains with it, under --exhaustive",
    "compile.*": "DeepCompile: CUDA",
    "checkpoint.parallel_write.pipeline_stage": "stages of several data-parallel ranks",
    "optimizer.params.bias_correction": "DeepSpeed's kernels: CUDA",
    "optimizer.params.capturable": "CUDA",
    "optimizer.params.set_grad_none": "DeepSpeed's kernel of Lion: CUDA",
    "zero_optimization.offload_optimizer.fast_init": "NVMe",
    "zero_optimization.leaf_module.*": "experts: tests/engine/test_routed_models.py",
    "zero_optimization.zero_quantized_gradients": "CUDA and several hosts",
    "zero_optimization.zero_quantized_weights": "CUDA",
}


def repeated(case: str) -> str:
    """Return a case that is observed the same, as another one."""
    return json.dumps({**json.loads(case), "is_again": True})


def case_of(sections: Mapping[str, Any], model: str = "") -> str:
    return json.dumps({"sections": sections, "model": model, "resumes": False, "passed": {}})


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a run shows, case -> observations; each case is a string of JSON."""
    folder: Path = tmp_path_factory.mktemp("keys")
    tried = [*FIRST, *(FURTHER if launched.exhaustive else [])]
    cases = list(dict.fromkeys(case for key, effect in tried for case in both(key, effect)))
    cases += [repeated(case) for case in REPEATED]
    (folder / "cases.json").write_text(f"[{','.join(cases)}]", encoding="utf-8")
    run_ranks(
        ROOT / "tests/jobs/observe_keys.py",
        str(folder / "cases.json"),
        str(folder / "found.json"),
        num_ranks=2,
        cwd=folder,
    )
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return dict(zip(cases, found, strict=True))


def all_effects() -> list[tuple[str, Effect]]:
    return [(key, effect) for key, effects in EFFECTS.items() for effect in effects]


FIRST: Final = [(key, effects[0]) for key, effects in EFFECTS.items()]
FURTHER: Final = [pair for pair in all_effects() if pair not in FIRST]


def both(key: str, effect: Effect) -> tuple[str, str]:
    """Return the case without the key, and the case with it."""
    sections = dict(effect.sections)
    shared = {"sections": sections, "model": effect.model, "resumes": effect.resumes}
    if effect.saves:
        shared["saves"] = True
    without = nested({name: value for name, value in effect.beside.items() if name != key})
    with_key = nested({**effect.beside, key: effect.value})
    return json.dumps({**shared, "passed": without}), json.dumps({**shared, "passed": with_key})


# A run that does not show the same each time would show an effect of every key.
REPEATED: Final = list(
    dict.fromkeys(
        [
            *(case_of(sections) for sections in ({}, at_stage(1), at_stage(3))),
            *(both(key, effect)[0] for key, effect in FIRST if effect.beside),
        ]
    )
)
# Its waits for the device are not always as many.
WAITS_COUNT: Final = ("timers.throughput.enabled", "timers.throughput.synchronized")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "effect"),
    [*FIRST, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in FURTHER)],
)
def test_a_key_changes_what_a_run_computes_or_costs(
    observed: dict[str, dict[str, str]], key: str, effect: Effect
) -> None:
    without, with_key = (dict(observed[case]) for case in both(key, effect))
    assert "error" not in without
    assert "error" not in with_key
    if key not in WAITS_COUNT:
        del without["waits"], with_key["waits"]
    assert without != with_key


@pytest.mark.slow
@pytest.mark.parametrize("case", REPEATED)
def test_a_run_shows_the_same_each_time(observed: dict[str, dict[str, str]], case: str) -> None:
    first = dict(observed[case])
    again = dict(observed[repeated(case)])
    del first["waits"], again["waits"]
    assert first == again


def changed(key: Key) -> Any:
    """Return a value of a key that is not its default."""
    default = None if key.default is MISSING else key.default
    if key.enum:
        return next((value for value in key.enum if value != default), key.enum[0])
    values: dict[str, Any] = {
        "boolean": not default,
        "integer": (default if isinstance(default, int) else 0) + 2,
        "number": 0.5,
        "array": [1] if key.items == "integer" else ["x"],
        "string": "x",
    }
    return values.get(key.types[0], "x")


def leaves_that_pass() -> list[str]:
    """List DeepSpeed's keys that stand under `deepspeed:`, and hold no section."""
    table = load_table()
    found = []
    for path in table:
        key = table.exact(path)
        section = path.partition(".")[0]
        if key is None or "*" in path or section not in PASSED_THROUGH | SHARED:
            continue
        has_choice = key.enum != (key.default,)
        if (
            has_choice
            and key.types != ("object",)
            and without_variant(path) not in TYPED.keys() | OWNED.keys()
        ):
            found.append(path)
    return found


OPTIMIZERS: Final = {
    "Adam": {"kind": "adam"},
    "AdamW": {"kind": "adamw"},
    "Adagrad": ADAGRAD["optimizer"],
    "Lion": {"kind": "lion"},
}
SCHEDULES: Final = {
    "WarmupLR": {"kind": "warmup", "warmup_steps": 2},
    "WarmupDecayLR": {"kind": "warmup_decay", "warmup_steps": 2},
    "WarmupCosineLR": {"kind": "warmup_cosine", "warmup_steps": 2},
    "OneCycle": ONE_CYCLE["scheduler"],
    "LRRangeTest": {"kind": "lr_range_test"},
}


def runs_of(path: str) -> list[dict[str, Any]]:
    """List runs in which a key may have an effect."""
    variant = re.search(r"\[(\w+)\]", path)
    if path.startswith("scheduler."):
        assert variant is not None
        return [{"scheduler": SCHEDULES[variant[1]]}]
    if path.startswith("optimizer.params["):
        assert variant is not None
        own = OPTIMIZERS.get(variant[1])
        return [] if own is None else [{"optimizer": own}]
    runs: list[dict[str, Any]] = [PIPELINE, {**PIPELINE, "training": {"recompute_every": 1}}]
    for stage, dtype in ((0, "fp32"), (0, "fp16"), (0, "autocast"), *enumerate(["bf16"] * 4)):
        run = {**at_stage(stage), "precision": {"dtype": dtype}}
        runs.append({**run, "training": {"clip_grad_norm": 0}})
    runs.append({"zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    return runs


def is_taken(path: str, run: Mapping[str, Any]) -> bool:
    """Check whether a run takes a key without a word about it."""
    name = without_variant(path)
    key = load_table().exact(path)
    assert key is not None
    values = {**run, "deepspeed": nested({name: changed(key)})}
    try:
        plan = make_plan(config_from_values(values), ON_HOSTS)
    except ConfigError:
        return False
    if any(_is_about(finding.key, f"deepspeed.{name}") for finding in plan.findings):
        return False
    for problem in judge_rendered(plan):
        if problem.severity == "error" or _is_about(problem.key, f"deepspeed.{name}"):
            return False
    return True


def _is_about(key: str, path: str) -> bool:
    return key.startswith("deepspeed.") and (path.startswith(key) or key.startswith(path))


def is_known(name: str) -> bool:
    known = [*EFFECTS, *NOT_SHOWN_HERE]
    return any(fnmatchcase(name, pattern) for pattern in known)


@pytest.mark.slow
def test_what_a_run_takes_without_a_word_has_an_effect() -> None:
    idle = set()
    for path in leaves_that_pass():
        name = without_variant(path)
        if not is_known(name) and any(is_taken(path, run) for run in runs_of(path)):
            idle.add(name)
    assert not idle, "shown by no run: list an effect, or why it has none, or cannot be had"


def test_keys_with_an_effect_are_taken() -> None:
    for key, effect in all_effects():
        passed = nested({**effect.beside, key: effect.value})
        plan = make_plan(config_from_values({**effect.sections, "deepspeed": passed}), ON_HOSTS)
        notes = [finding for finding in plan.findings if finding.kind == "inert-in-a-run"]
        assert not notes, key


@pytest.mark.parametrize(
    ("passed", "sections"),
    [
        ({"autotuning.metric": "latency"}, {}),
        ({"compile.debug_log": True}, {}),
        ({"compile.offload_activation": True}, {}),
        ({"compile.autoep_non_moe": True}, {}),
        ({"data_efficiency.seed": 7}, {}),
        ({"expert_parallel.top_k": 2}, {}),
        ({"hybrid_engine.max_out_tokens": 9}, {}),
        ({"tensor_parallel.tp_overlap_comm": True}, {}),
        ({"aio.queue_depth": 9}, {}),
        ({"flops_profiler.top_modules": 3}, {}),
        ({"comms_logger.debug": True}, {}),
        ({"timers.throughput.synchronized": True}, {}),
        ({"checkpoint.parallel_write.pipeline_stage": True}, {}),
        ({"pipeline.use_reentrant": False}, PIPELINE),
        ({"pipeline.grad_partitioned": False}, PIPELINE),
        ({"prescale_gradients": True}, at_stage(1)),
        ({"data_types.param_dtype": "bf16"}, BF16),
        ({"data_types.keep_in_fp32_modules": ["scale"]}, BF16),
        ({"fp16.auto_cast": True}, {"precision": {"dtype": "fp16"}}),
        ({"bf16.immediate_grad_update": True}, {**at_stage(1), **BF16}),
        ({"zero_optimization.enable_sanity_checks": True}, at_stage(2)),
        ({"zero_optimization.use_multi_rank_bucket_allreduce": False}, at_stage(3)),
        ({"zero_optimization.stage3_allgather_sequential": True}, at_stage(0)),
    ],
)
def test_a_key_without_an_effect_has_a_note(
    passed: dict[str, Any], sections: dict[str, Any]
) -> None:
    values = {**sections, "deepspeed": nested(passed)}
    findings = make_plan(config_from_values(values), ON_HOSTS).findings
    (name,) = passed
    notes = [finding for finding in findings if finding.kind == "inert-in-a-run"]
    assert [_is_about(note.key, f"deepspeed.{name}") for note in notes] == [True]
    assert notes[0].severity == "note"
