"""Steps engines by DeepSpeed's own step and by ours, from the same weights on the same batches:
step_passes.py OUT.json.

Of each case: the largest distance of weights and norms, the loss scales, and of one step what it
sends, reads from the device and computes: operations on doubles, those that write at least half as
many numbers as this rank's share has, copies of gradients in the backward pass, and weights for
which torch's graph is searched there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.config.load import config_from_values
from framework.engine import base_engine
from framework.engine.distributed import gather, process_group, rank
from framework.engine.plain_engine import PlainEngine, build_engine
from framework.engine.workarounds.half_without_zero import norm_of
from framework.setup.prepare_run import prepare
from framework.tasks.task import Task
from tests.jobs.half_on_cpu import allow_fp16

STEPS, WIDTH, ROWS = 8, 64, 4
GROUPS = {"kind": "adamw", "weight_decay": 0.1, "weight_decay_on": "matrices"}
FUSED = {"kind": "adamw", "implementation": "fused"}
# begins with overflows, and grows again
DYNAMIC = {"dtype": "fp16", "initial_scale_power": 21, "hysteresis": 1, "loss_scale_window": 2}
CASES: dict[str, dict[str, Any]] = {}
for stage in (0, 1, 2):
    for dtype in ("bf16", "fp32"):
        if stage or dtype == "bf16":
            CASES[f"z{stage}-{dtype}"] = {
                "zero": {"stage": stage},
                "precision": {"dtype": dtype},
                "training": {"clip_grad_norm": 0.0},
            }
    CASES[f"z{stage}-clip"] = {
        "zero": {"stage": stage},
        "precision": {"dtype": "bf16"},
        "training": {"clip_grad_norm": 0.1},
    }
    CASES[f"z{stage}-fused"] = CASES[f"z{stage}-clip"] | {"optimizer": FUSED}
    CASES[f"z{stage}-fp16"] = CASES[f"z{stage}-clip"] | {"precision": DYNAMIC}
for stage in (1, 2):
    CASES[f"z{stage}-two"] = CASES[f"z{stage}-clip"] | {
        "batch": {"micro_size": ROWS, "accumulation_steps": 2}
    }
    CASES[f"z{stage}-groups"] = CASES[f"z{stage}-clip"] | {"optimizer": GROUPS}
    CASES[f"z{stage}-sums"] = CASES[f"z{stage}-clip"] | {
        "precision": {"dtype": "bf16", "grad_accumulation": "fp32"},
        "batch": {"micro_size": ROWS, "accumulation_steps": 2},
    }
CASES["z0-checked"] = CASES["z0-clip"] | {
    "precision": {"dtype": "bf16", "check_grad_overflow": True}
}


class Net(nn.Module):
    """Three layers of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).tanh())  # type: ignore[no-any-return]


class Squares(Task):
    """A mean, of which a step's gradients are not finite where inputs are very large."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return (outputs.float() - targets.float()).square().mean()


class Seen(TorchDispatchMode):
    """What is computed while it is entered; `counters` are those of torch's Adam, on the host."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.counters = set[int]()
        self.large: Counter[str] = Counter()
        self.reads = 0
        self.doubles = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += args[0].data_ptr() not in self.counters
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if any(one.dtype == torch.float64 for one in tensors):
            self.doubles += 1
        is_view = func.is_view or "empty" in func.__name__ or "unflatten" in func.__name__
        if not is_view and sum(one.numel() for one in tensors) >= self.least:
            self.large[func.__name__.split(".")[0]] += 1
        return result


@contextmanager
def counted_messages() -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    names = ("all_reduce", "all_gather_into_tensor", "reduce", "reduce_scatter_tensor")
    with mock.patch.multiple(
        torch.distributed,
        **{name: _counting(calls, name, getattr(torch.distributed, name)) for name in names},
    ):
        yield calls


def _counting(calls: Counter[str], name: str, function: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **named)

    return call


def build(case: dict[str, Any], *, is_ours: bool) -> PlainEngine:
    values = {"data": {"target": "tests.jobs.step_passes:rows"}, "model": {"kind": "mlp"}}
    prepared = prepare(config_from_values({"batch": {"micro_size": ROWS}} | values | case))
    shorten = base_engine._shorten_step if is_ours else lambda engine, plan: None
    with mock.patch.object(base_engine, "_shorten_step", shorten):
        return build_engine(
            prepared.plan, ds_config=prepared.ds_config, model=Net(), task=Squares()
        )


def rows() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.zeros(64, WIDTH), torch.zeros(64, WIDTH))


def batches(step: int, count: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1000 * step + rank())
    for _ in range(count):
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        yield inputs, torch.randn(ROWS, WIDTH, generator=generator)


def run(case: dict[str, Any], *, is_ours: bool) -> dict[str, Any]:
    engine = build(case, is_ours=is_ours)
    inner = engine.engine
    found: dict[str, Any] = {"norms": [], "scales": [], "skipped": []}
    num_weights = sum(weight.numel() for weight in engine.module.parameters())
    seen = Seen(num_weights // inner.dp_world_size // 2 if inner.zero_optimization_stage() else 1)
    take = inner._take_model_step

    def take_seen(*arguments: Any, **named: Any) -> None:
        if inner.global_steps == STEPS - 1:
            base = getattr(inner.optimizer, "optimizer", inner.optimizer)
            seen.counters = {state["step"].data_ptr() for state in base.state.values()}
            with seen, counted_messages() as messages:
                take(*arguments, **named)
            found["messages"] = dict(messages)
        else:
            take(*arguments, **named)

    inner._take_model_step = take_seen
    copies = Seen(1)
    backward = inner.backward

    def backward_seen(*arguments: Any, **named: Any) -> None:
        if inner.global_steps == STEPS - 1:
            search = mock.Mock(wraps=torch._C._will_engine_execute_node)
            with copies, mock.patch.object(torch._C, "_will_engine_execute_node", search):
                backward(*arguments, **named)
            found["searches"] = search.call_count
        else:
            backward(*arguments, **named)

    inner.backward = backward_seen
    for step in range(STEPS):
        engine.train_step(batches(step, inner.gradient_accumulation_steps()))
        found["norms"].append(float(norm_of(inner) or 0.0))
        found["scales"].append(float(getattr(inner.optimizer, "loss_scale", None) or 1.0))
        found["skipped"].append(inner.skipped_steps)
    found |= {"large": dict(seen.large), "reads": seen.reads, "doubles": seen.doubles}
    found["copies"] = copies.large["copy_"] + copies.large["add_"]
    found["weights"] = [weight.detach().float() for weight in engine.module.parameters()]
    engine.close()
    return found


def main() -> None:
    allow_fp16()
    report = {}
    with process_group(None):
        for name, case in CASES.items():
            ours, theirs = run(case, is_ours=True), run(case, is_ours=False)
            pairs = zip(ours.pop("weights"), theirs.pop("weights"), strict=True)
            distance = max(float((one - other).abs().max()) for one, other in pairs)
            report[name] = {"distance": distance, "ours": ours, "theirs": theirs}
        reports = gather(report)
        if rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(reports, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
