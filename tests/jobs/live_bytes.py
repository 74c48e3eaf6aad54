"""Counts the bytes of a rank's live tensors at five moments of a run, for each config of a list:
live_bytes.py CASES.json OUT.json. OUT has a list for each config: the most of all ranks at each
moment, what autograd saved (0 where a case does not ask for it), and the bytes of checkpoints.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.checkpoint.save_stream import StagedFiles
from framework.config.load import config_from_values
from framework.engine import adapter_weights
from framework.engine.distributed import gather, process_group, rank
from framework.setup.assemble import assemble_engine
from framework.setup.prepare_run import prepare
from framework.tasks.task import Task


class Squares(Task):
    """A mean over all that the model returns."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return outputs.float().square().mean()


def address(storage: torch.UntypedStorage) -> int:
    """Where its bytes are; 0 where it has none: what stands for a spread weight raises where it is
    asked.
    """
    return storage.data_ptr() if storage.nbytes() else 0


def live_storages() -> dict[int, torch.UntypedStorage]:
    """All storages that a tensor of this process shows, without those of tensors on no device."""
    gc.collect()
    found = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return {address(storage): storage for storage in found if address(storage)}


def bytes_beside(earlier: Mapping[int, torch.UntypedStorage]) -> int:
    """Bytes of what is alive and was not there earlier. Who holds `earlier` keeps what is in it."""
    return sum(
        storage.nbytes() for number, storage in live_storages().items() if number not in earlier
    )


class Ledger(TorchDispatchMode):
    """Bytes of the storages that operations make while it is on, now and at most since the last
    `cut`.

    The backward pass adds up gradients of one tensor in place, if not under a dispatch mode: there
    such a sum counts when the next operation runs, and what it was made of has gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor):
                self._add(one)
        self.now = self.most = 0

    def _add(self, tensor: torch.Tensor, *, is_sum: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = self.most if is_sum else max(self.most, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes()).atexit = False

    def _freed(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.most = max(self.most, self.now)
        made = func(*args, **(kwargs or {}))
        is_sum = func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() >= 0
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, is_sum=is_sum and not torch.is_grad_enabled())
        return made

    def cut(self) -> int:
        """The most since the last time."""
        most, self.most = max(self.most, self.now), self.now
        return most


class Saved:
    """Bytes of the storages that autograd saves, beside those of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = [*model.parameters(), *model.buffers()]
        self._found: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # weights of stage 3 have other storages in every pass
        if address(storage) not in {address(one.untyped_storage()) for one in self._own}:
            self._found[address(storage)] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self._found.values())

    def without(self, tensors: Sequence[torch.Tensor]) -> int:
        """The total without what was there before."""
        known = {address(tensor.untyped_storage()) for tensor in tensors}
        return sum(size for number, size in self._found.items() if number not in known)


LINEAR = torch.nn.functional.linear
# Steps that are counted, of which the one with the least counts: in one step of a hundred a thread
# of a collective lets go of a tensor late, which is no memory that a step needs.
NUM_COUNTED = 2


def measure(case: Mapping[str, Any]) -> list[int]:
    # DeepSpeed replaces it at stage 3, to the end of the process
    torch.nn.functional.linear = LINEAR
    prepared = prepare(config_from_values(case["config"]))
    earlier, task = live_storages(), prepared.parts.task
    with quantizing(earlier) as most_before:
        engine: Any = assemble_engine(prepared)
    rest()
    start = max(bytes_beside(earlier), *most_before)
    batch, steps = make_batch(case), prepared.plan.layout.accumulation_steps
    for _ in range(2):
        engine.train_step(iter([batch] * steps))
    between = bytes_beside(earlier)
    quiet = between - sum(tensor.nbytes for tensor in batch)  # the micro-batch is of the passes
    ledger, deepspeed_engine = Ledger(), engine.engine
    # what is there stays to the end of the step, and every rest would look through all of it
    gc.freeze()
    # a stage is told by a schedule when to run: one figure for the whole step
    if prepared.cut is not None:
        peaks = []
        for _ in range(NUM_COUNTED):
            settle(ledger)
            with ledger:
                engine.train_step(iter([batch] * steps))
            peaks.append(ledger.cut())
        return [start, quiet, *[between + min(peaks)] * 3, 0, *ended(engine)]

    most: dict[str, int] = {}

    def counted(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def within(*values: Any, **named: Any) -> Any:
            if name == "backward":
                most["forward"] = max(most["forward"], ledger.cut())
            settle(ledger)
            result = run(*values, **named)
            most[name] = max(most[name], ledger.cut())
            settle(ledger)
            return result

        return within

    own = deepspeed_engine.backward, deepspeed_engine.step
    deepspeed_engine.backward, deepspeed_engine.step = (
        counted(own[0], "backward"),
        counted(own[1], "step"),
    )
    saved = Saved(deepspeed_engine.module)
    counts = []
    for _ in range(NUM_COUNTED):
        most |= {"forward": 0, "backward": 0, "step": 0}
        with ledger:
            engine.train_step(iter([batch] * steps))
        counts.append([*most.values()])
    deepspeed_engine.backward, deepspeed_engine.step = own
    least = [min(each) for each in zip(*counts, strict=True)]
    if case["saved"]:
        with saved.hooks:
            inputs, targets = task.split(batch)
            task.loss(task.forward(deepspeed_engine, inputs), targets)
    return [start, quiet, *(between + each for each in least), saved.total, *ended(engine)]


@contextmanager
def quantizing(earlier: Mapping[int, torch.UntypedStorage]) -> Iterator[list[int]]:
    """Count the most while the first of the largest layers of ZeRO stage 3 is put into few bits."""
    own, most, sizes = adapter_weights._quantize, [0], [0]

    def counted(module: Any, *values: Any, **named: Any) -> Any:
        weight = module.base_layer.weight
        if not hasattr(weight, "ds_id") or weight.numel() <= max(sizes):
            return own(module, *values, **named)
        sizes.append(weight.numel())
        rest()
        before = bytes_beside(earlier)
        with Ledger() as ledger:
            done = own(module, *values, **named)
        most.append(before + ledger.cut())
        return done

    with mock.patch.object(adapter_weights, "_quantize", counted):
        yield most


def ended(engine: Any) -> tuple[int, int]:
    """Bytes of the files that this rank saves, staged in memory, and of those of all ranks; the
    engine is closed.
    """
    staged = StagedFiles()
    engine.save(Path("saved"), "global_step3", {"step": 3}, open_file=staged.open)
    own = sum(one.num_bytes for one in staged.files)
    staged.close()
    total = sum(gather(own))
    engine.close()
    return own, total


def settle(ledger: Ledger) -> None:
    rest()
    ledger.cut()


def rest() -> None:
    """Wait for what is let go of in time: cycles, and tensors that the threads of collectives hold
    to the end.
    """
    torch.distributed.barrier()
    time.sleep(0.02)
    gc.collect()


def make_batch(case: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """One micro-batch of zeros, in the shapes that the case names; of as many different numbers, in
    turn, where it names how many.
    """
    made = []
    for dtype, shape, *different in case["batch"]:
        numbers = torch.zeros(shape, dtype=getattr(torch, dtype))
        if different:
            numbers = torch.arange(numbers.numel()).remainder(*different).view(shape).to(numbers)
        made.append(numbers)
    return tuple(made)


@contextmanager
def products_in_fp32() -> Iterator[None]:
    """Multiply matrices of bf16 in fp32, and round, within the block: a processor without such
    products multiplies them fifty times as slowly. The tensors that are counted have their sizes.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        library.impl(name, partial(_multiply, getattr(torch.ops.aten, name).out), "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        yield
    library._destroy()


def _multiply(multiply: Any, *factors: torch.Tensor, **scales: Any) -> torch.Tensor:
    *_, first, second = factors
    dtype = first.dtype
    product = first.new_empty(
        *first.shape[:-1], second.shape[-1], dtype=torch.promote_types(dtype, torch.float32)
    )
    if dtype in (torch.bfloat16, torch.float16):
        factors = tuple(factor.float() for factor in factors)
    multiply(*factors, **scales, out=product)
    return product.to(dtype)


def main() -> None:
    with products_in_fp32(), process_group(None):
        cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        measure(cases[0])  # what a process makes once and keeps is not a run's
        gc.collect()
        gc.freeze()  # nor looked through again, ten times for each case
        measured = []
        for number, case in enumerate(cases, start=1):
            measured.append([max(each) for each in zip(*gather(measure(case)), strict=True)])
            if number % 20 == 0:  # what earlier cases froze is let go of
                gc.unfreeze()
                gc.collect()
                gc.freeze()
        is_first = rank() == 0
    if is_first:
        Path(sys.argv[2]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
