"""Weights alone, under the names in the plain module: out of a checkpoint or an export, and into a
model.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
import torch.distributed

from framework.checkpoint.huggingface import form_of
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import explaining_storage_errors, newest_at
from framework.checkpoint.state.reader import MergedWeights
from framework.checkpoint.state.tensor_split import split_of, whole_shape
from framework.checkpoint.state.weight_files import (
    PICKLED,
    LazyWeights,
    as_ours,
    is_exported,
    read_exported,
    shapes_of,
)
from framework.errors import ConfigError, StorageError, in_one_line, show_value
from framework.models.adapters import fingerprint
from framework.models.experts import is_elsewhere
from framework.models.survey import Surveyed

_KEY: Final = "checkpoint.init_weights"
_FILES: Final = (".pt", ".pth", ".bin")


def find_weights(
    path: str, *, allow_unverified: bool = False, model: Any = None
) -> LazyWeights | SavedCheckpoint:
    """The weights that `checkpoint.init_weights` names: an export, a file that `torch.save` made,
    or a checkpoint.

    The checkpoint, the newest one of a run folder, is found only: nothing of it may be read before
    it is verified. For `model`, a section of ours, transformers' names become ours.

    Raises:
        ConfigError: there is nothing of that kind, or a checkpoint without a manifest that is not
            allowed.
        StorageError: the files are damaged.
    """
    place = Path(path)
    with explaining_storage_errors(_KEY, path):
        if is_exported(place):
            return _named_as_ours(read_exported(place), model)
        file = next(
            (place / name for name in (PICKLED, "pytorch_model.bin") if (place / name).is_file()),
            place,
        )
        if file.suffix in _FILES and file.is_file():
            return _named_as_ours(_read_file(file), model)
    checkpoint = newest_at(path, key=_KEY, allow_unverified=allow_unverified)
    if checkpoint is None:
        if place.exists():
            found = "no finished checkpoint and no file of weights"
        else:
            found = "nothing at that path"
        fix = (
            "name a .../global_step<N> folder, a run folder, an export, or a .safetensors or "
            ".pt file"
        )
        raise ConfigError.of("weights-not-found", f"there is {found}", fix, _KEY, path)
    return checkpoint


def _named_as_ours(found: LazyWeights, model: Any) -> LazyWeights:
    form = form_of(model)
    if form is None or "embed.weight" in found.shapes:
        return found
    return as_ours(found, form)


def checkpoint_weights(
    checkpoint: SavedCheckpoint, *, average: bool = False, damage: Sequence[str] | None = None
) -> LazyWeights:
    """The weights of a checkpoint, or their moving average, on the CPU, each under all its names;
    fp32 where they are.

    `damage` is what was found where its files have been verified; otherwise they are now.

    Raises:
        ConfigError: no moving average was kept; or it holds adapters alone.
        StorageError: the files are damaged or missing, or hold more than weights.
    """
    if checkpoint.has_adapters:
        reason = "it holds adapters, and not the weights that they belong to"
        fix = "name an export of it"
        raise ConfigError.of("weights-are-adapters", reason, fix, _KEY, str(checkpoint.path))
    found = MergedWeights(checkpoint, average=average, damage=damage)
    names = {name: name for name in found} | dict(found.ties)
    shapes = {name: found.stored[first].shape for name, first in names.items()}
    return LazyWeights(
        shapes, {name: partial(found.__getitem__, first) for name, first in names.items()}
    )


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
    state = model.state_dict(keep_vars=True)
    held = shapes_of(weights)
    # of tied weights one name is enough
    named = {id(tensor) for name, tensor in state.items() if name in held}
    shapes = {
        name: whole_shape(one)
        for name, one in state.items()
        if name in held or id(one) not in named
    }
    elsewhere = is_elsewhere(model)
    others = {name: shape for name, shape in held.items() if elsewhere(name)}
    _refuse_differences(shapes | others, weights, source=source)
    for module_name, module in model.named_modules():
        gathered = [tensor for _, tensor in _own_tensors(module) if hasattr(tensor, "ds_id")]
        # Module by module: no more than one module's weights are ever whole on a device.
        with (
            deepspeed.zero.GatheredParameters(gathered, modifier_rank=0, enabled=bool(gathered)),
            torch.no_grad(),
        ):
            for name, tensor in _own_tensors(module):
                whole_name = f"{module_name}.{name}".lstrip(".")
                if not gives(tensor) or whole_name not in held:
                    continue
                own = weights[whole_name]
                split = split_of(tensor)
                if split:
                    place = (
                        torch.distributed.get_rank(tensor_group),
                        torch.distributed.get_world_size(tensor_group),
                    )
                    own = split.part(own, *place)
                tensor.copy_(own)


def gives(tensor: Any) -> bool:
    """Check whether what this rank writes into a weight counts: of those that ZeRO-3 has cut up,
    the first rank of the group spreads what it holds (`deepspeed.zero.GatheredParameters`,
    `modifier_rank` 0).
    """
    return not hasattr(tensor, "ds_id") or torch.distributed.get_rank(tensor.ds_process_group) == 0


def describe_base(model: torch.nn.Module, source: str | None) -> dict[str, Any]:
    """Identity of the frozen weights under adapters, as manifests have it: where they came from,
    `source`, None where they were drawn, and their fingerprint. Collective.
    """

    def gathered(weights: list[torch.nn.Parameter]) -> Any:
        cut = [weight for weight in weights if hasattr(weight, "ds_id")]
        return deepspeed.zero.GatheredParameters(cut, enabled=bool(cut))

    return {"init_weights": source, "sha256": fingerprint(model, gathered)}


def refuse_other_base(checkpoint: SavedCheckpoint, base: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose adapters were trained on other frozen weights.

    Raises:
        ConfigError: kind ``base-differs``.
    """
    saved = checkpoint.manifest.get("base")
    if saved is not None and saved["sha256"] != base["sha256"]:
        before, now = (
            one["init_weights"] or "weights drawn from run.seed" for one in (saved, base)
        )
        reason = (
            f"the adapters in {checkpoint.path} were trained on other frozen weights "
            f"({before}), or in another"
        )
        fix = "name the same weights, and precision.dtype as it was"
        raise ConfigError.of("base-differs", f"{reason} precision", fix, _KEY, now)


def refuse_other_layers(
    weights: Mapping[str, torch.Tensor], layers: Sequence[Surveyed], *, source: str
) -> None:
    """Refuse weights of other names or shapes than all layers of a pipeline have, on every rank: a
    stage that failed alone would leave the others waiting.
    """
    shapes: dict[str, torch.Size] = {}
    ties: set[str] = set()
    for surveyed in layers:
        if surveyed.layer.tied not in ties:  # later ones have no weights of their own
            shapes |= {
                f"{surveyed.layer.name}.{name}": shape for name, shape in surveyed.state.items()
            }
        ties |= {surveyed.layer.tied} - {""}
    _refuse_differences(shapes, weights, source=source)


def put_layer_weights(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, layer: str
) -> torch.nn.Module:
    """Load the weights of one layer, which `refuse_other_layers` let pass, into its module."""
    with torch.no_grad():
        held = shapes_of(weights)
        for name, tensor in module.state_dict().items():
            if f"{layer}.{name}" in held:
                tensor.copy_(weights[f"{layer}.{name}"])
    return module


def _read_file(file: Path) -> LazyWeights:
    """A state dict of tensors; nothing in the file is run."""
    try:
        # Mapped, so that the ranks of a host share one copy; torch's format before 1.6 cannot be.
        found = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except pickle.UnpicklingError as error:
        raise _not_read(
            file, "it holds Python objects, which could be programs, or is cut off"
        ) from error
    except Exception as error:
        raise _not_read(file, in_one_line(error)) from error
    if not isinstance(found, Mapping):
        raise _not_read(file, f"it holds a {type(found).__name__}")
    others = [
        name
        for name, value in found.items()
        if not isinstance(name, str) or not isinstance(value, torch.Tensor)
    ]
    if others:
        raise _not_read(file, f"its {show_value(others[0])} is no tensor")
    shapes = {name: tensor.shape for name, tensor in found.items()}
    return LazyWeights(shapes, {name: partial(found.__getitem__, name) for name in shapes})


def _not_read(file: Path, reason: str) -> StorageError:
    return StorageError(
        f"{file}: not a file of weights: {reason}; write it with torch.save(model.state_dict(), "
        "...) [weights-not-read]"
    )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _refuse_differences(
    shapes: Mapping[str, torch.Size], found: Mapping[str, torch.Tensor], *, source: str
) -> None:
    held = shapes_of(found)
    reason = ""
    missing = sorted(shapes.keys() - held.keys() - set(getattr(found, "lacks", ())))
    if missing:
        reason = f"it lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    elif extra := sorted(held.keys() - shapes.keys()):
        if extra[1:]:
            more = f", and {len(extra) - 1} more"
        else:
            more = ""
        reason = f"it has {extra[0]}, which the model has not{more}"
    elif other := next(
        (name for name, shape in shapes.items() if held.get(name, shape) != shape), None
    ):
        reason = (
            f"{other} has shape {tuple(held[other])} there and {tuple(shapes[other])} in the model"
        )
    if reason:
        raise ConfigError.of(
            "weights-differ", reason, "name weights of the same model", _KEY, source
        )
