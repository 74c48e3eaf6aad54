"""What becomes of a key of the run config that differs between a checkpoint and the run that goes on from it.

One table for all of them, because DeepSpeed restores most of what an optimizer, a schedule and a loss scale were given
from the
checkpoint: a value that was changed in the config would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Rule = Literal["applied", "refused", "irrelevant"]
"""applied: the new value holds from the next step on, and the run says so. refused: it must be the same. irrelevant: it
has nothing to do with what goes on."""

RULES: Final[Mapping[str, Rule]] = {
    "run.name": "irrelevant",
    "run.output_dir": "irrelevant",
    "run.seed": "refused",
    "run.world_size": "irrelevant",
    "run.backend": "applied",
    "model": "refused",
    "data": "refused",
    "data.root": "applied",
    "data.path": "applied",
    "data.download": "irrelevant",
    "data.num_workers": "irrelevant",
    "data.prefetch_batches": "irrelevant",
    "task": "refused",
    "batch.global_size": "refused",
    "batch.micro_size": "applied",
    "batch.accumulation_steps": "applied",
    "precision.dtype": "applied",
    "precision.matmul": "applied",
    "precision.compute_dtype": "applied",
    "precision.lower_precision_safe_modules": "applied",
    "precision.check_grad_overflow": "applied",
    "precision.loss_scale": "refused",
    "precision.initial_scale_power": "irrelevant",
    "precision.loss_scale_window": "refused",
    "precision.hysteresis": "refused",
    "precision.consecutive_hysteresis": "refused",
    "precision.min_loss_scale": "refused",
    "zero": "applied",
    "parallel.pipe": "applied",
    "parallel.partition": "applied",
    "parallel.stages": "applied",
    "optimizer": "refused",
    "scheduler": "refused",
    "training.max_epochs": "applied",
    "training.max_steps": "applied",
    "training.log_every": "applied",
    "training.clip_grad_norm": "refused",
    "training.recompute_every": "applied",
    "training.sync_batch_norm": "applied",
    "training.channels_last": "applied",
    "training.freeze": "refused",
    "training.ema": "applied",
    "evaluation.every_epochs": "applied",
    "evaluation.every_steps": "applied",
    "evaluation.at_end": "applied",
    "evaluation.batch_size": "applied",
    "evaluation.max_samples": "applied",
    "evaluation.weights": "applied",
    "checkpoint.every_steps": "applied",
    "checkpoint.every_epochs": "applied",
    "checkpoint.at_end": "applied",
    "checkpoint.keep_last": "applied",
    "checkpoint.keep_every": "applied",
    "checkpoint.keep_best": "applied",
    "checkpoint.best_is": "applied",
    "checkpoint.init_weights": "irrelevant",
    "checkpoint.resume": "irrelevant",
    "checkpoint.mode": "applied",
    "checkpoint.allow_unverified": "irrelevant",
    "monitors": "irrelevant",
    "deepspeed": "refused",
    # Of what is passed through, these measure and tell.
    "deepspeed.comms_logger": "irrelevant",
    "deepspeed.dump_state": "irrelevant",
    "deepspeed.flops_profiler": "irrelevant",
    "deepspeed.log_level": "irrelevant",
    "deepspeed.memory_breakdown": "irrelevant",
    "deepspeed.timers": "irrelevant",
    "deepspeed.wall_clock_breakdown": "irrelevant",
    "deepspeed.comet": "irrelevant",
    "deepspeed.wandb": "irrelevant",
}
"""Key, or section with all that is in it and not named by itself -> what becomes of a difference."""

# Compared as samples per step: any one of the three keys of `batch` may be left out.
COMPARED_BY_LAYOUT: Final = "batch.global_size"
# They belong to fp16, and go with it when the precision changes.
_OF_ONE_KIND: Final = "precision."


def rule_of(key: str) -> Rule:
    """The rule of a dotted key; what no release knows, or no longer, is refused."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((RULES[prefix] for prefix in prefixes if prefix in RULES), "refused")


def must_not_differ(key: str, *, saved: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether a difference between two flat configs is one that no run may go on with."""
    if key == COMPARED_BY_LAYOUT or (key.startswith(_OF_ONE_KIND) and not (key in saved and key in now)):
        return False
    return rule_of(key) == "refused"
