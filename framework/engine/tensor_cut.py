"""Divides the weights of a model over the ranks of a tensor group, when it was built whole and
before DeepSpeed has it.

Every rank builds the same weights as one process and keeps its part of them: what a run starts from
does not depend on `parallel.tensor`. A parameter that was cut has the attribute `split`
(`checkpoint.state.tensor_split.Split`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import nn

from framework.checkpoint.state.tensor_split import Split
from framework.config.training import TensorSplit
from framework.errors import ConfigError, counted
from framework.models.initialized import TokenEmbedding
from framework.models.layers import LayeredModel
from framework.models.split import (
    ColumnLinear,
    RowLinear,
    TensorPart,
    VocabularyEmbedding,
    VocabularyPart,
)
from framework.system.log import warn
from framework.tasks.causal_lm import CausalLM
from framework.tasks.masked_lm import MaskedLM
from framework.tasks.task import Task

# Words of transformers' `tp_plan` -> ours.
_OF_TRANSFORMERS: Final = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "summed",
}
_KEY: Final = "parallel.tensor_plan"
_LEAST_DIVIDED: Final = 0.5  # of the numbers in matrices, without a warning
_LEAST_WORTH: Final = 0.1  # with one, where the plan is the model's own
Plan = Mapping[str, TensorSplit]


class TensorCut:
    """Cuts one model; given a `task` that computes its loss from divided logits, leaves these
    divided.
    """

    def __init__(self, group: Any, given: Plan | None, task: Task) -> None:
        self.part = TensorPart(group)
        self._given = given
        self._task = task
        self._keeps_logits = type(task) in (CausalLM, MaskedLM)  # a subclass may read them
        self._columns: list[tuple[str, ColumnLinear]] = []  # whose row layer is yet to come
        self._cut: set[int] = set()  # modules

    def after(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """`build`, then the cut."""
        return lambda: self(build())

    def __call__(self, model: nn.Module) -> nn.Module:
        """Cut a model in place.

        Raises:
            ConfigError: kind ``tensor-plan``: it has no plan, a pattern of it matches nothing, or a
                layer cannot be divided as it wants.
        """
        plan = self._given or _own_plan(model, size=self.part.size)
        if not plan:
            reason = f"{type(model).__name__} has no plan of its own for parallel.tensor"
            fix = 'name its layers, such as {"blocks.*.up": column, "blocks.*.down": row}'
            raise ConfigError.of("tensor-plan", reason, fix, _KEY, None)
        is_ours = hasattr(type(model), "tensor_plan")
        self.part.has_draws = not is_ours or any(
            isinstance(one, nn.Dropout) and one.p for one in model.modules()
        )
        self._columns.clear()
        modules = dict(model.named_modules())
        weights = dict(model.named_parameters())
        sizes = {weight: weight.numel() for weight in weights.values() if weight.ndim > 1}
        wanted = _matched(plan, [*modules, *weights], may_be_idle=self._given is None)
        shared = [name for name, entry in wanted.items() if entry.split == "shared_input"]
        for name, module in modules.items():
            if name in wanted:
                self._cut_module(model, name, module, wanted[name])
        for name in wanted.keys() - modules.keys():
            # a bias of the output layer
            if wanted[name].split == "vocabulary" and self._keeps_logits:
                self._divide(name, weights[name], Split(0, (len(weights[name]),)))
                self._cut.add(id(model.get_submodule(name.rpartition(".")[0])))
        if self._columns:
            self._refuse(
                self._columns[0][0],
                "no row layer follows this column layer",
                "name the row layer as well",
            )
        for name in shared:
            modules[name].register_forward_pre_hook(self._copy_input, with_kwargs=True)
            for inner, module in modules[name].named_modules(prefix=name):
                if isinstance(module, ColumnLinear) and wanted[inner].split == "column":
                    module.copies = False
        self._refuse_other_users(modules)
        self._weigh(model, sizes)
        return model

    def _weigh(self, model: nn.Module, sizes: Mapping[nn.Parameter, int]) -> None:
        """Warn of a plan that leaves most numbers whole; one of the model's own that saves next to
        nothing is refused.

        `sizes` are those of its matrices before the cut.
        """
        divided = sum(size for weight, size in sizes.items() if "split" in vars(weight))
        share = divided / max(1, sum(sizes.values()))
        if share >= _LEAST_DIVIDED:
            return
        named = [
            name
            for name, weight in model.named_parameters()
            if "split" in vars(weight) and weight.ndim > 1
        ]
        reason = (
            f"the plan of {type(model).__name__} divides {share:.1%} of the numbers in its "
            f"matrices ({counted(len(named), 'weight')}, such as "
            f"{named[0] if named else 'none'}): every rank holds and computes all others"
        )
        fix = f"write a plan that names its layers as {_KEY}, or set parallel.tensor: 1"
        if share < _LEAST_WORTH and self._given is None:
            raise ConfigError.of("tensor-plan", reason, fix, _KEY, None)
        warn(f"{_KEY}: {reason}; {fix} [tensor-plan]", is_of_all_ranks=True)

    def _cut_module(
        self, model: nn.Module, name: str, module: nn.Module, entry: TensorSplit
    ) -> None:
        for attribute in entry.divide:
            value = getattr(module, attribute, None)
            if not isinstance(value, int) or value % self.part.size:
                self._refuse(
                    name,
                    f"its attribute {attribute} is {value}, which cannot be divided",
                    "name another",
                )
            setattr(module, attribute, value // self.part.size)
        kind = entry.split
        if kind == "summed":
            for parameter in module.parameters(recurse=False):
                parameter.register_hook(self._summed)  # type: ignore[no-untyped-call]
        if kind in ("replicated", "shared_input", "summed"):
            return
        self._cut.add(id(module))
        if isinstance(module, nn.Embedding):
            self._cut_embedding(model, name, module, kind)
        elif not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            self._refuse(
                name,
                f"it is a {type(module).__name__}, and only nn.Linear can be cut so",
                "leave it out",
            )
        elif module._parameters.get("weight") is None:
            self._refuse(name, "its weight is computed from others", "leave it out")
        elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            self._refuse(
                name,
                "nn.MultiheadAttention takes the weight and does not call the layer",
                "leave it out",
            )
        elif kind == "row":
            self._cut_row(model, name, module)
        else:
            self._cut_column(name, module, entry)

    def _cut_column(self, name: str, linear: nn.Linear, entry: TensorSplit) -> None:
        width = linear.out_features
        is_last = entry.split in ("vocabulary", "column_gathered")
        unit = entry.sections * (1 if is_last else self.part.size)
        if width % unit or (is_last and (entry.sections > 1 or width < self.part.size)):
            self._refuse(
                name,
                f"its {width} outputs cannot be divided over {self.part.size} ranks",
                "leave it out",
            )
        split = Split(0, (width // entry.sections,) * entry.sections)
        for weight in filter(None.__ne__, (linear.weight, linear.bias)):
            self._divide(name, weight, split)
        linear.__class__, linear.out_features = ColumnLinear, len(linear.weight)
        assert isinstance(linear, ColumnLinear)
        linear.part = self.part
        linear.is_last = is_last
        if not is_last:
            self._columns.append((name, linear))
        elif entry.split == "vocabulary" and self._keeps_logits:
            self._hand_to_task(width)
        else:
            linear.widths = self._widths(width)

    def _cut_row(self, model: nn.Module, name: str, linear: nn.Linear) -> None:
        if linear.in_features % self.part.size:
            what = f"its {linear.in_features} inputs cannot be divided over {self.part.size} ranks"
            self._refuse(name, what, "leave it and its column layers out")
        if not self._columns:
            self._refuse(
                name,
                "no column layer stands before this row layer",
                "name its column layers as well",
            )
        self._divide(name, linear.weight, Split(1, (linear.in_features,)))
        linear.__class__ = RowLinear
        linear.in_features = linear.weight.shape[1]
        assert isinstance(linear, RowLinear)
        linear.part = self.part
        around = _around(name, *(column for column, _ in self._columns))
        # When it has run, however it ended: a layer that is computed again may stop in between.
        model.get_submodule(around).register_forward_hook(self.part.end, always_call=True)
        self._columns.clear()

    def _cut_embedding(self, model: nn.Module, name: str, module: nn.Embedding, kind: str) -> None:
        size = module.num_embeddings
        if kind != "vocabulary":
            self._refuse(name, f"an embedding cannot be split as {kind}", "write vocabulary")
        if (
            size < self.part.size
            or module.max_norm is not None
            or module.sparse
            or module.scale_grad_by_freq
        ):
            self._refuse(
                name,
                "an embedding with max_norm, sparse or scale_grad_by_freq stays whole",
                "leave it out",
            )
        is_head = isinstance(model, LayeredModel) and any(
            layer.call is not None and model.place_of(layer) == name for layer in model.recipes
        )
        self._divide(name, module.weight, Split(0, (size,)))
        part = VocabularyPart(self.part, self._widths(size), joins=not self._keeps_logits)
        if isinstance(module, TokenEmbedding):
            module.vocabulary = part
            if is_head and self._keeps_logits:
                self._hand_to_task(size)
        else:
            self._divide_look_up(name, module, part)
        module.num_embeddings = part.size

    def _divide_look_up(self, name: str, module: nn.Embedding, part: VocabularyPart) -> None:
        """Have an embedding look tokens up in all ranks' parts; where it has a forward of its own,
        such as one that scales the vectors, inside of that.
        """
        kind = type(module)
        look_ups = _LookUps()
        if kind.forward is nn.Embedding.forward:
            module.__class__ = VocabularyEmbedding
        else:
            # What it calls as `super().forward` is the divided one then.
            module.__class__ = type(
                kind.__name__, (kind, VocabularyEmbedding), {"__module__": kind.__module__}
            )
            module.vocabulary = look_ups  # type: ignore[assignment]
            with torch.no_grad():
                module(torch.zeros(1, 2, dtype=torch.long, device=module.weight.device))
            if look_ups.number != 1:
                reason = (
                    f"{kind.__name__} has a forward() of its own, which reads the weight itself"
                )
                self._refuse(name, reason, "leave it out of the plan")
        module.vocabulary = part  # type: ignore[assignment]

    def _hand_to_task(self, size: int) -> None:
        assert isinstance(self._task, CausalLM | MaskedLM)
        self._task.vocabulary = VocabularyPart(self.part, self._widths(size), joins=False)

    def _widths(self, width: int) -> list[int]:
        split = Split(0, (width,))
        size = self.part.size
        return [end - begin for rank in range(size) for begin, end in split.bounds(rank, size)]

    def _divide(self, name: str, weight: torch.Tensor, split: Split) -> None:
        known = vars(weight).get("split")
        if known not in (None, split):
            self._refuse(
                name,
                "it shares a weight with a layer that is divided otherwise",
                "divide both alike",
            )
        if known is None:
            weight.data = split.part(weight.data, self.part.rank, self.part.size).clone()
            # The second is what DeepSpeed's norms look for: what others have as well is counted
            # once.
            vars(weight).update(split=split, tensor_model_parallel=True)

    def _copy_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.part.copy(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.part.copy(kwargs[first])}

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.part.group)
        return total

    def _refuse_other_users(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            for own, weight in module.named_parameters(recurse=False):
                if "split" in vars(weight) and id(module) not in self._cut:
                    what = (
                        f"its {own} is that of a layer that is divided, and the plan leaves it "
                        "whole"
                    )
                    self._refuse(name, what, "divide both: an embedding as vocabulary")

    def _refuse(self, name: str, reason: str, fix: str) -> NoReturn:
        raise ConfigError.of("tensor-plan", f"{name}: {reason}", fix, _KEY, name)


class _LookUps:
    """Stands in for a `VocabularyPart`, and counts what is asked of it."""

    number = 0

    def look_up(
        self, tokens: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None
    ) -> torch.Tensor:
        self.number += 1
        return weight.new_zeros(*tokens.shape, weight.shape[1])


def _around(*names: str) -> str:
    """Name of the innermost module that holds all of these."""
    parts = [name.split(".")[:-1] for name in names]
    common = [one[0] for one in zip(*parts, strict=False) if len(set(one)) == 1]
    while common and not all(each[: len(common)] == common for each in parts):
        common.pop()
    return ".".join(common)


def _own_plan(model: nn.Module, *, size: int) -> dict[str, TensorSplit]:
    """The plan that a model brings along: ours, or the one of the model of transformers that it is
    or holds.
    """
    own = getattr(type(model), "tensor_plan", None)
    if own is not None:
        return {name: TensorSplit(split=word) for name, word in own.items()}
    for name, module in model.named_modules():
        found = getattr(module, "_tp_plan", None)
        if found:
            unknown = sorted(set(found.values()) - _OF_TRANSFORMERS.keys())
            if unknown:
                reason = (
                    f"the plan of {type(module).__name__} splits layers as {unknown[0]}, "
                    "which is not done here"
                )
                raise ConfigError.of(
                    "tensor-plan", reason, "set parallel.tensor: 1, or write a plan", _KEY, None
                )
            _refuse_heads(getattr(module, "config", None), size)
            if name:
                prefix = f"{name}."
            else:
                prefix = ""
            return {
                f"{prefix}{key}": TensorSplit.model_validate({"split": _OF_TRANSFORMERS[word]})
                for key, word in found.items()
            }
    return {}


def _refuse_heads(config: Any, size: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, key, None)
        if isinstance(count, int) and count % size:
            reason = f"ranks cannot share the model's {count} {key} evenly"
            raise ConfigError.of(
                "tensor-not-divisible", reason, "set another size", "parallel.tensor", size
            )


def _matched(plan: Plan, names: Iterable[str], *, may_be_idle: bool) -> dict[str, TensorSplit]:
    """Entry by name of a module or weight; of several patterns the last."""
    found: dict[str, TensorSplit] = {}
    names = list(names)
    for pattern, entry in plan.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))
        matches = [name for name in names if name and regex.fullmatch(name)]
        if not matches and not may_be_idle:
            reason = "nothing in the model has such a name"
            fix = "write names as named_modules() has them, * for a part"
            raise ConfigError.of("tensor-plan", reason, fix, f"{_KEY}.{pattern}", entry.split)
        found |= dict.fromkeys(matches, entry)
    return found
