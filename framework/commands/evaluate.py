"""``evaluate CHECKPOINT [key=value ...]``: the metrics of a checkpoint, on its run's evaluation data or on other data.

The model is assembled as its run assembled it, in the same precision and ZeRO stage and with the same forward pass, so
that the same number of ranks measures what training has logged, to the bit. The optimizer is one without state, and
sizes of `parallel` that do not divide the ranks at hand become 1: weights are read out of any layout. Nothing is
written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.load import Source, load_with_source
from framework.config.run_config import RunConfig
from framework.engine.distributed import process_group, rank, refuse_different_ranks
from framework.engine.failures import ExplainedData, explaining_failures
from framework.engine.plain_engine import arithmetic_of
from framework.errors import EXIT_OK, ConfigError, printable
from framework.setup.assemble import assemble_engine, make_eval_loader
from framework.setup.prepared import prepare
from framework.setup.start_point import agreed_weights, measure_cut
from framework.setup.trained import config_in, find_source, refuse_untrusted
from framework.system.arguments import CommandParser
from framework.text.document import COMMAND_LINE

_NO_SINKS: Final = {"tensorboard": False, "csv": False, "report": False, "progress": "off"}


def main(words: Sequence[str]) -> int:
    """Run the command on this rank; returns the exit code.

    Raises:
        ConfigError, StorageError, TrainingError: it cannot be measured.
    """
    arguments = _parse(words)
    checkpoint = find_source(arguments.checkpoint, allow_unverified=False)
    config, source = config_to_evaluate(
        checkpoint, arguments.settings, num_ranks=int(os.environ.get("WORLD_SIZE", "1"))
    )
    for name in ("model", "data", "task"):
        if source.place((name, "target"))[0] != COMMAND_LINE:
            refuse_untrusted(getattr(config, name), checkpoint, arguments.trust, key=f"{name}.target")
    weights = arguments.weights or config_in(checkpoint).evaluation.weights
    metrics = evaluate(checkpoint, config, source, average=weights == "ema")
    if metrics is None:  # not rank 0
        return EXIT_OK
    found = {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "weights": weights, "metrics": metrics}
    text = json.dumps(found, indent=2)
    print(text if arguments.json else "\n".join(_table(found)))
    return EXIT_OK


def config_to_evaluate(
    checkpoint: SavedCheckpoint, settings: Sequence[str], *, num_ranks: int
) -> tuple[RunConfig, Source]:
    """The checkpoint's config for a measurement alone, on so many ranks; `settings` win over it.

    Raises:
        ConfigError: the manifest holds no config of this release, or parts that were handed over from Python, or a
            setting is wrong.
    """
    config_in(checkpoint)
    values = deepcopy(checkpoint.manifest["config"])
    layout, parallel = checkpoint.manifest.get("layout", {}), values.get("parallel", {})
    sizes = [name for name in ("pipe", "tensor", "sequence") if parallel.get(name, 1) > 1]
    if num_ranks % prod(parallel[name] for name in sizes):
        parallel |= dict.fromkeys(sizes, 1) | ({"stages": None} if "pipe" in sizes else {})
    is_cut = parallel.get("pipe", 1) > 1
    values["batch"] = {
        "micro_size": layout.get("micro_size") or values.get("batch", {}).get("micro_size"),
        "accumulation_steps": layout.get("accumulation_steps") if is_cut else 1,
    }
    values["run"] |= {"output_dir": tempfile.gettempdir(), "world_size": None}
    values["zero"] = values.get("zero", {}) | {"offload_optimizer": {"device": "none"}}
    values["training"] = values.get("training", {}) | {"ema": None}
    values["evaluation"] = values.get("evaluation", {}) | {"weights": "trained"}
    values |= {"optimizer": {"kind": "sgd"}, "scheduler": {"kind": "constant"}, "callbacks": [], "monitors": _NO_SINKS}
    values["checkpoint"] = {"init_weights": str(checkpoint.path)}
    values.pop("profile", None)
    return load_with_source(checkpoint.path, settings, text=json.dumps(values))


def evaluate(
    checkpoint: SavedCheckpoint, config: RunConfig, source: Source, *, average: bool
) -> Mapping[str, float] | None:
    """Measure the weights of a checkpoint, or their moving average; None on other ranks than 0. Collective.

    Raises:
        ConfigError: the config cannot work here, or there is nothing to measure; StorageError: damaged weights.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    prepared = prepare(config, source=source)
    with ExitStack() as stack:
        stack.enter_context(explaining_failures(Path(tempfile.gettempdir()), prepared.plan))
        stack.enter_context(process_group(config.run.backend))
        refuse_different_ranks(prepared.fingerprint())
        prepared = agreed_weights(measure_cut(prepared, checkpoint), None, average=average)
        plan, splits = prepared.plan, prepared.parts.splits
        if (loader := make_eval_loader(plan, splits, rank=rank())) is None:
            fix = "name data that has an evaluation set, for example data.path=... or data='{...}'"
            raise ConfigError.of("evaluation-without-data", "the data has no evaluation set", fix, "data")
        stack.enter_context(arithmetic_of(plan))
        engine = assemble_engine(prepared)
        metrics = engine.evaluate(ExplainedData(loader))
        is_main = rank() == 0
        engine.close()
    return metrics if is_main else None


def _table(found: Mapping[str, Any]) -> list[str]:
    """Lines for the screen; the digits are those that `metrics.jsonl` has."""
    width = max(map(len, found["metrics"]), default=0)
    head = f"{found['checkpoint']}, {found['weights']} weights"
    return [printable(head), *(f"  {name:<{width}}  {value!r}" for name, value in sorted(found["metrics"].items()))]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m framework evaluate", allow_abbrev=False, description="Measure a checkpoint on evaluation data."
    )
    option = parser.add_argument
    option("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or .../global_step<N>")
    option("settings", nargs="*", metavar="key=value", help="settings that win over the run's, such as data.path=...")
    which = "as trained, or their moving average; left out: what the run evaluated"
    option("--weights", choices=("trained", "ema"), help=which)
    option("--json", action="store_true", help="print it as JSON")
    trust = "the run folder or checkpoint whose model, data and task targets may be imported and called"
    option("--trust", metavar="FOLDER", help=trust)
    about = "on so many devices of this machine; left out: on one. Under torchrun or srun: train.py evaluate ..."
    parser.option("--num_gpus", metavar="N", help=about)
    return parser.parse_intermixed_args(list(words))
