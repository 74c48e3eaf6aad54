"""`StagesModule`: DeepSpeed's `PipelineModule`, cut where it is told, each layer built under its own seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from framework.checkpoint.state.optimizer_shards import Names, names_of
from framework.checkpoint.state.shard_map import plain_name
from framework.models.layers import Layer
from framework.models.recompute import recompute
from framework.plan.balance import Bounds

Adapt = Callable[[torch.nn.Module, str, Any], torch.nn.Module]
"""Changes a layer's module after it was built: (module, name of the layer, process group of the ranks that run the same
stage).
"""


class _Spec(LayerSpec):  # type: ignore[misc]
    """A layer that is built under its own seed."""

    def __init__(self, layer: Layer, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__(torch.nn.Module)
        self.layer, self._make = layer, make

    def build(self, log: bool = False) -> torch.nn.Module:
        return self._make()


class _TiedSpec(TiedLayerSpec):  # type: ignore[misc]
    """A layer that shares its weights with layers of other stages. All of them are built as the first one is."""

    def __init__(self, layer: Layer, first: _Spec) -> None:
        super().__init__(layer.tied, torch.nn.Module, forward_fn=layer.call, tied_weight_attr=list(layer.tied_weights))
        self._first = first

    def build(self, log: bool = False) -> torch.nn.Module:
        return self._first.build()


class StagesModule(PipelineModule):  # type: ignore[misc]
    """A PipelineModule that is cut where it is told."""

    def __init__(self, layers: Sequence[Layer], *, bounds: Bounds, seed: int, adapt: Adapt, **options: Any) -> None:
        self._given_bounds, self._seed, self._adapt, self._layers = list(bounds), seed, adapt, tuple(layers)
        super().__init__(
            layers=self._specs(layers),
            num_stages=len(bounds) - 1,
            activation_checkpoint_func=self._recompute,
            **options,
        )

    def _specs(self, layers: Sequence[Layer]) -> list[LayerSpec]:
        firsts: dict[str, _Spec] = {}
        specs: list[LayerSpec] = []
        for number, layer in enumerate(layers):
            spec = _Spec(layer, partial(self._make, layer, number))
            specs.append(_TiedSpec(layer, firsts.setdefault(layer.tied, spec)) if layer.tied else spec)
        return specs

    def _make(self, layer: Layer, number: int) -> torch.nn.Module:
        """Called while PipelineModule builds this stage, when its process groups exist."""
        return self._adapt(layer.make(number, seed=self._seed), layer.name, self._grid.get_data_parallel_group())

    def forward(self, forward_input: Any) -> Any:
        """What crosses to the next stage must be contiguous; a transposed view is not."""
        return _contiguous(super().forward(forward_input))

    def plain_names(self) -> Names:
        """Names in the plain module of what this stage holds."""
        first = {layer.tied: layer.name for layer in reversed(self._layers) if layer.tied}
        return names_of(self, partial(plain_name, layers=[layer.name for layer in self._layers], tied_keys=first))

    def _recompute(self, run: Callable[..., Any], *values: Any) -> Any:
        """Instead of DeepSpeed's own function, under which batch norms count every batch twice."""
        return recompute(run, *values, modules=self.modules)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._given_bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return tuple(map(_contiguous, value)) if type(value) is tuple else value
