"""Divides the weights of a model over the ranks of a tensor group, after it was built whole and
before DeepSpeed wraps it; of a stage of a pipeline layer by layer, each after it was built whole.

Every rank builds the same weights as one process and keeps its part of them: the first weights do
not depend on `parallel.tensor`. A parameter that was cut has the attribute `split`
(`checkpoint.state.tensor_split.Split`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import nn

from framework.checkpoint.state.tensor_split import Split
from framework.config.training import TensorSplit
from framework.engine.matrix_forms import MatrixForm, matrix_form
from framework.engine.packed_experts import divide_over_tensor_ranks
from framework.engine.tensor_plans import (
    PLAN_KEY,
    KnownPlan,
    entries_by_name,
    known_plan,
)
from framework.engine.transformers_plans import Plan
from framework.errors import ConfigError, counted
from framework.models.initialized import TokenEmbedding
from framework.models.layers import register_module
from framework.models.packed_experts import find_packed
from framework.models.split import (
    ColumnLayer,
    RowLayer,
    SumsTogether,
    TensorPart,
    VocabularyEmbedding,
    VocabularyPart,
)
from framework.system.log import warn
from framework.tasks.causal_lm import CausalLM
from framework.tasks.masked_lm import MaskedLM
from framework.tasks.task import Task

# Shares of the numbers in matrices: below the first one a warning, and below the second one a
# refusal if the plan is the model's own.
_LEAST_DIVIDED: Final = 0.5
_LEAST_WORTH: Final = 0.1


@dataclass(frozen=True)
class _Share:
    """What a plan divides, of a model or of the layers of one rank.

    Attributes:
        matched: patterns of the plan that match a name.
        num: elements of all matrices.
        num_divided: elements of those that are divided.
        names: names of those that are divided.
    """

    matched: frozenset[str]
    num: int
    num_divided: int
    names: tuple[str, ...]


class TensorCut:
    """Cuts one model, or the layers of a stage. For a `task` that computes its loss from divided
    logits, they stay divided.
    """

    def __init__(
        self,
        group: Any,
        config_plan: Plan | None,
        task: Task,
        *,
        known: KnownPlan | None = None,
    ) -> None:
        """Prepare to cut for a tensor group, by the plan of the config or else the model's own;
        layers of a stage by the `known` plan of their model.
        """
        self.part = TensorPart(group)
        self._config_plan = config_plan
        self._known = known
        self._is_stage = known is not None
        if known is not None:
            # Layers are looked at one by one.
            self.part.may_draw = not known.is_shipped
        self._task = task
        # A subclass may read them, and so do metrics of torchmetrics.
        is_shipped = type(task) in (CausalLM, MaskedLM)
        self._keeps_logits = is_shipped and task.added_metrics is None
        self._columns: list[tuple[str, ColumnLayer]] = []  # column layers before their row layer
        self._cut: set[int] = set()  # ids of modules
        self._layers: dict[str, nn.Module] = {}  # of a stage, each in a module of its own
        self._shares: dict[str, _Share] = {}
        self._refused: list[ConfigError] = []

    def after(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a function that builds a model and cuts it."""
        return lambda: self(build())

    def __call__(self, model: nn.Module) -> nn.Module:
        """Cut a model in place.

        Raises:
            ConfigError: kind ``tensor-plan``: it has no plan, a pattern of the config's plan
                matches nothing, a column layer has no row layer, a layer cannot be divided as the
                plan names, or the model's own plan divides next to nothing.
        """
        known = known_plan(model, self._config_plan, size=self.part.size)
        self._known = known
        self.part.may_draw = not known.is_shipped or _has_dropout(model)
        self._check_share(self._cut_parts(model))
        return model

    def layer(self, name: str, module: nn.Module) -> None:
        """Cut a layer of a stage, which has this name in the model, in place. What is wrong with it
        is kept for `check_stages`: the ranks of other stages do not see it.
        """
        if any(module is whole.get_submodule(other) for other, whole in self._layers.items()):
            return  # one module in two places
        whole = nn.Module()
        register_module(whole, name, module)  # its parts have the names of the model
        self.part.may_draw = self.part.may_draw or _has_dropout(module)
        self._layers[name] = whole
        try:
            self._shares[name] = self._cut_parts(whole)
        except ConfigError as error:
            self._refused.append(error)

    def check_stages(self) -> None:
        """Look at what is known when all stages have cut their layers. Collective.

        Raises:
            ConfigError: on all ranks, as of a whole model: a pattern of the config's plan matches
                nothing in any stage, a layer cannot be divided so, or the model's own plan divides
                next to nothing.
        """
        from framework.engine.distributed import gather

        try:
            for whole in self._layers.values():
                self._refuse_other_users(dict(whole.named_modules()))
        except ConfigError as error:
            self._refused.append(error)
        for refused in gather(self._refused):
            if refused:
                raise refused[0]
        by_layer: dict[str, _Share] = {}
        for shares in gather(self._shares):  # of tied layers every stage has one
            by_layer |= shares
        matched = frozenset().union(*(share.matched for share in by_layer.values()))
        names: list[str] = []
        for share in by_layer.values():
            names += share.names
        self._refuse_idle(matched)
        self._check_share(
            _Share(
                matched,
                sum(share.num for share in by_layer.values()),
                sum(share.num_divided for share in by_layer.values()),
                tuple(names),
            )
        )

    def _cut_parts(self, model: nn.Module) -> _Share:
        """Cut the modules and weights of a model, or of one layer of it, that the plan names."""
        assert self._known is not None
        self._columns.clear()
        modules = dict(model.named_modules())
        weights = dict(model.named_parameters())
        sizes = {name: weight.numel() for name, weight in weights.items() if weight.ndim > 1}
        matched, entries = entries_by_name(self._known.entries, [*modules, *weights])
        if not self._is_stage:
            self._refuse_idle(matched)
        for name, module in modules.items():
            if name in entries:
                self._cut_module(model, name, module, entries[name])
        for name, module in find_packed(model).items():
            if name not in entries:
                self._cut.add(id(module))
                divide_over_tensor_ranks(name, module, self.part, self._divide)
        # In the model's order, and not in a set's: ranks refuse the same weight.
        for name, weight in weights.items():
            if name in entries:
                self._cut_weight(model, name, weight, entries[name].split)
        if self._columns:
            reason = "no row layer follows this column layer"
            fix = "name the row layer as well"
            if self._is_stage:
                reason += " within one layer of the pipeline"
                fix = "name the row layer as well, and let both be in one module of layers()"
            self._refuse(self._columns[0][0], reason, fix)
        self._share_inputs(modules, entries)
        self._refuse_other_users(modules)
        divided = [name for name in sizes if "split" in vars(weights[name])]
        num_divided = sum(sizes[name] for name in divided)
        return _Share(matched, sum(sizes.values()), num_divided, tuple(divided))

    def _refuse_idle(self, matched: frozenset[str]) -> None:
        """Refuse a pattern of the config's plan that matches nothing."""
        for pattern, entry in (self._config_plan or {}).items():
            if pattern not in matched:
                reason = "nothing in the model has such a name"
                fix = "write names as named_modules() has them, * for a part"
                raise ConfigError.of(
                    "tensor-plan", reason, fix, f"{PLAN_KEY}.{pattern}", entry.split
                )

    def _share_inputs(
        self, modules: Mapping[str, nn.Module], entries: Mapping[str, TensorSplit]
    ) -> None:
        """Copy the inputs of modules with a shared input once, instead of in each column layer."""
        for name, entry in entries.items():
            if entry.split != "shared_input":
                continue
            sharing = modules[name]
            sums_together = isinstance(sharing, SumsTogether)
            if isinstance(sharing, SumsTogether):
                sharing.part = self.part
            else:
                sharing.register_forward_pre_hook(self._copy_input, with_kwargs=True)
            for inner, module in sharing.named_modules(prefix=name):
                if isinstance(module, ColumnLayer) and entries[inner].split == "column":
                    module.copies = False
                elif isinstance(module, RowLayer) and sums_together:
                    module.sums = False

    def _check_share(self, share: _Share) -> None:
        """Warn of a plan that leaves most numbers whole, and refuse a plan of the model's own that
        saves next to nothing.
        """
        assert self._known is not None
        part = share.num_divided / max(1, share.num)
        if part >= _LEAST_DIVIDED:
            return
        names = share.names
        example = names[0] if names else "none"
        reason = (
            f"the plan of {self._known.model} divides {part:.1%} of the numbers in its "
            f"matrices ({counted(len(names), 'weight')}, such as {example}): every rank holds and "
            "computes all others"
        )
        fix = f"write a plan that names its layers as {PLAN_KEY}, or set parallel.tensor: 1"
        if part < _LEAST_WORTH and self._known.is_own:
            raise ConfigError.of("tensor-plan", reason, fix, PLAN_KEY, None)
        warn(f"{PLAN_KEY}: {reason}; {fix} [tensor-plan]", is_of_all_ranks=True)

    def _cut_weight(self, model: nn.Module, name: str, weight: nn.Parameter, kind: str) -> None:
        """Cut a weight that the plan names by itself, such as the bias of the output layer."""
        if kind == "vocabulary":
            # A bias that the output layer has as well is divided already.
            is_divided = "split" in vars(weight)
            if self._keeps_logits and not is_divided:
                self._divide(name, weight, Split(0, (len(weight),)))
            if self._keeps_logits or is_divided:
                self._cut.add(id(model.get_submodule(name.rpartition(".")[0])))
        elif kind == "summed":
            weight.register_hook(self._summed)  # type: ignore[no-untyped-call]
        elif kind != "replicated" and self._config_plan is not None:
            reason = f"it is a weight, and only a module can be split as {kind}"
            self._refuse(name, reason, "name its module")

    def _cut_module(
        self, model: nn.Module, name: str, module: nn.Module, entry: TensorSplit
    ) -> None:
        """Cut a module as its entry in the plan has it, or sum the gradients of its weights."""
        self._divide_attributes(name, module, entry)
        kind = entry.split
        if kind == "summed":
            for parameter in module.parameters(recurse=False):
                parameter.register_hook(self._summed)  # type: ignore[no-untyped-call]
        if kind in ("replicated", "shared_input", "summed"):
            return
        self._cut.add(id(module))
        if isinstance(module, nn.Embedding):
            self._cut_embedding(model, name, module, kind)
            return
        form = self._form(model, name, module)
        if kind == "row":
            self._cut_row(model, name, module, form)
        else:
            self._cut_column(name, module, form, entry)

    def _divide_attributes(self, name: str, module: nn.Module, entry: TensorSplit) -> None:
        """Divide the attributes of a module that the plan names, such as a number of heads."""
        for attribute in entry.divide:
            value = getattr(module, attribute, None)
            if not isinstance(value, int) or value % self.part.size:
                reason = f"its attribute {attribute} is {value}, which cannot be divided"
                self._refuse(name, reason, "name another")
            setattr(module, attribute, value // self.part.size)

    def _form(self, model: nn.Module, name: str, module: nn.Module) -> MatrixForm:
        """Return how a module keeps its matrix, or refuse one that cannot be divided."""
        form = matrix_form(module)
        if form is None:
            kind = type(module).__name__
            reason = f"it is a {kind}, and only nn.Linear and transformers' Conv1D can be cut so"
            self._refuse(name, reason, "leave it out")
        if module._parameters.get("weight") is None:
            self._refuse(name, "its weight is computed from others", "leave it out")
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            reason = "nn.MultiheadAttention takes the weight and does not call the layer"
            self._refuse(name, reason, "leave it out")
        return form

    def _cut_column(self, name: str, layer: Any, form: MatrixForm, entry: TensorSplit) -> None:
        """Divide the outputs of a layer; unless it is the last one, a row layer has to follow."""
        width: int = getattr(layer, form.num_outputs)
        is_last = entry.split in ("vocabulary", "column_gathered")  # may be divided unevenly
        if is_last:
            is_divisible = entry.sections == 1 and width >= self.part.size
        else:
            is_divisible = width % (entry.sections * self.part.size) == 0
        if not is_divisible:
            reason = f"its {width} outputs cannot be divided over {self.part.size} ranks"
            self._refuse(name, reason, "leave it out")
        sections = (width // entry.sections,) * entry.sections
        self._divide(name, layer.weight, Split(form.outputs, sections))
        if layer.bias is not None:
            self._divide(name, layer.bias, Split(0, sections))
        layer.__class__ = form.column
        setattr(layer, form.num_outputs, layer.weight.shape[form.outputs])
        assert isinstance(layer, ColumnLayer)
        layer.part = self.part
        layer.is_last = is_last
        if not is_last:
            self._columns.append((name, layer))
        elif entry.split == "vocabulary" and self._keeps_logits:
            self._hand_to_task(width)
        else:
            layer.widths = self._widths(width)

    def _cut_row(self, model: nn.Module, name: str, layer: Any, form: MatrixForm) -> None:
        """Divide the inputs of a layer, which are the outputs of the column layers before it."""
        width: int = getattr(layer, form.num_inputs)
        if width % self.part.size:
            reason = f"its {width} inputs cannot be divided over {self.part.size} ranks"
            self._refuse(name, reason, "leave it and its column layers out")
        if not self._columns:
            reason = "no column layer stands before this row layer"
            self._refuse(name, reason, "name its column layers as well")
        self._divide(name, layer.weight, Split(form.inputs, (width,)))
        layer.__class__ = form.row
        setattr(layer, form.num_inputs, layer.weight.shape[form.inputs])
        assert isinstance(layer, RowLayer)
        layer.part = self.part
        names = [name]
        names += [column for column, _ in self._columns]
        # The module around these layers ends the part when it has run, also by an error: a layer
        # that is computed again may stop in between.
        model.get_submodule(_innermost_parent(names)).register_forward_hook(
            self.part.end, always_call=True
        )
        self._columns.clear()

    def _cut_embedding(self, model: nn.Module, name: str, module: nn.Embedding, kind: str) -> None:
        """Divide the rows of an embedding over the ranks, by tokens."""
        size = module.num_embeddings
        if kind != "vocabulary":
            self._refuse(name, f"an embedding cannot be split as {kind}", "write vocabulary")
        has_options = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
        if size < self.part.size or has_options:
            reason = "an embedding with max_norm, sparse or scale_grad_by_freq stays whole"
            self._refuse(name, reason, "leave it out")
        assert self._known is not None
        is_head = name in self._known.heads
        if is_head and not isinstance(module, TokenEmbedding):
            if self._known.is_own:
                return  # stays whole
            reason = "a later layer uses its weight as the output layer, and would have a part"
            self._refuse(name, reason, "leave it out")
        self._divide(name, module.weight, Split(0, (size,)))
        part = VocabularyPart(self.part, self._widths(size), joins=not self._keeps_logits)
        if isinstance(module, TokenEmbedding):
            module.vocabulary = part
            if self._keeps_logits and is_head:
                self._hand_to_task(size)
        else:
            self._divide_look_up(name, module, part)
        module.num_embeddings = part.size

    def _divide_look_up(self, name: str, module: nn.Embedding, part: VocabularyPart) -> None:
        """Have an embedding look tokens up in all ranks' parts; if it has a forward of its own,
        such as one that scales the vectors, inside of that forward.
        """
        kind = type(module)
        look_ups = _LookUps()
        if kind.forward is nn.Embedding.forward:
            module.__class__ = VocabularyEmbedding
        else:
            # Its `super().forward` is the divided one then.
            bases = (kind, VocabularyEmbedding)
            module.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
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
        """Return the number of rows, or columns, of each rank."""
        split = Split(0, (width,))
        widths = []
        for rank in range(self.part.size):
            for begin, end in split.bounds(rank, self.part.size):
                widths.append(end - begin)
        return widths

    def _divide(self, name: str, weight: torch.Tensor, split: Split) -> None:
        """Leave this rank's part in a weight; refuse one that was divided otherwise before."""
        known = vars(weight).get("split")
        if known not in (None, split):
            self._refuse(
                name,
                "it shares a weight with a layer that is divided otherwise",
                "divide both alike",
            )
        if known is None:
            weight.data = split.part(weight.data, self.part.rank, self.part.size).clone()
            # `tensor_model_parallel` is for DeepSpeed's norms: of a weight without it they count
            # one rank's copy alone.
            vars(weight).update(split=split, tensor_model_parallel=True)

    def _copy_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy the first argument of a module for the group, as a hook (`TensorPart.copy`)."""
        if args:
            return (self.part.copy(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, kwargs | {first: self.part.copy(kwargs[first])}

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of a gradient over the group, as a hook. Collective."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.part.group)
        return total

    def _refuse_other_users(self, modules: Mapping[str, nn.Module]) -> None:
        """Refuse modules that the plan leaves whole, and that share a weight with a cut one."""
        for name, module in modules.items():
            for weight_name, weight in module.named_parameters(recurse=False):
                if "split" in vars(weight) and id(module) not in self._cut:
                    reason = (
                        f"its {weight_name} is that of a layer that is divided, and the plan "
                        "leaves it whole"
                    )
                    self._refuse(name, reason, "divide both: an embedding as vocabulary")

    def _refuse(self, name: str, reason: str, fix: str) -> NoReturn:
        raise ConfigError.of("tensor-plan", f"{name}: {reason}", fix, PLAN_KEY, name)


class _LookUps:
    """Stands in for a `VocabularyPart`, and counts its calls."""

    number = 0

    def look_up(
        self, tokens: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None
    ) -> torch.Tensor:
        self.number += 1
        return weight.new_zeros(*tokens.shape, weight.shape[1])


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p for module in model.modules())


def _innermost_parent(names: Sequence[str]) -> str:
    """Return the name of the innermost module that holds all of these modules."""
    parents = [name.split(".")[:-1] for name in names]
    common = [parts[0] for parts in zip(*parents, strict=False) if len(set(parts)) == 1]
    while common and not all(parts[: len(common)] == common for parts in parents):
        common.pop()
    return ".".join(common)
