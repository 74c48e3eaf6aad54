"""Map from every weight to the files of a checkpoint: the stretches of tensors that hold it.

DeepSpeed flattens, pads and cuts in a way that depends on ZeRO stage, ranks and pipeline stages
(0.19.8's layout):

- stage 0: weights whole in ``mp_rank_*``; in half precision their fp32 copies in its ``optimizer``,
  by number, or end to end in one tensor per group where the optimizer is DeepSpeed's FusedAdam;
- stages 1 and 2, bf16 pipelines: flat partitions in ``*optim_states.pt``, one per parameter group
  and rank; `param_slice_mappings` names what lies where in each, and a parameter goes on in the
  partition of the next rank;
- stage 3: every parameter cut into equal pieces, one per rank, the last one padded; a rank lays its
  pieces in a row over all its groups, in the order of `param_shapes`;
- pipelines: weights in ``layer_*``, by number of the layer; the partitions as above, once for every
  stage;
- tensor parallelism: all of it once for every tensor rank. What the manifest lists under ``tensor``
  is put together from the parts of all of them; the rest they have alike, and it is read from the
  first.

Where a number lies follows from the shapes and from the first rank's files, so that a rank of a
thousand opens only the files that hold what it reads; each is compared with its own notes when it
is opened. Files are mapped into memory, which costs their headers only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from framework.checkpoint.manifest import SavedCheckpoint, zenflow_of
from framework.checkpoint.names import (
    EXPERT,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_KEY,
    SWAPPED,
    layer_file,
    shift_expert,
)
from framework.checkpoint.state.stage0_names import COPIES, FLAT, INNER, names_by_shape
from framework.checkpoint.state.stored import CheckpointFiles, Stored, ValuePath
from framework.checkpoint.state.swapped import SwappedFiles, SwappedGroups, noted_groups
from framework.checkpoint.state.tensor_split import Split
from framework.models.adapters import is_adapter

_SLICES: Final = "single_partition_of_fp32_groups"
_ROWS: Final = "fp32_flat_groups"
_NamedTensor = tuple[str, torch.Tensor, "ValuePath"]


@dataclass(frozen=True)
class ShardMap:
    """All weights and saved buffers of a checkpoint under their plain names, in the order of the
    module.

    Attributes:
        stored: each once.
        ties: further names of a weight -> the name under which it is stored.
        lacking: names of the module that nothing in the checkpoint has numbers for.
    """

    files: CheckpointFiles
    stored: Mapping[str, Stored]
    ties: Mapping[str, str]
    lacking: Sequence[str] = ()


def map_checkpoint(checkpoint: SavedCheckpoint) -> ShardMap:
    """Map a checkpoint with verified checksums. Raises errors of any type if it cannot be read, or
    is laid out in another way.
    """
    manifest = checkpoint.manifest
    size = checkpoint.tensor_size
    files = CheckpointFiles(checkpoint.path)
    if (checkpoint.path / SWAPPED).is_dir():
        groups = _swapped_groups(files)
        swapped = SwappedFiles(checkpoint.path, groups, tensor_size=size)
        files = CheckpointFiles(checkpoint.path, complete=swapped.complete)
    stored, ties, lacking = _map_of_rank(files, manifest, 0, size)
    if checkpoint.has_adapters:  # frozen weights are left out, and may have further names
        lacking = [name for name in lacking if is_adapter(name)]
    splits = manifest.get("tensor")
    if splits:
        rank_maps = [stored]
        for rank in range(1, size):
            rank_maps.append(_map_of_rank(files, manifest, rank, size)[0])
        stored |= _joined_weights(splits, ties, rank_maps)
    return ShardMap(files, stored, ties, lacking)


def _joined_weights(
    splits: Mapping[str, Any], ties: Mapping[str, str], rank_maps: Sequence[Mapping[str, Stored]]
) -> dict[str, Stored]:
    """Return the weights that tensor ranks divide, each of its parts on all ranks."""
    joined = {}
    for name, (dim, sections) in splits.items():
        stored_name = ties.get(name, name)
        parts = [rank_map[stored_name] for rank_map in rank_maps]
        joined[stored_name] = _join_parts(name, Split(dim, tuple(sections)), parts)
    return joined


def _swapped_groups(files: CheckpointFiles) -> SwappedGroups:
    """Read which groups were on NVMe. Raises ValueError if the checkpoint does not note it."""
    content = files[files.named(MODEL_FILE)[0, 0]]
    groups = noted_groups(content[STATE_KEY])
    if groups is None:
        raise ValueError(
            "its state lies in the files of DeepSpeed's NVMe swapper, and the release that wrote "
            "it did not note what they hold: resume it in the layout that wrote it, and save again"
        )
    return groups


def _join_parts(name: str, split: Split, parts: Sequence[Stored]) -> Stored:
    whole = split.whole_shape(parts[0].shape)
    for rank, part in enumerate(parts):
        if part.shape != split.part_shape(whole, rank, len(parts)):
            raise ValueError(
                f"tensor rank {rank} has another part of {name} than the manifest says"
            )
    return replace(parts[0], shape=whole, split=split, parts=tuple(parts))


def _map_of_rank(
    files: CheckpointFiles, manifest: Mapping[str, Any], rank: int, size: int
) -> tuple[dict[str, Stored], dict[str, str], list[str]]:
    """Return what one of `size` tensor ranks has stored, the further names, and the names that
    nothing has numbers for.
    """
    models = _files_of_tensor_rank(files, MODEL_FILE, rank, size)
    optimizers = _files_of_tensor_rank(files, OPTIMIZER_FILE, rank, size)
    pipeline = manifest.get("pipeline")
    if pipeline:
        tensors = _layer_tensors(files, pipeline, None if size == 1 else rank)
    else:
        tensors = _dict_tensors(files, models[0, 0], "module")
    stored, ties = _store_once(tensors)
    moe = manifest["config"].get("model", {}).get("moe") or {}
    experts = moe.get("num_experts", 1), manifest.get("layout", {}).get("expert_size", 1)
    packed = manifest.get("experts", {})
    empty: set[str] = set()
    weights: Iterable[tuple[str, Stored]]
    if not optimizers:
        weights = _stage0_weights(files, models.values(), stored)
    elif zenflow_of(manifest):
        # The module has the columns that are stepped at every micro-batch; the shares lie column
        # by column.
        weights = ()
    elif manifest["config"]["zero"]["stage"] == 3:
        model = files[models[0, 0]]
        empty = _empty_names(model, stored)
        rank_weights = _stage3_weights(files, models, optimizers, experts, packed)
        stage3_weights = dict(_with_joined_experts(rank_weights, packed))
        ties |= _stage3_ties(model, manifest, empty, stored_names=stage3_weights)
        empty -= stage3_weights.keys() | ties.keys()
        weights = stage3_weights.items()
    else:
        rank_weights = _stage12_weights(files, models, optimizers, pipeline, experts, packed)
        weights = _with_joined_experts(rank_weights, packed)
    for name, weight in weights:
        stored[ties.get(name, name)] = weight
    for name in chain(ties, empty):
        del stored[name]
    _check_sizes(stored)
    return stored, ties, sorted(empty)


def _check_sizes(stored: Mapping[str, Stored]) -> None:
    for name, weight in stored.items():
        for part in weight.parts or (weight,):
            if part.offset + part.shape.numel() > len(part.files) * part.size:
                raise ValueError(f"the files do not hold all of {name}")


def _files_of_tensor_rank(
    files: CheckpointFiles, pattern: re.Pattern[str], rank: int, size: int
) -> dict[tuple[int, int], str]:
    """List the files of one of `size` tensor ranks: (data-parallel rank, pipeline stage) -> name.
    A model-parallel rank is stage * size + tensor rank.
    """
    names = {}
    for (data_rank, model_rank), name in files.named(pattern).items():
        stage, tensor_rank = divmod(model_rank, size)
        if tensor_rank == rank:
            names[data_rank, stage] = name
    return names


def _empty_names(model: Mapping[str, Any], stored: Mapping[str, Stored]) -> set[str]:
    """List the weights that stage 3 leaves empty in the module: their numbers are in other places
    of the files.
    """
    empty = {name for name, weight in stored.items() if not weight.shape.numel()}
    return empty.difference(model.get("buffer_names") or ())


def _stage3_ties(
    model: Mapping[str, Any],
    manifest: Mapping[str, Any],
    empty: Collection[str],
    *,
    stored_names: Collection[str],
) -> dict[str, str]:
    """Return the further names of weights at stage 3 -> the stored name. DeepSpeed's own list lacks
    those in a module that has several (0.19.8, engine.py `_get_shared_params` meets a child once);
    the manifest has all.
    """
    ties = dict(model["shared_params"] or {})
    ties.update(manifest.get("ties", {}))
    stage3_ties = {}
    for name, first in ties.items():
        if name in empty and name not in stored_names and first in stored_names:
            stage3_ties[name] = first
    return stage3_ties


def _dict_tensors(
    files: CheckpointFiles, file: str, *keys: str, prefix: str = ""
) -> Iterator[_NamedTensor]:
    """Yield the tensors in a dict of a file: name after `prefix`, tensor, path."""
    path = ValuePath(file, keys)
    for name, tensor in files.value(path).items():
        yield prefix + name, tensor, path.then(name)


def _layer_tensors(
    files: CheckpointFiles, pipeline: Mapping[str, Any], rank: int | None
) -> Iterator[_NamedTensor]:
    """Yield the tensors of all layers but those that share the weights of an earlier layer. A
    manifest that was made up names the files.
    """
    file_of = pipeline.get("files", {})
    for number, layer in enumerate(pipeline["layers"]):
        file = file_of.get(layer) or layer_file(number, rank)  # a layer without weights has none
        if layer not in pipeline["tied"] and (files.folder / file).exists():
            yield from _dict_tensors(files, file, prefix=f"{layer}.")


def _store_once(tensors: Iterable[_NamedTensor]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return all tensors by name, and the further names of a tensor -> its first name."""
    stored: dict[str, Stored] = {}
    ties: dict[str, str] = {}
    first_names: dict[Any, str] = {}
    for name, tensor, path in tensors:
        stored[name] = Stored(tensor.shape, tensor.dtype, (path.file,), path.keys, tensor.numel())
        if not tensor.numel():  # stage 3 leaves empty ones, which lie nowhere
            continue
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        first = first_names.setdefault(memory, name)
        if first != name:
            ties[name] = first
    return stored, ties


def _stage0_weights(
    files: CheckpointFiles, names: Iterable[str], stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Stored]]:
    """Yield the weights of stage 0 with the optimizer's state, each once: a tied weight has the
    same state on every stage that has it.
    """
    seen: set[str] = set()
    for file in names:
        for name, weight in _stage0_weights_in(files, file, stored):
            if name not in seen:
                yield name, weight
            seen.add(name)


def _stage0_weights_in(
    files: CheckpointFiles, file: str, stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Stored]]:
    """Yield the weights that one file's optimizer steps. The optimizer knows its parameters by
    number only; our own state names them, group by group.
    """
    content = files[file]
    optimizer = content["optimizer"] or {}
    names = _names_of_groups(content)
    state_keys: tuple[str, ...] = ("optimizer", "state")
    if INNER in optimizer:
        state_keys = ("optimizer", INNER, "state")
    states = optimizer.get(INNER, optimizer).get("state", {})
    number = 0
    for group, members in enumerate(names):
        start = 0
        for index, name in enumerate(members):
            weight = stored[name]
            # The flat copy of a group has one state.
            key: int = group if FLAT in optimizer else number
            state: tuple[str | int, ...] | None = None
            if key in states:
                state = (*state_keys, key)
            weight = replace(weight, state=state, state_file=file)
            if FLAT in optimizer:
                weight = _with_copy(files, weight, ("optimizer", FLAT, group), start)
            elif COPIES in optimizer:
                weight = _with_copy(files, weight, ("optimizer", COPIES, group, index), 0)
            yield name, weight
            number += 1
            start += weight.shape.numel()


def _names_of_groups(content: Any) -> Sequence[Sequence[str]]:
    """Return the names of the weights of each group of a file's optimizer."""
    if STATE_KEY in content:
        names: Sequence[Sequence[str]] = content[STATE_KEY]["names"]
        return names
    if content["module"] is None:  # a stage of a pipeline that DeepSpeed wrote by itself
        return []
    return names_by_shape(content)


def _with_copy(
    files: CheckpointFiles, weight: Stored, keys: tuple[str | int, ...], start: int
) -> Stored:
    """Return the weight as its fp32 copy, which begins at `start` of the tensor at `keys` in the
    optimizer's file.
    """
    file = weight.state_file
    dtype = files.value(ValuePath(file, keys)).dtype
    return replace(weight, dtype=dtype, files=(file,), keys=keys, start=start)


def _stage12_weights(
    files: CheckpointFiles,
    models: Mapping[tuple[int, int], str],
    optimizers: Mapping[tuple[int, int], str],
    pipeline: Mapping[str, Any] | None,
    experts: tuple[int, int],
    packed: Mapping[str, int],
) -> Iterator[tuple[str, Stored]]:
    """Yield the weights of stages 1 and 2: the parameters of a group lie in a row, and every rank
    has an equal part of it. `experts` is the number of experts and the expert-parallel size,
    `packed` the weights with packed experts of several ranks: each part is yielded.
    """
    stage_of: dict[str, int] = {}
    named: Callable[[str], str] = str
    if pipeline:
        named = partial(plain_name, layers=pipeline["layers"], tied_keys=pipeline["tied_keys"])
    for stage in sorted({stage for _, stage in optimizers}):
        model = files[models[0, stage]]
        ranks = _files_of_stage(optimizers, stage)
        names = chain.from_iterable(model["param_shapes"])
        own_packed = {name: packed[named(name)] for name in names if named(name) in packed}
        for row in _rows_of_stage(files, model, ranks, experts, own_packed):
            for name, weight in row.items():
                name = named(name)
                # A tied weight has the same copies on all its stages.
                if stage_of.setdefault(name, stage) == stage:
                    yield name, weight


def _with_joined_experts(
    weights: Iterable[tuple[str, Stored]], packed: Mapping[str, int]
) -> Iterator[tuple[str, Stored]]:
    """Yield the weights, and those with packed experts once, joined from their parts, which come in
    the order of expert ranks. `packed` has the numbers of all experts.
    """
    parts: dict[str, list[Stored]] = {}
    for name, weight in weights:
        if name in packed:
            parts.setdefault(name, []).append(weight)
        else:
            yield name, weight
    for name, rank_parts in parts.items():
        yield name, _join_parts(name, Split(0, (packed[name],)), rank_parts)


def _rows_of_stage(
    files: CheckpointFiles,
    model: Mapping[str, Any],
    ranks: Sequence[str],
    experts: tuple[int, int],
    packed: Mapping[str, int],
) -> list[dict[str, Stored]]:
    """Return the rows of one pipeline stage at ZeRO stages 1 and 2, and have every optimizer file
    compared with them when it is opened.
    """
    rows = []
    parts_in: dict[str, list[tuple[Mapping[str, Stored], int]]] = {file: [] for file in ranks}
    for group, shapes in enumerate(model["param_shapes"]):
        for row_ranks, row_shapes in _rows_by_expert_rank(shapes, ranks, *experts, packed):
            row = _row_of_group(files, row_ranks, group, row_shapes)
            rows.append(row)
            for rank, file in enumerate(row_ranks):
                parts_in[file].append((row, rank))
    zero = (model.get("ds_config") or {}).get("zero_optimization", {})
    # Where gradients go round robin, DeepSpeed's notes of what lies where are of another order than
    # its numbers.
    if not zero.get("round_robin_gradients"):
        files.expect({file: partial(_check_slices, parts) for file, parts in parts_in.items()})
    return rows


def _rows_by_expert_rank(
    shapes: Mapping[str, torch.Size],
    ranks: Sequence[str],
    num_experts: int,
    expert_size: int,
    packed: Mapping[str, int],
) -> Iterator[tuple[Sequence[str], Mapping[str, torch.Size]]]:
    """Yield the rows of a group of parameters, each with its files: one row per expert-parallel
    rank, with the experts of that rank, or a single row for weights that are no expert's. Parts of
    packed experts have the same name in each of their rows.
    """
    has_experts = any(map(EXPERT.search, shapes)) or not packed.keys().isdisjoint(shapes)
    if not has_experts:
        expert_size = 1
    for expert_rank in range(expert_size):
        first_expert = expert_rank * num_experts // expert_size
        yield (
            ranks[expert_rank::expert_size],
            {shift_expert(name, first_expert): shape for name, shape in shapes.items()},
        )


def _row_of_group(
    files: CheckpointFiles, ranks: Sequence[str], group: int, shapes: Mapping[str, torch.Size]
) -> dict[str, Stored]:
    """Return one group's parameters, in the order of its row."""
    optimizer = files.value(ValuePath(ranks[0], ("optimizer_state_dict",)))
    partition = optimizer[_SLICES][group]
    if "param_alignment_paddings" in optimizer:
        paddings = optimizer["param_alignment_paddings"][group]
    else:
        paddings = [0 for _ in shapes]
    keys = ("optimizer_state_dict", _SLICES, group)
    state = None
    if group in optimizer["base_optimizer_state"]["state"]:
        state = ("optimizer_state_dict", "base_optimizer_state", "state", group)
    dtype = partition.dtype
    size = partition.numel()
    offset = 0
    row: dict[str, Stored] = {}
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        row[name] = Stored(shape, dtype, ranks, keys, size, offset, state=state, number=len(row))
        offset += shape.numel() + padding
    return row


def _check_slices(parts: Sequence[tuple[Mapping[str, Stored], int]], content: Any) -> None:
    """Compare the slices that a file notes of its parameters with their shapes. `parts` are the
    rows that the file has a part of, each with the rank of that part.
    """
    notes = content["optimizer_state_dict"]["param_slice_mappings"]
    for (row, rank), row_notes in zip(parts, notes, strict=True):
        expected = {}
        for name, weight in row.items():
            begin = weight.offset - rank * weight.size
            end = begin + weight.shape.numel()
            start = max(begin, 0)
            stop = min(end, weight.size)
            if start < stop:
                expected[name] = (start, stop - start)
        noted = {name: (note.start, note.numel) for name, note in row_notes.items() if note.numel}
        if noted != expected:
            raise ValueError(f"the parameters of rank {rank} lie elsewhere than their shapes say")


def _files_of_stage(files: Mapping[tuple[int, int], str], stage: int = 0) -> list[str]:
    """Return the files of one pipeline stage, in the order of its data-parallel ranks. Raises
    LookupError if a rank has none.
    """
    file_of = {rank: file for (rank, file_stage), file in files.items() if file_stage == stage}
    result = []
    for rank in range(len(file_of)):
        if rank not in file_of:
            raise LookupError(f"there is no optimizer file of rank {rank}")
        result.append(file_of[rank])
    return result


def plain_name(name: str, *, layers: Sequence[str], tied_keys: Mapping[str, str]) -> str:
    """Return a weight's name in the plain module for its name in DeepSpeed's PipelineModule, which
    calls the weights of layer 3 ``3.weight``, and tied ones ``tied_modules.<key>.weight``.
    `tied_keys` maps the key to the first of its layers.
    """
    number, _, rest = name.partition(".")
    if number == "tied_modules":
        key, _, rest = rest.partition(".")
        return f"{tied_keys[key]}.{rest}"
    return f"{layers[int(number)]}.{rest}"


def _stage3_weights(
    files: CheckpointFiles,
    models: Mapping[tuple[int, int], str],
    optimizers: Mapping[tuple[int, int], str],
    experts: tuple[int, int],
    packed: Mapping[str, int],
) -> Iterator[tuple[str, Stored]]:
    """Yield the weights of stage 3: an equal piece of every parameter from every rank that holds
    it; then the frozen ones, which no optimizer has. `experts` and `packed` are as in
    `_stage12_weights`.
    """
    ranks = _files_of_stage(optimizers)
    model = files[models[0, 0]]
    optimizer = files.value(ValuePath(ranks[0], ("optimizer_state_dict",)))
    flats = optimizer[_ROWS]
    states = optimizer["optimizer_state_dict"]["state"]
    sizes = [flat.numel() for flat in flats]
    files.expect(dict.fromkeys(ranks, partial(_check_rows, sizes)))
    group = 0
    start = 0
    number = 0
    for name, shape in chain.from_iterable(shapes.items() for shapes in model["param_shapes"]):
        rows = list(_rows_by_expert_rank({name: shape}, ranks, *experts, packed))
        size = -(-shape.numel() // len(rows[0][0]))  # rounded up: the last piece is padded
        while group + 1 < len(sizes) and start == sizes[group]:
            group += 1
            start = 0
            number = 0
        left = sizes[group] - start
        if size and not left:
            raise ValueError(f"{ranks[0]} holds fewer numbers than the parameters have")
        if size > left:
            raise ValueError(f"{ranks[0]} cuts {name} elsewhere than its shape says")
        state = None
        if group in states:
            state = ("optimizer_state_dict", "optimizer_state_dict", "state", group)
        keys = ("optimizer_state_dict", _ROWS, group)
        dtype = flats[group].dtype
        for row_ranks, names in rows:
            for row_name in names:
                weight = Stored(shape, dtype, row_ranks, keys, size, start=start, state=state)
                yield row_name, replace(weight, number=number)
        start += size
        number += 1
    # With a rest that belongs to no parameter, all would be misread.
    if sum(sizes[:group]) + start < sum(sizes):
        raise ValueError(f"{ranks[0]} holds more numbers than the parameters have")
    yield from _frozen_weights(files, models, experts, packed)


def _frozen_weights(
    files: CheckpointFiles,
    models: Mapping[tuple[int, int], str],
    experts: tuple[int, int],
    packed: Mapping[str, int],
) -> Iterator[tuple[str, Stored]]:
    """Yield the weights that no optimizer has at stage 3; each model file has a piece of them."""
    shapes = files[models[0, 0]]["frozen_param_shapes"] or {}
    for name, shape in shapes.items():
        rows = _rows_by_expert_rank({name: shape}, _files_of_stage(models), *experts, packed)
        for row_files, names in rows:
            size = -(-shape.numel() // len(row_files))
            for row_name in names:
                path = ValuePath(row_files[0], ("frozen_param_fragments", row_name))
                dtype = files.value(path).dtype
                yield row_name, Stored(shape, dtype, row_files, path.keys, size)


def _check_rows(sizes: Sequence[int], content: Any) -> None:
    """Compare the rows of a rank's file with the sizes of the first rank's. Raises ValueError."""
    if [flat.numel() for flat in content["optimizer_state_dict"][_ROWS]] != sizes:
        raise ValueError("a rank holds other numbers of the parameters than the first")
