"""DeepSpeed is asked to compile where the config says so, before the first step; after a resume its
passes are those of a first step; and nothing else then holds the hooks of gradients.
"""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.config.training import Compile
from framework.engine import deep_compilation
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.compiled_ops import needed_ops
from framework.plan.compiling import uses_deepcompile
from framework.plan.judge_passed import judge_rendered
from framework.plan.plan import make_plan
from framework.plan.render import render

CUDA = Cluster(devices_per_host=2, device="cuda")
DEEP: dict[str, Any] = {
    "training": {"compile": {"backend": "deepcompile"}},
    "zero": {"stage": 1},
}


class Engine:
    """Has what DeepSpeed's engine has for it."""

    def __init__(self, global_steps: int = 0) -> None:
        self.global_steps = global_steps
        self.compiled: list[tuple[str, dict[str, Any]]] = []
        self.launched: list[int] = []

    def compile(self, *, backend: str, compile_kwargs: dict[str, Any]) -> None:
        self.compiled.append((backend, compile_kwargs))
        self.launch_compile_passes = self.launched.append

    def forward(self) -> None:
        """Begin as `DeepSpeedEngine.forward` does."""
        self.launch_compile_passes(self.global_steps)


def test_deepspeed_compiles_with_inductor() -> None:
    engine = Engine()
    deep_compilation.compile_by_deepspeed(engine, Compile(backend="deepcompile", dynamic=False))
    assert engine.compiled == [("inductor", {"dynamic": False, "fullgraph": False})]


def test_after_a_resume_its_passes_begin_with_the_first_step_of_the_start() -> None:
    engine = Engine(global_steps=100)
    deep_compilation.compile_by_deepspeed(engine, Compile(backend="deepcompile"))
    for step in (100, 100, 101, 105):
        engine.global_steps = step
        engine.forward()
    assert engine.launched == [0, 0, 1, 5]


@pytest.mark.slow
def test_deepspeed_takes_up_its_passes_where_its_count_of_steps_is_theirs() -> None:
    """The reason for counting anew: the schedule's first step is 0, and no other will do."""
    backend = pytest.importorskip("deepspeed.compile.backend")
    backend.init_schedule([(0, [])])
    backend.launch_compile_passes(100)
    assert len(backend.remaining_schedule) == 1
    backend.init_schedule([])


def test_the_json_turns_it_on_and_its_op_is_known() -> None:
    plan = make_plan(config_from_values(DEEP), CUDA)
    rendered = render(plan)
    assert rendered["compile"] == {"deepcompile": True}
    assert "dc" in {op.name for op in needed_ops(rendered, device="cuda")}
    assert judge_rendered(plan) == []
    assert uses_deepcompile(plan.config)
    plain = make_plan(config_from_values({"training": {"compile": True}}), CUDA)
    assert "compile" not in render(plain)


def test_further_keys_of_it_are_handed_on() -> None:
    values = {**DEEP, "deepspeed": {"compile": {"debug_log": True}}}
    plan = make_plan(config_from_values(values), CUDA)
    assert render(plan)["compile"] == {"deepcompile": True, "debug_log": True}
    assert not plan.findings


def test_on_processors_it_is_refused_before_the_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"is_deepcompile_supported.*\[deepcompile-unsupported\]"):
        make_plan(config_from_values(DEEP), Cluster(devices_per_host=2, device="cpu"))


def test_at_stage_3_it_is_refused_with_deepspeeds_function() -> None:
    with pytest.raises(ConfigError, match=r"init_z3.*\[deepcompile-unsupported\]"):
        make_plan(config_from_values(DEEP | {"zero": {"stage": 3}}), CUDA)
