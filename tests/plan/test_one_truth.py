"""One truth: every candidate of a search is the plan that its settings make by themselves, in
memory, time and verdict; and what `auto` chooses fits by the plan that is shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from framework.cli import main
from framework.config.load import config_from_values
from framework.plan import work as work_module
from framework.plan.alternatives import size_text, with_settings
from framework.plan.auto import listed_target
from framework.plan.candidate import Candidate, judge
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.search import SearchResult, search
from framework.plan.search_space import EVERYTHING, Request

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


SIXTEEN: dict[str, Any] = {
    "model": {"kind": "gpt", "size": "llama-3-8b", "max_positions": 4096},
    "data": {"kind": "text", "sequence_length": 4096},
    "task": {"kind": "causal_lm"},
    "precision": {"dtype": "bf16"},
    "batch": {"global_size": 64, "micro_size": "auto"},
    "zero": {"stage": 1},
    "parallel": "auto",
    "training": {"max_steps": 100, "recompute_every": 1},
}


def test_what_auto_chooses_fits_by_the_plan_that_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search once took the tiles of one strategy for those of others, which have none."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(SIXTEEN))
    words = [str(file), "--num_gpus", "8", "--gpu", "a100-40gb"]
    assert main(["plan", *words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    kinds = [finding["kind"] for finding in planned["findings"]]
    assert "memory-too-small" not in kinds
    peak = max(planned["memory"]["total_bytes"].values())
    assert main(["check", *words]) == 0
    stated = capsys.readouterr()
    assert f": {size_text(peak)} of " in stated.out
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
