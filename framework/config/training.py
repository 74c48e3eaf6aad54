"""Sections without an own file: `batch`, `parallel`, `task`, `training`, `evaluation`,
`checkpoint`, `monitors`.

`training`, `evaluation`, `checkpoint`, `monitors`: what happens when.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from framework.config.base import (
    WORDS_OF_PATTERNS,
    Count,
    CountFromTwo,
    Kind,
    NonNegative,
    Object,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    StepRange,
    Target,
)
from framework.config.paths import OptionalPath, PathText


class EMA(Section):
    """An exponential moving average of the weights, kept beside them: ema = decay x ema + (1 -
    decay) x weights.
    """

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Share of the old average that stays at an update. The average reaches back over about 1 / (1
    - decay) updates.
    """
    every_steps: PositiveCount = 1
    """Steps between two updates."""
    start_step: Count = 0
    """The average begins as the weights after this step; 0: the first weights."""


Quantization = Literal["nf4", "int8"]


class LoRA(Section):
    """Low-rank adapters (Hu et al. 2021), which are trained in place of the weights: to a module's
    W x they add lora_alpha / r x B A x, with A (r, inputs) drawn and B (outputs, r) zero at first.
    The keys are those of peft's LoraConfig, and mean the same.
    """

    target_modules: list[str] | str
    """The modules that get adapters: linear layers, convolutions, embeddings. A list: whole names,
    or their ends after a dot, as ``[query, value]``. Text: a regular expression for whole
    names, or ``all-linear``.
    """
    r: PositiveCount = 8
    """Rank: rows of every A, columns of every B."""
    lora_alpha: PositiveCount = 8
    """What an adapter adds is multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(r) instead, so that large ranks learn as fast (Kalajdzievski
    2023).
    """
    use_dora: bool = False
    """Train the length of each row of W + lora_alpha / r x B A beside its direction (Liu et al.
    2024): DoRA.
    """
    modules_to_save: list[str] = []
    """Modules that are trained whole beside the adapters, such as a new head: what their names end
    with, wherever it begins.
    """
    init_adapter: OptionalPath = None
    """A folder of adapters from which training starts, as ``export --adapter`` and peft write them,
    of the same base. Left out: they are drawn under `run.seed`.
    """

    quantization: Quantization | None = None
    """Keep the weights under adapters of linear layers in few bits: ``nf4``, 4 bits and a scale for
    each 64 numbers (Dettmers et al. 2023: QLoRA); ``int8``, 8 bits and a scale for each row.
    """

    def of_peft(self) -> dict[str, Any]:
        """Return the arguments of peft's LoraConfig, but for `modules_to_save`, which are trained
        in their own place here.
        """
        return self.model_dump(exclude={"modules_to_save", "init_adapter", "quantization"})


class Compile(Section):
    """torch.compile of the model; the keys but `per` and `passes` are torch's, and mean the
    same.
    """

    backend: str = "inductor"
    """``inductor`` makes kernels; ``eager`` and ``aot_eager`` make none, to look for an error;
    ``deepcompile`` is DeepSpeed's: inductor, with the sums of gradients inside of the graph (ZeRO 1
    and 2, CUDA).
    """
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] = []
    """Passes of ``deepcompile``, as DeepSpeed names them; left out: that of the ZeRO stage."""
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = None
    """How much inductor tries; left out: default."""
    dynamic: bool | None = None
    """Whether one graph serves all shapes; left out: from the second shape on."""
    fullgraph: bool = False
    """End at what no graph can hold instead of running it as it is between two graphs."""
    per: Literal["model", "block"] = "model"
    """``model``: one graph; ``block``: each repeated block, compiled once for all that are alike,
    and ready to send its gradients while the backward pass goes on. With `recompute_every`: each
    layer.
    """


# Number of logits that may exist at once without tiles (1 GiB in fp32), and number of a tile. In
# half precision a tile may have as many: large products are faster on GPUs (32,768 positions of
# 50,257 tokens on an H200: 25.7 ms in tiles of 8,192 positions, and 31.7 in tiles of 1,280), and it
# takes no more than whole logits do: 0.5 GiB, and 1 GiB in fp32 where it is not compiled.
_WHOLE_LOGITS: Final = 2**28
_LOGITS_OF_A_TILE: Final = 2**26
_HALF_LOGITS_OF_A_TILE: Final = 2**28
# GPUs multiply matrices of half precision an eighth as fast where a row is no multiple of 8
# numbers (1,344 x 768 by 768 x 50,257 on an H200: 1.23 ms, and 0.15 for 50,304).
FAST_ROWS: Final = 8
# Rows of tiles in half precision are filled up to a multiple of 64.
HALF_ROWS: Final = 64
# Products of fewer positions, as in generation, read the weight, and do little else.
_FILLED_POSITIONS: Final = 256
_POSITIONS_ROUNDED: Final = 64
LossTile = Literal["auto"] | Count


def positions_of_tile(tile: LossTile, positions: int, tokens: int, *, is_half: bool) -> int:
    """Return the number of positions in a tile of the loss, at most `positions`.

    Args:
        tile: `training.loss_tile`.
        positions: number of all positions.
        tokens: number of logits of a position, one for each token of the vocabulary.
        is_half: whether the logits are in half precision.

    Returns:
        0: no tiles, all logits come from the output layer's own product.
    """
    if tile == "auto":
        has_slow_rows = is_half and tokens % FAST_ROWS != 0
        if positions * tokens <= _WHOLE_LOGITS and not has_slow_rows:
            return 0
        of_a_tile = _HALF_LOGITS_OF_A_TILE if is_half else _LOGITS_OF_A_TILE
        largest = max(of_a_tile // tokens, 1)
        rounded = largest - largest % _POSITIONS_ROUNDED
        tile = rounded or largest
    return min(tile, positions)


def fills_rows(tokens: int, positions: int) -> bool:
    """Check whether rows of `tokens` logits in half precision are filled up on a GPU, to a multiple
    of `HALF_ROWS`, for a product of `positions` rows.
    """
    return tokens % FAST_ROWS != 0 and positions >= _FILLED_POSITIONS


def slow_rows(tokens: int) -> str:
    """Describe the cost of `tokens` logits per position for an output layer in half precision."""
    return (
        f"rows of {tokens:,} numbers, no multiple of {FAST_ROWS}, take GPUs up to eight times "
        "as long in half precision"
    )


def switch(value: Any) -> Any:
    """Let true stand for a section of defaults, and false for none."""
    if not isinstance(value, (bool, Mapping, Section, type(None))):
        raise PydanticKnownError("bool_type")
    if value is True:
        return {}
    if value is False:
        return None
    return value


_WORDS_OF_TRUTH: Final = frozenset(
    {"", "yes", "no", "on", "off", "y", "n", "true", "false", "1", "0"}
)


def named(key: str) -> Callable[[Any], Any]:
    """Return a switch that also takes a name, as the value of this key of the section; words that
    mean true or false elsewhere are no names.
    """

    def take(value: Any) -> Any:
        if isinstance(value, str) and value.lower() not in _WORDS_OF_TRUTH:
            return {key: value}
        return switch(value)

    return take


def _compile_switch(value: Any) -> Any:
    """Take ``auto`` as it is, and the rest as a switch."""
    if value == "auto":
        return value
    return switch(value)


_Compile = Annotated[
    Literal["auto"] | Compile | None,
    BeforeValidator(
        _compile_switch, json_schema_input_type=Literal["auto"] | bool | Compile | None
    ),
]


Policy = Literal["stop", "skip", "roll_back"]


class BadSteps(Section):
    """Policy for a bad step: one whose loss or gradient norm is not finite, or a spike. Alone,
    `policy` may be written without a section.
    """

    policy: Policy = "stop"
    """``stop``: the run ends at the next logged step, and names the first bad one. ``skip``:
    weights and optimizer stay as they are, data and schedule go on. ``roll_back``: the run goes
    back to a checkpoint and leaves out the data of the steps up to the bad one.
    """
    spike_sigmas: NonNegative = 6.0
    """A spike is above the mean of the last good steps by more than so many of their standard
    deviations; 0: nothing is. Values that fall are none.
    """
    window_steps: PositiveCount = 128
    """Last steps that make mean and deviation, the good ones of them. Before half as many, and 20,
    there is no spike.
    """
    roll_back_steps: PositiveCount = 100
    """Steps whose data is left out, the bad one the last of them. The run goes back to the newest
    sound checkpoint before all of them, or else to its oldest.
    """
    max_roll_backs: PositiveCount = 3
    """After so many the next bad step ends the run."""
    rerun: bool = False
    """Compute a bad step once more from the same weights, batches and random states, before
    anything is changed. Where it is as bad again, it is ``persistent``, and the policy holds;
    otherwise ``transient``: hardware is suspected, and the second result is taken. Every step waits
    for the device. Not in pipelines.
    """


def _as_policy(value: Any) -> Any:
    if isinstance(value, str):
        return {"policy": value}
    return value


_BadSteps = Annotated[
    BadSteps | None, BeforeValidator(_as_policy, json_schema_input_type=Policy | BadSteps | None)
]


class FrozenSteps(Section):
    """Weights that are frozen in some steps of the run: up to one (gradual unfreezing), or from one
    on. They are in the optimizer all the time, and a step in which they are frozen leaves them and
    their moments as they are.
    """

    match: str | Annotated[list[str], Field(min_length=1)]
    """Regular expression, or several; the weights whose whole name matches one."""
    until_step: PositiveCount | None = None
    """Last step in which they are frozen; the next one is their first."""
    from_step: CountFromTwo | None = None
    """First step in which they are frozen; the one before is their last."""


def _freeze_entry(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept text as it is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (Mapping, Section)):
        raise PydanticKnownError("string_type")
    return validate(value)


def _plain_entry(value: str | FrozenSteps) -> str | dict[str, Any]:
    if isinstance(value, str):
        return value
    return value.model_dump(exclude_none=True)


if TYPE_CHECKING:
    FreezeEntry = str | FrozenSteps
else:
    FreezeEntry = Annotated[
        FrozenSteps,
        WrapValidator(_freeze_entry, json_schema_input_type=str | FrozenSteps),
        PlainSerializer(_plain_entry),
    ]


def always_frozen(entries: Iterable[FreezeEntry]) -> list[str]:
    """List the patterns of weights that are never trained."""
    return [entry for entry in entries if isinstance(entry, str)]


class Training(Section):
    """Length of the training, and options of its steps."""

    max_epochs: PositiveCount | None = None
    """Passes over the training data; left out together with max_steps: 1."""
    max_steps: PositiveCount | None = None
    """Optimizer steps; wins over max_epochs."""
    max_minutes: Positive | None = None
    """Wall time of one start, from when its process began. Then it saves and ends with exit code
    75, as on a request to stop: whatever starts it again goes on. At least one step is taken. Left
    out: no limit.
    """
    log_every: PositiveCount = 10
    """Steps between two logged points. Between them nothing waits for the device."""
    clip_grad_norm: NonNegative = 1.0
    """Largest global L2 norm of the gradients; 0 turns clipping off."""
    recompute_every: Count = 0
    """Groups of this many layers keep only their input for the backward pass and run again in it:
    less memory for about a third more computation. 0 keeps everything. 1 also turns on what
    transformers' models bring along (`gradient_checkpointing_enable`).
    """
    recompute: Literal["selective", "full"] | None = None
    """What of a group runs again. ``full``: all of it. ``selective``: all but matrix products,
    convolutions and fused attention: their outputs are kept beside the group's input: more memory,
    hardly more computation. Left out: full. Written without `recompute_every`: groups of one layer.
    """
    offload_activations: bool = False
    """Hold what autograd saves in host memory until the backward pass needs it: with
    `recompute_every` the inputs of groups. Copies run beside the computation. Products that
    ``recompute: selective`` keeps stay on the device. Not in pipelines.
    """
    loss_tile: LossTile = "auto"
    """Positions of a micro-batch whose logits are there at once: the output layer, the
    cross-entropy and both their gradients are computed tile by tile. 0: all. auto: all up to 2^28
    logits on a device (1 GiB in fp32), else as many as have 2^26, or 2^28 in half precision. With
    gpt, bert and the tasks causal_lm and masked_lm; written down also with models that have
    transformers' ``get_output_embeddings``, and subclasses of these tasks. Not in pipelines.
    """
    mlp_tile: Count = 0
    """Positions of a micro-batch whose inner values of a block's perceptron are there at once: it
    runs tile by tile, and again in the backward pass. 0: all. With gpt, and with transformers'
    models that have perceptrons like Llama's.
    """
    sync_batch_norm: bool = False
    """Batch norms take mean and variance over the batches of all data-parallel devices instead of
    over their own.
    """
    deterministic: bool = False
    """Use only operations that give the same bits in every run, slower ones where need be, and end
    at one that has no such form: runs and resumed runs are then equal to the bit on GPUs too. Other
    devices, versions or numbers of ranks round otherwise all the same.
    """
    detect_anomaly: bool = False
    """End at the first gradient that is NaN and name the operation of the forward pass that it
    belongs to: to look for an error, at several times the cost of a step.
    """
    bad_steps: _BadSteps = None
    """What becomes of steps whose numbers go wrong: ``stop``, ``skip``, ``roll_back``, or how. Left
    out: the run ends at a logged step whose loss is not finite, and nothing else is looked at.
    """
    compile: _Compile = "auto"
    """torch.compile of the model: auto, true, false, or how. The first micro-batch is computed as
    written and compiled, and both must agree to rounding; where they do not, ``true`` and a section
    end the run, and ``auto`` goes on as written, with a line that has the reason. auto compiles
    repeated blocks on CUDA devices, and nothing on processors.
    """
    attention: Literal["auto", "flash", "fa3", "efficient", "cudnn", "math"] = "auto"
    """The kernel that computes attention wherever it can, of torch's
    ``scaled_dot_product_attention``: in our models and those of transformers. fa3: FlashAttention
    3, if it is installed. auto: on GPUs in half precision the fastest of a short measurement, else
    torch's choice. A kernel that is named and cannot compute the model's attention ends the run.
    """
    channels_last: bool = False
    """Store images with the channels last; convolutions follow, and tensor cores read that order
    faster.
    """
    freeze: list[FreezeEntry] = []
    """Regular expressions; parameters whose whole name matches one are not trained, for example
    ``embed\\..*``. An entry may be ``{match: ..., until_step: N}`` instead, or with ``from_step:
    N``: then they are frozen in the first N steps only, or from step N on. A frozen batch norm's
    running statistics follow the batches all the same, unless the model's `train()` keeps it in
    evaluation mode.
    """
    lora: LoRA | None = None
    """Train adapters and freeze everything else, which then is in no checkpoint:
    `checkpoint.init_weights` or `run.seed` gives it again. Left out: all weights are trained.
    """
    ema: EMA | None = None
    """Keep a moving average of the weights, in fp32, spread over the ranks as the optimizer's state
    is; left out: none.
    """

    @model_validator(mode="before")
    @classmethod
    def _group_what_is_recomputed(cls, values: Any) -> Any:
        """Let `recompute` alone mean groups of one layer."""
        if not isinstance(values, Mapping) or not values.get("recompute"):
            return values
        return {"recompute_every": 1, **values}

    @property
    def first_adapter(self) -> str | None:
        """Folder of adapters that training starts from; None: it has none."""
        return None if self.lora is None else self.lora.init_adapter

    @property
    def keeps_products(self) -> bool:
        """Whether recomputed layers keep the outputs of their products."""
        return self.recompute == "selective"


class _Often(Section):
    """A rhythm in epochs, steps or minutes."""

    @property
    def is_often(self) -> bool:
        """Check whether it happens before the end of the run."""
        return any(getattr(self, name) for name in ("every_epochs", "every_steps", "every_minutes"))


_METRIC_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
WORDS_OF_PATTERNS[_METRIC_NAME] = (
    "not the name of a metric",
    lambda text: "use letters, digits, _, - and .",
)
MetricName = Annotated[str, StringConstraints(pattern=_METRIC_NAME)]


class Evaluation(_Often):
    """When the evaluation data is measured."""

    every_epochs: PositiveCount | None = None
    """Epochs between two evaluations."""
    every_steps: PositiveCount | None = None
    """Steps between two evaluations."""
    every_minutes: Positive | None = None
    """Minutes from an evaluation to the next, which follows the step that ends then; beside steps
    or epochs.
    """
    start_step: Count = 0
    """No evaluation before this step, but for those at start and end."""
    at_start: bool = False
    """Evaluate before the first step of the run."""
    at_end: bool = True
    """Evaluate after the last step."""
    batch_size: PositiveCount | None = None
    """Samples per forward pass on one device; left out: the micro-batch size."""
    max_samples: PositiveCount | None = None
    """Measure the first so many evaluation samples, the same whatever the layout; left out: all of
    them.
    """
    weights: Literal["trained", "ema"] = "trained"
    """What is measured: the weights as trained, or their moving average (needs `training.ema`)."""
    metrics: dict[MetricName, Target] = Field(default_factory=dict)
    """Metrics of torchmetrics over all samples, by name: ``{auroc: {target: torchmetrics:AUROC,
    args: {task: multiclass, num_classes: 10}}}`` (docs/custom-metrics.md).
    """


# Numbers of an optimizer that its moments do not depend on, and sections that leave no state.
CHANGEABLE: Final = (
    r"^(optimizer\.(lr|adam_lr|weight_decay|betas|eps|momentum"
    r"|args\.(lr|weight_decay|betas|eps|momentum))"
    r"|scheduler(\..+)?|data(\..+)?|task(\..+)?|training\.(clip_grad_norm|max_steps|max_epochs))$"
)
WORDS_OF_PATTERNS[CHANGEABLE] = (
    "not a key that a resumed run can change",
    lambda text: (
        "name optimizer.lr, another number of the optimizer, scheduler, training.clip_grad_norm, "
        "data or task; for others start from the weights, checkpoint.init_weights"
    ),
)
ChangeableKey = Annotated[str, StringConstraints(pattern=CHANGEABLE)]


class Checkpoint(_Often):
    """When the state of the run is saved, how much is kept, and where it starts from."""

    every_steps: PositiveCount | None = None
    """Steps between two checkpoints."""
    every_epochs: PositiveCount | None = None
    """Epochs between two checkpoints."""
    every_minutes: Positive | None = None
    """Minutes from a checkpoint to the next, which follows the step that ends then; beside steps or
    epochs.
    """
    at_end: bool = True
    """Save after the last step."""
    mode: Literal["sync", "async"] = "sync"
    """``sync``: training waits until a checkpoint is on disk; ``async``: until the state is copied
    into host memory, from which a process beside each rank writes it. async needs that memory: as
    much as a rank writes.
    """
    keep_last: Literal["all"] | PositiveCount = 3
    """Newest checkpoints that are kept; older ones of this run are deleted after a save. ``all``:
    none is deleted.
    """
    keep_every: PositiveCount | None = None
    """Checkpoints whose step is a multiple of this are kept as well."""
    keep_best: str | None = None
    """The checkpoint with the best value of this metric, such as ``eval/accuracy``, is kept as
    well. Until one was saved where the metric was measured, all are kept.
    """
    best_is: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of `keep_best` is the best."""
    init_weights: OptionalPath = None
    """Weights that a fresh start begins with: a checkpoint of any layout, a run folder, an export,
    a folder of Hugging Face's transformers for ``gpt`` and ``bert``, or a ``.pt`` file of a state
    dict. Left out: drawn from `run.seed`. Of a checkpoint the trained weights are taken; `export
    --weights ema` writes the average.
    """
    resume: PathText = "never"
    """``never``: start afresh; ``auto``: from the newest checkpoint in the run folder, afresh if
    there is none; otherwise the path of a checkpoint (``.../global_step<N>``) or of a run folder,
    which must exist.
    """
    allow_changed: list[ChangeableKey] = []
    """Keys that a resumed run may set otherwise than its checkpoint, and go on with all moments:
    ``optimizer.lr`` and other numbers of the optimizer, ``scheduler``, ``training.clip_grad_norm``,
    ``data``, ``task``.
    """
    allow_unverified: bool = False
    """Let `resume` and `init_weights` name a checkpoint that DeepSpeed wrote by itself: it has no
    manifest, so nothing tells whether its files are whole. They are read as weights only, as all
    are.
    """


class Supervision(Section):
    """Starts after a failure, by `dsf train` on this machine or through ssh, each
    from the newest sound checkpoint; not after a request to stop, a refused configuration, or the
    same error at the same step again.
    """

    max_restarts: Count = 0
    """Starts after the first one, at most; 0: a failure ends the job."""
    wait_seconds: NonNegative = 5.0
    """Wait before the next start where nothing was saved since the last one; doubled each time, up
    to five minutes.
    """
    hang_seconds: Count = 1800
    """Seconds without a step, or a batch of an evaluation, after which all ranks end with 70; more
    than the first step takes. A start, a save and a callback have two hours at least. 0: never.
    What they wait for is said before, under every launcher.
    """


class Profile(Section):
    """Steps that are looked at closely: a trace of all operations, and on request what has to wait
    for each of them.
    """

    steps: StepRange
    """First and last step, counted from the begin of the run, as ``10-12``; or one, as ``10``."""
    modules: bool = False
    """Measure time, FLOPs, parameters and kept activations of every module."""
    deepspeed_timers: bool = False
    """Take the times of DeepSpeed's wall_clock_breakdown."""
    communication: bool = False
    """Time what DeepSpeed sends, one after the other, with its comms_logger."""

    @property
    def first(self) -> int:
        """First step that is profiled."""
        return int(self.steps.partition("-")[0])

    @property
    def last(self) -> int:
        """Last step that is profiled."""
        return int(self.steps.rpartition("-")[2])

    @property
    def waits(self) -> bool:
        """Check whether a measurement waits for the device: it then has the last step to itself,
        which is not traced.
        """
        return self.modules or self.deepspeed_timers or self.communication


class Sink(Section):
    """A destination of metrics that a package of its own writes."""

    package: ClassVar[str]


class TensorBoard(Sink):
    """Event files under ``tensorboard/`` in the run folder, with the config as text and as
    hyper-parameters.
    """

    package: ClassVar[str] = "tensorboard"
    samples: Count = 0
    """Evaluation samples, the first so many of rank 0, that are shown at every evaluation with what
    the model predicts for them: images, or text; of several sets the first one's. Not with a
    pipeline, whose last stage has the predictions and not the inputs.
    """
    histograms_every_steps: PositiveCount | None = None
    """Steps between two histograms of the weights; left out: none. All ranks stop to count their
    shares.
    """


class WandB(Sink):
    """A run at Weights & Biases. The key comes from WANDB_API_KEY or ``wandb login``."""

    package: ClassVar[str] = "wandb"
    project: str | None = None
    """Left out: WANDB_PROJECT, or W&B's own default."""
    entity: str | None = None
    """User or team; left out: W&B's own default."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = []
    """Words to find the run by."""
    offline: bool = False
    """Write to ``wandb/`` in the run folder alone; ``wandb sync`` uploads it later."""


class MLflow(Sink):
    """A run of MLflow. Credentials come from MLflow's environment variables."""

    package: ClassVar[str] = "mlflow"
    experiment: str | None = None
    """Left out: MLFLOW_EXPERIMENT_NAME, or "Default"."""
    tracking_uri: str | None = None
    """A server, ``sqlite:///FILE`` or a folder (``file:PATH``); left out: MLFLOW_TRACKING_URI, or
    MLflow's own default.
    """


class Comet(Sink):
    """An experiment at Comet. The key comes from COMET_API_KEY or ``~/.comet.config``."""

    package: ClassVar[str] = "comet_ml"
    project: str | None = None
    """Left out: COMET_PROJECT_NAME, or Comet's own default."""
    workspace: str | None = None
    """Left out: COMET_WORKSPACE, or the key's own."""
    offline: bool = False
    """Write to ``comet/`` in the run folder alone; ``comet upload`` uploads it later."""


class Trackio(Sink):
    """A run of trackio, on this machine (TRACKIO_DIR) or in a Space of Hugging Face."""

    package: ClassVar[str] = "trackio"
    project: str = "dsf-trainer"
    """Runs of one project are shown together."""
    space_id: str | None = None
    """The Space that shows it; the token comes from HF_TOKEN. Left out: this machine alone."""


_TensorBoard = Annotated[
    TensorBoard | None, BeforeValidator(switch, json_schema_input_type=bool | TensorBoard | None)
]
_WandB = Annotated[
    WandB | None,
    BeforeValidator(named("project"), json_schema_input_type=bool | str | WandB | None),
]
_MLflow = Annotated[
    MLflow | None,
    BeforeValidator(named("experiment"), json_schema_input_type=bool | str | MLflow | None),
]
_Comet = Annotated[
    Comet | None,
    BeforeValidator(named("project"), json_schema_input_type=bool | str | Comet | None),
]
_Trackio = Annotated[
    Trackio | None,
    BeforeValidator(named("project"), json_schema_input_type=bool | str | Trackio | None),
]


class EarlyStopping(Section):
    """End the run when a metric has stopped becoming better."""

    kind: Literal["early_stopping"] = "early_stopping"
    metric: str = "eval/loss"
    """The metric of the evaluations."""
    best_is: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""
    patience: PositiveCount = 3
    """Evaluations in a row without a better value."""
    min_change: NonNegative = 0.0
    """Smallest difference that counts as better."""


class ReduceOnPlateau(EarlyStopping):
    """Lower the learning rate when a metric has stopped becoming better; with the constant
    schedule.
    """

    kind: Literal["reduce_on_plateau"] = "reduce_on_plateau"  # type: ignore[assignment]
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """What the rate is multiplied by, each time."""


CallbackSection = Annotated[EarlyStopping | ReduceOnPlateau | Target, OneOf()]


class MonitorKind(Kind):
    """Base of destinations of metrics that installed packages register. `builds` is called with the
    fields as keyword arguments.
    """

    registered_in: ClassVar[str] = "dsf.monitors"


class Monitors(Section):
    """Destinations of the metrics. `metrics.jsonl` is always written. Keys and tokens come from the
    environment, never from here: this becomes config.yaml.
    """

    tensorboard: _TensorBoard = TensorBoard()
    """true, false, or what else is written."""
    csv: bool = True
    """``metrics.csv`` in the run folder."""
    wandb: _WandB = None
    """Weights & Biases: true, false, the name of a project, or where."""
    mlflow: _MLflow = None
    """MLflow: true, false, the name of an experiment, or where."""
    comet: _Comet = None
    """Comet: true, false, the name of a project, or where."""
    trackio: _Trackio = None
    """trackio: true, false, the name of a project, or where."""
    others: list[Annotated[MonitorKind | Target, OneOf()]] = []
    """Kinds of installed packages, and your own by ``target``: each is called on rank 0 with its
    args, in a thread of its own, and gives an object with ``write(point)``
    (`framework.train.monitors.base.Point`) and ``close()``.
    """
    wait_seconds: Positive = 20.0
    """Longest wait at the end of the run for each sink that is not yet done: a server that does not
    answer costs this and its last points.
    """
    report: bool = True
    """``report.html`` in the run folder, written at the end of the run."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """On the terminal of rank 0: a bar, a line per logged step, or nothing; auto: a bar if it is a
    terminal.
    """

    def sinks(self) -> Mapping[str, Sink]:
        """Return the configured sinks that need a package of their own, by name."""
        sinks: dict[str, Sink] = {}
        for name in ("tensorboard", "wandb", "mlflow", "comet", "trackio"):
            section = getattr(self, name)
            if section is not None:
                sinks[name] = section
        return sinks

    def missing_packages(self, *, but: str = "") -> Iterator[tuple[str, str]]:
        """Yield the dotted key and the package of each sink that this Python has no package for.

        No package is imported; the sink `but` is left out.
        """
        for name, section in self.sinks().items():
            if name != but and importlib.util.find_spec(section.package) is None:
                yield f"monitors.{name}", section.package


# `batch`: how many samples make a step. The arithmetic is in `framework/plan/layout.py`, and only
# there.


MEASURED: Final = "measured"
MicroSize = Literal["measured"] | PositiveCount | None


class Batch(Section):
    """global_size = micro_size x accumulation_steps x data-parallel size; any one of the three may
    be left out.
    """

    global_size: PositiveCount | None = None
    """Samples per optimizer step, over all devices."""
    micro_size: MicroSize = None
    """Samples per forward pass on one device; ``auto``: as the plan takes the devices to allow;
    ``measured``: the most that fit in steps on the devices before the first start.
    """
    accumulation_steps: PositiveCount | None = None
    """Forward passes per optimizer step on one device."""

    @property
    def fixed_micro_size(self) -> int | None:
        """`micro_size`, or None where it is to be measured."""
        if self.micro_size == MEASURED:
            return None
        return self.micro_size


# `parallel`: how the model itself is spread over devices.


_PARTITION: Final = r"^(uniform|parameters|measured|type:.+)$"
WORDS_OF_PATTERNS[_PARTITION] = (
    "not a way to cut a model",
    lambda text: "write parameters, uniform, measured, or type:<regex of layer class names>",
)


class TensorSplit(Section):
    """Way in which a layer is divided over a tensor group; alone, `split` may be written without a
    section.
    """

    split: Literal[
        "column", "row", "vocabulary", "column_gathered", "summed", "shared_input", "replicated"
    ] = "replicated"
    """``column``: by outputs, up to the next row layer; ``row``: by inputs; ``vocabulary``: an
    embedding or output head by tokens; ``column_gathered``: an output layer whose parts are joined;
    ``summed``: whole, between column and row, where each rank sees a part of its gradient;
    ``shared_input``: a module only whose column layers read its first input, which is then copied
    once; ``replicated``: whole.
    """
    sections: PositiveCount = 1
    """Equal matrices that a column layer holds side by side: 3 where query, key and value are
    one.
    """
    divide: list[str] = []
    """Attributes of the module that count what a rank has a part of, such as ``num_heads``."""


def _as_split(value: Any) -> Any:
    if isinstance(value, str):
        return {"split": value}
    return value


_Split = Annotated[
    TensorSplit, BeforeValidator(_as_split, json_schema_input_type=str | TensorSplit)
]


class Parallel(Section):
    """Parallelism of the model itself over devices."""

    pipe: PositiveCount = 1
    """Pipeline stages, each on a device of its own; every other device count is data parallel. 1:
    no pipeline; ``auto``: as the devices allow.
    """
    tensor: PositiveCount = 1
    """Ranks that share every large matrix, each with a part of its rows or columns. Best on one
    host; ``auto``: as the devices allow, within a host.
    """
    tensor_plan: dict[str, _Split] | None = None
    """Name of a layer, with * for any part between dots, to how it is divided; left out: gpt, bert
    and most models of transformers bring their own, or have one here.
    """
    sequence: PositiveCount = 1
    """Ranks that share every sequence, each with a part of its positions (Ulysses, with a ring
    where they are more than heads); ``auto``: as the devices allow, within a host.
    """
    expert: PositiveCount = 1
    """Ranks of different samples that share the experts of a mixture, each with as many whole ones:
    of `model.moe`, or of a mixture of transformers 5; ``auto``: as the devices allow.
    """
    partition: Annotated[str, StringConstraints(pattern=_PARTITION)] = "parameters"
    """What the stages share evenly: ``parameters`` (trainable ones), ``uniform`` (number of
    layers), ``type:<regex>`` (layers whose class name matches), ``measured`` (seconds per layer,
    timed on rank 0 before the run).
    """
    stages: list[Count] | None = None
    """The stage of every layer, one number per layer in order; left out: `partition` decides."""

    def sizes(self) -> dict[str, int]:
        """Ranks that train on the same samples, by direction, as
        `framework.plan.layout.make_layout` takes them.
        """
        return {"pipe_size": self.pipe, "tensor_size": self.tensor, "sequence_size": self.sequence}


# `task`: what a batch means, that is its loss and its metrics (`framework/tasks/`).


class TaskKind(Kind):
    """Base of all tasks that are known by name."""

    registered_in: ClassVar[str] = "dsf.tasks"
    metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics of an evaluation; left out: they are known once it has run."""


class Classification(TaskKind):
    """Cross-entropy over classes; metric: accuracy."""

    builds: ClassVar[str] = "framework.tasks.classification:Classification"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    kind: Literal["classification"] = "classification"
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the target spread evenly over all classes, in training only (Szegedy et al.
    2016).
    """
    ignore_index: int = -100
    """Targets that are left out of loss and metrics: often 255 in segmentation."""


class CausalLM(TaskKind):
    """Cross-entropy of the next token at every position; metrics: accuracy, perplexity."""

    builds: ClassVar[str] = "framework.tasks.causal_lm:CausalLM"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "perplexity")
    kind: Literal["causal_lm"] = "causal_lm"

    def form(self) -> str:
        return "text"


class MaskedLM(TaskKind):
    """BERT's pre-training: hidden tokens plus next-sentence prediction; metrics: accuracy,
    perplexity, one for each part.
    """

    builds: ClassVar[str] = "framework.tasks.masked_lm:MaskedLM"
    metrics: ClassVar[tuple[str, ...]] = (
        "loss",
        "mlm_loss",
        "accuracy",
        "nsp_loss",
        "nsp_accuracy",
        "perplexity",
    )
    kind: Literal["masked_lm"] = "masked_lm"

    def form(self) -> str:
        return "text_pairs"


class ModelLoss(TaskKind):
    """The loss that the model returns, alone or with its outputs, as transformers' models do:
    batches are mappings, which it takes whole as keyword arguments, or tuples, as positional ones.
    """

    builds: ClassVar[str] = "framework.tasks.model_loss:ModelLoss"
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    kind: Literal["model_loss"] = "model_loss"
    labels: str = "labels"
    """Key of the labels in a batch that is a mapping; of a tuple the last item is the labels."""
    mean_over: Literal["samples", "labels", "next_labels"] = "samples"
    """What that loss is a mean over, so that micro-batches and ranks are added up exactly: samples,
    labels that are not `ignore_index`, or those without the first of each row (causal language
    models).
    """
    ignore_index: int = -100
    """Labels that the model's loss leaves out, and that are not counted: of fairseq and old BERT
    code the padding.
    """


TaskSection = Annotated[TaskKind | Target | Object, OneOf()]
