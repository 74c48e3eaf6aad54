"""`PipelineEngine`: DeepSpeed's pipeline engine behind the five methods of `framework.train.engine.Engine`.

The layers of a model become the layers of DeepSpeed's `PipelineModule`, cut where the plan says. Every rank builds the
layers of its own stage only, each under its own seed, so that the first weights do not depend on where the model is cut.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from framework.backend.checkpoint_bytes import load_bytes, move_in, save_bytes
from framework.backend.device_batches import HALF, DeviceBatches
from framework.backend.distributed import device, rank
from framework.backend.ema import WeightAverage
from framework.backend.grad_norm import keep_norm
from framework.backend.grad_scaler import forget_autocast, may_have_been_skipped, scale_fp16_loss, telling_of_overflow
from framework.backend.measures import EvalSums, engine_metrics
from framework.backend.plain_engine import trained_parameters
from framework.backend.safe_files import use_safe_files
from framework.backend.schedules import client_schedule
from framework.backend.shard_map import plain_name
from framework.backend.state_views import Names, names_of
from framework.errors import FrameworkError, TrainingError
from framework.files import FileRecord, NewFile, OpenFile
from framework.models.layers import Layer
from framework.models.recompute import recompute
from framework.plan.balance import Bounds
from framework.plan.plan import Plan
from framework.tasks.task import Task
from framework.train.saved import SavedCheckpoint

# Batches per stage that are evaluated in one go: enough to fill the pipeline, few enough to hold in memory.
_EVAL_CHUNK = 4
Adapt = Callable[[torch.nn.Module, str, Any], torch.nn.Module]


def build_pipeline(
    plan: Plan,
    *,
    ds_config: Mapping[str, Any],
    layers: Sequence[Layer],
    bounds: Bounds,
    task: Task,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    adapt: Adapt = lambda module, name, data_parallel_group: module,
    varying_shapes: bool = False,
) -> PipelineEngine:
    """Build this rank's stage and wrap it with `deepspeed.initialize`. Collective.

    Args:
        plan: what was decided; its layout says how many stages there are.
        ds_config: the rendered JSON.
        layers: all layers of the model.
        bounds: where it is cut.
        task: loss and metrics; runs on the last stage.
        make_optimizer: the user's optimizer, if the JSON names none.
        adapt: changes a layer's module after it was built: (module, name of the layer, process group of the ranks that
            run the same stage) -> module.
        varying_shapes: batches may differ in more than their number of samples: the stages then tell each other the
            shape of everything they send.
    """
    loss = _LastStageLoss(task)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers; the plan's table says more
        module = _Stages(layers, bounds=bounds, seed=plan.config.run.seed, adapt=adapt, loss_fn=loss,
                         dynamic_shape=varying_shapes)  # fmt: skip
    forget_autocast()
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        model_parameters=trained_parameters(plan, module),
        optimizer=make_optimizer,
        lr_scheduler=client_schedule(plan),
        dist_init_required=False,
        config=dict(ds_config),
    )
    if engine.is_last_stage():  # where the loss is
        scale_fp16_loss(engine)
    batches = DeviceBatches(device(), HALF.get(plan.config.precision.dtype), plan.config.training.channels_last)
    # DeepSpeed hands out one buffer for several purposes by its number of elements alone: where a middle stage receives
    # other types than it sends (integers before floats, or bf16 and fp32 under autocast), numbers would be misread.
    engine._allocate_or_extend_buffers = partial(_fresh_buffer, engine.device)
    return PipelineEngine(engine, loss=loss, task=task, batches=batches, average=WeightAverage(engine, plan.config))


def _fresh_buffer(device: torch.device, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class _Spec(LayerSpec):  # type: ignore[misc]
    """A layer that is built under its own seed."""

    def __init__(self, layer: Layer, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__(torch.nn.Module)
        self.layer, self._make = layer, make

    def build(self, log: bool = False) -> torch.nn.Module:
        return self._make()


class _TiedSpec(TiedLayerSpec):  # type: ignore[misc]
    """A layer that shares its weights with layers of other stages. All of them are built as the first one is."""

    def __init__(self, layer: Layer, first: _Spec) -> None:
        super().__init__(layer.tied, torch.nn.Module, forward_fn=layer.call, tied_weight_attr=list(layer.tied_weights))
        self._first = first

    def build(self, log: bool = False) -> torch.nn.Module:
        return self._first.build()


class _Stages(PipelineModule):  # type: ignore[misc]
    """A PipelineModule that is cut where it is told."""

    def __init__(self, layers: Sequence[Layer], *, bounds: Bounds, seed: int, adapt: Adapt, **options: Any) -> None:
        self._given_bounds, self._seed, self._adapt, self._layers = list(bounds), seed, adapt, tuple(layers)
        super().__init__(layers=self._specs(layers), num_stages=len(bounds) - 1, activation_checkpoint_func=self._recompute,
                         **options)  # fmt: skip

    def _specs(self, layers: Sequence[Layer]) -> list[LayerSpec]:
        firsts: dict[str, _Spec] = {}
        specs: list[LayerSpec] = []
        for number, layer in enumerate(layers):
            spec = _Spec(layer, partial(self._make, layer, number))
            specs.append(_TiedSpec(layer, firsts.setdefault(layer.tied, spec)) if layer.tied else spec)
        return specs

    def _make(self, layer: Layer, number: int) -> torch.nn.Module:
        """Called while PipelineModule builds this stage, when its process groups exist."""
        return self._adapt(layer.make(number, seed=self._seed), layer.name, self._grid.get_data_parallel_group())

    def forward(self, forward_input: Any) -> Any:
        """What crosses to the next stage must be contiguous; a transposed view is not."""
        return _contiguous(super().forward(forward_input))

    def plain_names(self) -> Names:
        """Names in the plain module of what this stage holds."""
        first = {layer.tied: layer.name for layer in reversed(self._layers) if layer.tied}
        return names_of(self, partial(plain_name, layers=[layer.name for layer in self._layers], tied_keys=first))

    def _recompute(self, run: Callable[..., Any], *values: Any) -> Any:
        """Instead of DeepSpeed's own function, under which batch norms count every batch twice."""
        return recompute(run, *values, modules=self.modules)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._given_bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return tuple(map(_contiguous, value)) if type(value) is tuple else value


@dataclass(frozen=True)
class _Held:
    """Targets on their way through DeepSpeed, which would turn lists into tuples and refuses whatever holds no tensors."""

    targets: Any


class _LastStageLoss:
    """What the last stage does with the model's outputs: the task's loss, or in evaluation its metrics."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.sums: EvalSums | None = None
        self.counts: Iterator[bool] = iter(())

    def __call__(self, outputs: Any, held: _Held) -> torch.Tensor:
        if self.sums is None:
            return self._task.loss(outputs, held.targets)
        self.sums.add(self._task.measure(outputs, held.targets), counts=next(self.counts))
        return torch.zeros((), device=device())


@dataclass(frozen=True)
class _Step:
    """The loss of one step, which DeepSpeed has averaged over micro-batches and pipelines and sent to every stage."""

    engine: PipelineEngine
    loss: torch.Tensor
    lr: float
    may_be_skipped: bool

    def read(self) -> Mapping[str, float]:
        engine = self.engine
        return {"train/loss": float(self.loss), "train/lr": self.lr} | engine_metrics(engine.engine, engine.kept_norm)


class PipelineEngine:
    """One stage of a pipeline."""

    def __init__(
        self, engine: deepspeed.PipelineEngine, *, loss: _LastStageLoss, task: Task, batches: DeviceBatches,
        average: WeightAverage,
    ) -> None:  # fmt: skip
        self.engine, self._files = engine, use_safe_files(engine)
        self._loss, self._task, self._batches, self._average = loss, task, batches, average
        self._shapes: Any = None
        self.kept_norm = keep_norm(engine, stages=engine.mpu.get_pipe_parallel_group())

    def train_step(self, micro_batches: Iterator[Any]) -> _Step:
        """One 1F1B pass over the step's micro-batches; the first stage takes their inputs, the last one their targets."""
        lr = float(self.engine.get_lr()[0])
        with telling_of_overflow(self.engine), self._telling():
            loss = self.engine.train_batch(self._halves(micro_batches))
        return _Step(self, loss.detach().clone(), lr, may_have_been_skipped(self.engine))

    def evaluate(self, batches: Iterable[tuple[Any, bool]]) -> Mapping[str, float]:
        """Metrics of the task over all samples of all ranks, on every rank."""
        sums = self._loss.sums = EvalSums(device())
        if isinstance(batches, Sized) and not (self.engine.is_first_stage() or self.engine.is_last_stage()):
            batches = [(None, True)] * len(batches)  # a stage between others needs their number only
        try:
            with self._telling(), self._average.in_evaluation():
                for chunk in _with_last_alone(batches, size=_EVAL_CHUNK * self.engine.num_stages):
                    self._evaluate_alike(chunk)
        finally:
            self._loss.sums = None
            self._forget_shapes()  # training batches have a size of their own
            self.engine.train()
        return sums.metrics(self._task)

    def _evaluate_alike(self, pairs: list[tuple[Any, bool]]) -> None:
        """Batches of one size, so that the stages need to agree only once on the size of what they send. Collective."""
        self._forget_shapes()
        self._loss.counts = iter([counts for _, counts in pairs])
        self.engine.eval_batch(
            self._halves(batch for batch, _ in pairs), compute_loss=True, reduce_output=None, bcast_loss=False,
            num_micro_batches=len(pairs),
        )  # fmt: skip

    def _halves(self, batches: Iterable[Any]) -> Iterator[tuple[Any, _Held]]:
        """(inputs, targets) on the device, as DeepSpeed's first and last stage expect them."""
        for batch in batches:
            inputs, targets = self._task.split(self._batches.move(batch))
            if not self.engine.dynamic_shape:
                self._refuse_other_shapes(inputs)
            yield inputs, _Held(targets)

    def _forget_shapes(self) -> None:
        self._shapes = None
        self.engine.reset_activation_shape()

    def _refuse_other_shapes(self, inputs: Any) -> None:
        """The stages have told each other the shapes of what they send once; other ones would be misread, or never come."""
        found = [tuple(tensor.shape) for tensor in (inputs if isinstance(inputs, tuple) else (inputs,))]
        if self._shapes is None:
            self._shapes = found
        if found != self._shapes:
            raise TrainingError(
                f"a micro-batch has inputs of the shapes {found}, and those before it had {self._shapes}: in a pipeline they "
                "may differ only where the dataset has a collate_fn of its own; give it one [batch-shapes-differ]"
            )

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What fails in a stage fails on its ranks alone, which must tell it."""
        try:
            yield
        except FrameworkError as error:
            error.is_of_one_rank = True
            raise
        except Exception as error:
            add_note = getattr(error, "add_note", None)  # since Python 3.11
            if add_note is not None:
                add_note(f"on rank {rank()}, stage {self.engine.stage_id} of {self.engine.num_stages}")
            raise

    def save(
        self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile
    ) -> Mapping[str, FileRecord]:
        """DeepSpeed's files plus the random state of every rank. Collective."""
        return save_bytes(self.engine, self._files, folder, tag, state, names=self.engine.module.plain_names(),
                          open_file=open_file)  # fmt: skip

    def load(self, checkpoint: SavedCheckpoint, *, moved: bool) -> Mapping[str, Any]:
        """Put back weights, optimizer, schedule and, unless it moved, this rank's random state. Collective."""
        state = (
            move_in(self.engine, checkpoint, names=self.engine.module.plain_names())
            if moved
            else load_bytes(self.engine, checkpoint.folder, checkpoint.tag)
        )
        self._average.after_load()
        return state

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers."""
        self.engine.destroy()


def _with_last_alone(batches: Iterable[Any], *, size: int) -> Iterator[list[Any]]:
    """Lists of at most `size` batches; the last batch, which may be smaller, in a list of its own.

    The same on every rank for the same number of batches: `eval_batch` is collective.
    """
    remaining = iter(batches)
    held = list(islice(remaining, 1))
    while held:
        following = list(islice(remaining, size))
        if not following:
            yield held
            return
        together = [*held, *following]
        yield together[:-1]
        held = together[-1:]
