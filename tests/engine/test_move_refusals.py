"""What a checkpoint is not moved into: a model with other shapes or fewer names.

DeepSpeed's files of stage 0, and torch's own optimizer, which they are moved into.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import STATE_KEY
from framework.checkpoint.state.weight_names import names_of
from framework.engine.checkpoint_load import move_in
from framework.errors import StorageError
from framework.plan.layout import Layout


class Cached(torch.nn.Module):
    """A layer with a buffer, which layers may share."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.weight = torch.nn.Parameter(torch.randn(3, 4))


def write(model: torch.nn.Module, folder: Path) -> SavedCheckpoint:
    """As DeepSpeed leaves it at stage 0, of an optimizer that has no state."""
    (folder / "global_step1").mkdir()
    names = [[name for name, parameter in model.named_parameters() if parameter.requires_grad]]
    content = {
        "module": model.state_dict(),
        "optimizer": None,
        STATE_KEY: {"names": names, "state": {"step": 1}},
        "global_steps": 1,
        "global_samples": 8,
        "skipped_steps": 0,
    }
    torch.save(content, folder / "global_step1/mp_rank_00_model_states.pt")
    return SavedCheckpoint(folder, "global_step1", {"step": 1, "config": {"zero": {"stage": 0}}})


def move(checkpoint: SavedCheckpoint, model: torch.nn.Module) -> Any:
    engine: Any = SimpleNamespace(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lr_scheduler=None
    )
    return move_in(engine, checkpoint, names=names_of(model), layout=Layout(1, 1, 8, 8, 1))


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (12,)])
def test_other_shapes_of_weights_that_are_cut_up(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Read as flat they would fit, and stand in wrong places. Stage 3 notes the shape of the whole
    weight beside its pieces.
    """
    checkpoint = write(
        torch.nn.ParameterDict({"first": torch.randn(2), "second": torch.randn(3, 4)}), tmp_path
    )
    model = torch.nn.ParameterDict(
        {"first": torch.zeros(2), "second": torch.zeros(torch.Size(shape).numel())}
    )
    for number, (name, whole) in enumerate((("first", (2,)), ("second", shape))):
        model[name].ds_id, model[name].ds_shape = number, torch.Size(whole)  # type: ignore[union-attr]
    with pytest.raises(
        StorageError,
        match=r"second it holds shape \(3, 4\), and the run has \(.*\[checkpoint-not-loaded\]",
    ):
        move(checkpoint, model)
    assert not any(tensor.any() for tensor in values(model).values()), "nothing was changed"


def test_weights_that_the_model_has_not(tmp_path: Path) -> None:
    checkpoint = write(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))), tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    before = values(model)
    with pytest.raises(
        StorageError,
        match=r"of 2\.bias \(and 1 more\) it holds numbers, and the run's model has nothing",
    ):
        move(checkpoint, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in values(model).items())


@pytest.mark.parametrize(
    "kind", ["tied", "frozen", "shared buffer", "buffers that were not shared"]
)
def test_a_model_that_is_the_same_is_filled(kind: str, tmp_path: Path) -> None:
    def build(*, copies: bool) -> torch.nn.Module:
        table = torch.randn(2)
        model = torch.nn.Sequential(
            Cached(table), Cached(table.clone() if copies else table), torch.nn.BatchNorm1d(3)
        )
        if kind == "tied":
            model[1].weight = model[0].weight
        if kind == "frozen":
            model[0].weight.requires_grad_(False)
        return model

    saved = build(copies=kind.startswith("buffers"))
    if kind.startswith("buffers"):  # as a pipeline saves them: every layer its own
        assert saved[1].table is not saved[0].table  # type: ignore[index]
    model = build(copies=False)
    assert move(write(saved, tmp_path), model) == {"step": 1}
    held = values(model)
    assert all(torch.equal(tensor, held[name]) for name, tensor in values(saved).items())
