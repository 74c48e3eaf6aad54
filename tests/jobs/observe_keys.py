"""Trains a small run for each case and notes all that a key of DeepSpeed may change: numbers,
operations and their order, collectives, waits for the device, lines of the log, files.

Usage: observe_keys.py CASES.json OUT.json, on several ranks. A case has `sections` of a run config
and what stands under its `deepspeed:` (`passed`); `model` names a function of this file, and
`resumes` asks for the observations of a resume, `saves` for a checkpoint at the end. OUT has the
observations of rank 0 for each case, name -> text, or {"error": its first line}.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import deepspeed.comm
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import framework
from deepspeed_lint.lint import lint
from framework.engine.distributed import process_group
from framework.plan import judge_passed
from tests.jobs.half_on_cpu import allow_fp16

_COLLECTIVES: Final = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
    "recv",
)
# What differs from call to call: times, rates, addresses, numbers of processes. Numbers in what
# the profiler says of its settings do not.
_DIGITS: Final = re.compile(
    r"(?<!depth )(?<!at step )(?<!Top )(?<!per GPU = )(?:0x[0-9a-f]+|[-+]?\d[\d.,:e+-]*)"
)
_TIME_UNIT: Final = re.compile(r"# (?:[um]?s|(?:[KMGT] ?)?FLOPS)\b")
# Lines of the framework, and of the list of all settings that DeepSpeed writes, and one
# that it writes when garbage is collected.
_NOT_OF_A_KEY: Final = re.compile(
    r"\s|[{}]|case#|training |note: |warning: |Removed grad|.* dsf-trainer: "
    r"|.*INFO DeepSpeed: (  | json|\*\*|Removed grad)"
)
_STEPS: Final = 3
_calls: Counter[str] = Counter()  # what the model was asked, and how often


class Net(nn.Module):
    """Linear layers, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        )
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        _calls["collects garbage"] += gc.isenabled()
        return self.layers(values) * self.scale.to(values.dtype)

    def set_deepspeed_parallelism(self, data_before_experts: bool) -> None:
        """Take what DeepSpeed gives layers of experts."""
        _calls["data before experts"] += data_before_experts


class _Wide(Net):
    """Has far more weights beside its layers than in them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 512)
        self.narrow = nn.Linear(512, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values + self.narrow(self.wide(values)))


_MODELS: Final[dict[str, Callable[[], Any]]] = {
    "": Net,
    "layers": lambda: list(Net().layers),
    "wide": _Wide,
}


class _Operations(TorchDispatchMode):
    """Counts operations by name, types and sizes of what they take, and notes their order."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.order = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.is_pinned.default:  # asked as often as a loader is ahead
            self.counts[f"{func} {_sizes(args)}"] += 1
            self.order.update(str(func).encode())
        return func(*args, **(kwargs or {}))


def _sizes(values: Any) -> str:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)


@contextmanager
def _counted_collectives(counts: Counter[str]) -> Iterator[None]:
    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[f"{name} {_sizes([*args, *kwargs.values()])}"] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for module in (torch.distributed, deepspeed.comm.comm):
            for name in _COLLECTIVES:
                if hasattr(module, name):
                    patched = counting(name, getattr(module, name))
                    patches.enter_context(mock.patch.object(module, name, patched))
        yield


@contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    """Write what this process prints to a file, whichever library does."""
    sys.stdout.flush()
    kept = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


def _fit(case: dict[str, Any], name: str, *, max_steps: int) -> None:
    config: dict[str, Any] = {
        "run": {"name": name, "output_dir": "runs", "seed": 7},
        "data": {"shuffle": False},
        "batch": {"micro_size": 4, "accumulation_steps": 2},
        "training": {"max_steps": max_steps, "log_every": 1},
        "checkpoint": {"at_end": case.get("saves", False)},
        "monitors": {"tensorboard": False, "csv": False, "report": False, "progress": "off"},
        "deepspeed": case["passed"],
    }
    for section, values in case["sections"].items():
        config[section] = config.get(section, {}) | values
    if case.get("resumes"):
        config["checkpoint"] = {"resume": "auto", "at_end": True}
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(64, 16, generator=draw), torch.randint(4, (64,), generator=draw)
    )
    torch.manual_seed(3)
    model = _MODELS[case.get("model", "")]()
    framework.fit(config, model=model, train_data=data, task=nn.functional.cross_entropy)


def observe(case: dict[str, Any], name: str) -> dict[str, str]:
    """Return the observations of one run."""
    if case.get("resumes"):
        _fit(case, name, max_steps=1)
    operations = _Operations()
    collectives: Counter[str] = Counter()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    waits = mock.Mock()
    _calls.clear()
    gc.enable()
    deepspeed.comm.comm.comms_logger.enabled = False  # DeepSpeed leaves it on for later runs
    before = set(_files(Path.cwd(), name))
    printed = Path(f"printed{os.environ['RANK']}.txt")
    with ExitStack() as patches:
        for logger in (logging.getLogger(), logging.getLogger("DeepSpeed")):
            logger.addHandler(handler)
            patches.callback(logger.removeHandler, handler)
        patches.enter_context(mock.patch.object(get_accelerator(), "synchronize", waits))
        patches.enter_context(_counted_collectives(collectives))
        patches.enter_context(_printed_to(printed))
        patches.enter_context(operations)
        _fit(case, name, max_steps=_STEPS)
    gc.enable()
    texts = [*records, *printed.read_text(encoding="utf-8").splitlines()]
    texts += Path("runs", name, "logs", "rank0.log").read_text(encoding="utf-8").splitlines()
    return {
        "operations": _counts(operations.counts),
        "order": operations.order.hexdigest(),
        "collectives": _counts(collectives),
        "waits": str(waits.call_count),
        "calls": _counts(_calls),
        "lines": "\n".join(sorted(_lines_of_keys(texts))),
        "files": "\n".join(sorted(_files(Path.cwd(), name) - before)),
        "losses": _losses(Path("runs", name, "metrics.jsonl")),
    }


def _counts(counts: Counter[str]) -> str:
    return "\n".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _lines_of_keys(texts: list[str]) -> set[str]:
    lines = {_without_times(text) for text in texts}
    return {line for line in lines if line and not _NOT_OF_A_KEY.match(line)}


def _without_times(text: str) -> str:
    """Return a line without what differs from call to call: a time's unit, and the blanks that fill
    a column, depend on how long it was.
    """
    line = _TIME_UNIT.sub("# of time", _DIGITS.sub("#", text))
    return re.sub(r"(?<=\S)\s+", " ", line).rstrip()


def _files(folder: Path, name: str) -> set[str]:
    """Return what lies in the folder of a run, and beside those of all runs."""
    paths = [*folder.glob("*"), *(folder / "runs" / name).rglob("*")]
    return {str(path.relative_to(folder)).replace(name, "case") for path in paths}


def _losses(metrics: Path) -> str:
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return json.dumps([[row.get("train/loss"), row.get("train/grad_norm")] for row in rows])


def _lint_for_cuda(document: Any, **options: Any) -> Any:
    """Judge as on a GPU: fp16 computes here as well, slowly."""
    options["topology"] = replace(options["topology"], device="cuda")
    return lint(document, **options)


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    allow_fp16()
    judge_passed.lint = _lint_for_cuda
    found: list[dict[str, str]] = []
    with process_group(None):
        is_first = torch.distributed.get_rank() == 0
        observe(cases[0], "first")  # what is written once for a process
        for number, case in enumerate(cases):
            try:
                found.append(observe(case, f"case{number}"))
            except Exception as error:  # whatever DeepSpeed raises
                found.append({"error": str(error).splitlines()[0]})
    if is_first:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
