"""Loops that train one model with the same maths, to be run in turn: ours, plain PyTorch,
DeepSpeed's engine in a bare loop, Accelerate, Hugging Face's Trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final, Protocol

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from benchmarks.loops.setting import (
    CLIP,
    Pace,
    Paced,
    Setting,
    batches_from,
    dataset_from,
    endless,
    halved,
    mean_loss,
    moved,
    place_of_models,
)
from framework.engine.attention_kernels import chosen_kernel
from framework.engine.distributed import device, device_name, rank
from framework.engine.metrics import over_ranks
from framework.setup.assemble import assemble_engine, make_monitors, make_schedule
from framework.setup.components import make_train_loader
from framework.train.cadence import Every, Schedule
from framework.train.hooks import Hooks
from framework.train.monitors.base import Monitor, Point
from framework.train.trainer import RunStart, Trainer


class Side(Protocol):
    """One way to train, in blocks of steps.

    Attributes:
        pace: when the steps of the last block began.
        began: when the last block began, for a loop that prepares itself within `run`; else 0.
    """

    pace: Pace
    began: float

    def ready(self, start: int) -> None:
        """Prepare for a block, outside of its time."""

    def run(self, start: int, end: int) -> None:
        """Take the steps of a block."""

    def loss(self, step: int) -> float:
        """Return the mean over ranks of a step's loss, counted from 1; of ours at logged steps
        alone. Collective.
        """

    def end(self) -> None:
        """Leave the process as it was, behind the last block."""


class Ours:
    """The Trainer as `framework.fit` uses it, and a monitor of it."""

    name = "benchmark"

    def __init__(self, setting: Setting) -> None:
        self._folder = setting.folder / f"ours-{id(self)}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stop = setting.stop
        self._log_every = setting.log_every
        self.pace = Pace()
        self.began = 0.0
        prepared = setting.prepared
        plan = prepared.plan
        self._engine = assemble_engine(prepared)
        self._kernel = chosen_kernel(plan, self._engine.module, device())
        self._agenda = make_schedule(plan)
        loader = make_train_loader(plan, prepared.parts.splits, rank=rank(), for_engine=True)
        self._loader = Paced(loader, self.pace, plan.layout.accumulation_steps)
        self._config = plan.config
        self._monitors: list[Monitor] = []
        self._losses: dict[int, float] = {}

    def loss(self, step: int) -> float:
        return self._losses[step]

    def ready(self, start: int) -> None:
        """Open the monitors' files anew: a Trainer closes them at its end."""
        if rank() == 0:
            self._monitors = make_monitors(
                self._config, self._folder, total_steps=self._agenda.total_steps, from_step=start
            )

    def run(self, start: int, end: int) -> None:
        agenda = Schedule(
            end,
            self._agenda.steps_per_epoch,
            self._agenda.samples_per_step,
            log=Every(self._log_every),
            evaluate=Every(),
            save=Every(),
        )
        trainer = Trainer(
            self._engine,
            schedule=agenda,
            train_data=self._loader,
            monitors=[*self._monitors, self],
            start=RunStart(start),
            hooks=Hooks(stop=self._stop),
        )
        with self._kernel.first() if self._kernel else nullcontext():
            trainer.fit()

    def write(self, point: Point) -> None:
        self._losses[point.step] = point.metrics["train/loss"]

    def close(self) -> None:
        """Keep what was written: a Trainer closes its monitors, block after block."""

    def end(self) -> None:
        """Close the engine: it has taken what was there out of Python's collections (`gc.freeze`),
        the other loops as well, and none of it would be freed for the next model.
        """
        self._engine.close()


class _Loop:
    """A loop that a user writes: it keeps the loss of each step, on the device."""

    def __init__(self, setting: Setting) -> None:
        self.pace = Pace()
        self.began = 0.0
        self._setting = setting
        self._losses: list[Tensor] = []

    def loss(self, step: int) -> float:
        return over_ranks({"train/loss": float(self._losses[step - 1])})["train/loss"]

    def ready(self, start: int) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


class Bare(_Loop):
    """The loop of DeepSpeed's own getting-started page, with our batches."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        prepared = setting.prepared
        model = setting.build_model()
        self._engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=[weight for weight in model.parameters() if weight.requires_grad],
            config=dict(prepared.ds_config),
            dist_init_required=False,
        )
        self._accumulation = prepared.plan.layout.accumulation_steps
        self._half = prepared.plan.config.precision.dtype == "bf16"
        self._loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank())

    def run(self, start: int, end: int) -> None:
        engine = self._engine
        stream: Iterator[Any] = self._loader.stream(start)
        for _ in range(start, end):
            self.pace.step()
            for _ in range(self._accumulation):
                *inputs, targets = moved(next(stream), engine.device)
                if self._half:
                    inputs = [halved(tensor) for tensor in inputs]
                loss = mean_loss(engine(*inputs), targets)
                engine.backward(loss)
                engine.step()
            self._losses.append(loss.detach())


class Plain(_Loop):
    """torch's loader and AdamW, and DistributedDataParallel on several ranks: the loop of its
    tutorial. On one rank nothing is around the model.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._device = device()
        model = self._placed()
        self._optimizer = setting.adamw(model)
        self._model: Any = model
        if torch.distributed.get_world_size() > 1:
            self._model = DistributedDataParallel(model)
        if setting.compiles:
            self._model = torch.compile(self._model)

    def _placed(self) -> nn.Module:
        model = self._setting.build_model(place_of_models()).to(self._device)
        if self._setting.half:
            model = model.to(torch.bfloat16)
        return model

    def run(self, start: int, end: int) -> None:
        stream = batches_from(self._setting, start)
        for _ in range(start, end):
            self.pace.step()
            *inputs, targets = moved(next(stream), self._device)
            if self._setting.half:
                inputs = [halved(tensor) for tensor in inputs]
            self._optimizer.zero_grad()
            loss = mean_loss(self._model(*inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
            self._optimizer.step()
            self._losses.append(loss.detach())


class Accelerated(_Loop):
    """The loop of Accelerate's quick tour."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from accelerate import Accelerator  # type: ignore[import-untyped]

        model = setting.build_model(place_of_models())
        self._accelerator = Accelerator(
            cpu=device_name() == "cpu", mixed_precision="bf16" if setting.half else "no"
        )
        self._model, self._optimizer = self._accelerator.prepare(model, setting.adamw(model))

    def run(self, start: int, end: int) -> None:
        setting = self._setting
        loader: Any = DataLoader(
            dataset_from(setting, start),
            batch_size=setting.micro_size,
            shuffle=setting.recorded is None,
            drop_last=True,
            pin_memory=device_name() != "cpu",
        )
        stream = endless(self._accelerator.prepare(loader))
        for _ in range(start, end):
            self.pace.step()
            *inputs, targets = next(stream)
            self._optimizer.zero_grad()
            loss = mean_loss(self._model(*inputs), targets)
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(self._model.parameters(), CLIP)
            self._optimizer.step()
            self._losses.append(loss.detach())


class _WithLoss(nn.Module):
    """A model that returns its loss, as Hugging Face's Trainer wants it, and keeps it."""

    def __init__(self, model: nn.Module, losses: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.losses = losses

    def forward(self, inputs: Any, labels: Tensor) -> dict[str, Tensor]:
        loss = mean_loss(self.model(*inputs), labels)
        self.losses.append(loss.detach())
        return {"loss": loss}


def _with_labels(samples: list[Any]) -> dict[str, Any]:
    """Collate samples into a batch as Hugging Face's Trainer wants it."""
    *inputs, labels = default_collate(samples)
    return {"inputs": inputs, "labels": labels}


class HuggingFace(_Loop):
    """`transformers.Trainer`, made anew for each block outside of its time."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import transformers  # noqa: F401 - a missing package is found before the first block

        model = setting.build_model(place_of_models()).to(device())
        self._model = _WithLoss(model, self._losses)
        self._optimizer = setting.adamw(model)
        self._trainer: Any = None

    def ready(self, start: int) -> None:
        """Make a Trainer."""
        import transformers

        setting = self._setting
        on_cpu = device_name() == "cpu"
        arguments = transformers.TrainingArguments(
            output_dir=str(setting.folder / "hf"),
            use_cpu=on_cpu,
            bf16=setting.half,
            per_device_train_batch_size=setting.micro_size,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP,
            logging_steps=setting.log_every,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            dataloader_pin_memory=not on_cpu,
            dataloader_drop_last=True,
            remove_unused_columns=False,
        )
        shuffles = setting.recorded is None

        class InOrder(transformers.Trainer):
            """Reads recorded batches as they are."""

            def _get_train_sampler(self, *arguments: Any) -> Any:
                if shuffles:
                    return super()._get_train_sampler(*arguments)
                return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

        side = self

        class Begin(transformers.TrainerCallback):
            """Notes when the first step begins: what `train` does before belongs to no step."""

            def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 0:
                    side.began = time.perf_counter()

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                side.pace.step()

        self._trainer = InOrder(
            model=self._model,
            args=arguments,
            train_dataset=dataset_from(setting, start),
            data_collator=_with_labels,
            optimizers=(self._optimizer, None),
        )
        self._trainer.remove_callback(transformers.PrinterCallback)
        self._trainer.add_callback(Begin())

    def run(self, start: int, end: int) -> None:
        self._trainer.args.max_steps = end - start
        self._trainer.train()


SIDES: Final[dict[str, Callable[[Setting], Side]]] = {
    "ours": Ours,
    "plain": Plain,
    "bare": Bare,
    "accelerate": Accelerated,
    "hf": HuggingFace,
}
