"""Map from every weight to the files of a checkpoint: which stretch of which tensor in which file
holds it.

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
thousand opens only the files that hold what it reads; each is held against what it notes of itself
when it is opened. Files are mapped into memory, which costs their headers only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import (
    EXPERT,
    MODEL_FILE,
    OPTIMIZER_FILE,
    SWAPPED,
    layer_file,
    shift_expert,
)
from framework.checkpoint.state.checkpoint_engine import read_file
from framework.checkpoint.state.tensor_split import Split
from framework.models.adapters import is_adapter

# The project's former name: a part of the file format, which releases before and after the change
# of name share.
STATE_KEY: Final = "dsframework"
_SLICES: Final = "single_partition_of_fp32_groups"
_ROWS: Final = "fp32_flat_groups"
# In half precision at stage 0: DeepSpeed wraps the optimizer, and keeps the fp32 weights one by one
# or flattened.
_INNER: Final = "optimizer_state_dict"
_COPIES: Final = "fp32_groups"
_FLAT: Final = "fp32_groups_flat"
_Whole = tuple[str, torch.Tensor, "Place"]
_Found = Iterable[tuple[str, "Stored"]]


@dataclass(frozen=True)
class Place:
    """A value in a checkpoint: the name of a file, and the way to the value through the dicts and
    lists in it.
    """

    file: str
    keys: tuple[str | int, ...]

    def then(self, *keys: str | int) -> Place:
        """A place further in."""
        return Place(self.file, (*self.keys, *keys))


@dataclass(frozen=True)
class Piece:
    """A stretch of one stored tensor, seen as flat.

    Attributes:
        place: the tensor.
        start: where the stretch begins in it.
        num: how many numbers it has.
        state: the optimizer's state of that tensor, a dict whose tensors are laid out alike; None
            where there is none.
    """

    place: Place
    start: int
    num: int
    state: Place | None = None


@dataclass(frozen=True)
class Stored:
    """One weight or buffer: where its numbers lie is computed, and no file is opened for it.

    Attributes:
        shape: of the whole tensor.
        dtype: of its numbers. The fp32 copies where the optimizer keeps any.
        files: that hold the numbers, in the order of ranks; each has `size` of a row in which the
            tensor begins at `offset`.
        keys: the way to the tensor in each of them.
        size: numbers in each of them; in one file, all.
        offset: of the tensor's first number.
        start: where the row begins in each tensor.
        state: the way to the optimizer's state in each of them; None where it keeps none.
        state_file: the one file that has the state, where it is another one.
        split, parts: of a weight that tensor ranks share: how, and the part of each. Files and keys
            are the first's.
    """

    shape: torch.Size
    dtype: torch.dtype
    files: Sequence[str]
    keys: tuple[str | int, ...]
    size: int
    offset: int = 0
    start: int = 0
    state: tuple[str | int, ...] | None = None
    state_file: str = ""
    split: Split | None = None
    parts: tuple[Stored, ...] = ()

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """The stretches that together are numbers `start` to `stop` of the flattened tensor, in
        order.
        """
        if stop is None:
            stop = self.shape.numel()
        else:
            stop = min(stop, self.shape.numel())
        if self.split is not None:
            for rank, first, num in self.split.to_parts(self.shape, len(self.parts), start, stop):
                yield from self.parts[rank].pieces(first, first + num)
            return
        while start < stop:
            rank, within = divmod(self.offset + start, self.size)
            count = min(self.size - within, stop - start)
            file = self.files[rank]
            if self.state is None:
                state = None
            else:
                state = Place(self.state_file or file, self.state)
            yield Piece(Place(file, self.keys), self.start + within, count, state)
            start += count

    @property
    def first_state(self) -> Place | None:
        """The state in the first file, which has the same keys as in the others."""
        if self.state is None:
            return None
        return Place(self.state_file or self.files[0], self.state)


class CheckpointFiles:
    """The files of one checkpoint, each mapped into memory when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._checks: dict[str, Callable[[Any], None]] = {}

    def expect(self, checks: Mapping[str, Callable[[Any], None]]) -> None:
        """Call the check of a file with its content before anything more of it is used; it raises
        ValueError.
        """
        self._checks.update(checks)
        for name in checks.keys() & self._open.keys():
            checks[name](self._open[name])

    def __getitem__(self, name: str) -> Any:
        """Return the content of a file. Raises whatever `read_file` raises."""
        if name not in self._open:
            content = read_file(self.folder / name, mmap=True)
            if name in self._checks:
                self._checks[name](content)
            self._open[name] = content
        return self._open[name]

    def value(self, place: Place) -> Any:
        """Return the value at a place."""
        found = self[place.file]
        for key in place.keys:
            found = found[key]
        return found

    def numbers(self, piece: Piece, *, state: str = "") -> torch.Tensor:
        """A stretch, one-dimensional, still in the file; of the optimizer's `state` of that name,
        if one is given.
        """
        assert not state or piece.state is not None
        if state and piece.state:
            place = piece.state.then(state)
        else:
            place = piece.place
        flat: torch.Tensor = self.value(place)
        return flat.reshape(-1).narrow(0, piece.start, piece.num)

    def joined(
        self, pieces: Iterable[Piece], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """A weight or buffer put together; still in the file where it lies in one piece."""
        found = [self.numbers(piece) for piece in pieces] or [torch.empty(0, dtype=dtype)]
        return (found[0] if len(found) == 1 else torch.cat(found)).detach().view(shape)

    def named(self, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
        """Files of one kind: (data-parallel rank, model-parallel rank, which counts pipeline
        stages) -> name.
        """
        matches = filter(
            None, map(pattern.fullmatch, (path.name for path in self.folder.iterdir()))
        )
        return dict(
            sorted(
                ((int(match["rank"] or 0), int(match["model_rank"])), match[0]) for match in matches
            )
        )


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
    """Find everything in a checkpoint whose checksums have been verified; raises errors of any type
    where it cannot be read, or is laid out in another way.
    """
    files = CheckpointFiles(checkpoint.path)
    manifest = checkpoint.manifest
    if (checkpoint.path / SWAPPED).is_dir():
        raise ValueError(
            "its state lies in the files of DeepSpeed's NVMe swapper, which nobody else reads"
        )
    size = checkpoint.tensor_size
    stored, ties, lacking = _map_of_rank(files, manifest, 0, size)
    if checkpoint.has_adapters:  # frozen weights are left out, and may have further names
        lacking = [name for name in lacking if is_adapter(name)]
    splits = manifest.get("tensor")
    if splits:
        ranks = [stored, *(_map_of_rank(files, manifest, rank, size)[0] for rank in range(1, size))]
        for name, (dim, sections) in splits.items():
            own = ties.get(name, name)
            stored[own] = _joined(
                name, Split(dim, tuple(sections)), [of_rank[own] for of_rank in ranks]
            )
    return ShardMap(files, stored, ties, lacking)


def _joined(name: str, split: Split, parts: Sequence[Stored]) -> Stored:
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
    """Find what one of so many tensor ranks has, further names, and names that nothing has numbers
    for. Model-parallel ranks are (stage, tensor rank).
    """
    models, optimizers = (
        {
            (data, of // size): name
            for (data, of), name in files.named(pattern).items()
            if of % size == rank
        }
        for pattern in (MODEL_FILE, OPTIMIZER_FILE)
    )
    pipeline = manifest.get("pipeline")
    if pipeline:
        of_layers = _of_layers(files, pipeline, None if size == 1 else rank)
    else:
        of_layers = None
    wholes = of_layers or _of_dict(files, models[0, 0], "module")
    stored, ties = _each_once(wholes)
    empty: set[str] = set()
    if not optimizers:
        seen: set[str] = set()  # a tied weight has the same state on every stage that has it
        found: _Found = chain.from_iterable(
            _numbered(files, file, stored, seen) for file in models.values()
        )
    elif manifest["config"]["zero"]["stage"] == 3:
        empty = _spread_names(files[models[0, 0]], stored)
        found = list(_rows(files, models, optimizers))
        ties |= _spread_ties(files[models[0, 0]], manifest, empty, held={name for name, _ in found})
        empty -= {name for name, _ in found} | ties.keys()
    else:
        moe = manifest["config"].get("model", {}).get("moe") or {}
        experts = moe.get("num_experts", 1), manifest["layout"].get("expert_size", 1)
        found = _slices(files, models, optimizers, pipeline, experts)
    for name, one in found:
        stored[ties.get(name, name)] = one
    for name in (*ties, *empty):
        del stored[name]
    for name, one in stored.items():
        if one.offset + one.shape.numel() > len(one.files) * one.size:
            raise ValueError(f"the files do not hold all of {name}")
    return stored, ties, sorted(empty)


def _spread_names(model: Mapping[str, Any], stored: Mapping[str, Stored]) -> set[str]:
    """Names of weights that stage 3 leaves empty in the module: their numbers are in other places
    of the files.
    """
    buffers = set(model.get("buffer_names") or ())
    return {name for name, one in stored.items() if not one.shape.numel() and name not in buffers}


def _spread_ties(
    model: Mapping[str, Any],
    manifest: Mapping[str, Any],
    empty: Collection[str],
    *,
    held: Collection[str],
) -> dict[str, str]:
    """Further names of spread weights. DeepSpeed's own list lacks those of a module that has
    several (0.19.8, engine.py `_get_shared_params` meets a child once); the manifest has all.
    """
    ties = {**(model["shared_params"] or {}), **manifest.get("ties", {})}
    return {
        name: first
        for name, first in ties.items()
        if name in empty and name not in held and first in held
    }


def _of_dict(files: CheckpointFiles, file: str, *keys: str, prefix: str = "") -> Iterator[_Whole]:
    for name, tensor in files.value(Place(file, keys)).items():
        yield prefix + name, tensor, Place(file, (*keys, name))


def _of_layers(
    files: CheckpointFiles, pipeline: Mapping[str, Any], rank: int | None
) -> Iterator[_Whole]:
    for number, layer in enumerate(pipeline["layers"]):
        file = layer_file(number, rank)  # there is none for a layer without weights
        if layer not in pipeline["tied"] and (files.folder / file).exists():
            yield from _of_dict(files, file, prefix=f"{layer}.")


def _each_once(wholes: Iterable[_Whole]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Whole tensors, and which of them are one tensor under a further name."""
    stored: dict[str, Stored] = {}
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor, place in wholes:
        stored[name] = Stored(tensor.shape, tensor.dtype, (place.file,), place.keys, tensor.numel())
        if tensor.numel():  # stage 3 leaves empty ones, which lie nowhere
            one = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
            ties |= {name: one} if one != name else {}
    return stored, ties


def _numbered(
    files: CheckpointFiles, file: str, stored: Mapping[str, Stored], seen: set[str]
) -> _Found:
    """Stage 0. The optimizer knows its parameters by number only; our own state names them, group
    by group.
    """
    optimizer = files[file]["optimizer"] or {}
    if STATE_KEY in files[file]:
        names = files[file][STATE_KEY]["names"]
    else:
        names = names_by_shape(files[file])
    inner = (_INNER,) if _INNER in optimizer else ()
    states = optimizer.get(_INNER, optimizer).get("state", {})
    number = 0
    for group, members in enumerate(names):
        start = 0
        for index, name in enumerate(members):
            whole = stored[name]
            key = group if _FLAT in optimizer else number
            state = ("optimizer", *inner, "state", key) if key in states else None
            one = replace(whole, state=state, state_file=file)
            if _FLAT in optimizer or _COPIES in optimizer:
                way = (
                    ("optimizer", _FLAT, group)
                    if _FLAT in optimizer
                    else ("optimizer", _COPIES, group, index)
                )
                dtype = files.value(Place(file, way)).dtype
                one = replace(
                    one,
                    dtype=dtype,
                    files=(file,),
                    keys=way,
                    start=start if _FLAT in optimizer else 0,
                )
            if name not in seen:
                yield name, one
            seen.add(name)
            number = number + 1
            start = start + whole.shape.numel()


def _slices(
    files: CheckpointFiles,
    models: Mapping[tuple[int, int], str],
    optimizers: Mapping[tuple[int, int], str],
    pipeline: Mapping[str, Any] | None,
    experts: tuple[int, int],
) -> _Found:
    """Stages 1 and 2: the parameters of a group lie in a row, of which every rank has an equal
    part.
    """
    stage_of: dict[str, int] = {}
    for stage in sorted({stage for _, stage in optimizers}):
        model = files[models[0, stage]]
        ranks = _of_ranks(optimizers, stage)
        rows: list[dict[str, Stored]] = []
        notes: dict[str, list[tuple[Mapping[str, Stored], int]]] = {file: [] for file in ranks}
        for group, shapes in enumerate(model["param_shapes"]):
            for own, of in _divided(shapes, ranks, *experts):
                rows.append(_sliced(files, own, group, of))
                for rank, file in enumerate(own):
                    notes[file].append((rows[-1], rank))
        # Where gradients go round robin, DeepSpeed's notes of what lies where are of another order
        # than its numbers.
        if (
            not (model.get("ds_config") or {})
            .get("zero_optimization", {})
            .get("round_robin_gradients")
        ):
            files.expect({file: partial(_check_slices, parts) for file, parts in notes.items()})
        for inner_name, one in chain.from_iterable(row.items() for row in rows):
            name = inner_name
            if pipeline:
                name = plain_name(name, layers=pipeline["layers"], tied_keys=pipeline["tied_keys"])
            # a tied weight has the same copies on all its stages
            if stage_of.setdefault(name, stage) == stage:
                yield name, one


def _divided(
    shapes: Mapping[str, torch.Size], ranks: Sequence[str], count: int, size: int
) -> Iterator[tuple[Sequence[str], Mapping[str, torch.Size]]]:
    """The rows of a group of parameters, each with its files: of `count` experts those of every of
    `size` ranks.
    """
    if any(map(EXPERT.search, shapes)):
        size = size
    else:
        size = 1
    for place in range(size):
        first = place * count // size
        yield (
            ranks[place::size],
            {shift_expert(name, first): shape for name, shape in shapes.items()},
        )


def _sliced(
    files: CheckpointFiles, ranks: Sequence[str], group: int, shapes: Mapping[str, torch.Size]
) -> dict[str, Stored]:
    """One group's parameters, in the order of its row."""
    top = files.value(Place(ranks[0], ("optimizer_state_dict",)))
    own = top[_SLICES][group]
    offset = 0
    row = {}
    if "param_alignment_paddings" in top:
        paddings = top["param_alignment_paddings"][group]
    else:
        paddings = [0] * len(shapes)
    keys = ("optimizer_state_dict", _SLICES, group)
    has_state = group in top["base_optimizer_state"]["state"]
    if has_state:
        state = ("optimizer_state_dict", "base_optimizer_state", "state", group)
    else:
        state = None
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        row[name] = Stored(shape, own.dtype, ranks, keys, own.numel(), offset, state=state)
        offset += shape.numel() + padding
    return row


def _check_slices(parts: Sequence[tuple[Mapping[str, Stored], int]], content: Any) -> None:
    """Compare what a file notes of its parameters with what their shapes say; of each row it is a
    rank's part.
    """
    for (row, rank), noted in zip(
        parts, content["optimizer_state_dict"]["param_slice_mappings"], strict=True
    ):
        expected = {}
        for name, one in row.items():
            begin = one.offset - rank * one.size
            end = one.offset + one.shape.numel() - rank * one.size
            if max(begin, 0) < min(end, one.size):
                expected[name] = (max(begin, 0), min(end, one.size) - max(begin, 0))
        if {
            name: (part.start, part.numel) for name, part in noted.items() if part.numel
        } != expected:
            raise ValueError(f"the parameters of rank {rank} lie elsewhere than their shapes say")


def _of_ranks(files: Mapping[tuple[int, int], str], stage: int = 0) -> list[str]:
    """The files of one pipeline stage, in the order of its data-parallel ranks."""
    own = {rank: file for (rank, of), file in files.items() if of == stage}
    missing = next((rank for rank in range(len(own)) if rank not in own), None)
    if missing is not None:
        raise LookupError(f"there is no optimizer file of rank {missing}")
    return [own[rank] for rank in range(len(own))]


def plain_name(name: str, *, layers: Sequence[str], tied_keys: Mapping[str, str]) -> str:
    """A weight's name in the plain module, from DeepSpeed's PipelineModule: it calls the weights of
    layer 3 ``3.weight``, and tied ones ``tied_modules.<key>.weight``; `tied_keys` maps the key to
    the first of its layers.
    """
    number, _, rest = name.partition(".")
    if number == "tied_modules":
        key, _, rest = rest.partition(".")
        return f"{tied_keys[key]}.{rest}"
    return f"{layers[int(number)]}.{rest}"


def _rows(
    files: CheckpointFiles,
    models: Mapping[tuple[int, int], str],
    optimizers: Mapping[tuple[int, int], str],
) -> _Found:
    """Stage 3: an equal piece of every parameter from every rank; and of the frozen ones, which no
    optimizer has.
    """
    ranks = _of_ranks(optimizers)
    model = files[models[0, 0]]
    top = files.value(Place(ranks[0], ("optimizer_state_dict",)))
    flats = top[_ROWS]
    states = top["optimizer_state_dict"]["state"]
    sizes = [flat.numel() for flat in flats]
    files.expect(dict.fromkeys(ranks, partial(_check_rows, sizes)))
    group = start = 0
    for name, shape in chain.from_iterable(group.items() for group in model["param_shapes"]):
        size = -(-shape.numel() // len(ranks))
        while group < len(sizes) and start == sizes[group]:
            group = group + 1
            start = 0
        if size > sizes[group] - start:
            raise ValueError(f"{ranks[0]} cuts {name} elsewhere than its shape says")
        if group in states:
            state = ("optimizer_state_dict", "optimizer_state_dict", "state", group)
        else:
            state = None
        keys = ("optimizer_state_dict", _ROWS, group)
        yield name, Stored(shape, flats[group].dtype, ranks, keys, size, start=start, state=state)
        start += size
    # with a rest that belongs to no parameter, all would be misread
    if sum(sizes[:group]) + start < sum(sizes):
        raise ValueError(f"{ranks[0]} holds more numbers than the parameters have")
    frozen = model["frozen_param_shapes"] or {}
    for name, shape in frozen.items():
        place = Place(models[0, 0], ("frozen_param_fragments", name))
        held = _of_ranks(models)
        dtype = files.value(place).dtype
        yield name, Stored(shape, dtype, held, place.keys, -(-shape.numel() // len(held)))


def _check_rows(sizes: Sequence[int], content: Any) -> None:
    if [flat.numel() for flat in content["optimizer_state_dict"][_ROWS]] != sizes:
        raise ValueError("a rank holds other numbers of the parameters than the first")


def names_by_shape(content: Mapping[str, Any]) -> list[list[str]]:
    """Names of what the optimizer of a ``mp_rank_00_model_states.pt`` steps, group by group; empty
    where they cannot be told, so that its state stays unread.

    At stage 0 the optimizer only numbers it, and another program than ours notes no names. The
    weights of a group lie in it in the order of the module, wherever it was made from
    `module.parameters()`; which belong to which group is told by their shapes, and in half
    precision by their values.
    """
    optimizer = content.get("optimizer") or {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    weights = _parameters(content)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    flats: Sequence[torch.Tensor] = optimizer.get("fp32_groups_flat", ())
    if flats:  # laid end to end: where there is one group, it is everything or it is not known
        sizes = [shape.numel() for shape in shapes.values()]
        names = [list(shapes)]
        is_whole = len(flats) == 1 and flats[0].numel() == sum(sizes)
        if is_whole and _are_copies([list(torch.split(flats[0], sizes))], names, weights):
            return names
        return []
    groups = _shapes_in_groups(optimizer, inner)
    group_of = {shape: number for number, members in enumerate(groups) for shape in members}
    if sum(len(set(members)) for members in groups) != len(group_of):
        return []  # two groups hold weights of one shape
    found = [
        [name for name, shape in shapes.items() if group_of.get(shape) == number]
        for number in range(len(groups))
    ]
    reported = [[shapes[name] for name in names] for names in found]
    if reported == groups and _are_copies(optimizer.get("fp32_groups", ()), found, weights):
        return found
    return []


def _are_copies(
    copies: Sequence[Sequence[torch.Tensor]],
    names: Sequence[Sequence[str]],
    weights: Mapping[str, torch.Tensor],
) -> bool:
    """In half precision the weights are the rounded copies: where they are not, the order is
    another one.
    """
    pairs = (
        (copy, weights[name])
        for group, members in zip(copies, names, strict=False)
        for copy, name in zip(group, members, strict=True)
    )
    return all(
        torch.equal(copy.detach().to(weight.dtype).flatten(), weight.detach().flatten())
        for copy, weight in pairs
    )


def _parameters(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The module's weights in its order, each under its first name."""
    buffers = set(content["buffer_names"])
    seen = set()
    found = {}
    for name, tensor in content["module"].items():
        one = (tensor.data_ptr(), tensor.shape)
        if name not in buffers and one not in seen:
            seen.add(one)
            found[name] = tensor
    return found


def _shapes_in_groups(
    optimizer: Mapping[str, Any], inner: Mapping[str, Any]
) -> list[list[torch.Size]]:
    """Shapes that every group steps, by its copies in half precision and by the optimizer's state
    otherwise.
    """
    if "fp32_groups" in optimizer:
        return [[copy.shape for copy in copies] for copies in optimizer["fp32_groups"]]
    states = inner.get("state", {})
    numbers = [list(group["params"]) for group in inner.get("param_groups", ())]
    spread = {
        number: [
            value.shape
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        ]
        for number, state in states.items()
    }
    if any(not spread.get(number) for group in numbers for number in group):
        return []  # an optimizer without state, such as plain SGD, or weights that have no axis
    return [[spread[number][0] for number in group] for group in numbers]
