"""Readers of checkpoints of any layout, parameter by parameter, under their plain names:
`StoredState` for a run that goes on (fp32 weights and optimizer state), `MergedWeights` for whoever
wants the weights alone.

`shard_map` knows where every number lies; here they are read, only what is asked for, so that every
rank of the next run takes its own part, and a model costs the memory of its largest weight. Nothing
is unpickled but tensors and plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import MODEL_FILE, model_file_of
from framework.checkpoint.state.deepspeed_format import describe_raw, warn_of
from framework.checkpoint.state.optimizer_shards import EMA_KEY, FP32
from framework.checkpoint.state.shard_map import (
    STATE_KEY,
    CheckpointFiles,
    ShardPiece,
    Stored,
    ValuePath,
    map_checkpoint,
)
from framework.checkpoint.state.tensor_split import Division
from framework.errors import ConfigError, StorageError, in_one_line

_STEP: Final = "step"
_OF_EXPERTS: Final = ("moe", "name")  # keys of a group that belong to the layout
_LOSS_SCALE: Final = ("cur_scale", "cur_iter", "cur_hysteresis", "last_overflow_iter")


class StoredState:
    """The state in one checkpoint, of which a rank of the run reads its own parts where the run
    splits weights; every method raises StorageError where it is not there as DeepSpeed 0.19.8 lays
    it.

    Attributes:
        common: what DeepSpeed saves beside weights: schedule, counters, our own state under
            `STATE_KEY`.
    """

    def __init__(self, checkpoint: SavedCheckpoint, *, division: Division = Division()) -> None:  # noqa: B008
        """Open its files, whose checksums have been verified, for a rank of this place in the run's
        tensor group.
        """
        self._path = checkpoint.path
        self._division = division
        self._tensor_size = checkpoint.tensor_size
        with self._reading():
            self._map = map_checkpoint(checkpoint)
            self._files = self._map.files
            self.common: Mapping[str, Any] = self._files[self._files.named(MODEL_FILE)[0, 0]]
            places = (stored.first_state for stored in self._map.stored.values())
            self._places = list(dict.fromkeys(place for place in places if place))
            self._states = [self._files.value(place) for place in self._places]

    @property
    def keys(self) -> list[str]:
        """Keys of the optimizer's state that belong to every number of a parameter, such as
        ``exp_avg``.
        """
        pairs = (pair for state in self._states for pair in state.items())
        return sorted(
            {
                key
                for key, value in pairs
                if key != _STEP and torch.is_tensor(value) and value.ndim > 0
            }
        )

    def keys_of(self, name: str) -> list[str]:
        """Return the `keys` that a parameter has: Muon and Adafactor keep other state of matrices
        than of vectors.
        """
        with self._reading():
            place = self._of(name).first_state
            if place:
                state = self._files.value(place)
            else:
                state = {}
            return [key for key in self.keys if key in state]

    def step_of(self, name: str) -> float | None:
        """Steps that the optimizer has taken of a parameter, of all where it counts none of this
        one; None where it has no state of it, as it never took one.
        """
        with self._reading():
            place = self._of(name).first_state
            if place:
                state = self._files.value(place)
            else:
                state = {}
            if state:
                return float(state.get(_STEP, self._most_steps))
            return None

    @cached_property
    def _most_steps(self) -> float:
        return max((float(state[_STEP]) for state in self._states if _STEP in state), default=0.0)

    def group_of(self, name: str) -> Mapping[str, Any] | None:
        """The options of the parameter group that a parameter was in; None where the optimizer
        keeps no state of it.
        """
        with self._reading():
            place = self._of(name).first_state
            if place is None:
                return None
            groups = self._files.value(ValuePath(place.file, (*place.keys[:-2], "param_groups")))
            own = next(group for group in groups if place.keys[-1] in group["params"])
            return {key: value for key, value in own.items() if key not in ("params", *_OF_EXPERTS)}

    @property
    def loss_scale(self) -> Mapping[str, float]:
        """fp16's dynamic loss scale and its counters; empty where it was fixed, or in another
        precision.
        """
        if not self._places:
            return {}
        with self._reading():
            content = self._files[self._places[0].file]
            held = content.get("optimizer_state_dict") or content["optimizer"]
            if "loss_scaler" in held:
                values = vars(held["loss_scaler"])
            else:
                values = held
            # A fixed scale has no overflows to count.
            if _LOSS_SCALE[-1] in values:
                return {key: values[key] for key in _LOSS_SCALE if key in values}
            return {}

    def random_state(self, rank: int) -> Any:
        """The random generators of a rank; None where nothing is known of them. At stage 3 they are
        in the rank's own file.
        """
        with self._reading():
            states = self.common[STATE_KEY].get("random_states", ())
            if isinstance(states, Mapping) and rank not in states:
                own = model_file_of(rank, tensor_size=self._tensor_size)
                states = self._files[own][STATE_KEY]["random_states"]
            if len(states):
                return states[rank]
            return None

    def read(self, name: str, key: str, start: int, count: int) -> torch.Tensor:
        """Numbers of this rank's flattened tensor from `start` on, float32, one-dimensional."""
        result = torch.empty(count, dtype=torch.float32)
        found = 0
        for piece in self._pieces(name, start, start + count):
            with self._reading():
                result[found : found + piece.num] = self._files.numbers(
                    piece, state="" if key == FP32 else key
                )
            found += piece.num
        if found != count:
            raise self._lacks(
                name, f"{self._of(name).shape.numel():,} numbers of it, and the run has more"
            )
        return result

    def _pieces(self, name: str, start: int, stop: int) -> Iterator[ShardPiece]:
        """The stretches that together are these numbers of what this rank has of a weight."""
        stored = self._of(name)
        own = self._division
        split = own.splits.get(name)
        if split is None:
            yield from stored.pieces(start, stop)
        elif (split, own.size) == (stored.split, len(stored.parts)):
            yield from stored.parts[own.rank].pieces(start, stop)
        else:
            for first, num in split.to_whole(stored.shape, own.rank, own.size, start, stop):
                yield from stored.pieces(first, first + num)

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor:
        """What this rank has, in this shape, of a weight or buffer: the fp32 copy where there is
        one, otherwise as the model had it.
        """
        split = self._division.splits.get(name)
        self.refuse_other_shape(name, shape if split is None else split.whole_shape(shape))
        with self._reading():
            return self._files.joined(
                self._pieces(name, 0, shape.numel()), shape, self._of(name).dtype
            )

    def refuse_other_shape(self, name: str, shape: torch.Size) -> None:
        """Numbers of another shape would come to stand in wrong places where a tensor is read as
        flat.
        """
        stored = self._of(name)
        if stored.shape != shape:
            raise self._lacks(name, f"shape {tuple(stored.shape)}, and the run has {tuple(shape)}")

    def refuse_others(self, names: Iterable[str], *, is_elsewhere: Callable[[str], bool]) -> None:
        """Refuse what holds more than these names, and what other ranks have: the rest would be
        dropped.
        """
        known = {self._map.ties.get(name, name) for name in names}
        # Stage 3 leaves empty tensors in the place of weights of a further name.
        more = sorted(
            name
            for name, one in self._map.stored.items()
            if name not in known and one.shape.numel() and not is_elsewhere(name)
        )
        if more:
            if more[1:]:
                also = f" (and {len(more) - 1} more)"
            else:
                also = ""
            raise self._lacks(
                more[0] + also, "numbers, and the run's model has nothing of that name"
            )

    def _of(self, name: str) -> Stored:
        stored = self._map.stored.get(self._map.ties.get(name, name))
        if stored is None:
            raise self._lacks(name, "nothing of that name")
        return stored

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Files that were written by another release of DeepSpeed fail in a dozen ways."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"{self._path}: its state cannot be read as DeepSpeed 0.19.8 writes it: "
                f"{in_one_line(error)} [checkpoint-not-loaded]"
            ) from error

    def _lacks(self, name: str, what: str) -> StorageError:
        return StorageError(
            f"{self._path}: of {name} it holds {what}; the model or its optimizer has changed "
            "[checkpoint-not-loaded]"
        )


class MergedWeights(Mapping[str, torch.Tensor]):
    """Plain name -> tensor on the CPU, put together when it is asked for; the fp32 copy where the
    checkpoint has one.

    `ties` maps further names of a weight to the name under which it is found here; `lacking` are
    names that nothing in the files has numbers for; `checkpoint` has a manifest, also where
    DeepSpeed wrote none.
    """

    def __init__(
        self,
        checkpoint: SavedCheckpoint,
        *,
        average: bool = False,
        damage: Sequence[str] | None = None,
    ) -> None:
        """Map the files, after holding them against their checksums: a changed one would be read
        silently.

        With `damage` that has been done, and this is what was found.

        With `average`, the moving average of every weight that was trained; others, and buffers,
        have none and are as they are.

        Raises:
            ConfigError: kind ``ema-not-kept``: the run that wrote it kept no average.
            StorageError: kind ``weights-not-read``.
        """
        checkpoint = describe_raw(checkpoint)
        warn_of(checkpoint)
        self.checkpoint = checkpoint
        self._place = checkpoint.path
        self._average = average
        if average and not (checkpoint.manifest["config"].get("training") or {}).get("ema"):
            reason = "its run kept no moving average of the weights (training.ema)"
            fix = "leave --weights out to take the trained ones"
            file = str(checkpoint.path)
            raise ConfigError.of(
                "ema-not-kept", reason, fix, key="--weights", value="ema", file=file
            )
        if damage is None:
            damage = checkpoint.damage()
        else:
            damage = damage
        if damage:
            if damage[1:]:
                more = f", and {len(damage) - 1} more"
            else:
                more = ""
            raise self._not_read(f"it is damaged: {damage[0]}{more}")
        try:
            found = map_checkpoint(checkpoint)
        except (
            Exception
        ) as error:  # a file that is laid out in another way has any type of exception
            raise self._not_read(in_one_line(error)) from error
        self._files: CheckpointFiles = found.files
        self.stored: Mapping[str, Stored] = found.stored
        self.ties: Mapping[str, str] = found.ties
        self.lacking: Sequence[str] = found.lacking
        if average and all(self._averaged(stored) is stored for stored in self.stored.values()):
            raise self._not_read("nothing in its files is a moving average")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Put a weight together; raises StorageError, kind ``weights-not-read``, where a file holds
        something else.
        """
        stored = self.stored[name]
        try:
            pieces = (self._averaged(stored) if self._average else stored).pieces()
            return self._files.joined(pieces, stored.shape, stored.dtype)
        except Exception as error:
            raise self._not_read(in_one_line(error)) from error

    def _averaged(self, stored: Stored) -> Stored:
        """The same stretches of the average, which is laid out as the weight is. A weight without
        gradients has none.
        """
        if stored.parts:
            parts = tuple(map(self._averaged, stored.parts))
            if parts == stored.parts:
                return stored
            return replace(stored, parts=parts)
        place = stored.first_state
        if place is None or stored.state is None or EMA_KEY not in self._files.value(place):
            return stored
        files = (stored.state_file,) if stored.state_file else stored.files
        return replace(stored, files=files, keys=(*stored.state, EMA_KEY))

    def refuse_lacking(self) -> None:
        """Refuse a checkpoint without the numbers of some weight: what is made of it would be
        another model.

        Raises:
            StorageError: kind ``weights-not-read``.
        """
        if self.lacking:
            raise self._not_read(describe_lacking(self.lacking))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def _not_read(self, reason: str) -> StorageError:
        return StorageError(
            f"{self._place}: its weights cannot be read: {reason}; name another checkpoint "
            "[weights-not-read]"
        )


def describe_lacking(names: Sequence[str]) -> str:
    """Describe names that nothing in a checkpoint has numbers for."""
    if names[1:]:
        more = f" and {len(names) - 1} more"
    else:
        more = ""
    return (
        f"no file has the numbers of {names[0]}{more}: its optimizer did not hold them, or they "
        "are further names of other weights, which an earlier release did not note"
    )
