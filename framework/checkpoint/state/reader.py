"""Reader of checkpoints of any layout, parameter by parameter: fp32 weights and optimizer state under their plain
names.

`shard_map` knows where every number lies; here they are read, only what is asked for, so that every rank of the next
run takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import MODEL_FILE, model_file_of
from framework.checkpoint.state.files import Piece, Place, Stored
from framework.checkpoint.state.optimizer_shards import FP32
from framework.checkpoint.state.shard_map import STATE_KEY, ShardMap, map_checkpoint
from framework.errors import StorageError, in_one_line

_STEP: Final = "step"
_LOSS_SCALE: Final = ("cur_scale", "cur_iter", "cur_hysteresis", "last_overflow_iter")
_Read = TypeVar("_Read")


class StoredState:
    """The state in one checkpoint."""

    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        """Open its files, whose checksums have been verified.

        Raises:
            StorageError: the files are not laid out as DeepSpeed 0.19.8 lays them out.
        """
        self._path = checkpoint.path
        self._map: ShardMap = self._reading(lambda: map_checkpoint(checkpoint))
        self._common: Mapping[str, Any] = self._reading(self._first_model_file)
        self._states = self._reading(
            lambda: [self._map.files.value(piece.state) for piece in self._pieces() if piece.state]
        )

    @property
    def keys(self) -> list[str]:
        """Keys of the optimizer's state, such as ``exp_avg``."""
        return sorted(
            {key for state in self._states for key, value in state.items() if key != _STEP and _is_spread(value)}
        )

    @property
    def step(self) -> float:
        """Steps that the optimizer has taken."""
        return max((float(state[_STEP]) for state in self._states if _STEP in state), default=0.0)

    def group_of(self, name: str) -> Mapping[str, Any] | None:
        """The options of the parameter group that a parameter was in; None where the optimizer keeps no state of it."""

        def read() -> dict[str, Any] | None:
            place = next((piece.state for piece in self._of(name).pieces if piece.state), None)
            if place is None:
                return None
            groups = self._map.files.value(Place(place.file, (*place.keys[:-2], "param_groups")))
            own = next(group for group in groups if place.keys[-1] in group["params"])
            return {key: value for key, value in own.items() if key != "params"}

        return self._reading(read)

    @property
    def loss_scale(self) -> Mapping[str, float]:
        """fp16's dynamic loss scale and its counters; empty where it was fixed, or in another precision."""

        def read() -> dict[str, float]:
            piece = next(piece for piece in self._pieces() if piece.state)
            assert piece.state is not None
            content = self._map.files[piece.state.file]
            held = content.get("optimizer_state_dict") or content["optimizer"]
            values = vars(held["loss_scaler"]) if "loss_scaler" in held else held
            # A fixed scale has no overflows to count.
            return {key: values[key] for key in _LOSS_SCALE if key in values} if _LOSS_SCALE[-1] in values else {}

        return self._reading(read) if self._states else {}

    @property
    def common(self) -> Mapping[str, Any]:
        """Return what DeepSpeed saves beside weights: schedule, counters, our own state under `STATE_KEY`."""
        return self._common

    def random_state(self, rank: int) -> Any:
        """The random generators of a rank; None where nothing is known of them. At stage 3 they are in the rank's own
        file.
        """

        def find() -> Any:
            states = self.common[STATE_KEY].get("random_states", ())
            if isinstance(states, Mapping) and rank not in states:
                states = self._map.files[model_file_of(rank)][STATE_KEY]["random_states"]
            return states[rank] if states else None

        return self._reading(find)

    def read(self, name: str, key: str, start: int, count: int) -> torch.Tensor:
        """Numbers of a flattened tensor from `start` on, float32, one-dimensional.

        Raises:
            StorageError: the checkpoint does not hold them.
        """
        result, found, offset = torch.empty(count, dtype=torch.float32), 0, 0
        for piece in self._of(name).pieces:
            begin, end = max(start, offset), min(start + count, offset + piece.num)
            if begin < end:
                stretch = self._reading(lambda piece=piece: self._numbers(piece, key))  # type: ignore[misc]
                result[begin - start : end - start] = stretch[begin - offset : end - offset]
                found += end - begin
            offset += piece.num
        if found != count:
            raise self._lacks(name, f"{offset:,} numbers of it, and the run has more")
        return result

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A whole weight or buffer: the fp32 copy where there is one, otherwise as the model had it.

        Raises:
            StorageError: the checkpoint does not hold it, or in another shape.
        """
        self.refuse_other_shape(name, shape)
        return self._reading(lambda: self._map.files.whole(self._of(name)))

    def refuse_other_shape(self, name: str, shape: torch.Size) -> None:
        """Numbers of another shape would come to stand in wrong places where a tensor is read as flat.

        Raises:
            StorageError: the checkpoint does not hold it, or in another shape.
        """
        if (stored := self._of(name)).shape != shape:
            raise self._lacks(name, f"shape {tuple(stored.shape)}, and the run has {tuple(shape)}")

    def refuse_others(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint that holds more than these names, which are all of the run's model: the rest would be
        dropped.

        Raises:
            StorageError: it holds more.
        """
        known = {self._map.ties.get(name, name) for name in names}
        # Stage 3 leaves empty tensors in the place of weights of a further name.
        more = sorted(name for name, one in self._map.stored.items() if name not in known and one.shape.numel())
        if more:
            also = f" (and {len(more) - 1} more)" if more[1:] else ""
            raise self._lacks(more[0] + also, "numbers, and the run's model has nothing of that name")

    def _numbers(self, piece: Piece, key: str) -> torch.Tensor:
        return self._map.files.numbers(piece, state="" if key == FP32 else key)

    def _of(self, name: str) -> Stored:
        stored = self._map.stored.get(self._map.ties.get(name, name))
        if stored is None:
            raise self._lacks(name, "nothing of that name")
        return stored

    def _pieces(self) -> list[Piece]:
        return [piece for stored in self._map.stored.values() for piece in stored.pieces]

    def _first_model_file(self) -> Mapping[str, Any]:
        files = self._map.files
        found: Mapping[str, Any] = files[files.named(MODEL_FILE)[0, 0]]
        return found

    def _reading(self, work: Callable[[], _Read]) -> _Read:
        """Files that were written by another release of DeepSpeed fail in a dozen ways."""
        try:
            return work()
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"{self._path}: its state cannot be read as DeepSpeed 0.19.8 writes it: "
                f"{in_one_line(error)} [checkpoint-not-loaded]"
            ) from error

    def _lacks(self, name: str, what: str) -> StorageError:
        return StorageError(
            f"{self._path}: of {name} it holds {what}; the model or its optimizer has changed [checkpoint-not-loaded]"
        )


def _is_spread(value: Any) -> bool:
    """Check whether a value of the optimizer's state belongs to every number of a parameter, and is laid out as it
    is.
    """
    return isinstance(value, torch.Tensor) and value.ndim > 0
