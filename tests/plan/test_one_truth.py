"""One truth: every candidate of a search is the plan that its settings make by themselves, in
memory, time and verdict; and what `auto` chooses fits by the plan that is shown.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from framework.cli import main
from framework.commands import traced_work
from framework.commands.traced_work import find_own_work
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.plan import search as search_module
from framework.plan import work as work_module
from framework.plan.alternatives import size_text, with_settings
from framework.plan.auto import listed_target, resolve
from framework.plan.candidate import Candidate, judge
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate, stage_memories
from framework.plan.plan import make_plan
from framework.plan.search import SearchResult, search
from framework.plan.search_space import EVERYTHING, Request, sizes_of_groups
from framework.plan.work import work_of
from tests.commands.children import answer_here
from tests.jobs.divided_models import WRITTEN_PLAN

GPT: dict[str, Any] = {
    "model": {
        "kind": "gpt",
        "size": "gpt2",
        "num_layers": 4,
        "max_positions": 4096,
        "vocab_size": 128_256,
    },
    "data": {"kind": "text", "sequence_length": 4096},
    "task": {"kind": "causal_lm"},
    "precision": {"dtype": "bf16"},
    "training": {"max_steps": 100},
}
EXPERTS = {"model": GPT["model"] | {"moe": {"num_experts": 4}}}
ADAPTERS = {"training": {"max_steps": 100, "lora": {"target_modules": "all-linear"}}}
CLUSTER = Cluster(2, 4, "cuda")
CASES: dict[str, dict[str, Any]] = {
    "a batch that grows": {},
    "autocast": {"batch": {"global_size": 32}, "precision": {"dtype": "autocast"}},
    "experts": EXPERTS | {"batch": {"global_size": 16}},
    "adapters": ADAPTERS | {"batch": {"global_size": 16}},
}


def searched(sections: dict[str, Any], gpu: str = "l4-24gb") -> tuple[Request, SearchResult]:
    target = listed_target(gpu, devices_per_host=4, network="infiniband-hdr")
    request = Request(config_from_values(GPT | sections), CLUSTER, target, EVERYTHING)
    return request, search(request)


def facts(candidate: Candidate, request: Request) -> tuple[Any, ...]:
    return (
        candidate.memory.to_dict(),
        candidate.time and candidate.time.to_dict(),
        candidate.lacking(request.target),
        candidate.plan.layout,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_the_plan_of_its_settings(name: str) -> None:
    """Work that a search keeps for one candidate is no other's: all are planned again from plain
    values, with nothing kept, and in the other order.
    """
    request, found = searched(CASES[name])
    assert len(found.ranked) > 20
    values = request.config.to_dict()
    work_module._work.cache_clear()
    for each in reversed(found.ranked):
        alone = with_settings(config_from_values(values), each.settings)
        planned = judge(make_plan(alone, CLUSTER), request.target)
        assert facts(planned, request) == facts(each, request), each.settings
    kinds = {key for each in found.ranked for key, value in each.choice.items() if value != 1}
    assert {"parallel.pipe", "parallel.tensor", "parallel.sequence"} <= kinds


@pytest.mark.slow
def test_ranks_share_a_model_of_a_users_own_in_a_search_as_in_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each candidate is planned again with a pass over the model for its own sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(traced_work, "ask_child", answer_here)
    sizes = {"vocab_size": 300, "width": 64, "num_blocks": 1}
    values: dict[str, Any] = {
        "model": {"target": "tests.jobs.divided_models:Written", "args": sizes},
        "data": {"kind": "text", "sequence_length": 64},
        "task": {"kind": "causal_lm"},
        "batch": {"micro_size": 4},
        "parallel": {"tensor_plan": WRITTEN_PLAN},
        "training": {"max_steps": 9},
    }
    config = config_from_values(values)
    cluster = Cluster(1, 2, "cuda")
    free = {"zero.stage", "parallel.tensor", "parallel.sequence"}
    pairs = sizes_of_groups(config, cluster, free)
    assert pairs == [(1, 1), (1, 2), (2, 1)]
    work = find_own_work(make_plan(config, cluster), pairs)
    target = listed_target("a100-80gb", devices_per_host=2)
    request = Request(config, cluster, target, free, work=work)
    found = search(request)
    ways = set()
    for each in found.ranked:
        alone = with_settings(config_from_values(values), each.settings)
        plan = make_plan(alone, cluster)
        planned = judge(plan, target, work=find_own_work(plan))
        assert facts(planned, request) == facts(each, request), each.settings
        assert planned.time is not None
        ways.add((plan.layout.tensor_size, plan.layout.sequence_size))
    assert ways == set(pairs)
    # A model without layers cannot be recomputed: a run would refuse it.
    assert not work.can_recompute
    found = search(replace(request, free={"training.recompute_every"}))
    (only,) = found.ranked
    assert only.choice["training.recompute_every"] == 0


SIXTEEN: dict[str, Any] = {
    "model": {"kind": "gpt", "size": "llama-3-8b", "max_positions": 16_384},
    "data": {"kind": "text", "sequence_length": 16_384},
    "task": {"kind": "causal_lm"},
    "precision": {"dtype": "bf16"},
    "batch": {"global_size": 64, "micro_size": "auto"},
    "zero": {"stage": 1},
    "parallel": "auto",
    "training": {"max_steps": 100, "recompute_every": 1},
}


@pytest.mark.slow
def test_what_auto_chooses_fits_by_the_plan_that_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search once took the tiles of one strategy for those of others, which have none."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(SIXTEEN))
    target = listed_target("a100-40gb", devices_per_host=8)
    cluster = Cluster(1, 8)
    chosen, _, _ = resolve(config_from_values(SIXTEEN), cluster, target, is_proposal=True)
    shown = judge(make_plan(chosen, cluster), target)
    assert not shown.lacking(target)
    words = [str(file), "--num_gpus", "8", "--gpu", "a100-40gb"]
    assert main(["check", *words]) == 0
    stated = capsys.readouterr()
    assert f": {size_text(shown.peak_bytes)} of " in stated.out
    assert "memory-too-small" not in stated.err


def test_check_does_not_call_fine_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(SIXTEEN | {"batch": {"micro_size": 8}, "parallel": {}}))
    assert main(["check", str(file), "--num_gpus", "8", "--gpu", "a100-40gb"]) == 0
    stated = capsys.readouterr()
    assert "too large for 8 devices: " in stated.out
    assert "fine on" not in stated.out
    assert "[memory-too-small]" in stated.err


@pytest.mark.parametrize("batch", [{"micro_size": 1, "accumulation_steps": 3}, {"micro_size": 2}])
def test_stages_that_are_alike_are_estimated_once(batch: dict[str, int]) -> None:
    """The fullest stage and the files of all are those of estimates of every stage."""
    model = GPT["model"] | {"num_layers": 12}
    for sections in ({"zero": {"stage": 1}}, ADAPTERS | {"zero": {"stage": 1}}):
        asked = GPT | {"model": model, "batch": batch, "parallel": {"pipe": 8}} | sections
        planned = make_plan(config_from_values(asked), Cluster(2, 8, "cuda"))
        work = work_of(planned)
        assert work is not None
        stages = stage_memories(planned, work)
        fullest = max(stages, key=lambda stage: stage.total(stage.peak))
        files = sum(stage.saved_bytes for stage in stages)
        assert estimate(planned) == replace(fullest, saved_bytes=files)


LLAMA = {"kind": "gpt", "size": "llama-3-8b", "max_positions": 8192}
LARGE = LLAMA | {
    "num_layers": 126,
    "hidden_size": 16_384,
    "num_heads": 128,
    "num_kv_heads": 8,
    "mlp_size": 53_248,
}
# Name -> model, global batch, hosts, and what has to be above 1 in the answer.
FREE: dict[str, tuple[dict[str, Any], int, int, tuple[str, ...]]] = {
    "8 samples on 64 devices": (LLAMA, 8, 8, ("parallel.tensor",)),
    "512 samples on 13 hosts": (LLAMA, 512, 13, ("parallel.pipe",)),
    "405 billion weights, 2,048 samples": (LARGE, 2048, 2048, ("parallel.pipe", "parallel.tensor")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FREE)
def test_a_search_starts_from_what_is_free(name: str) -> None:
    """As written the samples do not divide over the ranks."""
    model, samples, hosts, keys = FREE[name]
    data = GPT["data"] | {"sequence_length": 8192}
    asked = GPT | {"model": model, "data": data, "batch": {"global_size": samples, "micro_size": 8}}
    target = listed_target("h100-80gb", devices_per_host=8)
    request = Request(config_from_values(asked), Cluster(hosts, 8, "cuda"), target)
    with pytest.raises(ConfigError):
        make_plan(request.config, request.cluster)
    judged = mock.Mock(side_effect=judge)
    with mock.patch.object(search_module, "judge", judged):
        best = search(request).ranked[0]
    assert 20 < judged.call_count < 1000  # up to 550 were counted
    assert best.plan.layout.global_size == samples
    assert all(best.choice[key] > 1 for key in keys)
    inside = best.choice["parallel.tensor"] * best.choice["parallel.sequence"]
    assert 8 % inside == 0
