"""The weights of a checkpoint, whole and one at a time: out of the pieces that the ranks wrote, in any layout.

Nothing is unpickled but tensors and plain values, and what was handed out may be let go before the next is read:
reading a model costs the memory of its largest weight, beside the mapped files, which the system can drop at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.files import CheckpointFiles, Stored
from framework.checkpoint.state.optimizer_shards import EMA_KEY
from framework.checkpoint.state.raw import describe_raw, warn_of
from framework.checkpoint.state.shard_map import map_checkpoint
from framework.errors import ConfigError, Problem, StorageError, in_one_line


class MergedWeights(Mapping[str, torch.Tensor]):
    """Plain name -> tensor on the CPU, put together when it is asked for; the fp32 copy where the checkpoint has one.

    `ties` maps further names of a weight to the name under which it is found here; `checkpoint` has a manifest, also
    where DeepSpeed wrote none.
    """

    def __init__(
        self, checkpoint: SavedCheckpoint, *, average: bool = False, damage: Sequence[str] | None = None
    ) -> None:
        """Map the files, after holding them against their checksums: a changed one would be read silently.

        With `damage` that has been done, and this is what was found.

        With `average`, the moving average of every weight that was trained; others, and buffers, have none and are as
        they are.

        Raises:
            ConfigError: kind ``ema-not-kept``: the run that wrote it kept no average.
            StorageError: kind ``weights-not-read``.
        """
        checkpoint = describe_raw(checkpoint)
        warn_of(checkpoint)
        self.checkpoint, self._place, self._average = checkpoint, checkpoint.path, average
        if average and not (checkpoint.manifest["config"].get("training") or {}).get("ema"):
            raise ConfigError(
                Problem(
                    kind="ema-not-kept",
                    key="--weights",
                    value="ema",
                    file=str(checkpoint.path),
                    reason="its run kept no moving average of the weights (training.ema)",
                    fix="leave --weights out to take the trained ones",
                )
            )
        damage = checkpoint.damage() if damage is None else damage
        if damage:
            more = f", and {len(damage) - 1} more" if damage[1:] else ""
            raise self._not_read(f"it is damaged: {damage[0]}{more}")
        try:
            found = map_checkpoint(checkpoint)
        except Exception as error:  # a file that is laid out in another way has any type of exception
            raise self._not_read(in_one_line(error)) from error
        self._files: CheckpointFiles = found.files
        self.stored: Mapping[str, Stored] = found.stored
        self.ties: Mapping[str, str] = found.ties
        if average and all(self._averaged(stored) is stored for stored in self.stored.values()):
            raise self._not_read("nothing in its files is a moving average")

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        return self._files.whole(self._averaged(stored) if self._average else stored)

    def _averaged(self, stored: Stored) -> Stored:
        """The same stretches of the average, which is laid out as the weight is. A weight without gradients has
        none.
        """
        pieces = []
        for piece in stored.pieces:
            if piece.state is None or EMA_KEY not in self._files.value(piece.state):
                return stored
            pieces.append(replace(piece, place=piece.state.then(EMA_KEY)))
        return replace(stored, pieces=tuple(pieces))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def _not_read(self, reason: str) -> StorageError:
        return StorageError(
            f"{self._place}: its weights cannot be read: {reason}; name another checkpoint [weights-not-read]"
        )
