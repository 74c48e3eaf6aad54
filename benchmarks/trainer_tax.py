"""What the Trainer costs over loops that do the same maths: plain DDP, Accelerate, Hugging Face's
Trainer, DeepSpeed.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/trainer_tax.py --out
    benchmarks/results/trainer_tax.json torchrun --standalone --nproc-per-node 1
    benchmarks/trainer_tax.py --model small_resnet18      # on a GPU

All sides are built from the same seed and train one model (LeNet) on the same images, a
`TensorDataset` as a user would bring, in turn, A B C A B C, in blocks of steps: `trainer` through
`Trainer.fit` with all monitors on, a logged point every 10 steps and an ear for requests to stop;
`ddp` and `accelerate` through the loop that a user would write, with torch's `DataLoader` and
clipping, which logs nothing at all; `bare` through such a loop around DeepSpeed's engine, with our
batches; `hf` through Hugging Face's Trainer, which logs every 10 steps; `deaf` is the Trainer that
cannot be asked to stop. Printed: the ratio of the median block times to each, with the spread block
by block, and how far the losses of `trainer` and `bare` differ, which read the same batches: one
divides a sum by its count and clips with other kernels, so in the last bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from framework.config.load import config_from_values
from framework.engine import random_state
from framework.engine.distributed import (
    barrier,
    describe_environment,
    device,
    device_name,
    process_group,
    rank,
)
from framework.engine.metrics import over_ranks
from framework.engine.plain_engine import arithmetic_of, build_engine
from framework.engine.stop_agreement import agreed_stops
from framework.recipes.image_sets.digits import build
from framework.setup.assemble import make_monitors, make_schedule
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import Prepared, prepare
from framework.system.stopping import GO_ON, Decision, StopRequest
from framework.train.cadence import Every, Schedule
from framework.train.hooks import Hooks
from framework.train.monitors.base import Monitor, Point
from framework.train.trainer import RunStart, Trainer

LOG_EVERY = 10


def main() -> None:
    arguments = _arguments()
    config = {
        "run": {"name": "trainer_tax"},
        "data": {"target": "benchmarks.trainer_tax:images"},
        "model": {"kind": arguments.model},
        "batch": {"micro_size": arguments.micro_size},
        "zero": {"stage": arguments.stage},
        "training": {
            "max_steps": arguments.steps * (arguments.blocks + 1),
            "log_every": LOG_EVERY,
            "deterministic": arguments.deterministic,
        },
        "monitors": {"progress": "off"},
    }
    prepared = prepare(config_from_values(config))
    with process_group(None), arithmetic_of(prepared.plan), tempfile.TemporaryDirectory() as folder:
        with agreed_stops(StopRequest(), start_step=0) as stop:
            makers: dict[str, Callable[[], Side]] = {
                "bare": lambda: Bare(prepared),
                "ddp": lambda: PlainDDP(prepared),
                "accelerate": lambda: Accelerated(prepared),
                "hf": lambda: HuggingFace(prepared, folder),
                "deaf": lambda: Ours(prepared, Path(folder, "deaf")),
            }
            sides: dict[str, Side] = {"trainer": Ours(prepared, Path(folder, "ours"), stop=stop)}
            for name in arguments.against:
                sides[name] = makers[name]()
            report = _measure(prepared, sides, blocks=arguments.blocks, steps=arguments.steps)
        if rank() == 0:
            text = json.dumps(report, indent=2)
            print(text)
            if arguments.out:
                Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def images() -> TensorDataset:
    """Return the digits as two tensors."""
    train = build(28).train
    samples = [train[index] for index in range(len(train))]
    return TensorDataset(
        torch.stack([image for image, _ in samples]),
        torch.tensor([int(label) for _, label in samples]),
    )


def _measure(
    prepared: Prepared, sides: Mapping[str, Side], *, blocks: int, steps: int
) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(blocks + 1):
        for name, side in sides.items():
            side.ready(block * steps)
            _settle()
            before = time.perf_counter()
            side.run(block * steps, (block + 1) * steps)
            _settle()
            if block:  # the first one warms up
                times[name].append(time.perf_counter() - max(before, getattr(side, "began", 0.0)))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio_of_medians = {}
    block_ratios = {}
    for name in sides:
        if name != "trainer":
            ratio_of_medians[name] = medians["trainer"] / medians[name]
            pairs = zip(times["trainer"], times[name], strict=True)
            block_ratios[name] = sorted(ours / other for ours, other in pairs)
    environment = describe_environment()
    report: dict[str, Any] = {
        "ratio_of_medians": ratio_of_medians,
        "block_ratios": block_ratios,
        "model": prepared.plan.config.model.kind,
        "ms_per_step": {name: 1000 * median / steps for name, median in medians.items()},
        "blocks": blocks,
        "steps_per_block": steps,
        "plan": prepared.plan.to_dict()["layout"] | {"zero_stage": prepared.plan.config.zero.stage},
        "versions": environment["versions"],
        "machine": {key: environment[key] for key in ("accelerator", "device", "cpu_count")},
    }
    if "bare" in sides:
        logged_steps = range(LOG_EVERY, (blocks + 1) * steps + 1, LOG_EVERY)
        trainer_losses = [sides["trainer"].loss(step) for step in logged_steps]
        bare_losses = [sides["bare"].loss(step) for step in logged_steps]
        pairs = zip(trainer_losses, bare_losses, strict=True)
        report["largest_difference_of_losses"] = max(abs(ours - other) for ours, other in pairs)
        report["num_losses_compared"] = len(logged_steps)
    return report


def _settle() -> None:
    """Wait for the queued work of the device, and for all ranks."""
    get_accelerator().synchronize()
    barrier()


class Side(Protocol):
    """One way to train, in blocks of steps."""

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
        plan = prepared.plan
        random_state.seed_everything(plan.config.run.seed)
        self._engine = build_engine(
            plan,
            ds_config=prepared.ds_config,
            model=prepared.parts.build_model(),
            task=prepared.parts.task,
        )
        self._agenda = make_schedule(plan)
        self._loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank())
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

        self._trainer.add_callback(Begin())

    def run(self, start: int, end: int) -> None:
        self._trainer.args.max_steps = end - start
        self._trainer.train()

    def loss(self, step: int) -> float:
        raise NotImplementedError("it reads other batches")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=5, help="timed blocks of each side")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in a block")
    parser.add_argument("--micro_size", type=int, default=64, help="samples per step and rank")
    parser.add_argument("--model", default="lenet", help="kind of model, for images of 28 x 28")
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    sides = ("bare", "ddp", "accelerate", "hf", "deaf")
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits in every run, on all sides"
    )
    parser.add_argument(
        "--against", nargs="+", choices=sides, default=sides[:-1], help="the other sides"
    )
    parser.add_argument("--out", help="also write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
