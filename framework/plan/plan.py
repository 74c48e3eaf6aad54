"""`make_plan`: what will happen when this config runs on this cluster; and a plan in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, gcd, prod
from typing import Any, Final

from framework.config.load import Source
from framework.config.model import LanguageModel
from framework.config.run_config import AUTO, RunConfig
from framework.config.training import (
    FAST_ROWS,
    HALF_ROWS,
    CausalLM,
    LoRA,
    MaskedLM,
    positions_of_tile,
    slow_rows,
)
from framework.errors import ConfigError, Problem, counted
from framework.plan import rules
from framework.plan.cluster import Cluster, Device
from framework.plan.layout import (
    Layout,
    implied_data_parallel_size,
    largest_global_size,
    make_layout,
)
from framework.plan.rules.devices import half_precision_without_zero
from framework.plan.rules.schedule import length_for_schedule, overruled

_WITHOUT_LENGTH: Final = Problem(
    "stream-without-length",
    "the training data is a stream, which has no length",
    "set it; or data.train_samples, the samples of an epoch",
    "training.max_steps",
)


@dataclass(frozen=True)
class Length:
    """Length of the run, in optimizer steps.

    Attributes:
        steps_per_epoch: complete global batches in one pass over the training data; None when its
            size is not known yet.
        total_steps: optimizer steps of the run; None when it is given in epochs and the size of the
            data is not known.
        num_train_samples: size of the training data; None when not known yet.
        unused_samples_per_epoch: samples that do not fill a global batch; a new order brings others
            every epoch.
    """

    steps_per_epoch: int | None
    total_steps: int | None
    num_train_samples: int | None
    unused_samples_per_epoch: int

    @property
    def epoch(self) -> int:
        """Steps of an epoch once the data is known; of a stream without a length the run is one."""
        return self.steps_per_epoch or self.total_steps or 1

    def __str__(self) -> str:
        if self.total_steps is None:
            return "known when the data is read"
        steps = counted(self.total_steps, "step")
        # `own_loop.py` puts 2**40 samples for the data of a loop of the user's own
        if self.steps_per_epoch is None or self.total_steps < self.steps_per_epoch / 1e6:
            return steps
        epochs = _epochs_text(self.total_steps / self.steps_per_epoch)
        text = f"{steps} = {epochs} of {self.steps_per_epoch}"
        if self.unused_samples_per_epoch:
            text += f", {counted(self.unused_samples_per_epoch, 'sample')} dropped per epoch"
        return text


def _epochs_text(epochs: float) -> str:
    if epochs < 0.01:
        return "less than 0.01 epochs"
    if epochs.is_integer():
        return counted(int(epochs), "epoch")
    return f"{epochs:.2f} epochs"


@dataclass(frozen=True)
class Plan:
    """The decisions of one run. `findings` are warnings and notes; errors never get this far.

    `texts_per_row` counts where rows are packed: this number of texts of equal length in each row
    would have attention compute as much as the texts of the data do. Until the data is read it is
    1, the most work and memory that rows of a length can take.
    """

    config: RunConfig
    cluster: Cluster
    layout: Layout
    length: Length
    findings: tuple[Problem, ...]
    texts_per_row: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as written to ``plan.json``."""
        values: dict[str, Any] = {}
        chosen = self._chosen()
        if chosen:
            values["auto"] = chosen
        values["cluster"] = asdict(self.cluster) | {"world_size": self.cluster.world_size}
        values["layout"] = asdict(self.layout)
        tile = loss_tile(self.config, self.layout.micro_size)
        if tile:
            values["loss_tile"] = tile
        values["length"] = asdict(self.length)
        values["findings"] = [finding.to_dict() for finding in self.findings]
        return values

    def _chosen(self) -> dict[str, Any]:
        """Return key -> value of what was `auto`."""
        chosen = {}
        for key in sorted(self.config.was_auto):
            section, name = key.split(".")
            chosen[key] = getattr(getattr(self.config, section), name)
        return chosen

    def num_newest_kept(self) -> int | None:
        """Return the most checkpoints that `checkpoint.keep_last` keeps; None where that depends on
        the time a step takes, or on data that is not read.
        """
        kept = self.config.checkpoint.keep_last
        if kept == "all":
            return self._num_saves()
        return kept

    def _num_saves(self) -> int | None:
        checkpoint = self.config.checkpoint
        total_steps = self.length.total_steps
        if total_steps is None or checkpoint.every_minutes is not None:
            return None
        every_steps = checkpoint.every_steps
        if every_steps is None and checkpoint.every_epochs is not None:
            every_steps = checkpoint.every_epochs * self.length.epoch
        saves = 0
        is_last_saved = False
        if every_steps is not None:
            saves, rest = divmod(total_steps, every_steps)
            is_last_saved = rest == 0
        if checkpoint.at_end and not is_last_saved:
            saves += 1
        return saves

    def on_device(self, device: Device, source: Source) -> Plan:
        """Return the plan for a kind of device that has become known: layout and length are the
        same on every kind, and only what the rules find may differ.

        Raises:
            ConfigError: the run cannot work on it.
        """
        cluster = replace(self.cluster, device=device)
        findings = _findings_of_rules(self.config, cluster, source)
        findings += _findings_of_layout(self.config, cluster, self.layout, self.length)
        return replace(self, cluster=cluster, findings=accepted(findings, source))

    def with_data(self, num_train_samples: int | None, source: Source) -> Plan:
        """Return the plan with the real size of the training data.

        Args:
            num_train_samples: size of the data; None: of a stream.
            source: where the config's values came from.

        Raises:
            ConfigError: the data is too small for a step, or a stream has no length.
        """
        size = num_train_samples
        if size is None:
            size = self.config.data.num_train_samples()
        length = _length(self.config, self.layout, size)
        if length.total_steps is None:
            raise ConfigError(source.locate(_WITHOUT_LENGTH))
        if size is None:
            _refuse_epochs(self.config, source)
        old_findings = _length_findings(self.config, self.layout, self.length)
        before = [source.locate(finding) for finding in old_findings]
        findings = [finding for finding in self.findings if finding not in before]
        findings += _length_findings(self.config, self.layout, length)
        return replace(self, length=length, findings=accepted(findings, source))


def _refuse_epochs(config: RunConfig, source: Source) -> None:
    """Raise ConfigError for what is set by epochs of a stream: an epoch is the entire run."""
    fix = "set every_steps or every_minutes; or data.train_samples, the samples of an epoch"
    problems = []
    for section, every in (
        ("evaluation", config.evaluation.every_epochs),
        ("checkpoint", config.checkpoint.every_epochs),
    ):
        if every:
            key = f"{section}.every_epochs"
            problems.append(replace(_WITHOUT_LENGTH, fix=fix, key=key, value=every))
    if problems:
        raise ConfigError([source.locate(problem) for problem in problems])


def default_cluster(config: RunConfig) -> Cluster:
    """Return the smallest cluster that the config alone allows: the one it names, or the one that
    its batch implies.
    """
    world_size = config.run.world_size
    if not world_size:
        parallel = implied_data_parallel_size(config.batch) or config.parallel.expert
        world_size = parallel * prod(config.parallel.sizes().values())
    return Cluster(devices_per_host=world_size)


def make_plan(
    config: RunConfig,
    cluster: Cluster,
    *,
    num_train_samples: int | None = None,
    source: Source | None = None,
    further: Sequence[Problem] = (),
) -> Plan:
    """Decide everything that follows from a config and a cluster.

    Args:
        config: of the run.
        cluster: where it will run.
        num_train_samples: real size of the training data; left out: as published, if that is known.
        source: where the config's values came from, so that problems name file and line.
        further: problems to be reported with the plan's findings.

    Raises:
        ConfigError: with every problem found.
    """
    source = source or Source()
    _refuse_auto(config, source)
    findings = _findings_of_rules(config, cluster, source)
    layout = make_layout(config.batch, world_size=cluster.world_size, **config.parallel.sizes())
    if isinstance(layout, Problem):
        raise ConfigError(errors_in([layout, *findings, *further], source))
    if num_train_samples is None:
        num_train_samples = config.data.num_train_samples()
    layout = replace(layout, expert_size=config.parallel.expert)
    length = _length(config, layout, num_train_samples)
    findings += _findings_of_layout(config, cluster, layout, length)
    findings += further
    return Plan(config, cluster, layout, length, accepted(findings, source))


def _refuse_auto(config: RunConfig, source: Source) -> None:
    """Raise ConfigError for keys that are still `auto`."""
    if not config.auto:
        return
    reason = "it has not been chosen"
    fix = "write a number, or let `check`, `plan`, `launch` or `fit` choose it"
    keys = sorted(config.auto)
    problems = [Problem("auto-not-chosen", reason, fix, key, AUTO) for key in keys]
    raise ConfigError(map(source.locate, problems))


def _findings_of_rules(config: RunConfig, cluster: Cluster, source: Source) -> list[Problem]:
    findings = list(rules.apply_rules(config, cluster))
    findings += overruled(config, source)
    return findings


def _findings_of_layout(
    config: RunConfig, cluster: Cluster, layout: Layout, length: Length
) -> list[Problem]:
    findings = list(_length_findings(config, layout, length))
    findings += half_precision_without_zero(config, layout)
    if layout.pipe_size > 1:
        from framework.plan.rules.parallel import idle_stages

        findings += idle_stages(config, layout)
    findings += _slow_vocabulary(config, cluster, layout)
    return findings


def errors_in(findings: Iterable[Problem], source: Source) -> list[Problem]:
    """Return the errors of some findings, with their places in the config."""
    return [source.locate(finding) for finding in findings if finding.severity == "error"]


def accepted(findings: Iterable[Problem], source: Source) -> tuple[Problem, ...]:
    """Return the findings with their places in the config; raises ConfigError for errors."""
    errors = errors_in(findings, source)
    if errors:
        raise ConfigError(errors)
    return tuple(source.locate(finding) for finding in findings)


def _length(config: RunConfig, layout: Layout, num_samples: int | None) -> Length:
    """Return the length of a run on `num_samples` training samples; None: not known."""
    steps_per_epoch = None
    unused = 0
    if num_samples is not None:
        steps_per_epoch, unused = divmod(num_samples, layout.global_size)
    total = config.training.max_steps
    if total is None and steps_per_epoch is not None:
        max_epochs = config.training.max_epochs or 1
        total = steps_per_epoch * max_epochs
    return Length(steps_per_epoch, total, num_samples, unused)


def _length_findings(config: RunConfig, layout: Layout, length: Length) -> Iterator[Problem]:
    """Find data, schedules and weights that contradict the length of the run."""
    if length.num_train_samples is not None and not length.steps_per_epoch:
        yield _too_few_samples(config, layout, length.num_train_samples)
    if length.total_steps is None and getattr(config.data, "streaming", False):
        yield _WITHOUT_LENGTH
    yield from length_for_schedule(config, length.total_steps)
    yield from _length_for_weights(config, length.total_steps)


def _length_for_weights(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """Find an average, or frozen weights, that the length of the run contradicts."""
    if config.training.ema is not None:
        from framework.plan.rules.metrics_and_ema import length_for_ema

        yield from length_for_ema(config, total_steps)
    if config.training.freeze:
        from framework.config.freezing import length_for_freeze

        yield from length_for_freeze(config.training.freeze, total_steps)


def _too_few_samples(config: RunConfig, layout: Layout, samples: int) -> Problem:
    """Return the problem of data that does not fill a global batch."""
    key = "batch.global_size"
    largest = largest_global_size(config.batch, parallel=layout.data_parallel_size, at_most=samples)
    reason = f"the training data has only {samples} samples, not enough for one step"
    if largest:
        fix = f"set {key}: {largest} or less"
    else:
        fix = "use fewer devices or smaller micro-batches"
    return Problem("dataset-smaller-than-batch", reason, fix, key, layout.global_size)


def loss_tile(config: RunConfig, micro_size: int) -> int:
    """Return the positions that have logits at once, as `training.loss_tile` sets it for a
    micro-batch of `micro_size` samples; 0: all, and if the model or the task is the user's own.
    """
    model = config.model
    lora = config.training.lora
    parallel = config.parallel
    is_named_task = isinstance(config.task, CausalLM | MaskedLM)
    if not isinstance(model, LanguageModel) or not is_named_task or parallel.pipe > 1:
        return 0
    if lora and _has_adapted_head(model, lora):
        return 0
    length = getattr(config.data, "sequence_length", None) or model.max_positions
    positions = micro_size * ceil(length / parallel.sequence)
    tokens = ceil(model.vocab_size / parallel.tensor)
    is_half = config.precision.dtype != "fp32"
    return positions_of_tile(config.training.loss_tile, positions, tokens, is_half=is_half)


def _has_adapted_head(model: LanguageModel, lora: LoRA) -> bool:
    """Check whether the output layer is a module of its own that adapters adapt."""
    if getattr(model, "tie_embeddings", True):
        return False
    from framework.config.groups import is_adapted

    return is_adapted("head", lora)


def _slow_vocabulary(config: RunConfig, cluster: Cluster, layout: Layout) -> Iterator[Problem]:
    """Find an output layer that GPUs compute slowly in half precision: a product with the matrix
    of the embedding is filled up, and so are tiles, but no other layer is.
    """
    model = config.model
    is_half = config.precision.dtype != "fp32"
    if cluster.device != "cuda" or not is_half or not isinstance(model, LanguageModel):
        return
    is_tied = getattr(model, "tie_embeddings", True)
    if is_tied or not isinstance(config.task, CausalLM | MaskedLM):
        return
    tokens = ceil(model.vocab_size / layout.tensor_size)
    if not tokens % FAST_ROWS or loss_tile(config, layout.micro_size):
        return
    reason = f"{slow_rows(tokens)}; no text has the tokens that fill it up"
    yield Problem(
        "slow-vocabulary",
        reason,
        f"set it to {_fast_size(model.vocab_size, layout.tensor_size)}",
        "model.vocab_size",
        model.vocab_size,
        severity="note",
    )


def _fast_size(vocab_size: int, tensor_size: int) -> str:
    """Describe sizes of a vocabulary that GPUs compute fast."""
    filled = vocab_size + -vocab_size % HALF_ROWS
    if tensor_size == 1 and filled:
        return f"{filled}"
    return f"a multiple of {HALF_ROWS * tensor_size}"


def describe_packed_rows(plan: Plan) -> str:
    """Describe how packed rows count in work and memory; return empty text for other rows."""
    if not getattr(plan.config.data, "packing", False):
        return ""
    texts = "1 text each, the most work and memory"
    if plan.texts_per_row > 1:
        texts = f"{plan.texts_per_row:.1f} texts of equal length each"
    return f"packed, planned as {texts}"


def ring_size(plan: Plan) -> int:
    """Return around how many teams keys and values go, where the ranks that share sequences are
    more than the heads of attention; 1 where they are not, and where the heads are not known.
    """
    size = plan.layout.sequence_size
    num_heads = getattr(plan.config.model, "num_heads", None)
    if not num_heads:
        return 1
    return size // gcd(num_heads // plan.layout.tensor_size, size)
