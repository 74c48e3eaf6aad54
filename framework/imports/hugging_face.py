"""Hugging Face's TrainingArguments under the keys of a run config.

The order of the steps is the order of the sections in the file that `import` prints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.facts import value_at
from framework.errors import Problem, show_value
from framework.imports.foreign_arguments import MAPPINGS, ForeignArguments, Values, disagreement

_SINKS: Final = ("wandb", "mlflow", "trackio", "comet_ml")
_DEFAULT_CLIPPING: Final = 1.0  # of DeepSpeed, for a JSON without gradient_clipping
_INVERSE_SQRT_WARMUP: Final = 10_000


def take_training_arguments(arguments: ForeignArguments) -> None:
    """Put Hugging Face's TrainingArguments under the keys of a run config."""
    _take_run(arguments)
    _take_model(arguments)
    _take_optimizer(arguments)
    _take_schedule(arguments)
    _take_length(arguments)
    _take_interval(arguments, "logging", "training.log_every")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        arguments.move(name, "training.recompute_every", lambda _: 1)
    _take_label_smoothing(arguments)
    _take_precision(arguments)
    compile_options = {
        name: arguments.take(f"torch_compile_{name}") for name in ("backend", "mode")
    }
    arguments.put_compile(compile_options, "torch_compile")
    _take_cadences(arguments)
    _take_sampling(arguments)
    _leave_out_loader_options(arguments)
    _take_monitors(arguments)
    arguments.move("resume_from_checkpoint", "checkpoint.resume", _resume_point)
    _take_fsdp(arguments)
    arguments.add_deepspeed(arguments.take("deepspeed"), "deepspeed", _find_mismatches)
    _take_clipping(arguments)


def _take_run(arguments: ForeignArguments) -> None:
    folder = Path(str(arguments.take("output_dir") or "runs/run"))
    name = _run_name(str(arguments.take("run_name") or folder.name))
    arguments.put("run.name", name, "output_dir")
    if str(folder.parent) != ".":
        arguments.put("run.output_dir", str(folder.parent), "output_dir")


def _run_name(text: str) -> str:
    """Make a name of a run from any text."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:100] or "run"


def _take_model(arguments: ForeignArguments) -> None:
    """Take the model's name, which is an argument of transformers' own scripts."""
    model = arguments.values.get("model_name_or_path")
    if not model:
        return
    arguments.put(
        "model.target",
        "transformers:AutoModel.from_pretrained",
        comment="the class of your task, AutoModelFor...",
    )
    model_args = {"pretrained_model_name_or_path": model}
    arguments.put("model.args", model_args, "model_name_or_path")
    arguments.mark_taken("model_name_or_path")


def _take_optimizer(arguments: ForeignArguments) -> None:
    """Take optimizer, rate, decay, betas and eps: as keys of a kind of ours, or as arguments of a
    target.
    """
    name = str(arguments.take("optim"))
    section = MAPPINGS["optim"].get(name)
    if section is None:
        reason = "name its class as optimizer.target; this is adamw"
        arguments.omit("optim", name, reason)
        section = {"kind": "adamw"}
    rate = float(arguments.take("learning_rate"))
    decay = float(arguments.take("weight_decay"))
    betas = [arguments.take("adam_beta1"), arguments.take("adam_beta2")]
    eps = arguments.take("adam_epsilon")
    for key, value in section.items():
        arguments.put(f"optimizer.{key}", value, "optim")
    if "target" in section:
        class_args: Values = {"lr": rate, "weight_decay": decay}
        if "Adam" in section["target"]:
            class_args |= {"betas": betas, "eps": eps}
        arguments.put("optimizer.args", class_args, "learning_rate")
        return
    arguments.put("optimizer.lr", rate, "learning_rate")
    _put_decay(arguments, decay)
    if section["kind"] == "adamw":
        arguments.put("optimizer.betas", betas, "adam_beta1")
        arguments.put("optimizer.eps", eps, "adam_epsilon")


def _put_decay(arguments: ForeignArguments, decay: float) -> None:
    arguments.put("optimizer.weight_decay", decay, "weight_decay")
    if decay:
        comment = "as there: not biases and norms"
        arguments.put("optimizer.weight_decay_on", "matrices", comment=comment)


def _take_schedule(arguments: ForeignArguments) -> None:
    name = str(arguments.take("lr_scheduler_type"))
    kind = MAPPINGS["lr_scheduler_type"].get(name)
    if kind is None:
        reason = "name one as scheduler.target; this is cosine"
        arguments.omit("lr_scheduler_type", name, reason)
        kind = "cosine"
    arguments.put("scheduler.kind", kind, "lr_scheduler_type")
    _take_warmup(arguments, name)
    options = arguments.take("lr_scheduler_kwargs") or {}
    for option, value in options.items():
        _take_schedule_option(arguments, option, value)
    if name == "reduce_lr_on_plateau":
        callback = {
            "kind": "reduce_on_plateau",
            "factor": options.get("factor", 0.1),
            "patience": options.get("patience", 10),
        }
        arguments.sections["callbacks"] = [callback]


def _take_schedule_option(arguments: ForeignArguments, option: str, value: Any) -> None:
    key = MAPPINGS["lr_scheduler_kwargs"].get(option)
    if key:
        arguments.put(f"scheduler.{key}", value, "lr_scheduler_kwargs")
    elif option not in ("num_warmup_steps", "num_training_steps"):
        reason = "no key of this schedule"
        arguments.omit(f"lr_scheduler_kwargs.{option}", show_value(value), reason)


def _take_warmup(arguments: ForeignArguments, schedule: str) -> None:
    """Take the warm-up: a number of steps, or below 1 a share of the run."""
    warmup = _warmup(arguments)
    arguments.mark_taken("warmup_ratio")
    if schedule in ("constant", "reduce_lr_on_plateau"):  # the Trainer ignores it for these, too
        return
    if 0 < warmup < 1:
        _take_share(arguments, warmup, schedule)
    elif warmup or schedule == "inverse_sqrt":
        num_steps = int(warmup) or _INVERSE_SQRT_WARMUP
        arguments.put("scheduler.warmup_steps", num_steps, "warmup_steps")


def _take_share(arguments: ForeignArguments, share: float, schedule: str) -> None:
    """Take a warm-up that is a share of the run, of a length that is not known."""
    if schedule == "inverse_sqrt":
        shown = f"{share:g} of the steps"
        arguments.omit("warmup", shown, "`plan` says how many; set scheduler.warmup_steps")
    else:
        arguments.put("scheduler.warmup_ratio", share, "warmup_ratio")


def _warmup(arguments: ForeignArguments) -> float:
    """Return the warm-up: a number of steps, or below 1 a share of a run without max_steps."""
    steps = arguments.take("warmup_steps")
    warmup = float(steps or arguments.values.get("warmup_ratio") or 0)
    max_steps = arguments.take("max_steps")
    if 0 < warmup < 1 and max_steps > 0:
        return float(math.ceil(warmup * max_steps))
    return warmup


def _take_length(arguments: ForeignArguments) -> None:
    """Take max_steps, or the epochs rounded to whole ones."""
    if arguments.take("max_steps") > 0:
        arguments.put("training.max_steps", arguments.take("max_steps"), "max_steps")
        arguments.leave_out("num_train_epochs", "max_steps wins, as there")
        return
    epochs = float(arguments.take("num_train_epochs"))
    whole_epochs = max(1, round(epochs))
    comment = ""
    if whole_epochs != epochs:
        comment = f"{epochs:g} there; whole epochs here, or training.max_steps"
    arguments.put("training.max_epochs", whole_epochs, "num_train_epochs", comment)


def _take_label_smoothing(arguments: ForeignArguments) -> None:
    smoothing = arguments.take("label_smoothing_factor")
    if smoothing:
        arguments.put("task.label_smoothing", smoothing, "label_smoothing_factor")
        arguments.put("task.kind", "classification")


def _take_precision(arguments: ForeignArguments) -> None:
    dtype = next((name for name in ("bf16", "fp16") if arguments.take(name)), "")
    arguments.mark_taken("bf16", "fp16")
    if dtype:
        with_deepspeed = bool(arguments.take("deepspeed"))
        arguments.put_half_precision(dtype, dtype, with_deepspeed=with_deepspeed)
    elif arguments.take("tf32"):
        arguments.put("precision.matmul", "high", "tf32")


def _take_interval(arguments: ForeignArguments, prefix: str, key: str) -> None:
    """Take the steps between two logs, evaluations or saves; a share of the run has no key."""
    strategy = str(arguments.take(f"{prefix}_strategy"))
    interval = arguments.take(f"{prefix}_steps")
    if strategy != "steps" or interval is None:
        return
    if interval < 1:
        share = f"{interval:g} of the run"
        arguments.omit(f"{prefix}_steps", share, f"set {key} to a number of steps")
    else:
        arguments.put(key, int(interval), f"{prefix}_steps")


def _take_cadences(arguments: ForeignArguments) -> None:
    """Take when the run evaluates and saves, and which checkpoints it keeps."""
    if arguments.take("eval_strategy") == "steps" and arguments.take("eval_steps") is None:
        arguments.values["eval_steps"] = arguments.take("logging_steps")  # as there
    _take_cadence(arguments, "eval", "evaluation")
    _take_cadence(arguments, "save", "checkpoint")
    if arguments.take("eval_strategy") != "no":
        arguments.move("per_device_eval_batch_size", "evaluation.batch_size")
    arguments.mark_taken("per_device_eval_batch_size")
    num_kept = arguments.take("save_total_limit")
    if num_kept or arguments.take("save_strategy") != "no":
        arguments.put("checkpoint.keep_last", num_kept or "all", "save_total_limit")
    _take_best_checkpoint(arguments)


def _take_cadence(arguments: ForeignArguments, prefix: str, section: str) -> None:
    """Take when the run evaluates, or saves."""
    strategy = arguments.take(f"{prefix}_strategy")
    if strategy == "epoch":
        arguments.put(f"{section}.every_epochs", 1, f"{prefix}_strategy")
    elif strategy == "no":
        arguments.put(f"{section}.at_end", False, f"{prefix}_strategy")
    _take_interval(arguments, prefix, f"{section}.every_steps")
    arguments.mark_taken(f"{prefix}_steps")


def _take_best_checkpoint(arguments: ForeignArguments) -> None:
    """Take the metric that rates checkpoints; by default, as there, the loss, and less is better
    for losses alone.
    """
    metric = arguments.take("metric_for_best_model")
    loads_best = arguments.take("load_best_model_at_end")
    if not metric and not loads_best:
        return
    metric = str(metric or "loss").removeprefix("eval_")
    arguments.put("checkpoint.keep_best", f"eval/{metric}", "metric_for_best_model")
    arguments.put("checkpoint.best_is", _best_is(arguments, metric), "greater_is_better")
    if loads_best:
        reason = (
            "the model stays the last; evaluate, predict, generate, export and inspect take "
            "--step best"
        )
        arguments.omit("load_best_model_at_end", "true", reason)


def _best_is(arguments: ForeignArguments, metric: str) -> str:
    is_greater_better = arguments.take("greater_is_better")
    if is_greater_better is None:
        is_greater_better = not metric.endswith("loss")
    if is_greater_better:
        return "max"
    return "min"


def _take_sampling(arguments: ForeignArguments) -> None:
    strategy = arguments.take("train_sampling_strategy")
    groups_by_length = arguments.take("group_by_length")
    if strategy == "group_by_length" or groups_by_length:
        arguments.put("data.bucket_steps", 50)  # there too a window of 50 batches is sorted


def _leave_out_loader_options(arguments: ForeignArguments) -> None:
    """List the options of the data loader: they are no `data:` section without the user's data."""
    loader = arguments.sections.pop("data", {})
    options = [f"{name}: {value}" for name, value in loader.items() if value]
    if options:
        arguments.omit("for your data section", ", ".join(options), reason="")


def _take_monitors(arguments: ForeignArguments) -> None:
    sinks = arguments.take("report_to")
    if isinstance(sinks, str):
        sinks = [sinks]
    for sink in sinks or []:
        if sink in _SINKS:
            arguments.put(f"monitors.{sink.removesuffix('_ml')}", True, "report_to")


def _resume_point(value: Any) -> str:
    if value is True:
        return "auto"
    return str(value)


def _take_fsdp(arguments: ForeignArguments) -> None:
    """Take FSDP's sharding as a ZeRO stage."""
    if arguments.is_set("fsdp"):
        stage = 2 if "shard_grad_op" in str(arguments.take("fsdp")) else 3
        arguments.put("zero.stage", stage, "fsdp")


def _take_clipping(arguments: ForeignArguments) -> None:
    """Let DeepSpeed's default win over max_grad_norm where the JSON has no gradient_clipping."""
    clipping = arguments.take("max_grad_norm")
    has_json = arguments.take("deepspeed") is not None
    if not has_json or "training.clip_grad_norm" in arguments.decided_by_json:
        return
    if clipping != _DEFAULT_CLIPPING:
        reason = "the DeepSpeed JSON has no gradient_clipping, and DeepSpeed clips at 1.0 then"
        arguments.omit("max_grad_norm", show_value(clipping), reason)
        arguments.put("training.clip_grad_norm", _DEFAULT_CLIPPING, "max_grad_norm")


def _find_mismatches(arguments: ForeignArguments, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Find values of the JSON that the Trainer refuses because its arguments, given or by default,
    have others; "auto" matches any (transformers/integrations/deepspeed.py
    `HfTrainerDeepSpeedConfig`).
    """
    reason = "the Trainer refuses another value than its argument's, given or by default"
    fix = 'write one value in both, or "auto" in the JSON'
    for key, value, argument in _compared(arguments):
        json_value = value_at(config, key.split("."), None)
        if json_value not in (None, "auto") and json_value != value:
            yield disagreement(key, json_value, argument, value, reason, fix)
    yield from _find_uneven_batch(arguments, config.get("train_batch_size"))


def _find_uneven_batch(arguments: ForeignArguments, global_size: Any) -> Iterator[Problem]:
    """Find a batch of the JSON that is no multiple of what a device takes in a step."""
    micro_size = arguments.take("per_device_train_batch_size")
    steps = arguments.take("gradient_accumulation_steps")
    are_numbers = all(isinstance(size, int) for size in (global_size, micro_size, steps))
    if are_numbers and global_size % max(1, micro_size * steps):
        yield disagreement(
            "train_batch_size",
            global_size,
            "per_device_train_batch_size",
            micro_size,
            "the Trainer refuses a batch that is no multiple of what a device takes in a step, "
            f"{micro_size} x {steps}",
            'write a multiple, or "auto" in the JSON',
        )


def _compared(arguments: ForeignArguments) -> list[tuple[str, Any, str]]:
    """List what the Trainer compares: key of the JSON, value of the argument, argument."""
    micro_size = arguments.take("per_device_train_batch_size")
    steps = arguments.take("gradient_accumulation_steps")
    betas = [arguments.take("adam_beta1"), arguments.take("adam_beta2")]
    rate = arguments.take("learning_rate")
    max_steps = arguments.take("max_steps")
    clipping = arguments.take("max_grad_norm")
    eps = arguments.take("adam_epsilon")
    decay = arguments.take("weight_decay")
    fp16 = bool(arguments.take("fp16") or arguments.take("fp16_full_eval"))
    bf16 = bool(arguments.take("bf16") or arguments.take("bf16_full_eval"))
    rows: list[tuple[str, Any, str]] = []
    if not arguments.take("auto_find_batch_size"):
        batch_key = "train_micro_batch_size_per_gpu"
        rows.append((batch_key, micro_size, "per_device_train_batch_size"))
    rows += [
        ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
        ("gradient_clipping", clipping, "max_grad_norm"),
        ("optimizer.params.lr", rate, "learning_rate"),
        ("optimizer.params.betas", betas, "adam_beta1"),
        ("optimizer.params.eps", eps, "adam_epsilon"),
        ("optimizer.params.weight_decay", decay, "weight_decay"),
        ("scheduler.params.warmup_max_lr", rate, "learning_rate"),
        ("fp16.enabled", fp16, "fp16"),
        ("bf16.enabled", bf16, "bf16"),
    ]
    if max_steps > 0:
        rows.append(("scheduler.params.total_num_steps", max_steps, "max_steps"))
    warmup = _warmup(arguments)
    if not 0 < warmup < 1:  # no share of a run of unknown length
        key = "scheduler.params.warmup_num_steps"
        rows.append((key, max(1, int(warmup)), "warmup_steps"))
    return rows
