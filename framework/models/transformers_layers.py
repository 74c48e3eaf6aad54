"""Layers of a causal language model of transformers (5.0 and later), for the stages of a pipeline.

The model names its embedding, its decoder layers and its norm itself (`base_model_pp_plan`). What
a decoder layer gets beside hidden vectors (masks, rotary positions) is found by the model's own
`forward()`: it runs on a copy without weights, in which each decoder layer notes what it is called
with. What `forward()` makes of logits (a scale, a cap, the loss) is found in the same way.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only

from framework.errors import ConfigError
from framework.models.layers import AroundLayers, Layer

_TIE: Final = "embedding"  # key of an embedding that is the output layer, too
# Of the comparison of the layers with `forward()`: samples and positions that are computed, and
# the largest difference as a part of the largest logit.
_FEW_SAMPLES: Final = 2
_FEW_POSITIONS: Final = 16
_ROUNDING: Final = 1e-3


@dataclass(frozen=True)
class Beside:
    """What goes from layer to layer of a stage beside hidden vectors.

    Attributes:
        inputs: the model's inputs beside its tokens, in the order of `TransformersLayers.names`.
        calls: arguments of each decoder layer after the first, and its named ones.
    """

    inputs: tuple[Tensor, ...]
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]


class _Noting(nn.Module):
    """Stands in the place of a decoder layer, with its attributes, and notes its arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, nn.Module):
                setattr(self, name, value)
        self.noted: tuple[Tensor, tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        self.noted = (hidden_states, args, named)
        return hidden_states


class _Given(nn.Module):
    """Stands in the place of all below the output layer, and returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.value)


class TransformersLayers:
    """The layers of a model, and what it does around them.

    Attributes:
        names: of the model's inputs that the stages get, in their order; the tokens first.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        """Take a model apart; `inputs` are of one batch.

        Raises:
            ConfigError: kind ``model-not-layered``.
        """
        self._model = model
        self._base: Any = model.base_model
        self._embedding, self._decoders, self._norm = _parts(model)
        self._head: Any = self._model.get_output_embeddings()
        self._is_tied = self._head.weight is self._embedding.weight
        self.names = _input_names(model, self._base, inputs)
        self._name_of = {id(module): name for name, module in model.named_modules()}
        self._below: dict[torch.device, Any] = {torch.device("cpu"): self._without_weights()}
        self._above, self._given = self._without_layers()

    def layers(self) -> list[Layer]:
        """Return embedding, decoder layers, norm and output layer, with their weights."""
        tied = _TIE if self._is_tied else ""
        layers = [self._layer(self._embedding, self._embed, tied=tied)]
        for number, decoder in enumerate(self._decoders):
            layers.append(self._layer(decoder, partial(self._decode, number)))
        layers.append(self._layer(self._norm, _normalise))
        call = self._tied_logits if self._is_tied else self._logits
        name = self._name_of[id(self._head)]
        module = self._embedding if self._is_tied else self._head
        layers.append(Layer(name, lambda: module, call=call, tied=tied, is_built=True))
        return layers

    def around(self) -> AroundLayers:
        """Return what the model does around its layers."""
        return AroundLayers(
            set_mode=None, enter=self._enter, leave=_leave, order=self.in_order, judge=self.judge
        )

    def in_order(self, inputs: Any) -> Any:
        """Return the tokens of a batch, or a tuple of them and what is read beside them. Masks
        become integers, which can be sent.
        """
        if not isinstance(inputs, Mapping):
            return inputs
        found = tuple(_sendable(inputs[name]) for name in self.names)
        if len(found) == 1:
            return found[0]
        return found

    def judge(self, logits: Tensor, labels: Tensor) -> Any:
        """Return the model's outputs, among them the loss that it makes of logits and labels."""
        return self._outputs_of(logits, labels=labels)

    def refuse_other_logits(self, inputs: Any) -> None:
        """Refuse a model if the layers, one after the other, give other logits than `forward()`.

        Raises:
            ConfigError: kind ``layers-differ-from-forward``.
        """
        few = _few(_as_tuple(inputs))
        was_training = [module for module in self._model.modules() if module.training]
        config = self._model.config
        had_cache = getattr(config, "use_cache", False)
        config.use_cache = False  # with a cache, transformers' masks ignore the positions
        self._model.eval()
        try:
            with torch.no_grad():
                named = dict(zip(self.names, few, strict=True))
                expected = _logits_in(self._model(**named))
                value: Any = few if len(few) > 1 else few[0]
                for layer in self.layers():
                    value = layer.apply(layer.build(), value)
        finally:
            config.use_cache = had_cache
            for module in was_training:
                module.training = True
        largest = float(expected.abs().max())
        difference = float((expected - value).nan_to_num().abs().max())
        if difference <= _ROUNDING * largest:
            return
        raise ConfigError.of(
            "layers-differ-from-forward",
            "its embedding, decoder layers, norm and output layer, one after the other, do not "
            f"give what its forward() gives: logits differ by up to {difference:.1e}, and the "
            f"largest is {largest:.1e}",
            "set parallel.pipe: 1",
            "model",
            type(self._model).__name__,
        )

    def _layer(self, module: nn.Module, call: Any, *, tied: str = "") -> Layer:
        name = self._name_of[id(module)]
        return Layer(name, lambda: module, call=call, tied=tied, is_built=True)

    def _enter(self, value: Any) -> Any:
        """Find what decoder layers get beside hidden vectors; tokens stay as they are."""
        values = _as_tuple(value)
        hidden = values[0]
        if not hidden.is_floating_point():
            return value
        return hidden, self._beside(hidden, values[1:])[1]

    def _embed(self, module: nn.Module, value: Any) -> tuple[Tensor, Beside]:
        values = _as_tuple(value)
        return self._beside(module(values[0]), values[1:])

    def _beside(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Beside]:
        """Return what the first decoder layer gets of embedded tokens, and what all of them get
        beside hidden vectors.
        """
        if hidden.device.type == "meta":
            return hidden, self._beside_on_meta(hidden, inputs)
        below = self._below.get(hidden.device)
        if below is None:
            shared = {id(self._base.config): self._base.config}
            on_host = self._below[torch.device("cpu")]
            below = self._below[hidden.device] = copy.deepcopy(on_host, shared).to(hidden.device)
        below.train(self._embedding.training)
        named = dict(zip(self.names[1:], inputs, strict=False))  # of zeros there are none
        below(inputs_embeds=hidden, use_cache=False, **named)
        notes = []
        for decoder in _noting(below):
            notes.append(decoder.noted)
            decoder.noted = None
        return notes[0][0], Beside(inputs, tuple(note[1:] for note in notes))

    def _beside_on_meta(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> Beside:
        """Return the same for tensors without numbers: masks are made by reading numbers, so here
        by reading zeros on the host.
        """
        zeros = torch.zeros(hidden.shape, dtype=hidden.dtype)
        beside = self._beside(zeros, ())[1]
        calls = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), beside.calls)
        return Beside(inputs, calls)

    def _decode(self, number: int, module: nn.Module, value: Any) -> tuple[Tensor, Beside]:
        hidden, beside = value
        args, named = beside.calls[number]
        output = module(hidden, *args, **named)
        if isinstance(output, tuple):
            output = output[0]
        return output, beside

    def _logits(self, module: nn.Module, value: Any) -> Tensor:
        return _logits_in(self._outputs_of(module(_hidden(value))))

    def _tied_logits(self, module: nn.Module, value: Any) -> Tensor:
        weight: Any = module.weight
        return _logits_in(self._outputs_of(linear(_hidden(value), weight)))

    def _outputs_of(self, logits: Tensor, **named: Any) -> Any:
        """Return what `forward()` makes of the products of its output layer."""
        self._given.value = logits
        try:
            return self._above(input_ids=None, **named)
        finally:
            self._given.value = None

    def _without_weights(self) -> nn.Module:
        """Return the part below the output layer with layers that note their arguments.

        Raises:
            ConfigError: kind ``model-not-layered``: it has further weights.
        """
        memo: dict[int, Any] = {id(self._base.config): self._base.config}
        for decoder in self._decoders:
            memo[id(decoder)] = _Noting(decoder)
        memo[id(self._embedding)] = nn.Identity()
        memo[id(self._norm)] = nn.Identity()
        below: nn.Module = copy.deepcopy(self._base, memo)
        weights = [name for name, _ in below.named_parameters()]
        if weights:
            raise _refusal(
                self._model, f"its forward() uses {weights[0]} beside the layers that it names"
            )
        from framework.models.packed_transformers import attends_in_packed_rows, find_texts

        if attends_in_packed_rows(self._model):
            find_texts(below)
        return below

    def _without_layers(self) -> tuple[Any, _Given]:
        """Return the model with what it is given in the place of its output layer's products."""
        given = _Given()
        memo: dict[int, Any] = {
            id(self._model.config): self._model.config,
            id(self._base): given,
            id(self._head): nn.Identity(),
        }
        above: nn.Module = copy.deepcopy(self._model, memo)
        weights = [name for name, _ in above.named_parameters()]
        if weights:
            raise _refusal(self._model, f"its forward() uses {weights[0]} beside its output layer")
        return above, given


def _noting(below: nn.Module) -> list[Any]:
    return [module for module in below.modules() if isinstance(module, _Noting)]


def _parts(model: Any) -> tuple[Any, Any, Any]:
    """Return the embedding, the decoder layers and the norm of a model of transformers.

    Raises:
        ConfigError: kind ``model-not-layered``.
    """
    base = model.base_model
    if base is model:
        raise _refusal(model, "it has no output layer of tokens")
    plan = getattr(base.config, "base_model_pp_plan", None) or {}
    named = {name: getattr(base, name, None) for name in plan}
    lists = [module for module in named.values() if isinstance(module, nn.ModuleList)]
    others = [module for module in named.values() if not isinstance(module, nn.ModuleList)]
    if len(lists) != 1 or len(others) != 2 or None in others:
        raise _refusal(model, "it names no embedding, decoder layers and norm for pipelines")
    embedding, norm = others
    if not isinstance(embedding, nn.Embedding) or not len(lists[0]):
        raise _refusal(model, "it begins with no embedding of tokens")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise _refusal(model, "it has no output layer of tokens")
    if getattr(base.config, "output_router_logits", False):
        raise _refusal(model, "the losses of its routers are made of all its layers at once")
    return embedding, lists[0], norm


def _refusal(model: Any, reason: str) -> ConfigError:
    fix = "take a causal language model with decoder layers alone, or set parallel.pipe: 1"
    return ConfigError.of("model-not-layered", reason, fix, "model", type(model).__name__)


def _input_names(model: nn.Module, base: nn.Module, inputs: Any) -> tuple[str, ...]:
    """Return the names of the inputs that are read below the output layer, the tokens first."""
    taken = list(inspect.signature(base.forward).parameters)
    if not isinstance(inputs, Mapping):
        given = list(inspect.signature(model.forward).parameters)
        return tuple(given[: len(_as_tuple(inputs))])
    names = [name for name in inputs if name in taken and name != "input_ids"]
    return tuple(["input_ids"] + names)  # noqa: RUF005


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _few(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a part of the inputs of a batch: all of them where they have not one shape."""
    if any(tensor.shape != inputs[0].shape for tensor in inputs):
        return inputs
    return tuple(tensor[:_FEW_SAMPLES, :_FEW_POSITIONS] for tensor in inputs)


def _hidden(value: Any) -> Tensor:
    """Return hidden vectors without what goes beside them."""
    hidden: Tensor = _as_tuple(value)[0]
    return hidden


def _normalise(module: nn.Module, value: Any) -> Tensor:
    normalised: Tensor = module(_hidden(value))
    return normalised


def _leave(value: Any) -> Any:
    """Return what a stage sends: hidden vectors, and the inputs that later stages need."""
    if not isinstance(value, tuple):
        return value
    hidden, beside = value
    if not beside.inputs:
        return hidden
    return (hidden,) + beside.inputs  # noqa: RUF005


def _sendable(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value.long()
    return value


def _logits_in(outputs: Any) -> Tensor:
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits
