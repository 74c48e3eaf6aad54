"""Schema of a manifest: the types of all values that a reader relies on.

Keys that it does not name are free, so that a later release can add some. A value has exactly its
JSON type: true is no number, and 2.0 is no count.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

_COUNT_LIMIT: Final = 1 << 63


def _check_name(name: str) -> str:
    """Check that a file lies inside the checkpoint: a manifest that was sealed anew must not point
    elsewhere.
    """
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError("the file is not inside the checkpoint")
    return name


def _check_time(text: str) -> str:
    datetime.fromisoformat(text).astimezone()
    return text


Count = Annotated[int, Field(ge=0, lt=_COUNT_LIMIT)]
PositiveCount = Annotated[int, Field(ge=1, lt=_COUNT_LIMIT)]
FileName = Annotated[str, AfterValidator(_check_name)]
Time = Annotated[str, AfterValidator(_check_time)]
# JSON has no number for the three texts.
MetricValue = float | Literal["inf", "-inf", "nan"]
# `checkpoint.state.tensor_split.Split`, a dimension and sections; JSON writes it as a list.
TensorSplit = Annotated[tuple[Count, list[Count]], Strict(False)]


class _Part(BaseModel):
    """Base of the parts of a manifest."""

    model_config = ConfigDict(strict=True, frozen=True)


class _File(_Part):
    model_config = ConfigDict(extra="forbid")

    num_bytes: Count
    sha256: str


class _Layout(_Part):
    """Sizes of the job that wrote it; what a later release adds is a positive count as well."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, PositiveCount]

    world_size: PositiveCount
    data_parallel_size: PositiveCount
    pipe_size: PositiveCount
    global_size: PositiveCount
    micro_size: PositiveCount
    accumulation_steps: PositiveCount


class _Run(_Part):
    name: str


class _Zero(_Part):
    stage: Annotated[int, Field(ge=0, le=3)]
    offload_optimizer: dict[str, Any] | None = None
    offload_param: dict[str, Any] | None = None


class _Precision(_Part):
    dtype: str
    states: str = "fp32"


class _Named(_Part):
    """A model or an optimizer: a kind of ours, or the user's own."""

    kind: str | None = None
    target: str | None = None
    object: str | None = None

    @model_validator(mode="after")
    def _check_that_one_is_given(self) -> _Named:
        if not (self.kind or self.target or self.object):
            raise ValueError("it has no name")
        return self


class _Optimizer(_Named):
    lr: float | None = None


class _Ema(_Part):
    decay: float


class _Training(_Part):
    ema: _Ema | None = None
    lora: dict[str, Any] | None = None


class _Parallel(_Part):
    partition: str | None = None


class _Config(_Part):
    """The resolved config: every section is a mapping, except the list of callbacks."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    run: _Run
    zero: _Zero
    precision: _Precision
    model: _Named
    optimizer: _Optimizer
    training: _Training = _Training()
    parallel: _Parallel = _Parallel()
    callbacks: Any = None


class _Base(_Part):
    """The weights that adapters belong to."""

    sha256: str
    init_weights: str | None


class _Pipeline(_Part):
    layers: list[str]
    # Of manifests that are made up for DeepSpeed's own checkpoints; another name must not point
    # elsewhere.
    files: dict[str, FileName] = {}
    bounds: list[Count] | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> _Pipeline:
        """Check that the bounds of the stages go up from 0 to the number of layers."""
        if self.bounds is None:
            return self
        if self.bounds[:1] != [0] or self.bounds[-1] != len(self.layers):
            raise ValueError("the bounds are not those of the layers")
        if any(end <= begin for begin, end in pairwise(self.bounds)):
            raise ValueError("the bounds do not rise")
        return self


class _Weights(_Part):
    names: Count
    elements: Count


class _Best(_Part):
    metric: str
    value: float
    step: Count


class Manifest(_Part):
    """A manifest without its seal."""

    format: Count
    step: Count
    files: dict[FileName, _File]
    layout: _Layout
    config: _Config
    steps_per_epoch: Count | None = None
    total_steps: Count | None = None
    num_train_samples: Count | None = None
    epoch: Count | None = None
    step_in_epoch: Count | None = None
    samples: Count | None = None
    order: Count = 0
    lanes: Count = 0
    base: _Base | None = None
    pipeline: _Pipeline = _Pipeline(layers=[])
    ties: dict[str, str] = {}
    weights: _Weights | None = None
    tensor: dict[str, TensorSplit] = {}
    # weights with packed experts that an expert group shares -> how many experts the group has
    experts: dict[str, Count] = {}
    metrics: dict[str, MetricValue] = {}
    best: _Best | None = None
    saved_at: Time | None = None
    versions: dict[str, str | None] = {}
    data_sha256: str | None = None
