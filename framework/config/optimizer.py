"""`optimizer`: the update rule. Names are torch's; `framework/plan/render.py` turns them into DeepSpeed's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from framework.config.base import Fraction, NonNegative, Object, Positive, Section, Target, kind_of

_Betas = Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)]


class _Optimizer(Section):
    """Base of all optimizers."""

    gpu_only: ClassVar[bool] = False

    lr: NonNegative = 1e-3
    """Learning rate; a scheduler changes it over time."""
    weight_decay: NonNegative = 0.0
    """Strength of the pull of weights towards zero."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Which weights are pulled. matrices: no decay on biases and norms, that is on tensors with fewer than two
    dimensions.
    """


class AdamW(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: NonNegative = 0.01
    betas: _Betas = [0.9, 0.999]
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    implementation: Literal["torch", "deepspeed"] = "torch"
    """``torch``: torch.optim, resumes bit for bit, compiles nothing. ``deepspeed``: its fused kernel (with CPU offload
    its vectorised host kernel, several times faster there); compiled at first use, and a resumed run drifts in the last
    bits."""


class Adam(AdamW):
    """Adam (Kingma & Ba 2015): weight decay is added to the gradient. DeepSpeed calls AdamW "Adam"; this is the real
    one.
    """

    kind: Literal["adam"] = "adam"  # type: ignore[assignment]
    weight_decay: NonNegative = 0.0


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    lr: NonNegative = 1e-2
    momentum: Fraction = 0.0
    """Share of the last update carried over."""
    nesterov: bool = False
    """Look ahead along the momentum (needs momentum > 0)."""


class Adagrad(_Optimizer):
    """Adagrad (Duchi et al. 2011)."""

    kind: Literal["adagrad"] = "adagrad"
    lr: NonNegative = 1e-2
    eps: Positive = 1e-10
    """Added to the root of the summed squares."""


class Lion(_Optimizer):
    """Lion (Chen et al. 2023) by DeepSpeed's fused kernel. On the device it needs a GPU; with CPU offload it runs on
    the host.
    """

    gpu_only: ClassVar[bool] = True
    kind: Literal["lion"] = "lion"
    lr: NonNegative = 1e-4
    betas: _Betas = [0.9, 0.99]
    """Interpolation of the update, decay of the running mean."""


class Lamb(_Optimizer):
    """LAMB (You et al. 2020) by DeepSpeed's fused kernel: layer-wise scaling for large batches. GPU only."""

    gpu_only: ClassVar[bool] = True
    kind: Literal["lamb"] = "lamb"
    betas: _Betas = [0.9, 0.999]
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    max_coeff: Positive = 10.0
    """Upper bound of the layer-wise ratio."""
    min_coeff: Positive = 0.01
    """Lower bound of the layer-wise ratio."""


class OptimizerObject(Object):
    """An optimizer factory that was handed over from Python."""

    lr: NonNegative | None = None
    """Its learning rate, where it says one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its other keyword arguments, where it says them and they are plain values."""


OptimizerSection = Annotated[
    Annotated[AdamW, Tag("adamw")]
    | Annotated[Adam, Tag("adam")]
    | Annotated[SGD, Tag("sgd")]
    | Annotated[Adagrad, Tag("adagrad")]
    | Annotated[Lion, Tag("lion")]
    | Annotated[Lamb, Tag("lamb")]
    | Annotated[Target, Tag("target")]
    | Annotated[OptimizerObject, Tag("object")],
    Discriminator(kind_of),
]


def optimizer_lr(optimizer: OptimizerSection) -> float | None:
    """The learning rate that the config gives the optimizer."""
    lr = optimizer.args.get("lr") if isinstance(optimizer, Target) else optimizer.lr
    return float(lr) if isinstance(lr, (int, float)) else None
