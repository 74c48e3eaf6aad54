"""`make_plan`: what will happen when this config runs on this cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.plan.cluster import Cluster
from framework.plan.layout import Layout, implied_data_parallel_size, largest_global_size, make_layout
from framework.plan.rules import apply_rules
from framework.plan.rules.devices import half_precision_without_zero
from framework.plan.rules.metrics_and_ema import length_for_ema
from framework.plan.rules.schedule import length_for_schedule, overruled


@dataclass(frozen=True)
class Length:
    """Length of the run, in optimizer steps.

    Attributes:
        steps_per_epoch: whole global batches in one pass over the training data; None when its size is not known yet.
        total_steps: optimizer steps of the run; None when it is given in epochs and the size of the data is not known.
        num_train_samples: size of the training data; None when not known yet.
        unused_samples_per_epoch: samples that do not fill a global batch; a new order brings others every epoch.
    """

    steps_per_epoch: int | None
    total_steps: int | None
    num_train_samples: int | None
    unused_samples_per_epoch: int


@dataclass(frozen=True)
class Plan:
    """The decisions of one run. `findings` are warnings and notes; errors never get this far."""

    config: RunConfig
    cluster: Cluster
    layout: Layout
    length: Length
    findings: tuple[Problem, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, as written to ``plan.json``."""
        return {
            "cluster": asdict(self.cluster) | {"world_size": self.cluster.world_size},
            "layout": asdict(self.layout),
            "length": asdict(self.length),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def default_cluster(config: RunConfig) -> Cluster:
    """The smallest cluster that the config alone allows: what it says it is meant for, or what its batch implies."""
    pipelines = implied_data_parallel_size(config.batch) or 1
    return Cluster(devices_per_host=config.run.world_size or pipelines * config.parallel.pipe)


def make_plan(
    config: RunConfig, cluster: Cluster, *, num_train_samples: int | None = None, source: Source | None = None
) -> Plan:
    """Decide everything that follows from a config and a cluster.

    Args:
        config: what was asked.
        cluster: where it will run.
        num_train_samples: real size of the training data; left out: as published, where that is known.
        source: where the config's values came from, so that problems name file and line.

    Raises:
        ConfigError: with every problem found.
    """
    source = source or Source()
    findings = [*apply_rules(config, cluster), *overruled(config, source)]
    layout = make_layout(config.batch, world_size=cluster.world_size, pipe_size=config.parallel.pipe)
    if isinstance(layout, Problem):
        raise _refusal([layout, *findings], source)
    if num_train_samples is None:
        num_train_samples = config.data.num_train_samples()
    length = _length(config, layout, num_train_samples)
    findings += [*_length_findings(config, layout, length), *half_precision_without_zero(config, cluster, layout)]
    if any(finding.severity == "error" for finding in findings):
        raise _refusal(findings, source)
    return Plan(config, cluster, layout, length, tuple(source.locate(finding) for finding in findings))


def _refusal(findings: list[Problem], source: Source) -> ConfigError:
    return ConfigError([source.locate(finding) for finding in findings if finding.severity == "error"])


def _length(config: RunConfig, layout: Layout, num_samples: int | None) -> Length:
    steps_per_epoch = None if num_samples is None else num_samples // layout.global_size
    total = config.training.max_steps
    if total is None and steps_per_epoch is not None:
        total = steps_per_epoch * (config.training.max_epochs or 1)
    unused = 0 if num_samples is None else num_samples % layout.global_size
    return Length(steps_per_epoch, total, num_samples, unused)


def _length_findings(config: RunConfig, layout: Layout, length: Length) -> list[Problem]:
    """Find contradictions to the length of the run."""
    found = []
    if length.num_train_samples is not None and not length.steps_per_epoch:
        largest = largest_global_size(
            config.batch, parallel=layout.data_parallel_size, at_most=length.num_train_samples
        )
        found.append(
            Problem(
                kind="dataset-smaller-than-batch",
                key="batch.global_size",
                value=layout.global_size,
                reason=f"the training data has only {length.num_train_samples} samples, not enough for one step",
                fix=f"set batch.global_size: {largest} or less"
                if largest
                else "use fewer devices or smaller micro-batches",
            )
        )
    total = length.total_steps
    return [*found, *length_for_schedule(config, total), *length_for_ema(config, total)]
