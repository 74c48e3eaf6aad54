"""What is found wrong before any process group exists: with real configs, and a process group that
fails the test.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import framework
from framework.checkpoint import resume_point
from framework.config.load import config_from_values, load_with_source
from framework.data.token_files import SpecialTokens
from framework.data.tokens import Tokens
from framework.errors import FrameworkError
from framework.recipes.text.windows import TextWindows
from framework.setup import device_needs, prepare_run
from framework.setup.handed_over import config_with_objects
from framework.setup.prepare_run import prepare
from framework.setup.user_code import Objects

DATA = TensorDataset(torch.randn(64, 3), torch.arange(64) % 2)


@pytest.fixture(autouse=True)
def _no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        deepspeed, "init_distributed", lambda **_: pytest.fail("a process group was started")
    )


def refused(config: Any, **objects: Any) -> FrameworkError:
    given = {"model": torch.nn.Linear(3, 2), "train_data": DATA} | objects
    before = sorted(Path().rglob("*"))
    with pytest.raises(FrameworkError) as caught:
        framework.fit(config, **given)
    assert sorted(Path().rglob("*")) == before
    return caught.value


@pytest.mark.parametrize("resume", ["nowhere", "empty", "file", "empty/checkpoints/global_step5"])
def test_a_checkpoint_that_is_not_there(resume: str) -> None:
    Path("empty").mkdir()
    Path("file").touch()
    error = refused({"checkpoint": {"resume": resume}})
    assert error.exit_code == 78
    reason = (
        "there is no finished checkpoint"
        if resume in ("empty", "file")
        else "there is no such folder"
    )
    assert str(error).startswith(
        f"checkpoint.resume = {resume}: {reason}; name a .../global_step<N> folder"
    )


NET = "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self, width=3):\n        super().__init__(width, 2)\n"  # noqa: E501
WRONG = {
    "no-dataset": ("data: {kind: fashion_mnist, root: nowhere}", "[dataset-not-found]"),
    "no-module": ("model: {target: 'nowhere.at_all:Net'}", "[target-not-found]"),
    "bad-module": ("model: {target: 'broken_net:Net'}", "[target-import-failed]"),
    "bad-name": ("model: {target: 'fine_net:Nett'}", "[target-not-found]"),
    "bad-arguments": ("model: {target: 'fine_net:Net', args: {wide: 3}}", "[target-args]"),
    "no-checkpoint": ("checkpoint: {resume: nowhere}", "[checkpoint-not-found]"),
    "no-weights": ("checkpoint: {init_weights: nowhere}", "[weights-not-found]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_in_a_file_is_one_line_with_its_place(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As train.py finds it; tests/test_train_script.py has what it finds before it imports
    torch.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("broken_net.py").write_text("import torch\n\nwidth = 1 / 0\n")
    Path("fine_net.py").write_text(NET)
    section, kind = WRONG[case]
    Path("x.yaml").write_text(f"run: {{name: x}}\n{section}\n")
    config, source = load_with_source("x.yaml")
    before = {*Path().rglob("*")}
    with pytest.raises(framework.ConfigError) as caught:
        prepare(config, source=source)
    assert str(caught.value).startswith("x.yaml:2: ")
    assert str(caught.value).endswith(kind)
    assert str(caught.value).count("\n") == 0
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} == before
    for name in ("broken_net", "fine_net"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("output_dir", "reason"),
    [
        ("/proc/x", "No such file or directory"),
        ("file", "Not a directory"),
        ("file/below", "Not a directory"),
        ("link", "No such file or directory"),
    ],
)
def test_an_output_folder_that_cannot_be_made(output_dir: str, reason: str) -> None:
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    error = refused({"run": {"output_dir": output_dir, "name": "x"}})
    assert error.exit_code == 74
    assert str(error) == (
        f"run.output_dir: {output_dir}/x cannot be used as run folder ({reason}); set run.output_dir to a folder "
        "you can write to [run-folder-unusable]"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_without_permission() -> None:
    Path("closed").mkdir(mode=0o500)
    assert "(Permission denied)" in str(refused({"run": {"output_dir": "closed"}}))


def test_what_cannot_compile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = str(refused({"training": {"compile": {"backend": "inducter"}}}))
    assert "[unknown-backend]" in error
    assert "inductor" in error
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert "training.compile = true: its backend inductor needs a compiler, and g++" in str(
        refused({"training": {"compile": True}})
    )


def test_fp8_is_refused_without_its_package_and_on_a_gpu_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = {"dtype": "bf16", "fp8": {"emulate": True}}
    config = config_from_values({"precision": section, "zero": {"stage": 1}})
    assert "cpu devices have no products in fp8" in str(
        refused({"precision": section | {"fp8": True}, "zero": {"stage": 1}})
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torchao" else find_spec(name)
    )
    (problem,) = device_needs._fp8_problems(config, "cpu")
    assert (problem.kind, problem.key) == ("package-missing", "precision.fp8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert list(device_needs._fp8_problems(config, "cuda")) == []
    config = config_from_values({"precision": section | {"fp8": True}, "zero": {"stage": 1}})
    (problem,) = device_needs._fp8_problems(config, "cuda")
    assert problem.kind == "fp8-on-device"
    assert "NVIDIA A100 has no products in fp8: its compute capability is 8.0" in problem.reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert list(device_needs._fp8_problems(config, "cuda")) == []


def test_a_builder_that_needs_arguments() -> None:
    assert "[object-args]" in str(refused({}, model=torch.nn.Linear))


def test_nothing_is_left_in_a_folder_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    prepare(config_from_values({"data": {"kind": "digits"}, "run": {"output_dir": "runs/deep/er"}}))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_ranks_compare_a_text_that_was_handed_over() -> None:
    """Its size is the same, its tokens are others."""

    def fingerprint(last: int) -> dict[str, Any]:
        tokens = Tokens(np.array([1, 2, 3, last, 8] * 20, dtype=np.uint16), np.arange(0, 101, 5))
        windows = TextWindows(tokens, sequence_length=4, vocab_size=9, special=SpecialTokens(end=8))
        model = torch.nn.Embedding(9, 9)
        config = framework.RunConfig.model_validate(
            {"batch": {"global_size": 4}, "task": {"kind": "causal_lm"}}
        )
        return prepare(config, objects=Objects(model=model, train_data=windows)).fingerprint()

    one, same, other = fingerprint(4), fingerprint(4), fingerprint(5)
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"checksum of the training text"}


def test_ranks_report_what_they_have_found_of_first_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sees a checkpoint already, which the others do not see yet, needs none; what all of
    them do is agreed on later.
    """
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "first.pt")
    config = framework.RunConfig.model_validate({"checkpoint": {"init_weights": "first.pt"}})

    def looked() -> prepare_run.Prepared:
        return prepare(config, objects=Objects(model=torch.nn.Linear(3, 2), train_data=DATA))

    one = looked()
    monkeypatch.setattr(
        resume_point, "find_checkpoint", lambda *arguments, **options: "global_step7"
    )
    other = looked()
    assert one.fingerprint() == other.fingerprint()
    assert (one.describe_weights(), other.describe_weights()) == (
        "2 tensors are found there",
        "no weights are read",
    )
    assert one.without_weights().describe_weights() == other.without_weights().describe_weights()
    adapted = replace(one, adapter={"a": torch.zeros(1), "b": torch.zeros(1)})
    assert adapted.describe_weights() == "2 tensors are found there, and 2 tensors of adapters"


class Streamed:
    """A stream of one part, or of six."""

    def __init__(self, num_shards: int = 1) -> None:
        self.num_shards = num_shards

    def shard(self, num_shards: int, index: int) -> Streamed:
        return Streamed()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.zeros(3), number % 2) for number in range(64))


def test_a_stream_without_a_length_is_refused_and_an_epoch_is_what_is_named() -> None:
    reason = "training.max_steps: the training data is a stream, which has no length; set it; or data.train_samples"
    assert reason in str(refused({}, train_data=Streamed()))
    handed = Objects(model=torch.nn.Linear(3, 2), train_data=Streamed())
    for values, length in (
        ({"training": {"max_steps": 5}}, (None, 5, 5)),
        (
            {
                "data": {"train_samples": 320},
                "batch": {"global_size": 32},
                "training": {"max_epochs": 2},
            },
            (10, 20, 10),
        ),
    ):
        found = prepare(config_with_objects(values, handed), objects=handed)
        assert (
            found.plan.length.steps_per_epoch,
            found.plan.length.total_steps,
            found.plan.length.epoch,
        ) == length
        assert found.description()["lanes"] == 1


@pytest.mark.parametrize(
    ("parts", "ranks", "line"),
    [(1, 2, "2 ranks share 1 part of"), (6, 4, "4 ranks share 6 parts of"), (6, 2, "")],
)
def test_lanes_that_ranks_share_cost_a_warning(
    parts: int, ranks: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    handed = Objects(model=torch.nn.Linear(3, 2), train_data=Streamed(parts))
    config = {"batch": {"global_size": 60}, "training": {"max_steps": 2}}
    found = prepare(config_with_objects(config, handed), objects=handed).plan.findings
    stated = [str(finding) for finding in found if finding.kind == "stream-lanes-shared"]
    assert len(stated) == bool(line)
    assert all(line in one for one in stated)
