"""`training`, `evaluation`, `checkpoint`, `monitors`: what happens when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from framework.config.base import Count, NonNegative, PositiveCount, Section


class EMA(Section):
    """An exponential moving average of the weights, kept beside them: ema = decay x ema + (1 - decay) x weights."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Share of the old average that stays at an update. The average reaches back over about 1 / (1 - decay) updates."""
    every_steps: PositiveCount = 1
    """Steps between two updates."""
    start_step: Count = 0
    """The average begins as the weights after this step; 0: the first weights."""


class Training(Section):
    """How long to train, and how steps are taken."""

    max_epochs: PositiveCount | None = None
    """Passes over the training data; left out together with max_steps: 1."""
    max_steps: PositiveCount | None = None
    """Optimizer steps; wins over max_epochs."""
    log_every: PositiveCount = 10
    """Steps between two logged points. Between them nothing waits for the device."""
    clip_grad_norm: NonNegative = 1.0
    """Largest global L2 norm of the gradients; 0 turns clipping off."""
    recompute_every: Count = 0
    """Groups of this many layers keep only their input for the backward pass and run again in it: less memory for about
    a third more computation. 0 keeps everything."""
    sync_batch_norm: bool = False
    """Batch norms take mean and variance over the batches of all data-parallel devices instead of over their own."""
    channels_last: bool = False
    """Store images with the channels last; convolutions follow, and tensor cores read that order faster."""
    freeze: list[str] = []
    """Regular expressions; parameters whose whole name matches one are not trained, for example ``embed\\..*``."""
    ema: EMA | None = None
    """Keep a moving average of the weights, in fp32, spread over the ranks as the optimizer's state is; left out:
    none.
    """


class Evaluation(Section):
    """When the evaluation data is measured."""

    every_epochs: PositiveCount | None = None
    """Epochs between two evaluations."""
    every_steps: PositiveCount | None = None
    """Steps between two evaluations."""
    at_end: bool = True
    """Evaluate after the last step."""
    batch_size: PositiveCount | None = None
    """Samples per forward pass on one device; left out: the micro-batch size."""
    max_samples: PositiveCount | None = None
    """Measure the first so many evaluation samples, the same whatever the layout; left out: all of them."""
    weights: Literal["trained", "ema"] = "trained"
    """What is measured: the weights as trained, or their moving average (needs `training.ema`)."""


class Checkpoint(Section):
    """When the state of the run is saved, how much is kept, and where it starts from."""

    every_steps: PositiveCount | None = None
    """Steps between two checkpoints."""
    every_epochs: PositiveCount | None = None
    """Epochs between two checkpoints."""
    at_end: bool = True
    """Save after the last step."""
    mode: Literal["sync", "async"] = "sync"
    """``sync``: training waits until a checkpoint is on disk; ``async``: until the state is copied into host memory,
    from which a process beside each rank writes it. async needs that memory: as much as a rank writes."""
    keep_last: PositiveCount = 3
    """Newest checkpoints that are kept; older ones of this run are deleted after a save."""
    keep_every: PositiveCount | None = None
    """Checkpoints whose step is a multiple of this are kept as well."""
    keep_best: str | None = None
    """The checkpoint with the best value of this metric, such as ``eval/accuracy``, is kept as well. Until one was
    saved where the metric was measured, all are kept."""
    best_is: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of `keep_best` is the best."""
    init_weights: str | None = None
    """Weights that a fresh start begins with: a checkpoint of any layout, a run folder, or a ``.pt`` file of a state
    dict.
    Left out: drawn from `run.seed`. Of a checkpoint the trained weights are taken; `export --weights ema` writes the
    average."""
    resume: str = "never"
    """``never``: start afresh; ``auto``: from the newest checkpoint in the run folder, afresh if there is none;
    otherwise the path of a checkpoint (``.../global_step<N>``) or of a run folder, which must exist."""
    allow_unverified: bool = False
    """Let `resume` and `init_weights` name a checkpoint that DeepSpeed wrote by itself: it has no manifest, so nothing
    tells whether its files are whole. They are read as weights only, as all are."""


class Monitors(Section):
    """Who is told about the metrics. `metrics.jsonl` is always written."""

    tensorboard: bool = True
    """Event files under ``tensorboard/`` in the run folder."""
    csv: bool = True
    """``metrics.csv`` in the run folder."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """On the terminal of rank 0: a bar, a line per logged step, or nothing; auto: a bar if it is a terminal."""
