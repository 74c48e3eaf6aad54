"""``export --format torch_export`` and ``onnx``: the plain module as a program of `torch.export`,
or as a file of ONNX that is made of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from framework.config.run_config import RunConfig
from framework.data.batches import collate, own_collate
from framework.data.splits import as_splits
from framework.errors import ConfigError, in_one_line, missing_package
from framework.models.layers import LayeredModel
from framework.setup.components import load_task
from framework.setup.user_code import call_factory
from framework.tasks.from_callable import as_task

PROGRAM: Final = "model.pt2"
ONNX: Final = "model.onnx"
# Largest difference of ONNX's outputs on the example from torch's, as a share of the largest value.
_ONNX_TOLERANCE: Final = 1e-5


@dataclass(frozen=True)
class _Exported:
    """A program, and the inputs that it was made with."""

    program: torch.export.ExportedProgram
    args: tuple[Any, ...]
    named: dict[str, Any]


def write_program(folder: Path, model: torch.nn.Module, config: RunConfig) -> dict[str, int]:
    """Write ``model.pt2`` of a module in evaluation mode; returns file -> bytes.

    Raises:
        ConfigError: torch cannot export the model; kind ``not-exportable``, with torch's reason.
    """

    def save(exported: _Exported) -> None:
        torch.export.save(exported.program, folder / PROGRAM)

    _export(model, config, save, file_format="torch_export")
    return {PROGRAM: (folder / PROGRAM).stat().st_size}


def refuse_without_onnx() -> None:
    """Raise a ConfigError, kind ``package-missing``, where torch's exporter to ONNX lacks a
    package.
    """
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise missing_package(name, what="--format onnx", extra="onnx")


def write_onnx(folder: Path, model: torch.nn.Module, config: RunConfig) -> dict[str, int]:
    """Write ``model.onnx`` of a module in evaluation mode; returns file -> bytes. Large weights lie
    beside it. Where onnxruntime is installed, it computes the example as torch does to 1e-5.

    Raises:
        ConfigError: kind ``not-exportable``, with the reason.
    """

    def save(exported: _Exported) -> None:
        made: Any = torch.onnx.export(exported.program, dynamo=True, verbose=False)
        made.save(folder / ONNX)
        if importlib.util.find_spec("onnxruntime") is not None:
            _compare_with_torch(folder / ONNX, model, exported)

    _export(model, config, save, file_format="onnx")
    written = sorted(folder.glob(f"{ONNX}*"))
    return {path.name: path.stat().st_size for path in written}


def _compare_with_torch(path: Path, model: torch.nn.Module, exported: _Exported) -> None:
    """Raise ArithmeticError if onnxruntime's outputs of the example are not torch's."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tensors = [*tree_leaves(exported.args), *tree_leaves(exported.named)]
    names = [each.name for each in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    with torch.no_grad():
        outputs = model(*exported.args, **exported.named)
    wanted = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    for found, value in zip(session.run(None, feed), wanted, strict=True):
        largest = float(value.abs().max().clamp(min=1.0))
        difference = float((torch.from_numpy(found) - value).abs().max())
        if not difference <= _ONNX_TOLERANCE * largest:
            raise ArithmeticError(f"onnxruntime's outputs differ by {difference:.1e} from torch's")


def _export(
    model: torch.nn.Module,
    config: RunConfig,
    save: Callable[[_Exported], None],
    *,
    file_format: str,
) -> None:
    """Make a program of a module, and save it.

    The example inputs are two samples of the run's data, as its task gives them to the model. The
    program takes another number of samples, and of tokens (batch, length) another length if the
    model allows it.

    Raises:
        ConfigError: torch cannot export the model; kind ``not-exportable``, with torch's reason.
    """
    args, named = _example(config, next(model.parameters()).dtype)
    is_layered = isinstance(model, LayeredModel)  # it takes named inputs by their order
    if is_layered:
        args += tuple(named.values())
        named = {}
    model_config = getattr(model, "config", config)
    if hasattr(model_config, "use_cache"):
        model_config.use_cache = False  # of transformers; a cache is no output of a program
    for dimensions in _dynamic_dimensions((args, named)):
        dynamic = dict.fromkeys(dimensions, torch.export.Dim.DYNAMIC)
        shapes: Any = tree_map_only(Tensor, lambda _, dynamic=dynamic: dynamic, named or args)
        if is_layered:
            shapes = {"inputs": shapes}
        try:
            with torch.no_grad():
                program = torch.export.export(model, args, named, dynamic_shapes=shapes)
            save(_Exported(program, args, named))
            return
        except Exception as error:  # torch raises a dozen classes
            first = in_one_line(error, longest=300).partition(". ")[0]
            exporter = "torch.onnx" if file_format == "onnx" else "torch.export"
            reason = f"{exporter} does not take {type(model).__name__}: {first}"
    fix = "export its weights: --format safetensors"
    raise ConfigError.of("not-exportable", reason, fix, "--format", file_format)


def _dynamic_dimensions(inputs: Any) -> list[tuple[int, ...]]:
    """Return the sets of dimensions that a program may leave open, the widest one first."""
    if all(_is_tokens(tensor) for tensor in tree_leaves(inputs)):
        return [(0, 1), (0,)]
    return [(0,)]


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point()


def _example(config: RunConfig, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named inputs of the model for two samples of the training data."""
    section = config.data
    if hasattr(section, "packing"):
        section = section.model_copy(update={"packing": False})
    dataset = as_splits(call_factory(section.factory(), key="data")).train
    make_batch = own_collate(dataset) or collate
    batch = make_batch([dataset[0], dataset[min(1, len(dataset) - 1)]])
    inputs, _ = as_task(load_task(config)).split(batch)

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    inputs = tree_map_only(Tensor, cast, inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}
