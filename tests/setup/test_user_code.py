"""The door from Python: what `fit` takes beside a config, what it says of what it cannot take, and
under which name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from framework.config.data import DataObject
from framework.config.load import config_from_values
from framework.config.optimizer import AdamW
from framework.config.run_config import RunConfig
from framework.data.splits import Splits
from framework.errors import ConfigError, UsageError
from framework.recipes.image_sets.kinds import Digits
from framework.setup.components import gather_parts
from framework.setup.handed_over import config_with_objects, read_given
from framework.setup.user_code import Objects
from framework.tasks.classification import Classification
from framework.tasks.task import Task

X, Y = torch.randn(12, 3), torch.arange(12) % 2
DATA, FEWER = TensorDataset(X, Y), TensorDataset(X[:5], Y[:5])
MISSING = "missing a required argument: 'in_features'"


def without_address(value: object) -> str:
    """For the names of tests, which must be the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


def taken(values: Any = None, **objects: Any) -> RunConfig:
    return config_with_objects({} if values is None else values, Objects(**objects))


def refused(values: Any = None, **objects: Any) -> str:
    """The problems that `prepare` would meet, before it makes anything."""
    handed = Objects(**{"model": nn.Linear(3, 2), "train_data": DATA, **objects})
    with pytest.raises(ConfigError) as caught:
        gather_parts(config_with_objects({} if values is None else values, handed), handed)
    return str(caught.value)


class TestData:
    @pytest.mark.parametrize(
        ("handed", "sizes"),
        [
            ({"train_data": DATA}, (12, 0)),
            ({"train_data": DATA, "eval_data": FEWER}, (12, 5)),
            ({"train_data": (DATA, FEWER)}, (12, 5)),
            ({"train_data": (DATA, None)}, (12, 0)),
            ({"train_data": (DATA, None), "eval_data": FEWER}, (12, 5)),
            ({"train_data": Splits(FEWER, DATA)}, (5, 12)),
        ],
        ids=without_address,
    )
    def test_one_two_or_the_pair(self, handed: dict[str, Any], sizes: tuple[int, int]) -> None:
        handed = {"model": nn.Linear(3, 2), **handed}
        splits = gather_parts(taken(**handed), Objects(**handed)).splits
        assert (len(splits.train), len(splits.evaluation or ())) == sizes
        assert taken(**handed).data == DataObject(
            object="torch.utils.data.dataset.TensorDataset", train_samples=sizes[0]
        )

    @pytest.mark.parametrize(
        ("handed", "line"),
        [
            (
                {"train_data": (DATA, FEWER), "eval_data": FEWER},
                "eval_data: train_data is a pair (training, evaluation), so that "
                "there are two evaluation sets; leave one of them out [data-target-result]",
            ),
            (
                {"train_data": X},
                "train_data: the training set is a torch.Tensor, not a dataset of samples (inputs, target); hand "
                "over torch.utils.data.TensorDataset(inputs, targets) [data-target-result]",
            ),
            (
                {"train_data": X.numpy()},
                "train_data: the training set is a numpy.ndarray, not a dataset of samples",
            ),
            ({"eval_data": X}, "eval_data: the evaluation set is a torch.Tensor"),
            (
                {"train_data": ((X, Y), DATA)},
                "train_data: the training set is a tuple, not a dataset; hand over a map-style",
            ),
            (
                {"train_data": [DATA]},
                "train_data: the training set is a list of TensorDataset, not of samples (inputs, target)",
            ),
            (
                {"train_data": (DATA, FEWER, FEWER)},
                "train_data: a tuple of 3 was handed over; hand over (training, evaluation)",
            ),
            ({"eval_data": {}}, "eval_data: there is no evaluation set in it; hand over None"),
            (
                {"eval_data": {"a/b": FEWER}},
                "eval_data = a/b: this is no name of an evaluation set, as its metrics are",
            ),
            ({"eval_data": {"": FEWER, 3: FEWER}}, "eval_data = 3: this is no name"),
            (
                {"eval_data": {"clean": FEWER, "noisy": X}},
                "eval_data: the evaluation noisy set is a torch.Tensor",
            ),
            (
                {"train_data": {"train": DATA}},
                "train_data: the training set is a dict, not a dataset",
            ),
            (
                {"eval_data": TensorDataset(X[:0])},
                "is empty; hand over None in its place to train without evaluation",
            ),
        ],
    )
    def test_what_is_no_dataset_is_refused_under_its_own_name(
        self, handed: dict[str, Any], line: str
    ) -> None:
        assert line in refused(**handed)

    def test_a_pair_of_tensors_is_two_problems(self) -> None:
        assert [line.split(":")[0] for line in refused(train_data=(X, Y)).splitlines()] == [
            "train_data",
            "eval_data",
        ]


class TestSections:
    """The section of an object holds its other keys."""

    def test_the_loader_is_configured(self) -> None:
        loader = {
            "num_workers": 2,
            "prefetch_batches": 4,
            "shuffle": False,
            "random_samples": False,
        }
        config = taken({"data": loader, "model": {"kind": "mlp"}}, train_data=DATA)
        assert config.data.model_dump() == {
            "object": "torch.utils.data.dataset.TensorDataset",
            "train_samples": 12,
            "lanes": None,
            "bucket_steps": 0,
            "curriculum_steps": 0,
            **loader,
        }
        assert config_with_objects(config, Objects(train_data=DATA)) == config, (
            "as prepare does once more"
        )

    def test_a_wrong_loader_is_refused_at_its_key(self) -> None:
        assert (
            refused({"data": {"num_workers": -1}})
            == "data.num_workers = -1: too small; write 0 or more [wrong-value]"
        )
        assert "model.num_classes = 3: there is no such key here" in refused(
            {"model": {"num_classes": 3}}
        )
        assert refused({"data": None}).startswith(
            "data = null: nothing where a section of keys belongs"
        )

    def test_another_kind_gives_way(self) -> None:
        values = {"data": {"kind": "digits", "num_workers": 3}, "model": {"kind": "mlp"}}
        config = taken(values, train_data=DATA, model=nn.Linear(3, 2))
        assert (config.data.num_workers, config.model.model_dump()) == (
            3,
            {"object": "torch.nn.modules.linear.Linear"},
        )
        assert isinstance(taken({"data": {"kind": "digits"}}, model=nn.Linear(3, 2)).data, Digits)

    def test_the_rate_of_an_optimizer_that_does_not_give_it(self) -> None:
        by_hand: Callable[..., Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        assert taken({"optimizer": {"lr": 0.1}}, optimizer=by_hand).optimizer.lr == 0.1  # type: ignore[union-attr]
        reported = partial(torch.optim.SGD, lr=0.1)
        assert taken({"optimizer": {"lr": 0.1}}, optimizer=reported).optimizer.lr == 0.1  # type: ignore[union-attr]
        line = "optimizer.lr = 0.2: the optimizer that was handed over has lr=0.1; give one [object-lr-differs]"
        assert refused({"optimizer": {"lr": 0.2}}, optimizer=reported) == line


@pytest.mark.parametrize(
    ("handed", "line"),
    [
        (
            {"model": nn.Linear},
            f"model = Linear: it will be called as Linear(): {MISSING}; hand over functools.partial(...) with "
            "its arguments, or the built model [object-args]",
        ),
        ({"model": lambda width: nn.Linear(width, 2)}, "missing a required argument: 'width'"),
        (
            {"optimizer": lambda: None},
            "(parameters): too many positional arguments; hand over a function",
        ),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters())},
            "torch.optim.sgd.SGD: it is built already",
        ),
        (
            {"optimizer": "adam"},
            "optimizer = builtins.str: it cannot be called; hand over a function from parameters",
        ),
        ({"task": lambda outputs: outputs}, "(outputs, targets): too many positional arguments"),
        (
            {"task": lambda outputs, targets, weight: outputs},
            "missing a required argument: 'weight'",
        ),
        (
            {"task": "mse"},
            "task: a str was handed over; hand over a Task or a callable loss(outputs, targets) [task-",
        ),
        (
            {"task": nn.MSELoss},
            "task: the class torch.nn.modules.loss.MSELoss was handed over; hand over an instance",
        ),
        ({"task": nn.Bilinear(2, 2, 1)}, "task: the loss Bilinear has parameters"),
    ],
    ids=without_address,
)
def test_what_cannot_be_called_so_is_refused_at_once(handed: dict[str, Any], line: str) -> None:
    assert line in refused(**handed)


@pytest.mark.parametrize(
    "task",
    [
        nn.MSELoss(),
        nn.functional.mse_loss,
        partial(nn.functional.mse_loss, reduction="mean"),
        torch.dist,
    ],
)
def test_losses_are_taken(task: Any) -> None:
    objects = Objects(model=nn.Linear(3, 2), train_data=DATA, task=task)
    assert isinstance(gather_parts(config_with_objects({}, objects), objects).task, Task)


def test_a_loss_that_is_no_scalar_is_reported_under_its_own_name() -> None:
    objects = Objects(model=nn.Linear(3, 2), train_data=DATA, task=nn.MSELoss(reduction="none"))
    task = gather_parts(config_with_objects({}, objects), objects).task
    with pytest.raises(ConfigError, match=r"^task: the loss function returned a tensor of shape"):
        task.loss(torch.zeros(2), torch.zeros(2))


class TestPlainValues:
    def test_tuples_paths_and_numpy_numbers_are_welcome(self) -> None:
        config = taken(
            {
                "run": {"seed": np.int64(3), "output_dir": Path("a") / "b"},
                "batch": {"global_size": np.uint8(4)},
                "optimizer": {
                    "kind": "adamw",
                    "lr": np.float32(0.5),
                    "betas": (0.9, np.float64(0.95)),
                },
                "training": {"freeze": ("a",), "sync_batch_norm": True},
            }
        )
        assert (config.run.seed, config.run.output_dir, config.batch.global_size) == (3, "a/b", 4)
        assert config.optimizer == AdamW(lr=0.5, betas=[0.9, 0.95])
        assert [type(value) for value in config.optimizer.betas] == [float, float]
        assert (config.training.freeze, config.training.sync_batch_norm) == (["a"], True)

    def test_arguments_of_the_users_own_code_stay_as_they_are(self) -> None:
        args = {"sizes": (1, 2), "root": Path("x")}
        config = taken({"model": {"target": "a:b", "args": args}})
        assert config.model.factory().kwargs == args

    def test_a_count_that_is_no_whole_number_is_still_refused(self) -> None:
        assert "run.seed = 1.5" in refused({"run": {"seed": np.float64(1.5)}})

    def test_a_config_is_taken_as_it_is(self) -> None:
        config = config_from_values({"run": {"name": "x"}})
        assert config_with_objects(config, Objects()) == config
        with pytest.raises(UsageError, match="or the path of a file, not a int"):
            taken(3)

    def test_a_file_is_read_and_its_problems_have_their_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("run: {name: x}\nmodel: {object: a.Net}\nbatch: {size: 3}\n")
        values, source = read_given(path)
        net = Objects(model=nn.Linear(3, 2))
        with pytest.raises(ConfigError, match=rf"^{path}:3: batch.size = 3: ") as caught:
            config_with_objects(values, net, source=source)
        assert len(caught.value.problems) == 1
        with pytest.raises(ConfigError, match=rf"^{path}:2: model.object = a.Net: .*object-not"):
            config_with_objects(values, Objects(), source=source)
        path.write_text("run: {name: x}\nmodel: {object: a.Net}\n")
        config = config_with_objects(*read_given(str(path))[:1], net)
        assert config.model.object == "torch.nn.modules.linear.Linear"


def test_a_task_of_ones_own_stays_itself() -> None:
    task = Classification()
    objects = Objects(model=nn.Linear(3, 2), train_data=DATA, task=task)
    assert gather_parts(config_with_objects({}, objects), objects).task is task
