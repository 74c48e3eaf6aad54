"""Weights go from any layout to any other: out of a pipeline into the plain module and back,
exactly.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from framework.checkpoint.manifest import SavedCheckpoint, seal
from framework.checkpoint.resume_point import find_checkpoint
from framework.checkpoint.state.weight_files import LazyWeights
from framework.config.load import config_from_values
from framework.data.batches import SeededSamples, WholeBatch
from framework.data.order import epoch_order
from framework.engine.weights import checkpoint_weights, find_weights, put_weights
from framework.errors import ConfigError, StorageError, show_value
from framework.recipes.text.prepare import prepare
from framework.setup.user_code import call_factory
from framework.system.files import hash_file
from framework.tasks.from_callable import as_task
from tests.checkpoint.test_every_fault import before
from tests.engine.pipe_oracle import plain_run, tensors_of
from tests.engine.saved_runs import read_weights
from tests.engine.test_pipeline import BERT, GPT, LENET, RESNET
from tests.launched import fewer, series, train_cases
from tests.tasks.value import value_of_step

NUM_STEPS = fewer(2, of=4)
_ADAMW = {"kind": "adamw", "lr": 1e-3}
MODELS = {"lenet": LENET, "resnet": RESNET, "gpt": GPT, "bert": BERT}
# What a pipeline's layers are called, written down by hand: file number -> prefix of the weights'
# names.
FILES = {
    "lenet": {0: "conv1", 3: "conv2", 7: "fc1", 9: "fc2", 11: "fc3"},
    "gpt": {0: "embed", 1: "positions", 2: "blocks.0", 3: "blocks.1", 4: "blocks.2", 5: "norm"},
    "bert": {
        0: "embed",
        1: "embeddings",
        2: "blocks.0",
        3: "blocks.1",
        4: "blocks.2",
        5: "heads",
        7: "outputs",
    },
}
PIPED = [("gpt", 0), *((model, 1) for model in FILES)]
PLAIN = [("gpt", 0), ("gpt", 1), ("gpt", 2), ("gpt", 3), ("bert", 3), ("resnet", 0), ("resnet", 2)]
FROM_PLAIN = [("gpt", 0), ("gpt", 2), ("gpt", 3), ("bert", 3), ("resnet", 2)]
INTO_PLAIN = [("gpt", 0), ("bert", 2), ("lenet", 3)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    source = Path(os.__file__).read_text(encoding="utf-8")
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(
            source[800 * number : 800 * (number + 1)], encoding="utf-8"
        )
    prepare([str(path) for path in sorted(folder.glob("*.txt"))], str(folder / "tokens"))
    return folder / "tokens"


def values(
    name: str, model: str, folder: Path, text: Path, *, pipe: int, zero: int, **sections: Any
) -> dict[str, Any]:
    base = {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 16, "micro_size": 4},
        "parallel": {"pipe": pipe},
        "zero": {"stage": zero},
        "training": {"max_steps": NUM_STEPS, "log_every": 1},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        "optimizer": _ADAMW,
    } | MODELS[model]
    if base["data"]["kind"].startswith("text"):
        base["data"] = base["data"] | {"path": str(text)}
    return base | sections


def starting_from(path: Path, *, at_end: bool = False) -> dict[str, Any]:
    return {
        "checkpoint": {"init_weights": str(path), "at_end": at_end},
        "training": {"max_steps": 1, "log_every": 1},
    }


@pytest.fixture(scope="module")
def piped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two stages."""
    folder = tmp_path_factory.mktemp("piped")
    train_cases(
        [values(f"{m}-z{z}", m, folder, text, pipe=2, zero=z) for m, z in PIPED],
        num_ranks=2,
        folder=folder,
    )
    return folder


@pytest.fixture(scope="module")
def plain(piped: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain runs, some of them from the weights of a pipeline."""
    folder = tmp_path_factory.mktemp("plain")
    cases = [values(f"{m}-z{z}", m, folder, text, pipe=1, zero=z) for m, z in PLAIN]
    cases += [
        values(
            f"from-pipe-{m}-z{z}",
            m,
            folder,
            text,
            pipe=1,
            zero=z,
            **starting_from(piped / f"{m}-z1"),
        )
        for m, z in INTO_PLAIN
    ]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def piped_again(
    plain: Path, piped: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Pipelines from the weights of plain runs, of other pipelines and of a file; and from weights
    that do not fit.
    """
    folder = tmp_path_factory.mktemp("piped-again")
    cases = [
        values(
            f"from-plain-{m}-z{z}",
            m,
            folder,
            text,
            pipe=2,
            zero=z % 2,
            **starting_from(plain / f"{m}-z{z}"),
        )
        for m, z in FROM_PLAIN
    ]
    file = folder / "weights.pt"
    torch.save(dict(read_weights(str(piped / "gpt-z0"))), file)
    uniform = values(
        "from-file", "gpt", folder, text, pipe=2, zero=1, **starting_from(file, at_end=True)
    )
    uniform["parallel"] = {"pipe": 2, "partition": "uniform"}
    cut_off = folder / "cut_off.pt"
    cut_off.write_bytes(file.read_bytes()[:-2000])
    other = values(
        "other-model", "gpt", folder, text, pipe=2, zero=0, **starting_from(plain / "bert-z3")
    )
    longer = values("one-layer-less", "gpt", folder, text, pipe=2, zero=0, **starting_from(file))
    longer["model"] = longer["model"] | {"num_layers": 2}
    broken = values("broken", "gpt", folder, text, pipe=2, zero=0, **starting_from(cut_off))
    missing = values(
        "missing", "gpt", folder, text, pipe=2, zero=0, **starting_from(folder / "nowhere")
    )
    train_cases([*cases, uniform, other, longer, broken, missing], num_ranks=2, folder=folder)
    return folder


def module_with(weights: dict[str, torch.Tensor], case: dict[str, Any]) -> torch.nn.Module:
    model: torch.nn.Module = call_factory(config_from_values(case).model.factory(), key="model")
    put_weights(model, weights, source="test")
    return model


def first_batches(config: Any, dataset: Any) -> list[Any]:
    """The first step's micro-batches, of 4 samples each."""
    order = epoch_order(len(dataset), seed=config.run.seed, epoch=0, shuffle=True).tolist()
    found = []
    for start in range(0, 16, 4):
        indices = order[start : start + 4]
        if config.data.has_random_samples():
            samples = SeededSamples(dataset, seed=config.run.seed).__getitems__(
                [(0, index) for index in indices]
            )
        else:
            samples = [dataset[index] for index in indices]
        found.append(
            samples.fields if isinstance(samples, WholeBatch) else default_collate(samples)
        )
    return found


def first_loss(model: torch.nn.Module, case: dict[str, Any]) -> float:
    """Of the run's first step, in plain PyTorch."""
    config = config_from_values(case)
    splits, task = (
        call_factory(config.data.factory(), key="data"),
        as_task(call_factory(config.task.factory(), key="task")),
    )
    micro_batches = [task.split(batch) for batch in first_batches(config, splits.train)]
    losses = [task.loss(task.forward(model, inputs), targets) for inputs, targets in micro_batches]
    return float(value_of_step(losses).detach())


def of_run(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_checkpoint(str(folder), run_checkpoints=folder)
    assert checkpoint is not None
    return checkpoint_weights(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), PIPED)
def test_a_pipelines_weights_are_those_of_its_layer_files(
    model: str, stage: int, piped: Path
) -> None:
    found = of_run(piped / f"{model}-z{stage}")
    folder = piped / f"{model}-z{stage}" / "checkpoints" / f"global_step{NUM_STEPS}"
    assert {path.name for path in folder.glob("layer_*")} >= {
        f"layer_{n:02}-model_states.pt" for n in FILES[model]
    }
    expected = {
        f"{layer}.{name}": tensor
        for number, layer in FILES[model].items()
        for name, tensor in torch.load(
            folder / f"layer_{number:02}-model_states.pt", weights_only=True
        ).items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), PIPED)
def test_a_trained_pipeline_is_the_module_that_plain_pytorch_trains(
    model: str, stage: int, piped: Path, text: Path
) -> None:
    case = values(f"{model}-z{stage}", model, piped, text, pipe=2, zero=stage)
    _, _, expected = plain_run(case, micro_size=4, num_steps=NUM_STEPS)
    found = module_with(of_run(piped / f"{model}-z{stage}"), case).eval()
    config = config_from_values(case)
    splits, task = (
        call_factory(config.data.factory(), key="data"),
        as_task(call_factory(config.task.factory(), key="task")),
    )
    (inputs, _), *_ = [task.split(batch) for batch in first_batches(config, splits.train)]
    with torch.no_grad():
        pairs = zip(
            tensors_of(task.forward(found, inputs)),
            tensors_of(task.forward(expected.eval(), inputs)),
            strict=True,
        )
    worst = max(float((left - right).abs().max()) for left, right in pairs)
    assert worst < 1e-4, worst
    untrained: torch.nn.Module = call_factory(config.model.factory(), key="model").eval()
    with torch.no_grad():
        pairs = zip(
            tensors_of(task.forward(found, inputs)),
            tensors_of(task.forward(untrained, inputs)),
            strict=True,
        )
    assert max(float((left - right).abs().max()) for left, right in pairs) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), INTO_PLAIN)
def test_a_plain_run_starts_from_a_pipelines_weights(
    model: str, stage: int, piped: Path, plain: Path, text: Path
) -> None:
    case = values("x", model, plain, text, pipe=1, zero=stage)
    expected = first_loss(module_with(of_run(piped / f"{model}-z1"), case), case)
    assert series(plain / f"from-pipe-{model}-z{stage}", "train/loss")[1] == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), FROM_PLAIN)
def test_a_pipeline_starts_from_plain_weights(
    model: str, stage: int, plain: Path, piped_again: Path, text: Path
) -> None:
    case = values("x", model, plain, text, pipe=1, zero=stage)
    weights = of_run(plain / f"{model}-z{stage}")
    expected = first_loss(module_with(weights, case), case)
    assert series(piped_again / f"from-plain-{model}-z{stage}", "train/loss")[1] == pytest.approx(
        expected, abs=1e-6
    )
    fresh = first_loss(call_factory(config_from_values(case).model.factory(), key="model"), case)
    assert abs(fresh - expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), [("gpt", 1), ("gpt", 2), ("gpt", 3), ("resnet", 2)])
def test_every_zero_stage_gives_the_same_weights(model: str, stage: int, plain: Path) -> None:
    """Held against stage 0 of the same run, whose weights lie in its file as they are."""
    found = of_run(plain / f"{model}-z{stage}")
    file = (
        plain
        / f"{model}-z0"
        / "checkpoints"
        / f"global_step{NUM_STEPS}"
        / "mp_rank_00_model_states.pt"
    )
    expected = torch.load(file, map_location="cpu", weights_only=False)["module"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert float((tensor.double() - expected[name].double()).abs().max()) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("run", ["gpt-z0", "gpt-z2", "gpt-z3"])
def test_a_checkpoint_with_another_content_is_refused(
    run: str, plain: Path, tmp_path: Path
) -> None:
    """A flipped bit, and a program whose checksum was put into the manifest: neither is loaded,
    nothing runs.
    """
    shutil.copytree(plain / run / "checkpoints", tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / f"global_step{NUM_STEPS}"
    # of the first rank
    file = min(folder.glob("*optim_states.pt" if run == "gpt-z2" else "*model_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        StorageError, match=r"it is damaged: .*its content has changed .*\[weights-not-read\]"
    ):
        read_weights(str(tmp_path))
    torch.save({"module": Gadget(tmp_path / "trace")}, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file.name] = asdict(hash_file(file))
    (folder / "manifest.json").write_text(seal(manifest))
    with pytest.raises(StorageError, match=r"UnpicklingError.*\[weights-not-read\]"):
        dict(read_weights(str(tmp_path)))
    assert not (tmp_path / "trace").exists()


@pytest.mark.slow
def test_a_file_of_weights_starts_a_pipeline_that_is_cut_elsewhere(
    piped: Path, piped_again: Path, text: Path
) -> None:
    case = values("x", "gpt", piped, text, pipe=2, zero=1)
    expected = first_loss(module_with(of_run(piped / "gpt-z0"), case), case)
    assert series(piped_again / "from-file", "train/loss")[1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("other-model", "it lacks blocks.0.mlp.down.bias and 14 more"),
        ("one-layer-less", "it has blocks.2.attention.key.bias, which the model has not"),
        ("broken", "[weights-not-read]"),
        ("missing", "nowhere: there is nothing at that path"),
    ],
)
def test_weights_that_do_not_fit_end_the_run_before_it_starts(
    name: str, stated: str, piped_again: Path
) -> None:
    error = (piped_again / f"{name}.error").read_text(encoding="utf-8")
    assert stated in error
    assert "\n" not in error
    assert not (piped_again / name).exists()


class Gadget:
    """A pickle that writes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "it ran")


def refused(path: Path) -> str:
    with pytest.raises(StorageError) as caught:
        read_weights(str(path))
    assert caught.value.exit_code == 74
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: not a file of weights: ")
    return text


@pytest.mark.parametrize("zipped", [True, False])
def test_a_program_in_a_file_of_weights_does_not_run(zipped: bool, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "weights.pt"
    torch.save(
        {"fc.weight": torch.ones(2), "x": Gadget(trace)},
        file,
        _use_new_zipfile_serialization=zipped,
    )
    assert "it holds Python objects" in refused(file)
    assert not trace.exists()
    torch.load(file, weights_only=False)
    assert trace.exists()


def test_files_that_hold_other_things_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save([torch.ones(2)], file)
    assert "it holds a list" in refused(file)
    torch.save({"epoch": 3, "model": {"fc.weight": torch.ones(2)}}, file)
    assert "its epoch is no tensor" in refused(file)
    file.write_bytes(b"")
    refused(file)
    file.write_bytes(b"PK\x03\x04 not a file of torch's")
    refused(file)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_cut_off_file_is_refused(zipped: bool, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(
        {f"fc{n}.weight": torch.ones(100) for n in range(20)},
        file,
        _use_new_zipfile_serialization=zipped,
    )
    whole = file.read_bytes()
    for share in (0.05, 0.3, 0.6, 0.99):
        file.write_bytes(whole[: int(share * len(whole))])
        refused(file)


def test_a_file_of_weights_is_read_in_both_formats(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.randn(3, 2), "fc.bias": torch.randn(3)}
    for zipped in (True, False):
        torch.save(weights, tmp_path / "weights.pt", _use_new_zipfile_serialization=zipped)
        found = read_weights(str(tmp_path / "weights.pt"))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_folder_with_a_word_for_a_name_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` and `never` mean something to `checkpoint.resume` only."""
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "never"):
        (tmp_path / name).mkdir()
        before(tmp_path / name / "checkpoints")
        found = find_weights(name)
        assert isinstance(found, SavedCheckpoint)
        assert found.step == 20


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "nowhere", "there is nothing at that path"),
        (tmp_path, "there is no finished checkpoint"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_weights(str(path))
        assert caught.value.exit_code == 78
        assert str(caught.value).startswith(
            f"checkpoint.init_weights = {show_value(str(path))}: {reason}"
        )
        assert str(caught.value).endswith("[weights-not-found]")


def test_one_weight_is_held_at_a_time() -> None:
    """Weights of a large model are read while they are put into it; holding all of them on every
    rank would fill a host.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    truth = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def read(name: str) -> torch.Tensor:
        nonlocal most
        tensor = truth[name].clone()
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    lazy = LazyWeights(
        {name: tensor.shape for name, tensor in truth.items()},
        {name: partial(read, name) for name in truth},
    )
    put_weights(model, lazy, source="test")
    assert most <= 2
    assert all(torch.equal(tensor, truth[name]) for name, tensor in model.state_dict().items())
    lazy.let_go()
    assert list(lazy) == []


def test_other_shapes_change_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong = {name: torch.ones_like(tensor) for name, tensor in before.items()} | {
        "1.bias": torch.ones(3)
    }
    with pytest.raises(ConfigError, match=r"1.bias has shape \(3,\) there and \(2,\) in the model"):
        put_weights(model, wrong, source="weights.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
