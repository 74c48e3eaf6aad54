"""The sections of a run config as classes, each a public name of `framework`:
``framework.RunConfig(batch=framework.Batch(global_size=64))``.
"""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from framework.config.base import Section, Target
from framework.config.data import DataTarget, HuggingFace, Mixture, Part
from framework.config.explain import explain
from framework.config.model import MoE
from framework.config.optimizer import (
    SGD,
    WSD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    AdamW8bit,
    Constant,
    Cosine,
    Group,
    InverseSqrt,
    Lamb,
    Linear,
    Lion,
    LRRangeTest,
    Muon,
    OneCycle,
    Polynomial,
    ScheduleFree,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from framework.config.precision import BF16, FP8, FP16, FP32, Autocast
from framework.config.run_config import Run, RunConfig
from framework.config.training import (
    EMA,
    BadSteps,
    Batch,
    CausalLM,
    Checkpoint,
    Classification,
    Comet,
    Compile,
    EarlyStopping,
    Evaluation,
    FrozenSteps,
    LoRA,
    MaskedLM,
    MLflow,
    ModelLoss,
    Monitors,
    Parallel,
    Profile,
    ReduceOnPlateau,
    Supervision,
    TensorBoard,
    TensorSplit,
    Trackio,
    Training,
    WandB,
)
from framework.config.zero import (
    NoOffload,
    OptimizerToCPU,
    OptimizerToNVMe,
    ParamToCPU,
    ParamToNVMe,
    ZenFlow,
    Zero,
)
from framework.errors import ConfigError
from framework.recipes.image_models.kinds import MLP, LeNet, ResNet18, ResNet50, SmallResNet18
from framework.recipes.image_sets.kinds import (
    CIFAR10,
    Digits,
    FashionMNIST,
    ImageFolder,
    SyntheticImages,
)
from framework.recipes.language_models.kinds import BERT, GPT
from framework.recipes.text.kinds import Conversations, LabelledText, Text, TextPairs
from framework.system.exits import end_in_one_line

__all__ = [
    "BERT",
    "BF16",
    "CIFAR10",
    "EMA",
    "FP8",
    "FP16",
    "FP32",
    "GPT",
    "MLP",
    "SGD",
    "WSD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Autocast",
    "BadSteps",
    "Batch",
    "CausalLM",
    "Checkpoint",
    "Classification",
    "Comet",
    "Compile",
    "Constant",
    "Conversations",
    "Cosine",
    "DataTarget",
    "Digits",
    "EarlyStopping",
    "Evaluation",
    "FashionMNIST",
    "FrozenSteps",
    "Group",
    "HuggingFace",
    "ImageFolder",
    "InverseSqrt",
    "LRRangeTest",
    "LabelledText",
    "Lamb",
    "LeNet",
    "Linear",
    "Lion",
    "LoRA",
    "MLflow",
    "MaskedLM",
    "Mixture",
    "MoE",
    "ModelLoss",
    "Monitors",
    "Muon",
    "NoOffload",
    "OneCycle",
    "OptimizerToCPU",
    "OptimizerToNVMe",
    "Parallel",
    "ParamToCPU",
    "ParamToNVMe",
    "Part",
    "Polynomial",
    "Profile",
    "ReduceOnPlateau",
    "ResNet18",
    "ResNet50",
    "Run",
    "RunConfig",
    "ScheduleFree",
    "SmallResNet18",
    "Supervision",
    "SyntheticImages",
    "Target",
    "TensorBoard",
    "TensorSplit",
    "Text",
    "TextPairs",
    "Trackio",
    "Training",
    "WandB",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZenFlow",
    "Zero",
]


def _explained(error: ValidationError, section: type[BaseModel]) -> ConfigError:
    """Return the problems of a section that a program makes, as a file's are written."""
    end_in_one_line()
    return ConfigError([problem for _, problem in explain(error, section)])


# From the first public section on, a wrong one is refused as one of a file is.
type(Section).explained = _explained  # type: ignore[attr-defined]
