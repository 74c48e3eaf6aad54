"""Kinds of a run config's sections, and commands, by name: the framework's own, and what
installed packages add.

A package registers a name as an entry point, in its pyproject.toml::

    [project.entry-points."dsf.models"]
    tiny_net = "tiny_nets.kinds:TinyNet"

`BUILT_IN` has the framework's own names in the same form. Nothing is imported before its name is
asked for, and the installed packages are searched only for a name that is not built in: that takes
some milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from framework.errors import ConfigError, in_one_line

OWN_PACKAGE: Final = "dsf-trainer"
# Group -> name -> what it stands for, as ``package.module:name``.
BUILT_IN: Final[Mapping[str, Mapping[str, str]]] = {
    "dsf.models": {
        "lenet": "framework.recipes.image_models.kinds:LeNet",
        "small_resnet18": "framework.recipes.image_models.kinds:SmallResNet18",
        "resnet18": "framework.recipes.image_models.kinds:ResNet18",
        "resnet50": "framework.recipes.image_models.kinds:ResNet50",
        "mlp": "framework.recipes.image_models.kinds:MLP",
        "gpt": "framework.recipes.language_models.kinds:GPT",
        "bert": "framework.recipes.language_models.kinds:BERT",
    },
    "dsf.data": {
        "digits": "framework.recipes.image_sets.kinds:Digits",
        "fashion_mnist": "framework.recipes.image_sets.kinds:FashionMNIST",
        "cifar10": "framework.recipes.image_sets.kinds:CIFAR10",
        "image_folder": "framework.recipes.image_sets.kinds:ImageFolder",
        "synthetic_images": "framework.recipes.image_sets.kinds:SyntheticImages",
        "text": "framework.recipes.text.kinds:Text",
        "text_pairs": "framework.recipes.text.kinds:TextPairs",
        "conversations": "framework.recipes.text.kinds:Conversations",
        "labelled_text": "framework.recipes.text.kinds:LabelledText",
        "huggingface": "framework.config.data:HuggingFace",
        "mixture": "framework.config.data:Mixture",
    },
    "dsf.tasks": {
        "classification": "framework.config.training:Classification",
        "causal_lm": "framework.config.training:CausalLM",
        "masked_lm": "framework.config.training:MaskedLM",
        "model_loss": "framework.config.training:ModelLoss",
    },
    "dsf.optimizers": {
        "adamw": "framework.config.optimizer:AdamW",
        "adam": "framework.config.optimizer:Adam",
        "adamw_8bit": "framework.config.optimizer:AdamW8bit",
        "schedule_free": "framework.config.optimizer:ScheduleFree",
        "sgd": "framework.config.optimizer:SGD",
        "adagrad": "framework.config.optimizer:Adagrad",
        "lion": "framework.config.optimizer:Lion",
        "lamb": "framework.config.optimizer:Lamb",
        "adafactor": "framework.config.optimizer:Adafactor",
        "muon": "framework.config.optimizer:Muon",
    },
    "dsf.schedulers": {
        "constant": "framework.config.optimizer:Constant",
        "cosine": "framework.config.optimizer:Cosine",
        "linear": "framework.config.optimizer:Linear",
        "polynomial": "framework.config.optimizer:Polynomial",
        "wsd": "framework.config.optimizer:WSD",
        "inverse_sqrt": "framework.config.optimizer:InverseSqrt",
        "warmup": "framework.config.optimizer:WarmupLR",
        "warmup_decay": "framework.config.optimizer:WarmupDecayLR",
        "warmup_cosine": "framework.config.optimizer:WarmupCosineLR",
        "one_cycle": "framework.config.optimizer:OneCycle",
        "lr_range_test": "framework.config.optimizer:LRRangeTest",
    },
    "dsf.monitors": {},
    "dsf.commands": {},  # built-in ones, with their lines of help: commands/table.py
}
# Groups of sections of a run config.
KINDS: Final = (
    "dsf.models",
    "dsf.data",
    "dsf.tasks",
    "dsf.optimizers",
    "dsf.schedulers",
    "dsf.monitors",
)


@dataclass(frozen=True)
class Registered:
    """A name and what it stands for.

    Attributes:
        group: group of entry points, such as ``dsf.models``.
        name: name in the group.
        path: what it stands for, as ``package.module:name``.
        package: the distribution that registers it, with its version.
    """

    group: str
    name: str
    path: str
    package: str = OWN_PACKAGE

    def load(self) -> Any:
        """Import what the name stands for.

        Raises:
            ConfigError: kind ``plug-in-broken``, where that fails.
        """
        module_name, _, dotted_name = self.path.partition(":")
        try:
            value: Any = import_module(module_name)
            for name in dotted_name.split("."):
                value = getattr(value, name)
        except (Exception, SystemExit) as error:
            raise self.broken(f"importing that failed: {in_one_line(error)}") from error
        return value

    def broken(self, reason: str) -> ConfigError:
        """Return the error of a registered object that is of no use."""
        name = self.package.split()[0]
        fix = f"fix or upgrade {name}, or uninstall it: pip uninstall {name}"
        if self.package == OWN_PACKAGE:
            fix = f"install {name} again"
        return ConfigError.of(
            "plug-in-broken",
            f"the package {self.package} registers {self.name} in {self.group} as {self.path}, and "
            f"{reason}",
            fix,
        )


def find(group: str, name: str) -> Registered | None:
    """Return what a name stands for in a group; None if it is unknown.

    Raises:
        ConfigError: kind ``plug-ins-clash``, where several packages register the name.
    """
    path = BUILT_IN[group].get(name)
    if path is not None:
        return Registered(group, name, path)
    if name not in installed(group):
        return None
    return _only(installed(group)[name])


def all_registered(group: str) -> list[Registered]:
    """Return everything that is registered in a group, the built-in names first.

    Raises:
        ConfigError: kind ``plug-ins-clash``, where several packages register a name.
    """
    found = [Registered(group, name, path) for name, path in BUILT_IN[group].items()]
    for name, registered in installed(group).items():
        entries = list(registered)
        if name in BUILT_IN[group]:
            entries.insert(0, Registered(group, name, BUILT_IN[group][name]))
        found.append(_only(entries))
    return found


@cache
def installed(group: str) -> Mapping[str, Sequence[Registered]]:
    """Return what installed packages register in a group, by name; more than one of a name is a
    mistake.
    """
    found: dict[str, list[Registered]] = {}
    for entry in entry_points(group=group):
        package = OWN_PACKAGE
        if entry.dist is not None:
            package = f"{entry.dist.name} {entry.dist.version}"
        registered = Registered(group, entry.name, entry.value.replace(" ", ""), package)
        found.setdefault(entry.name, []).append(registered)
    return found


def _only(registered: Sequence[Registered]) -> Registered:
    """Return the only one that is registered under a name.

    Raises:
        ConfigError: kind ``plug-ins-clash``: there are several.
    """
    if len(registered) == 1:
        return registered[0]
    first, second = registered[:2]
    name = second.package.split()[0]
    raise ConfigError.of(
        "plug-ins-clash",
        f"two packages register {second.name} in {second.group}: {first.package} as {first.path}, "
        f"{second.package} as {second.path}",
        f"uninstall one of them (pip uninstall {name}), or give its entry point another name",
    )
