"""Model, data, task and optimizer: named in a config in every way that makes sense, or handed over,
or refused with a reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.recipes.text.prepare import prepare
from framework.setup.components import Parts, gather_parts, make_train_loader
from framework.setup.handed_over import describe_objects
from framework.setup.user_code import Objects
from framework.tasks.task import Ratio, Task
from tests.tasks.value import value_of

HERE = __name__
X, Y = torch.randn(12, 3), torch.arange(12) % 2
DATA = TensorDataset(X, Y)
OUTPUTS, TARGETS = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])


class Net(nn.Linear):
    def __init__(self, width: int = 2) -> None:
        super().__init__(3, width)


def no_model() -> str:
    return "weights.pt"


def loss_function(outputs: Any, targets: Any, scale: float = 1.0) -> torch.Tensor:
    return scale * nn.functional.cross_entropy(outputs, targets)


class OwnTask(Task):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self.scale * nn.functional.cross_entropy(outputs, targets)

    def measure(self, outputs: Any, targets: Any) -> dict[str, Ratio]:
        return super().measure(outputs, targets)


def make_task() -> Task:
    return OwnTask(3.0)


def make_scaled_task(scale: float = 1.0) -> Task:
    return OwnTask(scale)


def make_loss(scale: float) -> Callable[..., torch.Tensor]:
    return partial(loss_function, scale=scale)


OWN_TASK = OwnTask(5.0)
LOSS_MODULE = nn.CrossEntropyLoss()
NUMBER = 3


def data_pair(size: int = 12) -> tuple[Dataset[Any], Dataset[Any]]:
    return TensorDataset(X[:size], Y[:size]), DATA


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[index]


def endless() -> Any:
    return itertools.count()


def with_classes(classes: Any) -> Dataset[Any]:
    data = TensorDataset(X, Y)
    data.classes = classes  # type: ignore[attr-defined]
    return data


def no_optimizer(parameters: Any) -> str:
    return "adam"


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"target": f"{HERE}:data_pair"},
        "model": {"target": f"{HERE}:Net"},
    }
    return config_from_values(base | sections)


def gather(objects: Objects | None = None, **sections: Any) -> Parts:
    objects = objects or Objects()
    return gather_parts(describe_objects(config(**sections), objects), objects)


def refused(objects: Objects | None = None, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        gather(objects, **sections)
    return str(caught.value)


def at(name: str, **args: Any) -> dict[str, Any]:
    return {"target": f"{HERE}:{name}"} | ({"args": args} if args else {})


class TestTask:
    @pytest.mark.parametrize(
        ("section", "factor"),
        [
            (at("loss_function"), 1),
            (at("loss_function", scale=2.0), 2),
            (at("OwnTask"), 1),
            (at("OwnTask", scale=2.0), 2),
            (at("make_task"), 3),
            (at("make_scaled_task"), 1),
            (at("make_scaled_task", scale=4.0), 4),
            (at("make_loss", scale=4.0), 4),
            (at("OWN_TASK"), 5),
            (at("LOSS_MODULE"), 1),
            ({"target": "torch.nn.functional:cross_entropy"}, 1),
            ({"target": "torch.nn:CrossEntropyLoss"}, 1),
            ({"target": "torch.nn.functional:cross_entropy", "args": {"reduction": "mean"}}, 1),
            ({"target": "torch.nn:CrossEntropyLoss", "args": {"reduction": "mean"}}, 1),
            ({"kind": "classification"}, 1),
        ],
    )
    def test_what_a_target_may_be(self, section: dict[str, Any], factor: float) -> None:
        loss = value_of(gather(task=section).task.loss(OUTPUTS, TARGETS))
        assert float(loss) == pytest.approx(
            factor * float(nn.functional.cross_entropy(OUTPUTS, TARGETS))
        )

    @pytest.mark.parametrize(
        ("section", "text"),
        [
            (at("NUMBER"), "a int was returned"),
            (at("NUMBER", a=1), "it is an object (builtins.int), which takes no args"),
            (at("OWN_TASK", scale=1.0), "which takes no args"),
            (at("LOSS_MODULE", reduction="sum"), "which takes no args"),
            (
                at("loss_function", scael=1),
                "task.args = {scael: 1}: got an unexpected keyword argument 'scael'; it takes (outputs",
            ),
            (at("OwnTask", scael=1), "got an unexpected keyword argument 'scael'"),
            (at("make_loss"), "missing a required argument: 'scale'"),
            (at("no_model"), "a str was returned"),
            (
                {"target": "torch.nn:Linear", "args": {"in_features": 1, "out_features": 1}},
                "has parameters",
            ),
        ],
    )
    def test_what_it_may_not_be(self, section: dict[str, Any], text: str) -> None:
        assert text in refused(task=section)

    def test_objects(self) -> None:
        assert gather(Objects(task=OWN_TASK)).task is OWN_TASK
        assert float(value_of(gather(Objects(task=loss_function)).task.loss(OUTPUTS, TARGETS))) > 0


class TestModel:
    def test_it_is_checked_at_once_and_built_later(self) -> None:
        parts = gather(model=at("Net", width=5))
        first, second = parts.build_model(), parts.build_model()
        assert first is not second
        assert isinstance(first, Net)
        assert first.out_features == 5
        assert "unexpected keyword argument 'depth'" in refused(model=at("Net", depth=1))

    def test_what_is_no_module_is_refused_when_it_is_built(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"model = builtins\.str: it is neither a torch\.nn\.Module nor a list.*\[model-target-result\]",
        ):
            gather(model=at("no_model")).build_model()
        with pytest.raises(ConfigError, match="model-target-result"):
            gather(Objects(model=no_model)).build_model()  # type: ignore[arg-type]

    def test_objects(self) -> None:
        net = Net()
        assert gather(Objects(model=net)).build_model() is net
        assert isinstance(gather(Objects(model=Net)).build_model(), Net)
        assert "neither a torch.nn.Module nor a list of layers" in refused(
            Objects(model="resnet50")
        )  # type: ignore[arg-type]


class TestData:
    def test_a_pair_or_one(self) -> None:
        splits = gather(data=at("data_pair", size=8)).splits
        assert (len(splits.train), len(splits.evaluation or ())) == (8, 12)
        assert gather(data=at("with_classes", classes=2)).splits.evaluation is None

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("NoLength", "has no length"),
            ("endless", "is an iterator"),
            ("no_model", "is a str, not a dataset"),
        ],
    )
    def test_what_is_no_dataset(self, name: str, text: str) -> None:
        assert text in refused(data=at(name))

    def test_too_many_classes(self) -> None:
        model = {"kind": "mlp", "num_classes": 2}
        text = refused(data=at("with_classes", classes=["a", "b", "c"]), model=model)
        assert (
            text
            == "model.num_classes = 2: the training data has 3 classes; set model.num_classes: 3 "
            "[model-data-num-classes]"
        )
        gather(data=at("with_classes", classes=["a", "b"]), model=model)
        # not a list: the attribute means something else
        gather(data=at("with_classes", classes=3), model=model)

    def test_evaluation_data_alone(self) -> None:
        with pytest.raises(ConfigError, match="eval_data: it was handed over without train_data"):
            gather(Objects(eval_data=DATA))

    def test_objects_keep_the_loader_settings(self) -> None:
        section = at("data_pair") | {"shuffle": False, "num_workers": 3, "random_samples": False}
        described = describe_objects(config(data=section), Objects(train_data=DATA)).data
        assert described.model_dump() == {
            "object": "torch.utils.data.dataset.TensorDataset",
            "train_samples": 12,
            "shuffle": False,
            "num_workers": 3,
            "prefetch_batches": 2,
            "random_samples": False,
            "lanes": None,
            "bucket_steps": 0,
            "curriculum_steps": 0,
        }


class TestOptimizer:
    PARAMETERS = [nn.Parameter(torch.zeros(2))]

    def make(self, objects: Objects | None = None, **sections: Any) -> Any:
        make = gather(objects, **sections).make_optimizer
        assert make is not None
        return make(self.PARAMETERS)

    def test_a_target_gets_the_parameters_and_its_args(self) -> None:
        optimizer = self.make(optimizer={"target": "torch.optim:RMSprop", "args": {"lr": 1e-4}})
        assert isinstance(optimizer, torch.optim.RMSprop)
        assert optimizer.param_groups[0]["lr"] == 1e-4

    def test_a_kind_is_deepspeeds_business(self) -> None:
        assert gather(optimizer={"kind": "sgd"}).make_optimizer is None

    @pytest.mark.parametrize(
        ("section", "text"),
        [
            (
                {"target": "torch.optim:SGD", "args": {"lr": -1.0}},
                "optimizer.target = torch.optim:SGD: calling it failed: ValueError: Invalid learning rate: -1.0",
            ),
            (at("no_optimizer"), "it returned builtins.str, not a torch.optim.Optimizer"),
            (
                {"target": "torch.optim:SGD", "args": {"rate": 1.0}},
                "got an unexpected keyword argument 'rate'",
            ),
        ],
    )
    def test_what_fails_is_one_problem(self, section: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            self.make(optimizer=section)
        assert text in str(caught.value)

    @pytest.mark.parametrize(
        ("optimizer", "lr"),
        [
            (partial(torch.optim.SGD, lr=0.1), 0.1),
            (partial(torch.optim.SGD, lr=1), 1.0),
            (torch.optim.SGD, None),
            (partial(torch.optim.Adam, lr=torch.tensor(0.1)), None),
            (partial(torch.optim.SGD, lr=-1.0), None),
            (partial(torch.optim.SGD, lr=float("nan")), None),
            (partial(torch.optim.SGD, lr=True), None),
            (lambda parameters: torch.optim.SGD(parameters, lr=0.1), None),
        ],
    )
    def test_an_object_gives_its_rate_where_it_has_one(
        self, optimizer: Any, lr: float | None
    ) -> None:
        described = describe_objects(config(), Objects(optimizer=optimizer))
        assert described.optimizer.lr == lr  # type: ignore[union-attr]
        assert gather(Objects(optimizer=optimizer)).make_optimizer is not None

    @pytest.mark.parametrize(
        ("optimizer", "args"),
        [
            (
                partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
                {"momentum": 0.9, "nesterov": True},
            ),
            (
                partial(torch.optim.Adam, betas=(0.9, 0.95), foreach=None),
                {"betas": [0.9, 0.95], "foreach": None},
            ),
            (partial(torch.optim.SGD, momentum=torch.tensor(0.9), weight_decay=math.inf), {}),
            (torch.optim.SGD, {}),
        ],  # type: ignore[arg-type]
    )
    def test_an_object_gives_its_plain_keywords(self, optimizer: Any, args: dict[str, Any]) -> None:
        described = describe_objects(config(), Objects(optimizer=optimizer))
        assert described.optimizer.args == args  # type: ignore[union-attr]
        assert config_from_values(described.to_dict()) == described

    def test_an_object_gets_the_parameters(self) -> None:
        made = self.make(Objects(optimizer=partial(torch.optim.SGD, lr=0.1)))
        assert made.param_groups[0]["params"] == self.PARAMETERS
        with pytest.raises(
            ConfigError, match=r"optimizer = \S+no_optimizer: it returned builtins.str, not a torch"
        ):
            self.make(Objects(optimizer=no_optimizer))  # type: ignore[arg-type]


class TestResolvedConfig:
    """What a run with objects writes into its folder."""

    OBJECTS = Objects(
        model=Net(), train_data=DATA, task=loss_function, optimizer=partial(torch.optim.SGD, lr=0.1)
    )

    def resolved(self, tmp_path: Path) -> RunConfig:
        values = describe_objects(config(), self.OBJECTS).to_dict()
        text = yaml.safe_dump(values)
        return config_from_values(yaml.safe_load(text))

    def test_it_names_the_types(self, tmp_path: Path) -> None:
        found = self.resolved(tmp_path).to_dict()
        assert found["model"] == {"object": f"{HERE}.Net"}
        assert found["task"] == {"object": f"{HERE}.loss_function"}
        assert found["optimizer"] == {
            "object": f"{torch.optim.SGD.__module__}.SGD",
            "lr": 0.1,
            "args": {},
        }

    def test_it_cannot_bring_the_objects_back(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            gather_parts(self.resolved(tmp_path), Objects())
        assert [(problem.kind, problem.key) for problem in caught.value.problems] == [
            ("object-not-given", f"{key}.object") for key in ("model", "data", "task", "optimizer")
        ]
        assert "framework.fit(..., train_data=...)" in str(caught.value)

    def test_with_the_objects_it_runs_again(self, tmp_path: Path) -> None:
        parts = gather_parts(describe_objects(self.resolved(tmp_path), self.OBJECTS), self.OBJECTS)
        assert parts.build_model() is self.OBJECTS.model

    @pytest.mark.parametrize(
        "task",
        [torch.relu, nn.functional.mse_loss, nn.MSELoss(), OwnTask, OWN_TASK.loss, lambda o, t: o],
    )
    def test_anything_callable_has_a_name(self, task: Any) -> None:
        name = describe_objects(config(), Objects(task=task)).task.object  # type: ignore[union-attr]
        assert name
        assert not name.startswith("None.")
        assert " at 0x" not in name


@pytest.mark.parametrize("size", [261, 260])
def test_a_vocabulary_that_only_the_files_know(size: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text " * 100)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokens"))
    values = {
        "model": {"kind": "gpt", "vocab_size": size},
        "data": {"kind": "text", "path": str(tmp_path / "tokens"), "sequence_length": 16},
        "task": {"kind": "causal_lm"},
    }
    if size == 261:
        assert len(gather_parts(config_from_values(values), Objects()).splits.train) == 56
        return
    with pytest.raises(ConfigError) as caught:
        gather_parts(config_from_values(values), Objects())
    assert [str(problem) for problem in caught.value.problems] == [
        "model.vocab_size = 260: the data has 261 different tokens; set model.vocab_size: 261 or more "
        "[model-data-vocab-size]"
    ]


@pytest.mark.parametrize(("accumulation", "expected"), [(1, 2), (6, 2), (7, 3), (30, 10)])
def test_workers_have_a_step_ready_that_reads_all_its_batches_first(
    accumulation: int, expected: int
) -> None:
    batch = {"micro_size": 1, "accumulation_steps": accumulation}
    config = config_from_values({"batch": batch, "data": {"kind": "digits", "num_workers": 3}})
    plan = make_plan(config, Cluster(devices_per_host=1))
    splits = gather_parts(config, Objects()).splits
    loader = make_train_loader(plan, splits, rank=0, read_at_once=accumulation)
    assert loader._reading.prefetch_batches == expected
