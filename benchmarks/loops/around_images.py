"""Loops that train one image classifier with the same maths: ours, torch's DDP, Accelerate, Hugging
Face's Trainer, DeepSpeed's engine in a bare loop. `trainer_tax.py` lets them run in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import deepspeed
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from framework.engine import random_state
from framework.engine.distributed import device, device_name, rank
from framework.engine.metrics import over_ranks
from framework.engine.plain_engine import build_engine
from framework.setup.assemble import make_monitors, make_schedule
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import Prepared
from framework.system.stopping import GO_ON, Decision
from framework.train.cadence import Every, Schedule
from framework.train.hooks import Hooks
from framework.train.monitors.base import Monitor, Point
from framework.train.trainer import RunStart, Trainer

LOG_EVERY: Final = 10


class Pace:
    """Moments at which the steps of a block begin: of the clock, and of the processor time of the
    thread that trains, which other work on the machine does not lengthen.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._processor: list[float] = []

    def step(self) -> None:
        """Note that a step begins."""
        self._seconds.append(time.perf_counter())
        self._processor.append(time.thread_time())

    def take(self) -> tuple[float, float]:
        """Return the mean seconds and processor seconds of a step since the last call, of all
        steps but the last one.
        """
        num_steps = len(self._seconds) - 1
        seconds = (self._seconds[-1] - self._seconds[0]) / num_steps
        processor = (self._processor[-1] - self._processor[0]) / num_steps
        self._seconds.clear()
        self._processor.clear()
        return seconds, processor


class Paced:
    """The trainer's batches, of which the first of each step is noted."""

    def __init__(self, loader: Any, pace: Pace, per_step: int) -> None:
        self._loader = loader
        self._pace = pace
        self._per_step = per_step

    def stream(self, start_step: int) -> Iterator[Any]:
        """Yield the loader's micro-batches."""
        for number, batch in enumerate(self._loader.stream(start_step)):
            if number % self._per_step == 0:
                self._pace.step()
            yield batch


class Side(Protocol):
    """One way to train, in blocks of steps.

    Attributes:
        pace: when the steps of the last block began.
    """

    pace: Pace

    def ready(self, start: int) -> None:
        """Prepare for a block, outside of its time."""

    def run(self, start: int, end: int) -> None:
        """Take the steps of a block."""

    def loss(self, step: int) -> float:
        """Return the mean over ranks at a logged step."""


class Ours:
    """The Trainer as `framework.fit` uses it."""

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        *,
        stop: Callable[[int], Decision] = lambda step: GO_ON,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stop = stop
        self.pace = Pace()
        plan = prepared.plan
        random_state.seed_everything(plan.config.run.seed)
        self._engine = build_engine(
            plan,
            ds_config=prepared.ds_config,
            model=prepared.parts.build_model(),
            task=prepared.parts.task,
        )
        self._agenda = make_schedule(plan)
        loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank())
        self._loader = Paced(loader, self.pace, plan.layout.accumulation_steps)
        self._config = plan.config
        self._folder = folder
        self._monitors: list[Monitor] = []
        self._losses: dict[int, float] = {}

    def loss(self, step: int) -> float:
        """Return the mean over ranks at a logged step."""
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
            log=Every(LOG_EVERY),
            evaluate=Every(),
            save=Every(),
        )
        Trainer(
            self._engine,
            schedule=agenda,
            train_data=self._loader,
            monitors=[*self._monitors, self],
            start=RunStart(start),
            hooks=Hooks(stop=self._stop),
        ).fit()

    name = "benchmark"

    def write(self, point: Point) -> None:
        self._losses[point.step] = point.metrics["train/loss"]

    def close(self) -> None:
        pass


class Bare:
    """The loop of DeepSpeed's own getting-started page."""

    def __init__(self, prepared: Prepared) -> None:
        self.pace = Pace()
        plan = prepared.plan
        random_state.seed_everything(plan.config.run.seed)
        model = prepared.parts.build_model()
        self._engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=dict(prepared.ds_config),
            dist_init_required=False,
        )
        self._device = self._engine.device
        self._accumulation = plan.layout.accumulation_steps
        self._loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank())
        self._losses: list[torch.Tensor] = []

    def loss(self, step: int) -> float:
        """Return the mean over ranks. Collective."""
        return over_ranks({"train/loss": float(self._losses[step - 1])})["train/loss"]

    def ready(self, start: int) -> None:
        """Nothing to do."""

    def run(self, start: int, end: int) -> None:
        engine = self._engine
        device = self._device
        batches: Iterator[Any] = self._loader.stream(start)
        for _ in range(start, end):
            self.pace.step()
            for _ in range(self._accumulation):
                images, labels = next(batches)
                loss = torch.nn.functional.cross_entropy(
                    engine(images.to(device)), labels.to(device)
                )
                engine.backward(loss)
                engine.step()
            self._losses.append(loss.detach())


class PlainDDP:
    """torch's DistributedDataParallel, sampler and loader, and AdamW: the loop of its tutorial."""

    def __init__(self, prepared: Prepared) -> None:
        self.pace = Pace()
        random_state.seed_everything(prepared.plan.config.run.seed)
        self._device = device()
        self._model = DistributedDataParallel(prepared.parts.build_model().to(self._device))
        self._optimizer = _adamw(self._model)
        dataset: Any = prepared.parts.splits.train
        self._sampler: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
        self._loader: Any = DataLoader(
            dataset,
            batch_size=prepared.plan.layout.micro_size,
            sampler=self._sampler,
            drop_last=True,
            pin_memory=self._device.type != "cpu",
        )
        self._epochs = 0

    def ready(self, start: int) -> None:
        """Nothing to do."""

    def run(self, start: int, end: int) -> None:
        batches = self._batches()
        for _ in range(start, end):
            self.pace.step()
            batch = next(batches)
            images, labels = (tensor.to(self._device, non_blocking=True) for tensor in batch)
            self._optimizer.zero_grad()
            loss: torch.Tensor = torch.nn.functional.cross_entropy(self._model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._clip()
            self._optimizer.step()

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)

    def _batches(self) -> Iterator[Any]:
        while True:
            self._sampler.set_epoch(self._epochs)
            self._epochs += 1
            yield from self._loader

    def loss(self, step: int) -> float:
        raise NotImplementedError("it reads other batches")


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return torch's AdamW, on a GPU in its fused form, as Hugging Face's Trainer takes it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device_name() != "cpu")


class Accelerated(PlainDDP):
    """The loop of Accelerate's quick tour."""

    def __init__(self, prepared: Prepared) -> None:
        from accelerate import Accelerator  # type: ignore[import-untyped]

        self.pace = Pace()
        random_state.seed_everything(prepared.plan.config.run.seed)
        model = prepared.parts.build_model()
        self._accelerator = Accelerator(cpu=device_name() == "cpu")
        dataset: Any = prepared.parts.splits.train
        loader: Any = DataLoader(
            dataset,
            batch_size=prepared.plan.layout.micro_size,
            shuffle=True,
            drop_last=True,
            pin_memory=device_name() != "cpu",
        )
        self._model, self._optimizer, self._loader = self._accelerator.prepare(
            model, _adamw(model), loader
        )

    def run(self, start: int, end: int) -> None:
        batches = self._batches()
        for _ in range(start, end):
            self.pace.step()
            images, labels = next(batches)
            self._optimizer.zero_grad()
            self._accelerator.backward(
                torch.nn.functional.cross_entropy(self._model(images), labels)
            )
            self._clip()
            self._optimizer.step()

    def _clip(self) -> None:
        self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self._loader


class _Labelled(Dataset[Any]):
    """Samples as Hugging Face's Trainer wants them."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self._samples[index]
        return {"images": image, "labels": label}


class _WithLoss(torch.nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class HuggingFace:
    """`transformers.Trainer`, made anew for each block outside of its time."""

    def __init__(self, prepared: Prepared, folder: str) -> None:
        random_state.seed_everything(prepared.plan.config.run.seed)
        self._model = _WithLoss(prepared.parts.build_model())
        self._prepared = prepared
        self._folder = folder
        self._trainer: Any = None
        self.began = 0.0
        self.pace = Pace()

    def ready(self, start: int) -> None:
        """Make a Trainer."""
        import transformers

        arguments = transformers.TrainingArguments(
            output_dir=self._folder,
            use_cpu=device_name() == "cpu",
            optim="adamw_torch" if device_name() == "cpu" else "adamw_torch_fused",
            per_device_train_batch_size=self._prepared.plan.layout.micro_size,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            dataloader_pin_memory=device_name() != "cpu",
            dataloader_drop_last=True,
        )
        self._trainer = transformers.Trainer(
            model=self._model,
            args=arguments,
            train_dataset=_Labelled(self._prepared.parts.splits.train),
        )
        self._trainer.remove_callback(transformers.PrinterCallback)

        class Begin(transformers.TrainerCallback):
            """Notes when the first step begins: what `train` does before belongs to no step."""

            def on_epoch_begin(begin, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: N805
                if state.global_step == 0:
                    self.began = time.perf_counter()

            def on_step_begin(begin, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: N805
                self.pace.step()

        self._trainer.add_callback(Begin())

    def run(self, start: int, end: int) -> None:
        self._trainer.args.max_steps = end - start
        self._trainer.train()

    def loss(self, step: int) -> float:
        raise NotImplementedError("it reads other batches")
