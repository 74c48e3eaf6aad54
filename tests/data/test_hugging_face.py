"""Rows of files by Hugging Face's `datasets`, and tar files with samples."""

from __future__ import annotations

import io
import json
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from framework.config.load import config_from_values
from framework.data.hugging_face import build
from framework.data.loaders import is_stream
from framework.data.order import Share
from framework.data.streams import Lane, LanePlace, StreamEvalLoader
from framework.errors import ConfigError
from framework.setup.components import gather_parts
from framework.setup.user_code import Objects
from tests.data.loader_of import stream_loader, train_loader


def batches(dataset: Any, count: int) -> list[Any]:
    share = Share(4, 4, 1, 0, 1)
    if is_stream(dataset):
        return [*islice(stream_loader(dataset, share=share, seed=0).stream(), count)]
    sizes = {"global_size": 4, "micro_size": 4, "accumulation_steps": 1, "rank": 0, "world_size": 1}
    return [*islice(train_loader(dataset, **sizes, seed=0, shuffle=False).stream(), count)]


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(self.datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        self.rows = self.datasets.Dataset.from_dict(
            {"x": [[i, 2 * i] for i in range(12)], "y": [i % 3 for i in range(12)]}
        )
        for part in range(2):
            self.rows.select(range(6 * part, 6 * part + 6)).to_json(f"part{part}.jsonl")
        self.rows.to_parquet("rows.parquet")
        self.rows.remove_columns("x").to_csv("rows.csv")
        self.datasets.DatasetDict(
            {"train": self.rows, "test": self.rows.select(range(3))}
        ).save_to_disk("both")
        self.rows.save_to_disk("one")

    @pytest.mark.slow
    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize(
        "path", ["part{0..1}.jsonl", "part*.jsonl", "rows.parquet", "both", "one"]
    )
    def test_columns_become_tuples_or_dicts(self, path: str, streaming: bool) -> None:
        train = build(path, columns=["x", "y"], streaming=streaming).train
        assert is_stream(train) == streaming
        found = batches(train, 3)
        rows = sorted(
            (*x, y)
            for batch in found
            for x, y in zip(*map(torch.Tensor.tolist, batch), strict=True)
        )
        assert rows == [(i, 2 * i, i % 3) for i in range(12)]
        named = build(path, columns={"x": "inputs", "y": "labels"}, streaming=streaming).train
        (batch,) = batches(named, 1)
        assert {name: tuple(value.shape) for name, value in batch.items()} == {
            "inputs": (4, 2),
            "labels": (4,),
        }
        (batch,) = batches(build(path, streaming=streaming).train, 1)
        assert sorted(batch) == ["x", "y"]

    def test_evaluation_is_named_or_a_split_of_the_folder(self) -> None:
        assert len(build("both").evaluation) == 3
        assert build("one").evaluation is None
        splits = build("rows.parquet", eval_path="rows.csv", streaming=True)
        loader = StreamEvalLoader(
            splits.evaluation, batch_size=7, rank=0, world_size=1, gather=lambda one: [one]
        )
        assert [len(batch["y"]) for batch, _ in loader] == [7, 5]

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ({"path": "part{0..2}.jsonl"}, "data.path = part2.jsonl: there is no such file"),
            (
                {"path": "one", "eval_path": "*.arrow"},
                "data.eval_path = *.arrow: there is no such file",
            ),
            (
                {"path": "rows.csv", "columns": ["x"]},
                "there is no column x; there are y [dataset-columns]",
            ),
            ({"path": "broken.parquet"}, "data.path = broken.parquet: datasets cannot read it: "),
            (
                {"path": "rows.xyz"},
                "name a folder of save_to_disk with a split train, or .json, .csv, .parquet",
            ),
        ],
    )
    def test_what_is_not_there_is_named(self, arguments: dict[str, Any], line: str) -> None:
        for name in ("broken.parquet", "rows.xyz"):
            Path(name).write_text("nothing", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            build(**arguments)
        assert line in str(caught.value)

    def test_by_config(self) -> None:
        values = {
            "data": {
                "kind": "huggingface",
                "path": "rows.parquet",
                "columns": ["x", "y"],
                "train_samples": 12,
            }
        }
        config = config_from_values(
            values | {"model": {"kind": "gpt", "num_layers": 1}, "task": {"kind": "classification"}}
        )
        assert gather_parts(config, Objects()).splits.num_train == 12


class TestShards:
    """Tar files, as WebDataset writes them."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        for part in range(3):
            with tarfile.open(f"s{part:03}.tar", "w") as tar:
                for number in range(70 + part):
                    image = io.BytesIO()
                    Image.new("RGB", (3, 2), (part, number, 255)).save(image, "png")
                    sample = {"png": image.getvalue(), "cls": b"%d" % (number % 7), "txt": b"text"}
                    sample["json"] = json.dumps({"part": part}).encode()
                    for extension, data in sample.items():
                        member = tarfile.TarInfo(f"{part}/{number:04}.{extension}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))

    def test_their_samples_have_images_texts_and_numbers(self) -> None:
        train = build("s{000..002}.tar", streaming=True).train
        assert train.num_shards == 3
        (batch,) = batches(train, 1)
        assert batch["txt"] == ["text"] * 4
        assert batch["json"]["part"].tolist() == [0, 0, 1, 1] or batch["json"]["part"].tolist() == [
            0,
            0,
            2,
            2,
        ]
        assert batch["cls"].tolist() == [0, 1, 0, 1]
        assert torch.allclose(batch["png"][1, :, 0, 0], torch.tensor([0.0, 1 / 255, 1.0]))
        ((images, classes),) = batches(
            build("s*.tar", columns=["png", "cls"], streaming=True).train, 1
        )
        assert (tuple(images.shape), images.dtype, classes.tolist()) == (
            (4, 3, 2, 3),
            torch.float32,
            [0, 1, 0, 1],
        )

    def test_a_lane_begins_at_its_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("framework.data.streams._TIME_OF_STATES", 0)
        source = build("s*.tar", columns=["cls", "png"], streaming=True).train
        lane = Lane(source, index=1, num_lanes=2, seed=0)
        lane.start(0, LanePlace(0))
        found, places = [], []
        for _ in range(150):
            found.append(lane.take()["png"][:, 0, 0].tolist())
            places.append(lane.place())
        assert found[1][1] == found[0][1] + 1
        for number in (66, 80, 140):
            assert (places[number].state is not None) == (number != 80)
            again = Lane(source, index=1, num_lanes=2, seed=0)
            again.start(number + 1, places[number])
            assert [again.take()["png"][:, 0, 0].tolist() for _ in range(5)] == found[
                number + 1 : number + 6
            ]

    def test_one_that_is_missing_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"data.path = s003.tar: there is no such file"):
            build("s{000..003}.tar", streaming=True)
