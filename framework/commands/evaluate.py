"""``evaluate CHECKPOINT [key=value ...]``: the metrics of a checkpoint, on its run's evaluation
data or on other data.

The model is assembled as its run assembled it, but for adapters, which are merged: the same number
of ranks measures the numbers that training has logged, to the bit. If the sizes of `parallel` do
not divide the number of ranks, they become 1. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

from deepspeed_lint.text.document import COMMAND_LINE
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.weight_files import LazyWeights, shapes_of
from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.engine.distributed import process_group, rank, refuse_different_ranks
from framework.engine.failures import explaining_failures
from framework.engine.plain_engine import arithmetic_of
from framework.engine.workarounds.left_by_stage_3 import leaving_nothing
from framework.engine_protocol import Table, evaluate_sets
from framework.errors import EXIT_OK, ConfigError
from framework.setup.assemble import assemble_engine, make_eval_loaders
from framework.setup.prepare_run import prepare
from framework.setup.start_point import agreed_weights, measure_cut
from framework.setup.trained import find_source, module_of, saved_config
from framework.system.arguments import add_step
from framework.system.command_parser import CommandParser
from framework.system.launcher_rank import take_rank
from framework.system.log import warn


def main(words: Sequence[str]) -> int:
    """Evaluate a checkpoint on this rank, and print the metrics as JSON on rank 0; returns the exit
    code. Collective.
    """
    arguments = _parse(words)
    checkpoint = find_source(arguments.checkpoint, step=arguments.step)
    take_rank(os.environ)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config, source = config_to_evaluate(checkpoint, arguments.settings, num_ranks=num_ranks)
    sections = _sections_to_trust(config, source)
    saved = saved_config(checkpoint, *sections, trust=arguments.trust)
    weights = arguments.weights or saved.evaluation.weights
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    prepared = prepare(config, source=source)
    with ExitStack() as stack:
        stack.enter_context(explaining_failures(Path(tempfile.gettempdir()), prepared.plan))
        stack.enter_context(process_group(config.run.backend))
        refuse_different_ranks(prepared.fingerprint())
        prepared = agreed_weights(measure_cut(prepared, checkpoint), None, average=weights == "ema")
        if checkpoint.has_adapters:
            saved = saved.model_copy(update={"model": config.model})
            merged = module_of(checkpoint, saved, average=weights == "ema").state_dict()
            read = {name: partial(merged.__getitem__, name) for name in merged}
            prepared = replace(prepared, weights=LazyWeights(shapes_of(merged), read))
        sets = make_eval_loaders(prepared.plan, prepared.parts.splits, rank=rank())
        if not sets:
            reason = "the data has no evaluation set"
            fix = (
                "name data that has one, such as data.path=..., or return the pair (training, "
                "evaluation) from the function of data.target"
            )
            raise ConfigError.of("evaluation-without-data", reason, fix, "data")
        stack.enter_context(arithmetic_of(prepared.plan))
        stack.enter_context(leaving_nothing(prepared.plan.config.zero.stage))
        engine = assemble_engine(prepared)
        tables: dict[str, Table] = {}
        metrics = evaluate_sets(engine, sets, tables=tables)
        if rank() == 0:
            section = {
                "checkpoint": str(checkpoint.path),
                "step": checkpoint.step,
                "weights": weights,
                "metrics": metrics,
            }
            if tables:
                section["tables"] = tables
            _warn_of_left_out(checkpoint, metrics)
            print(json.dumps(section, indent=2))
        engine.close()
    return EXIT_OK


def _warn_of_left_out(checkpoint: SavedCheckpoint, metrics: Mapping[str, float]) -> None:
    """Warn of metrics that the run has measured at this checkpoint and this evaluation has not."""
    left_out = not_repeated(checkpoint.manifest.get("metrics", {}), metrics)
    if left_out:
        warn(
            f"the run has measured {', '.join(left_out)} as well: metrics that fit(metrics=...) "
            "was given are in no file; name them under evaluation.metrics [metrics-not-repeated]"
        )


def not_repeated(measured: Iterable[str], metrics: Iterable[str]) -> list[str]:
    """Return the metrics of a run that an evaluation of the same sets has not given."""
    sets = {name.rpartition("/")[0] for name in metrics}
    missing = set(measured) - set(metrics)
    return sorted(name for name in missing if name.rpartition("/")[0] in sets)


def _sections_to_trust(config: RunConfig, source: Source) -> list[str]:
    """Return the sections with a target that only the checkpoint names: one of the command line
    needs no trust.
    """
    sections = []
    metrics = [("evaluation", "metrics", name) for name in config.evaluation.metrics]
    for path in [("model",), ("data",), ("task",), *metrics]:
        if source.place((*path, "target"))[0] != COMMAND_LINE:
            sections.append(".".join(path))
    return sections


def config_to_evaluate(
    checkpoint: SavedCheckpoint, settings: Sequence[str], *, num_ranks: int
) -> tuple[RunConfig, Source]:
    """Return the checkpoint's config for an evaluation alone, on `num_ranks` ranks; `settings` win
    over it.
    """
    values = saved_config(checkpoint).to_dict()
    layout = checkpoint.manifest["layout"]
    sizes = {name: values["parallel"][name] for name in ("pipe", "tensor", "sequence", "expert")}
    if num_ranks % prod(sizes.values()):
        values["parallel"] |= dict.fromkeys(sizes, 1) | {"stages": None}
    values["batch"] = {"micro_size": layout["micro_size"], "accumulation_steps": 1}
    if values["parallel"]["pipe"] > 1:
        values["batch"]["accumulation_steps"] = layout["accumulation_steps"]
    values["run"] |= {"output_dir": tempfile.gettempdir(), "world_size": None}
    values["zero"] |= {"offload_optimizer": {"device": "none"}}
    values["training"] |= {"ema": None, "lora": None}
    values["evaluation"] |= {"weights": "trained"}
    values |= {
        "optimizer": {"kind": "sgd"},
        "scheduler": {"kind": "constant"},
        "callbacks": [],
        "profile": None,
    }
    values["monitors"] = {"tensorboard": False, "csv": False, "report": False, "progress": "off"}
    values["checkpoint"] = {}
    if not checkpoint.has_adapters:
        values["checkpoint"]["init_weights"] = str(checkpoint.path)
    return load_with_source(checkpoint.path, settings, text=json.dumps(values))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Measure a checkpoint on evaluation data."
    parser = CommandParser(prog="dsf evaluate", allow_abbrev=False, description=about)
    option = parser.add_argument
    option(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder (its newest checkpoint) or .../global_step<N>",
    )
    add_step(parser)
    option(
        "settings",
        nargs="*",
        metavar="key=value",
        help="settings that win over the run's, such as data.path=...",
    )
    option("--weights", choices=("trained", "ema"), help="left out: those that the run evaluated")
    option(
        "--trust",
        metavar="FOLDER",
        help="the run folder or checkpoint whose targets may be imported and called",
    )
    return parser.parse_intermixed_args(list(words))
