"""Estimated memory against the bytes of all live tensors of real ranks, counted in the process, and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.memory import Memory, estimate
from framework.plan.plan import make_plan
from tests.launched import ROOT, run_ranks

MOMENTS = ("start", "between", "forward", "backward", "step")
GPT = {"kind": "gpt", "vocab_size": 67, "hidden_size": 256, "num_layers": 3, "num_heads": 4, "max_positions": 64}
# What one operation of the smallest models takes for itself, such as a convolution's unfolded input.
OPERATION = 256 * 1024
TOKENS = [["int64", [1, 2]], ["int64", [1, 2]]]


def config_of(**sections: Any) -> dict[str, Any]:
    return {
        "model": GPT | {"dropout": 0.0},
        "data": {"target": "tests.jobs.parts:masked_prompts"},
        "task": {"target": "tests.jobs.live_bytes:Squares"},
        "batch": {"micro_size": 1, "accumulation_steps": 1},
        "training": {"max_steps": 10},
        **sections,
    }


def estimated(values: Mapping[str, Any], *, ranks: int, device: Any = "cpu", activation_bytes: int = 0) -> Memory:
    config = config_from_values(values)
    plan = make_plan(config, Cluster(devices_per_host=ranks, device=device))
    return estimate(plan, activation_bytes=activation_bytes)


def cases() -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Name, config and shapes of a batch."""
    for stage, dtype, steps in product((0, 1, 2, 3), ("fp32", "bf16"), (1, 4)):
        zero = {"stage": stage, "reduce_bucket_size": 600_000}
        batch = {"micro_size": 1, "accumulation_steps": steps}
        yield f"z{stage}-{dtype}-{steps}", config_of(zero=zero, precision={"dtype": dtype}, batch=batch), TOKENS
    half, small = {"dtype": "bf16"}, {"stage": 2, "reduce_bucket_size": 200_000}
    for stage in (1, 2, 3):
        zero, batch = {"stage": stage, "reduce_bucket_size": 600_000}, {"micro_size": 1, "accumulation_steps": 9}
        yield f"z{stage}-long-sum", config_of(zero=zero, precision=half, batch=batch), TOKENS
        large = {"stage": stage, "reduce_bucket_size": 5_000_000, "overlap_comm": stage < 3}
        yield f"z{stage}-large-bucket", config_of(zero=large, precision=half), TOKENS
        groups = {"kind": "adamw", "weight_decay_on": "matrices"}
        yield f"z{stage}-groups", config_of(zero=zero, precision=half, optimizer=groups), TOKENS
    for optimizer in ({"kind": "sgd", "momentum": 0.9}, {"kind": "adam", "weight_decay": 0.1}, {"kind": "adagrad"}):
        yield f"z2-{optimizer['kind']}", config_of(zero=small, precision=half, optimizer=optimizer), TOKENS
    training = {"max_steps": 10, "ema": {"decay": 0.9}}
    yield "z2-ema", config_of(zero=small, precision=half, training=training), TOKENS
    yield "z2-autocast", config_of(zero=small, precision={"dtype": "autocast"}), TOKENS
    for live, ahead in product((0, 1_000_000), (0, 300_000)):
        stage3 = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
        zero = {"stage": 3, "reduce_bucket_size": 200_000, "stage3_param_persistence_threshold": 0, **stage3}
        values = config_of(zero=zero | {"stage3_prefetch_bucket_size": ahead}, precision=half)
        yield f"z3-live-{live}-ahead-{ahead}", values, TOKENS
    for stage in (1, 2):
        zero = {"stage": stage, "reduce_bucket_size": 600_000, "offload_optimizer": {"device": "cpu"}}
        yield f"z{stage}-offload", config_of(zero=zero, precision=half), TOKENS
    digits = {"data": {"kind": "digits"}, "task": {"kind": "classification"}}
    models = (
        ({"kind": "lenet"}, 28),
        ({"kind": "small_resnet18"}, 8),
        ({"kind": "mlp", "hidden_sizes": [300, 300, 300]}, 28),
    )
    for (model, size), stage in product(models, (0, 2, 3)):
        images = [["float32", [2, 1, size, size]], ["int64", [2]]]
        zero = {"stage": stage, "reduce_bucket_size": 100_000} if stage else {}
        yield f"z{stage}-{model['kind']}", config_of(model=model, zero=zero, **digits), images
    for stage, steps in product((0, 2, 3), (1, 2)):
        zero = {"stage": stage, "reduce_bucket_size": 200_000} if stage else {}
        batch = {"micro_size": 8, "accumulation_steps": steps}
        yield f"z{stage}-activations-{steps}", config_of(zero=zero, batch=batch), [["int64", [8, 64]]] * 2


CASES = {name: (config, batch) for name, config, batch in cases()}


@pytest.fixture(scope="module", params=[1, 2, 4])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("live")
    listed = [{"config": config, "batch": batch} for config, batch in CASES.values()]
    (folder / "cases.json").write_text(json.dumps(listed), encoding="utf-8")
    files = [str(folder / name) for name in ("cases.json", "found.json")]
    run_ranks(ROOT / "tests/jobs/live_bytes.py", *files, num_ranks=request.param, cwd=folder)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return request.param, dict(zip(CASES, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_what_ranks_hold(measured: tuple[int, dict[str, Any]], name: str) -> None:
    ranks, found = measured
    *counted, saved = found[name]
    memory = estimated(CASES[name][0], ranks=ranks, activation_bytes=saved)
    for moment, each in zip(MOMENTS, counted, strict=True):
        told = memory.total(moment) + on_host(memory, moment)
        bound = 0.03 * each if moment in ("start", "between") else 0.05 * each + OPERATION
        assert told == pytest.approx(each, abs=bound), moment


def on_host(memory: Memory, moment: str) -> int:
    """Bytes in host memory at one moment: on CPU all tensors are there."""
    absent = {"start": {"optimizer state", "optimizer copies"}, "step": set()}.get(moment, {"optimizer copies"})
    return sum(size for name, size in memory.host.items() if name not in absent)
