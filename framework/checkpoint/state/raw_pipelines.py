"""The layers of a pipeline's checkpoint that DeepSpeed wrote by itself, as a manifest describes
them.

DeepSpeed (0.19.8, pipe/module.py `save_state_dict`) writes a file for every layer with a state,
``layer_03-model_states.pt``, and a file for every stage. A tied module lies in the file of each of
its layers that have no `forward_fn`; the optimizer has it as ``tied_modules.<key>.weight``. Layers
bear numbers, and so do their weights here: ``3.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from framework.checkpoint.names import MODEL_FILE
from framework.checkpoint.state.stored import CheckpointFiles

_LAYER: Final = re.compile(r"layer_(?P<number>\d{1,6})-(?:model_(?P<rank>\d+)-)?model_states\.pt")
_TIED: Final = "tied_modules."


def layer_files(files: CheckpointFiles) -> dict[int, str]:
    """Map the number of each layer with a file to the file.

    Raises:
        ValueError: tensor ranks share the layers.
    """
    found: dict[int, str] = {}
    for path in files.folder.iterdir():
        match = _LAYER.fullmatch(path.name)
        if match is None:
            continue
        number = int(match["number"])
        if number in found or int(match["rank"] or 0) > 0:
            raise ValueError(f"tensor ranks share layer {number}, cut in a way that no file has")
        found[number] = path.name
    return dict(sorted(found.items()))


def describe_pipeline(files: CheckpointFiles, *, stages: int) -> dict[str, Any]:
    """Return what a manifest has of a pipeline: the names of its layers, those that share the
    weights of an earlier one, and the layer of each key of a tie.

    Raises:
        ValueError: files of layers or stages are missing, a key belongs to several layers, or it is
            no pipeline's.
    """
    by_number = layer_files(files)
    shapes = _stepped_shapes(files, stages=stages)
    stepped = {int(name.partition(".")[0]) for name in shapes if not name.startswith(_TIED)}
    missing = sorted(stepped - by_number.keys())
    if missing:
        raise ValueError(f"there is no file of layer {missing[0]}")
    count = max(by_number, default=-1) + 1
    tied_keys: dict[str, str] = {}
    repeated: list[str] = []
    unstepped = {number: file for number, file in by_number.items() if number not in stepped}
    for key, weights in _weights_of_ties(shapes).items():
        layers = [number for number, file in unstepped.items() if _has_shapes(files[file], weights)]
        layers = _alike(files, by_number, layers, key)
        tied_keys[key] = str(layers[0])
        repeated += map(str, layers[1:])
    return {
        "layers": [str(number) for number in range(count)],
        "files": {str(number): file for number, file in by_number.items()},
        "tied": repeated,
        "tied_keys": tied_keys,
    }


def _stepped_shapes(files: CheckpointFiles, *, stages: int) -> dict[str, torch.Size]:
    """Return the shapes of the weights that optimizers of all stages step, by DeepSpeed's names;
    empty at stage 0, where no file has names.
    """
    names = {stage: name for (_, stage), name in files.named(MODEL_FILE).items()}
    shapes: dict[str, torch.Size] = {}
    for stage in range(stages):
        if stage not in names:
            raise ValueError(f"there is no file of stage {stage}")
        content = files[names[stage]]
        if content["module"] is not None:
            raise ValueError("it has files of layers, and a module of its own beside them")
        for group in content["param_shapes"] or ():
            shapes.update(group)
    return shapes


def _weights_of_ties(shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, torch.Size]]:
    """Return the shapes of each tie's weights: key -> name within the module -> shape. A key has no
    dot, as the key of an `nn.ModuleDict`.
    """
    ties: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        if name.startswith(_TIED):
            key, _, weight = name.removeprefix(_TIED).partition(".")
            ties.setdefault(key, {})[weight] = shape
    return ties


def _has_shapes(content: Mapping[str, Any], weights: Mapping[str, torch.Size]) -> bool:
    """Check whether a layer's file has these weights."""
    return all(name in content and content[name].shape == weights[name] for name in weights)


def _alike(
    files: CheckpointFiles, by_number: Mapping[int, str], layers: list[int], key: str
) -> list[int]:
    """Return the layers of a tie: they have the same numbers.

    Raises:
        ValueError: there is none, since each has a `forward_fn`, or layers of another tie have
            weights of the same shapes.
    """
    if not layers:
        raise ValueError(
            f"no file has the weights tied as {key}: each of its layers has a forward_fn, and "
            "DeepSpeed writes only layers without one"
        )
    first = files[by_number[layers[0]]]
    for number in layers[1:]:
        other = files[by_number[number]]
        if not all(torch.equal(tensor, other[name]) for name, tensor in _tensors(first)):
            raise ValueError(f"layers {layers[0]} and {number} may both be those tied as {key}")
    return layers


def _tensors(content: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            yield name, value
