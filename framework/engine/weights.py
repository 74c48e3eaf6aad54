"""Weights under the names of the plain module: read from a checkpoint or an export, and loaded into
a model.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import deepspeed
import torch
import torch.distributed

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import explaining_storage_errors, newest_at
from framework.checkpoint.state.tensor_split import part_of
from framework.checkpoint.state.weight_parts import whole_shape
from framework.errors import ConfigError, StorageError, in_one_line, show_value

if TYPE_CHECKING:
    from framework.checkpoint.state.weight_files import LazyWeights
    from framework.models.survey import Surveyed

_KEY: Final = "checkpoint.init_weights"
_FILES: Final = (".pt", ".pth", ".bin")


def find_weights(
    path: str, *, allow_unverified: bool = False, model: Any = None
) -> LazyWeights | SavedCheckpoint:
    """Find the weights that `checkpoint.init_weights` names: an export, a file that `torch.save`
    made, or a checkpoint.

    A checkpoint, the newest one of a run folder, is only found: nothing of it may be read before it
    is verified. For `model`, a section of a shipped model, transformers' names become the shipped
    model's.

    Raises:
        ConfigError: there is nothing of that kind, or a checkpoint without a manifest that is not
            allowed.
        StorageError: the files are damaged.
    """
    from framework.checkpoint.state.weight_files import PICKLED, is_exported, read_exported

    place = Path(path)
    with explaining_storage_errors(_KEY, path):
        if is_exported(place):
            return _renamed(read_exported(place), model)
        file = place
        for name in (PICKLED, "pytorch_model.bin"):
            if (place / name).is_file():
                file = place / name
                break
        if file.suffix in _FILES and file.is_file():
            return _renamed(_read_file(file), model)
    checkpoint = newest_at(path, key=_KEY, allow_unverified=allow_unverified)
    if checkpoint is None:
        if place.exists():
            reason = "there is no finished checkpoint and no file of weights"
        else:
            reason = "there is nothing at that path"
        fix = (
            "name a .../global_step<N> folder, a run folder, an export, or a .safetensors or "
            ".pt file"
        )
        raise ConfigError.of("weights-not-found", reason, fix, _KEY, path)
    return checkpoint


def _renamed(weights: LazyWeights, model: Any) -> LazyWeights:
    """Return weights under the names of a shipped model, if `model` is the section of one and they
    do not have them yet.
    """
    from framework.checkpoint.huggingface import form_of
    from framework.checkpoint.state.weight_files import as_ours

    form = form_of(model)
    if form is None or "embed.weight" in weights.shapes:
        return weights
    return as_ours(weights, form)


def checkpoint_weights(
    checkpoint: SavedCheckpoint, *, average: bool = False, damage: Sequence[str] | None = None
) -> LazyWeights:
    """Return the weights of a checkpoint, or their moving average, on the CPU, each under all its
    names; in fp32 if the checkpoint has them.

    `damage` is the result of an earlier verification of its files; without one they are verified
    now.

    Raises:
        ConfigError: no moving average was kept; or it holds adapters alone.
        StorageError: the files are damaged or missing, or hold more than weights.
    """
    from framework.checkpoint.state.reader import MergedWeights
    from framework.checkpoint.state.weight_files import LazyWeights

    if checkpoint.has_adapters:
        reason = "it holds adapters, and not the weights that they belong to"
        fix = "name an export of it"
        raise ConfigError.of("weights-are-adapters", reason, fix, _KEY, str(checkpoint.path))
    merged = MergedWeights(checkpoint, average=average, damage=damage)
    first_names = {name: name for name in merged} | dict(merged.ties)
    shapes = {name: merged.stored[first].shape for name, first in first_names.items()}
    readers = {name: partial(merged.__getitem__, first) for name, first in first_names.items()}
    return LazyWeights(shapes, readers)


def put_weights(
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    source: str,
    tensor_group: Any = None,
) -> None:
    """Load weights into a whole model, partitioned by ZeRO-3 or not; into a model that a tensor
    group shares, each rank's parts of them. Collective.

    Raises:
        ConfigError: names or shapes differ; nothing was changed.
    """
    from framework.checkpoint.state.weight_files import shapes_of

    shapes = shapes_of(weights)
    expected = _expected_shapes(model, shapes)
    _refuse_differences(expected, weights, source=source)
    for module_name, module in model.named_modules():
        spread = [tensor for _, tensor in _own_tensors(module) if hasattr(tensor, "ds_id")]
        # Module by module: no more than one module's weights are ever whole on a device.
        with (
            deepspeed.zero.GatheredParameters(spread, modifier_rank=0, enabled=bool(spread)),
            torch.no_grad(),
        ):
            for name, tensor in _own_tensors(module):
                full_name = f"{module_name}.{name}".lstrip(".")
                if gives(tensor) and full_name in shapes:
                    load_part(tensor, weights[full_name], tensor_group)


def needed_shapes(
    tensors: Mapping[str, torch.Tensor], held: Collection[str]
) -> dict[str, torch.Size]:
    """Return the whole shapes of a model's tensors, by name. Of one with several names those that
    are `held` are enough.
    """
    present = {id(tensor) for name, tensor in tensors.items() if name in held}
    shapes: dict[str, torch.Size] = {}
    for name, tensor in tensors.items():
        if name in held or id(tensor) not in present:
            shapes[name] = whole_shape(tensor)
    return shapes


def _expected_shapes(
    model: torch.nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Size]:
    """Return the shapes that weights for a model have, by name. Of tied weights one name is enough;
    experts of other ranks are expected as they are.
    """
    from framework.models.experts import is_elsewhere

    expected = needed_shapes(model.state_dict(keep_vars=True), shapes)
    elsewhere = is_elsewhere(model)
    for name, shape in shapes.items():
        if elsewhere(name):
            expected[name] = shape
    return expected


def load_part(tensor: torch.Tensor, weight: torch.Tensor, tensor_group: Any) -> None:
    """Copy a whole weight, or this rank's part if a group divides it, into a tensor."""
    rank = 0
    size = 1
    if tensor_group is not None:
        rank = torch.distributed.get_rank(tensor_group)
        size = torch.distributed.get_world_size(tensor_group)
    part = part_of(tensor, tensor_rank=rank, tensor_size=size)
    if part is not None:
        weight = part.of(weight)
    tensor.copy_(weight)


def gives(tensor: Any) -> bool:
    """Check whether what this rank writes into a weight counts: of those that ZeRO-3 has cut up,
    the first rank of the group spreads what it holds (`deepspeed.zero.GatheredParameters`,
    `modifier_rank` 0).
    """
    return not hasattr(tensor, "ds_id") or torch.distributed.get_rank(tensor.ds_process_group) == 0


def describe_base(
    model: torch.nn.Module,
    source: str | None,
    *,
    plain_name: Callable[[str], str] = str,
    is_stage: bool = False,
) -> dict[str, Any]:
    """Identify the frozen weights under adapters, for manifests: by their `source`, None for drawn
    weights, and their fingerprint. Collective.

    Of a pipeline's stage, `is_stage`, all ranks put theirs together.
    """
    from framework.engine.fingerprint import fingerprint

    def gathered(weights: list[torch.nn.Parameter]) -> Any:
        spread = [weight for weight in weights if hasattr(weight, "ds_id")]
        return deepspeed.zero.GatheredParameters(spread, enabled=bool(spread))

    sha256, by_name = fingerprint(model, gathered, plain_name=plain_name, is_stage=is_stage)
    base = {"init_weights": source, "sha256": sha256}
    if by_name != sha256:
        base["sha256_by_name"] = by_name
    return base


def is_base(sha256: str, base: Mapping[str, Any]) -> bool:
    """Check whether a noted fingerprint is that of these frozen weights, `base`, as `describe_base`
    describes them; earlier releases counted tied weights by each of their names.
    """
    return sha256 in (base["sha256"], base.get("sha256_by_name"))


def refuse_other_base(checkpoint: SavedCheckpoint, base: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with adapters that were trained on other frozen weights.

    Raises:
        ConfigError: kind ``base-differs``.
    """
    saved = checkpoint.manifest.get("base")
    if saved is not None and not is_base(saved["sha256"], base):
        drawn = "weights drawn from run.seed"
        before = saved["init_weights"] or drawn
        now = base["init_weights"] or drawn
        reason = (
            f"the adapters in {checkpoint.path} were trained on other frozen weights "
            f"({before}), or in another precision"
        )
        fix = "name the same weights, and precision.dtype as it was"
        raise ConfigError.of("base-differs", reason, fix, _KEY, now)


def refuse_other_layers(
    weights: Mapping[str, torch.Tensor], layers: Sequence[Surveyed], *, source: str
) -> None:
    """Refuse weights of other names or shapes than all layers of a pipeline have, on every rank: a
    stage that failed alone would leave the others waiting.

    Raises:
        ConfigError: kind ``weights-differ``.
    """
    shapes: dict[str, torch.Size] = {}
    ties: set[str] = set()
    for surveyed in layers:
        layer = surveyed.layer
        if layer.tied not in ties:  # later ones have no weights of their own
            for name, shape in surveyed.state.items():
                shapes[f"{layer.name}.{name}"] = shape
        if layer.tied:
            ties.add(layer.tied)
    _refuse_differences(shapes, weights, source=source)


def put_layer_weights(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, layer: str
) -> torch.nn.Module:
    """Load the weights of one layer, which `refuse_other_layers` let pass, into its module."""
    with torch.no_grad():
        from framework.checkpoint.state.weight_files import shapes_of

        shapes = shapes_of(weights)
        for name, tensor in module.state_dict().items():
            full_name = f"{layer}.{name}"
            if full_name in shapes:
                tensor.copy_(weights[full_name])
    return module


def _read_file(file: Path) -> LazyWeights:
    """Read a state dict of tensors, without running anything in the file."""
    from framework.checkpoint.state.weight_files import LazyWeights

    try:
        # Mapped, so that the ranks of a host share one copy; torch's format before 1.6 cannot be.
        is_mapped = zipfile.is_zipfile(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        reason = "it holds Python objects, which could be programs, or is cut off"
        raise _not_read(file, reason) from error
    except Exception as error:
        raise _not_read(file, in_one_line(error)) from error
    if not isinstance(content, Mapping):
        raise _not_read(file, f"it holds a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise _not_read(file, f"its {show_value(name)} is no tensor")
    shapes = {name: tensor.shape for name, tensor in content.items()}
    readers = {name: partial(content.__getitem__, name) for name in shapes}
    return LazyWeights(shapes, readers)


def _not_read(file: Path, reason: str) -> StorageError:
    return StorageError(
        f"{file}: not a file of weights: {reason}; write it with torch.save(model.state_dict(), "
        "...) [weights-not-read]"
    )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights and the saved buffers of a module without its submodules, by name."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _refuse_differences(
    expected: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor], *, source: str
) -> None:
    """Refuse weights of other names or shapes than expected; the names in their `lacks` may be
    missing.
    """
    from framework.checkpoint.state.weight_files import shapes_of

    reason = _difference(expected, shapes_of(weights), may_lack=getattr(weights, "lacks", ()))
    if reason:
        fix = "name weights of the same model"
        raise ConfigError.of("weights-differ", reason, fix, _KEY, source)


def _difference(
    expected: Mapping[str, torch.Size],
    shapes: Mapping[str, torch.Size],
    *,
    may_lack: Collection[str],
) -> str:
    """Return the first difference of names or shapes, as a reason; empty if there is none."""
    missing = sorted(expected.keys() - shapes.keys() - set(may_lack))
    if missing:
        more = ""
        if len(missing) > 1:
            more = f" and {len(missing) - 1} more"
        return f"it lacks {missing[0]}{more}"
    extra = sorted(shapes.keys() - expected.keys())
    if extra:
        more = ""
        if len(extra) > 1:
            more = f", and {len(extra) - 1} more"
        return f"it has {extra[0]}, which the model has not{more}"
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            there = tuple(shapes[name])
            return f"{name} has shape {there} there and {tuple(shape)} in the model"
    return ""
