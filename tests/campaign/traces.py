"""What a killed run left on the disk, and what is not the same at the end of two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from framework.checkpoint.manifest import list_checkpoints

# What differs between two runs of the same steps: the clock, what is measured with it, and what
# counts starts or begins anew at each.
_MEASURED = (
    "time",
    "throughput/",
    "time/",
    "memory/",
    "data/",
    "run/",
    "ranks/",
    "train/spike_score",
)


def left_behind(checkpoints: Path) -> str:
    """What a kill left says what it interrupted."""
    saving = checkpoints / ".saving"
    if any(checkpoints.glob(".leaving-*")):
        return "deleting an old checkpoint"
    if not saving.is_dir():
        return "no save"
    files = [path for path in saving.glob("*/*") if not path.name.startswith(".")]
    if not files:
        return (
            "save: nothing written yet"
            if not any(checkpoints.glob("global_step*")) or not _is_named(saving)
            else ("save: named, not tidied")
        )
    if any(path.name == "manifest.json" for path in files):
        return "save: all written, not named"
    if any(saving.glob("*/.manifest.json.*")):
        return "save: manifest being written"
    return "save: files being written"


def _is_named(saving: Path) -> bool:
    """DeepSpeed puts its scripts beside the checkpoint last; where they are and it is not, it has
    got its name.
    """
    return any(saving.glob("*.py"))


def differences(unbroken: Path, run: Path, *, num_steps: int) -> list[str]:
    """What is not the same at the end of two runs."""
    ends = [next(reversed(list_checkpoints(folder / "checkpoints"))) for folder in (unbroken, run)]
    found = [f"{run}: {stated}" for stated in ends[1].damage()]
    files, others = (
        {name: record for name, record in end.manifest["files"].items() if name.endswith(".pt")}
        for end in ends
    )
    if files.keys() != others.keys():
        found.append(f"{run}: other files: {sorted(others)}")
    for name in sorted(files.keys() & others.keys()):
        if files[name] != others[name]:
            found += [
                f"{run}: {name}: {stated}"
                for stated in _other_values(ends[0].path / name, ends[1].path / name)
            ]
    rows, other_rows = (_rows(folder) for folder in (unbroken, run))
    if len(rows) < num_steps or ends[0].step != num_steps or not files:
        found.append(f"{unbroken}: the unbroken run itself is not whole")
    if rows != other_rows:
        first = next(
            (pair for pair in zip(rows, other_rows, strict=False) if pair[0] != pair[1]),
            (len(rows), len(other_rows)),
        )
        found.append(f"{run}: other metrics: {first}")
    return found


_PLACES = "/state/stream/"


def _other_values(unbroken: Path, other: Path) -> list[str]:
    """Where two files hold other numbers; pickle may write the same ones in two ways, after what
    was one object was loaded.
    """
    import torch

    from framework.checkpoint.state.checkpoint_engine import read_file

    def leaves(value: Any, place: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {
                key: leaf
                for name, item in value.items()
                for key, leaf in leaves(item, f"{place}/{name}").items()
            }
        if isinstance(value, (list, tuple)):
            return {
                key: leaf
                for number, item in enumerate(value)
                for key, leaf in leaves(item, f"{place}/{number}").items()
            }
        if (
            type(value).__module__.startswith("deepspeed.")
            and hasattr(value, "__dict__")
            and not hasattr(value, "name")
        ):
            return leaves(vars(value), f"{place}/{type(value).__name__}")
        return {place: value}

    def same(left: Any, right: Any) -> bool:
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            # By bytes: a NaN is itself, and zero is not minus zero.
            if (left.dtype, left.shape) != (right.dtype, right.shape):
                return False
            bits = [
                tensor.detach().contiguous().view(-1).view(torch.uint8)
                for tensor in (left, right)
                if tensor.numel()
            ]
            return not bits or torch.equal(*bits)
        return type(left) is type(right) and bool(left == right)

    first, second = leaves(read_file(unbroken), ""), leaves(read_file(other), "")
    if first.keys() != second.keys():
        return [f"other entries: {sorted(first.keys() ^ second.keys())[:5]}"]
    return [
        f"{place}: {second[place]!r:.80} where {value!r:.80} was"
        for place, value in first.items()
        # Where a lane may be begun depends on when its source was asked; what follows from there
        # does not.
        if _PLACES not in place and not same(value, second[place])
    ]


def _rows(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(_MEASURED)}
        for line in lines
    ]
