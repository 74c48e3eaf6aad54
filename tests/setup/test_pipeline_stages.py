"""What cannot be cut into pipeline stages is refused while nothing waits: one line that names the
layer, and no run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import framework
import framework.engine.layer_times
import framework.setup.start_point
from framework.checkpoint.manifest import SavedCheckpoint
from framework.errors import ConfigError
from framework.models.layer_lists import as_layers
from framework.models.layers import Layer, LayeredModel
from framework.recipes.text.prepare import prepare as prepare_text
from framework.setup.pipeline_stages import cut_as_saved, let_go_of_others
from framework.setup.prepare_run import Prepared, prepare
from framework.setup.user_code import Objects

SAMPLES = TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,)))


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a launcher describes them, in an empty folder."""
    for name, value in {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def values(**sections: Any) -> dict[str, Any]:
    return {
        "batch": {"global_size": 8, "micro_size": 4},
        "parallel": {"pipe": 2},
        "training": {"max_steps": 2},
        "optimizer": {"kind": "sgd"},
        **sections,
    }


def prepared(
    model: Any = None, *, data: Any = SAMPLES, task: Any = None, **sections: Any
) -> Prepared:
    config = framework.RunConfig.model_validate(values(**sections))
    return prepare(config, objects=Objects(model=model, train_data=data, task=task))


def refused(tmp_path: Path, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared(*arguments, **keywords)
    (problem,) = caught.value.problems
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()
    assert "\n" not in str(problem)
    return str(problem)


class Returns(nn.Module):
    """A linear layer that hands on what a function makes of its output."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.result = nn.Linear(6, 6), result

    def forward(self, value: Tensor) -> Any:
        return self.result(self.linear(value))


class Takes(nn.Linear):
    """A classifier of anything that holds a tensor."""

    def forward(self, value: Any) -> Tensor:
        while not isinstance(value, Tensor):
            value = next(
                iter(value.values() if isinstance(value, Mapping) else value or [torch.zeros(4, 6)])
            )
        return super().forward(value)


UNSENDABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dict": (lambda value: {"hidden": value}, "it returns a dict"),
    "none": (lambda value: None, "it returns a NoneType"),
    "list": (lambda value: [value], "it returns a list"),
    "bool": (lambda value: (value, value > 0), "torch.bool"),
    "no-gradient": (lambda value: (value, torch.ones_like(value)), "no gradient flows"),
    "detached": (lambda value: value.detach(), "no gradient flows"),
}


@pytest.mark.parametrize("case", UNSENDABLE)
def test_what_cannot_cross_a_cut_is_refused(tmp_path: Path, case: str) -> None:
    result, words = UNSENDABLE[case]
    line = refused(tmp_path, nn.Sequential(Returns(result), Takes(6, 2)))
    assert "layer 0 (Returns)" in line
    assert words in line
    assert line.endswith("[layer-output-unsendable]")


def test_what_cannot_cross_a_cut_may_stay_within_a_stage() -> None:
    model = nn.Sequential(Returns(lambda value: {"hidden": value}), Takes(6, 6), nn.Linear(6, 2))
    found = prepared(model, parallel={"pipe": 2, "stages": [0, 0, 1]}).cut
    assert found is not None
    assert found.table.bounds == (0, 2, 3)


class Embedding(nn.Embedding):
    def forward(self, value: Tensor, *, as_head: bool = False) -> Tensor:
        return value @ self.weight.T if as_head else super().forward(value)


IDS = TensorDataset(torch.randint(0, 7, (32, 5)), torch.randint(0, 7, (32, 5)))


EMBED = partial(Embedding, 7, 6)


def as_head(module: nn.Module, value: Tensor) -> Any:
    return module(value, as_head=True)


def tied(
    *,
    head: Any = EMBED,
    call: Any = as_head,
    weights: tuple[str, ...] = ("weight",),
    first: Any = EMBED,
) -> list[Layer]:
    return [
        Layer("embed", first, tied="e", tied_weights=weights),
        Layer("middle", partial(nn.Linear, 6, 6)),
        Layer("head", head, call=call, tied="e", tied_weights=weights),
    ]


def fails(module: nn.Module, value: Tensor) -> Tensor:
    raise ValueError("no such head")


TIES: dict[str, tuple[list[Layer], str, str]] = {
    "shapes": (tied(head=partial(Embedding, 8, 6)), "head (Embedding)", "tied-layers-differ"),
    "missing": (tied(weights=("weights",)), "embed (Embedding)", "tied-weight-missing"),
    "call": (tied(call=fails), "ValueError: no such head", "layer-failed"),
    "left-out": (
        tied(first=partial(nn.Linear, 5, 6), head=partial(nn.Linear, 5, 6)),
        "its bias is not",
        "tied-weight-left-out",
    ),
}


@pytest.mark.parametrize("case", TIES)
def test_ties_that_do_not_hold_are_refused(tmp_path: Path, case: str) -> None:
    layers, words, kind = TIES[case]
    line = refused(tmp_path, layers, data=IDS)
    assert words in line
    assert line.endswith(f"[{kind}]")


def test_a_frozen_tie_is_frozen_on_both_ends(tmp_path: Path) -> None:
    line = refused(
        tmp_path,
        tied(),
        data=IDS,
        training={"max_steps": 2, "freeze": ["embed.*"]},
        parallel={"pipe": 2, "stages": [0, 0, 1]},
    )
    assert "stage 1 (head) would have nothing to train" in line


class OddTask(framework.Task):
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return outputs.float().mean()

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs), model(-inputs)


class ListedInputs(framework.Task):
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return outputs.float().mean()

    def split(self, batch: Any) -> Any:
        return [batch[0]], batch[1]


class Fails(Dataset[Any]):
    """A dataset that cannot be read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


def shared() -> nn.Sequential:
    linear = nn.Linear(6, 6)
    return nn.Sequential(linear, nn.ReLU(), linear)


def broken() -> nn.Module:
    raise RuntimeError("no weights file")


MLP = partial(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)))
DECAY = {"kind": "sgd", "weight_decay": 0.1, "weight_decay_on": "matrices"}
REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "too-few-layers": (
        lambda: nn.Sequential(nn.Linear(6, 2)),
        {},
        "the model has only 1 layer;",
        "pipe-exceeds-layers",
    ),
    "not-layered": (nn.Linear(6, 2), {}, "Linear", "model-not-layered"),
    "own-forward": (
        lambda: nn.TransformerEncoderLayer(6, 2),
        {},
        "TransformerEncoderLayer",
        "model-not-layered",
    ),
    "stages-short": (
        MLP,
        {"parallel": {"pipe": 2, "stages": [0, 1]}},
        "names 2 layers and the model has 3: 0, 1, 2",
        "stages-differ-from-layers",
    ),
    "nothing-to-train": (
        MLP,
        {
            "parallel": {"pipe": 2, "stages": [0, 0, 1]},
            "training": {"max_steps": 2, "freeze": ["2\\..*"]},
        },
        "stage 1 (2)",
        "stage-without-parameters",
    ),
    "no-parameters": (
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 2)),
        {"parallel": {"pipe": 2, "partition": "uniform"}},
        "stage 0 (0)",
        "stage-without-parameters",
    ),
    "does-not-fit": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 2)),
        {},
        "1 (Linear)",
        "layer-failed",
    ),
    "shared-weights": (
        shared,
        {"parallel": {"pipe": 2, "stages": [0, 0, 1]}},
        "2.weight",
        "weight-on-two-stages",
    ),
    "one-group": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2, bias=False)),
        {"optimizer": DECAY, "zero": {"stage": 1}},
        "stage 1",
        "stage-with-one-group",
    ),
    "own-task-forward": (MLP, {"task": OddTask()}, "OddTask", "task-forward-with-pipeline"),
    "inputs-in-a-list": (MLP, {"task": ListedInputs()}, "list", "inputs-unsendable"),
    "unreadable-data": (MLP, {"data": Fails()}, "OSError: the disk is gone", "first-batch-failed"),
    "zero-2": (MLP, {"zero": {"stage": 2}}, "zero.stage = 2", "zero-with-pipeline"),
    "zero-3": (MLP, {"zero": {"stage": 3}}, "zero.stage = 3", "zero-with-pipeline"),
    "bf16": (MLP, {"precision": {"dtype": "bf16"}}, "zero.stage = 0", "bf16-pipeline-without-zero"),
    "fp16-on-cpu": (MLP, {"precision": {"dtype": "fp16"}}, "precision.dtype = fp16", "fp16-on-cpu"),
    "world-size": (
        MLP,
        {"parallel": {"pipe": 3}},
        "2 devices cannot be split into pipelines of 3",
        "pipe-not-divisible",
    ),
    "pipeline-section": (
        MLP,
        {"deepspeed": {"pipeline": {"activation_checkpoint_interval": 1}}},
        "training.recompute_every",
        "section-clash",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_pipeline_is_refused(tmp_path: Path, case: str) -> None:
    model, changes, words, kind = REFUSED[case]
    line = refused(tmp_path, model, **changes)
    assert words in line
    assert line.endswith(f"[{kind}]")


def test_layers_of_ones_own_that_would_share_sequences_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    loss = nn.functional.mse_loss  # a class is of a whole sample: `check` refuses it before
    line = refused(tmp_path, MLP, parallel={"pipe": 2, "sequence": 2}, task=loss)
    assert "a model's own layers do not share their sequences" in line
    assert line.endswith("[sequence-with-pipeline]")


class Forgets(nn.Module):
    """Its layers() leaves out what forward() does between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 6), nn.Linear(6, 2), between

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("dropout", nn.Dropout(0.5)), ("last", self.last)]

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.between(self.first(value)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how", [{}, {"parallel": {"pipe": 1}, "training": {"max_steps": 2, "recompute_every": 1}}]
)
def test_layers_that_are_another_model_than_forward_are_refused(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    line = refused(tmp_path, Forgets(), **how)
    assert line.startswith(
        "model = Forgets: its layers(), one after the other, do not give what its forward() gives: numbers that"
    )
    assert line.endswith("[layers-differ-from-forward]")
    same = Forgets(between=nn.Identity())  # the dropout rests: it is compared in evaluation mode
    assert prepared(same, **how).plan is not None
    assert all(module.training for module in same.modules())


def test_layers_and_modules_in_any_form_are_cut_alike() -> None:
    """A sequence, a list, a ModuleList, a LayeredModel with its weights, and functions that return
    them.
    """
    modules = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)]
    layered = LayeredModel(
        [Layer(str(n), lambda module=module: module) for n, module in enumerate(modules)]
    )  # type: ignore[misc]
    for model in (
        nn.Sequential(*modules),
        modules,
        tuple(modules),
        nn.ModuleList(modules),
        layered,
        lambda: nn.Sequential(*modules),
        lambda: modules,
    ):
        cut = prepared(model).cut
        assert cut is not None
        assert cut.table.bounds == (0, 1, 3)
        assert [layer.name for layer in cut.layers] == ["0", "1", "2"]
        assert cut.layers[0].build() is modules[0]


def four_layers(**parallel: Any) -> Prepared:
    model = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)]
    return prepared(model, parallel={"pipe": 2, "partition": "measured", **parallel})


def manifest_of(run: Prepared, **pipeline: Any) -> dict[str, Any]:
    """As a run leaves it whose layers took other times than those of this machine."""
    return {
        "config": run.plan.config.to_dict(),
        "pipeline": {**(run.pipeline() or {}), "bounds": [0, 1, 4], **pipeline},
    }


def test_a_pipeline_that_goes_on_is_cut_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two measurements are never the same, and another cut would be a move."""

    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("the layers were timed again")

    run = four_layers()
    assert run.cut is not None
    assert run.cut.table.bounds == (0, 2, 4)
    start = SavedCheckpoint(
        Path("runs/x/checkpoints"), "global_step4", {"step": 4, **manifest_of(run)}
    )
    monkeypatch.setattr(framework.engine.layer_times, "time_layers", measured)
    monkeypatch.setattr(framework.setup.start_point, "rank", lambda: 1)
    cut = framework.setup.start_point.measure_cut(run, start).cut
    assert cut is not None
    assert cut.table.bounds == (0, 1, 4)
    assert cut.layers == run.cut.layers


@pytest.mark.parametrize(
    "pipeline",
    [
        {"layers": ["0", "1", "2"]},
        {"bounds": [0, 4]},
        {"bounds": [0, 1, 5]},
        {"bounds": [1, 2, 4]},
        {"bounds": [0, "1", 4]},
        {"bounds": None},
    ],
)
def test_what_was_measured_of_another_model_or_cut_is_not_taken(pipeline: dict[str, Any]) -> None:
    run = four_layers()
    assert run.cut is not None
    assert cut_as_saved(run.cut, run.plan, manifest_of(run)) is not None
    assert cut_as_saved(run.cut, run.plan, manifest_of(run, **pipeline)) is None


def test_what_was_not_measured_is_not_taken() -> None:
    run, balanced = four_layers(), four_layers(partition="parameters")
    assert run.cut is not None
    assert cut_as_saved(run.cut, run.plan, manifest_of(balanced)) is None
    assert cut_as_saved(run.cut, run.plan, {"config": run.plan.config.to_dict()}) is None


def test_a_module_in_two_places_is_two_layers() -> None:
    relu = nn.ReLU()
    cut = prepared(nn.Sequential(nn.Linear(6, 6), relu, nn.Linear(6, 6), relu, nn.Linear(6, 2))).cut
    assert cut is not None
    assert [layer.name for layer in cut.layers] == ["0", "1", "2", "3", "4"]


def test_ranks_compare_the_text_and_not_only_its_size(tmp_path: Path) -> None:
    config = values(
        model={"kind": "gpt", "hidden_size": 8, "num_layers": 2, "num_heads": 2},
        data={"kind": "text", "path": "tokens", "sequence_length": 8},
        task={"kind": "causal_lm"},
    )
    seen = []
    for word in ("one", "two", "two"):
        Path("a.txt").write_text(f"{word} three\n" * 400, encoding="utf-8")
        prepare_text(["a.txt"], "tokens")
        seen.append(prepare(framework.RunConfig.model_validate(config)).fingerprint())
        Path("tokens").rename(tmp_path / f"before-{len(seen)}")
    differing = {name for name in seen[0] if seen[0][name] != seen[1][name]}
    assert differing == {"checksum of the training text", "checksum of the evaluation text"}
    assert seen[1] == seen[2]


def test_a_damaged_token_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 400, encoding="utf-8")
    prepare_text(["a.txt"], "tokens")
    tokens = max(Path("tokens").iterdir(), key=lambda path: path.stat().st_size)
    tokens.write_bytes(tokens.read_bytes()[:-100])
    config = values(
        model={"kind": "gpt", "hidden_size": 8, "num_layers": 2, "num_heads": 2},
        data={"kind": "text", "path": "tokens", "sequence_length": 8},
        task={"kind": "causal_lm"},
    )
    with pytest.raises(ConfigError, match=tokens.name) as caught:
        prepare(framework.RunConfig.model_validate(config))
    assert len(str(caught.value).splitlines()) == 1
    assert not Path("runs").exists()


def test_layers_of_other_stages_are_freed() -> None:
    shared, first, second = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    layers = as_layers(nn.Sequential(first, shared, second, shared))
    let_go_of_others(layers, nn.Sequential(shared, second))
    assert [weight.numel() for weight in first.parameters()] == [0, 0]
    assert [weight.numel() for weight in (*shared.parameters(), *second.parameters())] == [9, 3] * 2
