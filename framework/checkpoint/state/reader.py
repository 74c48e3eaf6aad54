"""Readers of checkpoints of any layout, parameter by parameter, under their plain names:
`StoredState` for a run that goes on (fp32 weights and optimizer state), `MergedWeights` for
commands that want the weights alone.

`shard_map` knows where every number lies; this module reads the numbers, only the requested ones,
so that every rank of the next run takes its own part, and a model costs the memory of its largest
weight. Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import MODEL_FILE, STATE_KEY, model_file_of
from framework.checkpoint.state.deepspeed_format import describe_raw, warn_of
from framework.checkpoint.state.optimizer_shards import (
    EMA_KEY,
    FP32,
    is_whole_key,
    whole_key,
)
from framework.checkpoint.state.schedule_free import AHEAD_KEY, averaged, beta_of
from framework.checkpoint.state.shard_map import map_checkpoint
from framework.checkpoint.state.stored import CheckpointFiles, ShardPiece, Stored, ValuePath
from framework.checkpoint.state.tensor_split import RankPart
from framework.errors import ConfigError, StorageError, in_one_line

_STEP: Final = "step"
# Keys of a parameter group that are no options: its members, and two that belong to the layout.
_NOT_OPTIONS: Final = ("params", "moe", "name")
_LOSS_SCALE: Final = ("cur_scale", "cur_iter", "cur_hysteresis", "last_overflow_iter")
_UNDIVIDED: Final[Mapping[str, RankPart]] = MappingProxyType({})


class StoredState:
    """The state in one checkpoint; a rank reads its own parts of it if the run splits weights.
    Every method raises StorageError if the state is not there as DeepSpeed 0.19.8 lays it.

    Attributes:
        common: what DeepSpeed saves beside weights: schedule, counters, our own state under
            `STATE_KEY`.
    """

    def __init__(
        self, checkpoint: SavedCheckpoint, *, parts: Mapping[str, RankPart] = _UNDIVIDED
    ) -> None:
        """Open the files of a checkpoint with verified checksums, for a rank with these parts of
        the weights that the run divides, by their names in the plain module.
        """
        self._path = checkpoint.path
        self._parts = parts
        self._tensor_size = checkpoint.tensor_size
        seen: set[ValuePath] = set()
        with self._explaining_errors():
            self._map = map_checkpoint(checkpoint)
            self._files = self._map.files
            self.common: Mapping[str, Any] = self._files[self._files.named(MODEL_FILE)[0, 0]]
            self._state_paths: list[ValuePath] = []
            for stored in self._map.stored.values():
                path = stored.first_state
                if path is not None and path not in seen:
                    seen.add(path)
                    self._state_paths.append(path)
            self._states = [self._files.value(path) for path in self._state_paths]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the stored weights and buffers, by name; of experts, in one rank's file."""
        return {name: stored.shape for name, stored in self._map.stored.items()}

    @property
    def keys(self) -> list[str]:
        """Keys of the optimizer's state that belong to every number of a parameter, such as
        ``exp_avg``.
        """
        keys = set()
        for state in self._states:
            for key, value in state.items():
                if is_whole_key(key):
                    keys.add(key.partition(".")[0])
                elif key != _STEP and torch.is_tensor(value) and value.ndim > 0:
                    keys.add(key)
        return sorted(keys)

    def keys_of(self, name: str) -> list[str]:
        """Return the `keys` that a parameter has: Muon and Adafactor keep other state of matrices
        than of vectors.
        """
        with self._explaining_errors():
            state = self._state_of(name)
            number = self._stored(name).number
            return [key for key in self.keys if key in state or whole_key(key, number) in state]

    def step_of(self, name: str) -> float | None:
        """Return the number of steps that the optimizer has taken of a parameter; the most of any
        parameter if it does not count this one's; None if it has no state of it, having
        taken none.
        """
        with self._explaining_errors():
            state = self._state_of(name)
            if state:
                return float(state.get(_STEP, self._most_steps))
            return None

    def scalars_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return the single numbers, beside its steps, that the optimizer keeps of a parameter."""
        with self._explaining_errors():
            state = self._state_of(name)
            scalars = {}
            for key, value in state.items():
                is_moved_apart = key == _STEP or is_whole_key(key)
                if not is_moved_apart and torch.is_tensor(value) and value.ndim == 0:
                    scalars[key] = value
            return scalars

    def _state_of(self, name: str) -> Mapping[str, Any]:
        path = self._stored(name).first_state
        if path is None:
            return {}
        state: Mapping[str, Any] = self._files.value(path)
        return state

    @cached_property
    def _most_steps(self) -> float:
        return max((float(state[_STEP]) for state in self._states if _STEP in state), default=0.0)

    def group_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the options of the parameter group that a parameter was in; None if the optimizer
        keeps no state of it.
        """
        with self._explaining_errors():
            path = self._stored(name).first_state
            if path is None:
                return None
            # The path ends with "state" and the parameter's number.
            number = path.keys[-1]
            groups = self._files.value(ValuePath(path.file, (*path.keys[:-2], "param_groups")))
            group = next(group for group in groups if number in group["params"])
            return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}

    @property
    def loss_scale(self) -> Mapping[str, float]:
        """fp16's dynamic loss scale and its counters; empty if it was fixed, or in another
        precision.
        """
        if not self._state_paths:
            return {}
        with self._explaining_errors():
            content = self._files[self._state_paths[0].file]
            optimizer = content.get("optimizer_state_dict") or content["optimizer"]
            if "loss_scaler" in optimizer:
                values = vars(optimizer["loss_scaler"])
            else:
                values = optimizer
            # A fixed scale has no overflows to count.
            if _LOSS_SCALE[-1] in values:
                return {key: values[key] for key in _LOSS_SCALE if key in values}
            return {}

    def random_state(self, rank: int) -> Any:
        """Return the state of a rank's random generators, or None if the checkpoint has none. At
        stage 3 it is in the rank's own file.
        """
        with self._explaining_errors():
            states = self.common[STATE_KEY].get("random_states", ())
            if isinstance(states, Mapping) and rank not in states:
                rank_file = model_file_of(rank, tensor_size=self._tensor_size)
                states = self._files[rank_file][STATE_KEY]["random_states"]
            if len(states):
                return states[rank]
            return None

    def read(self, name: str, key: str, start: int, count: int) -> torch.Tensor:
        """Read `count` numbers of this rank's flattened tensor from `start` on: float32,
        one-dimensional.
        """
        if self._is_kept_whole(name, key):
            return self.whole_state(name, key)[start : start + count]
        state = "" if key == FP32 else key
        result = torch.empty(count, dtype=torch.float32)
        done = 0
        for piece in self._pieces(name, start, start + count):
            with self._explaining_errors():
                result[done : done + piece.num] = self._files.numbers(piece, state=state)
            done += piece.num
        if done != count:
            num_stored = self._stored(name).shape.numel()
            raise self._mismatch(name, f"{num_stored:,} numbers of it, and the run has more")
        return result

    def whole_state(self, name: str, key: str) -> torch.Tensor:
        """Return Adafactor's state `key` of a whole weight, flat: every rank that holds numbers of
        the weight has it alike.
        """
        kept_as = key  # of torch's Adafactor, which steps whole weights
        if self._is_kept_whole(name, key):
            kept_as = whole_key(key, self._stored(name).number)
        with self._explaining_errors():
            whole: torch.Tensor = self._state_of(name)[kept_as]
            return whole.reshape(-1)

    def _is_kept_whole(self, name: str, key: str) -> bool:
        """Check whether a weight's state was kept whole, beside a rank's share of the weight."""
        with self._explaining_errors():
            return whole_key(key, self._stored(name).number) in self._state_of(name)

    def _pieces(self, name: str, start: int, stop: int) -> Iterator[ShardPiece]:
        """Yield the stretches that together are numbers `start` to `stop` of this rank's part of a
        weight.
        """
        stored = self._stored(name)
        part = self._parts.get(name)
        if part is None:
            yield from stored.pieces(start, stop)
        elif (part.split, part.size) == (stored.split, len(stored.parts)):  # divided as it was
            yield from stored.parts[part.rank].pieces(start, stop)
        else:
            shape = stored.shape
            for first, num in part.split.to_whole(shape, part.rank, part.size, start, stop):
                yield from stored.pieces(first, first + num)

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Read this rank's part of a weight or buffer, of this shape: the fp32 copy if the
        checkpoint has one, otherwise as the model had it.
        """
        part = self._parts.get(name)
        if part is None:
            self.refuse_other_shape(name, shape)
        else:
            self.refuse_other_shape(name, part.split.whole_shape(shape))
        with self._explaining_errors():
            pieces = self._pieces(name, 0, shape.numel())
            return self._files.joined(pieces, shape, self._stored(name).dtype)

    def refuse_other_shape(self, name: str, shape: torch.Size) -> None:
        """Raise StorageError if a weight is stored in another shape: its numbers, read as flat,
        would land in wrong places.
        """
        stored = self._stored(name)
        if stored.shape != shape:
            raise self._mismatch(
                name, f"shape {tuple(stored.shape)}, and the run has {tuple(shape)}"
            )

    def refuse_others(self, names: Iterable[str], *, is_elsewhere: Callable[[str], bool]) -> None:
        """Raise StorageError if the checkpoint holds weights beside these names and those that are
        on other ranks (`is_elsewhere`): they would be dropped.
        """
        known = {self._map.ties.get(name, name) for name in names}
        others = []
        for name, stored in self._map.stored.items():
            # Stage 3 leaves empty tensors in the place of weights of a further name.
            if name not in known and stored.shape.numel() and not is_elsewhere(name):
                others.append(name)
        if others:
            first = min(others)
            if len(others) > 1:
                first += f" (and {len(others) - 1} more)"
            raise self._mismatch(first, "numbers, and the run's model has nothing of that name")

    def _stored(self, name: str) -> Stored:
        stored = self._map.stored.get(self._map.ties.get(name, name))
        if stored is None:
            raise self._mismatch(name, "nothing of that name")
        return stored

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Turn any error into StorageError: files of another release of DeepSpeed fail in a dozen
        ways.
        """
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"{self._path}: its state cannot be read as DeepSpeed 0.19.8 writes it: "
                f"{in_one_line(error)} [checkpoint-not-loaded]"
            ) from error

    def _mismatch(self, name: str, what: str) -> StorageError:
        return StorageError(
            f"{self._path}: of {name} it holds {what}; the model or its optimizer has changed "
            "[checkpoint-not-loaded]"
        )


class MergedWeights(Mapping[str, torch.Tensor]):
    """Plain name -> tensor on the CPU, joined when it is accessed: the fp32 copy if the checkpoint
    has one.

    Attributes:
        checkpoint: with a manifest, also if DeepSpeed wrote none.
        stored: name -> where its numbers lie.
        ties: further names of a weight -> its name here.
        lacking: names that nothing in the files has numbers for.
    """

    def __init__(
        self,
        checkpoint: SavedCheckpoint,
        *,
        average: bool = False,
        damage: Sequence[str] | None = None,
    ) -> None:
        """Map the files, after comparing them with their checksums: a changed one would be read
        silently.

        Args:
            checkpoint: the checkpoint.
            average: read the moving average of every weight that was trained; others, and buffers,
                have none and are read as they are. Of schedule-free AdamW the averaged weights are
                read in any case.
            damage: the result of a comparison that has been done; None: every byte is read here.

        Raises:
            ConfigError: kind ``ema-not-kept``: the run that wrote it kept no average.
            StorageError: kind ``weights-not-read``.
        """
        checkpoint = describe_raw(checkpoint)
        warn_of(checkpoint)
        self.checkpoint = checkpoint
        self._path = checkpoint.path
        self._average = average
        self._beta = beta_of(checkpoint.manifest)
        if average:
            _refuse_without_average(checkpoint)
        if damage is None:
            damage = checkpoint.damage()
        self._refuse_damage(damage)
        try:
            shard_map = map_checkpoint(checkpoint)
        except Exception as error:  # a file of another layout may raise any type
            raise self._not_read(in_one_line(error)) from error
        self._files: CheckpointFiles = shard_map.files
        self.stored: Mapping[str, Stored] = shard_map.stored
        self.ties: Mapping[str, str] = shard_map.ties
        self.lacking: Sequence[str] = shard_map.lacking
        if average:
            sources = [self._state_of(stored, EMA_KEY) for stored in self.stored.values()]
            if all(map(operator.is_, sources, self.stored.values())):
                raise self._not_read("nothing in its files is a moving average")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Join a weight. Raises StorageError, kind ``weights-not-read``, if a file holds something
        else.
        """
        stored = self.stored[name]
        try:
            source = stored
            if self._average:
                source = self._state_of(stored, EMA_KEY)
            weight = self._files.joined(source.pieces(), stored.shape, stored.dtype)
            if self._beta is None:
                return weight
            ahead = self._state_of(stored, AHEAD_KEY)
            if ahead is stored:  # it was never stepped
                return weight
            values = self._files.joined(ahead.pieces(), stored.shape, stored.dtype)
            return averaged(weight, values.to(weight.dtype), beta=self._beta)
        except Exception as error:
            raise self._not_read(in_one_line(error)) from error

    def _state_of(self, stored: Stored, key: str) -> Stored:
        """Return where the optimizer's state `key` of a weight lies, which is laid out as the
        weight is; a weight without gradients has none and is returned itself.
        """
        if stored.parts:
            parts = tuple(self._state_of(part, key) for part in stored.parts)
            if parts == stored.parts:
                return stored
            return replace(stored, parts=parts)
        path = stored.first_state
        if path is None or stored.state is None or key not in self._files.value(path):
            return stored
        files = stored.files
        if stored.state_file:
            files = (stored.state_file,)
        return replace(stored, files=files, keys=(*stored.state, key))

    def refuse_lacking(self) -> None:
        """Refuse a checkpoint without the numbers of some weight: it would make another model.

        Raises:
            StorageError: kind ``weights-not-read``.
        """
        if self.lacking:
            raise self._not_read(describe_lacking(self.lacking))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def _refuse_damage(self, damage: Sequence[str]) -> None:
        if not damage:
            return
        reason = f"it is damaged: {damage[0]}"
        if len(damage) > 1:
            reason += f", and {len(damage) - 1} more"
        raise self._not_read(reason)

    def _not_read(self, reason: str) -> StorageError:
        return StorageError(
            f"{self._path}: its weights cannot be read: {reason}; name another checkpoint "
            "[weights-not-read]"
        )


def _refuse_without_average(checkpoint: SavedCheckpoint) -> None:
    training = checkpoint.manifest["config"].get("training") or {}
    if not training.get("ema"):
        reason = "its run kept no moving average of the weights (training.ema)"
        fix = "leave --weights out to take the trained ones"
        file = str(checkpoint.path)
        raise ConfigError.of("ema-not-kept", reason, fix, key="--weights", value="ema", file=file)


def describe_lacking(names: Sequence[str]) -> str:
    """Describe names that nothing in a checkpoint has numbers for."""
    weights = names[0]
    if len(names) > 1:
        weights += f" and {len(names) - 1} more"
    return (
        f"no file has the numbers of {weights}: its optimizer did not hold them, or they "
        "are further names of other weights, which an earlier release did not note"
    )
