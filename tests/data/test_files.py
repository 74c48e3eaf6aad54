"""Rows of files by Hugging Face's `datasets`, and tar files with samples."""

from __future__ import annotations

import io
import json
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from framework.config.load import config_from_values
from framework.data.files import hugging_face, shards
from framework.data.loaders import TrainLoader
from framework.data.order import Share
from framework.data.streams import Lane, Place, StreamEvalLoader, StreamLoader, is_stream
from framework.errors import ConfigError, StorageError
from framework.setup.objects import Objects
from framework.setup.parts import gather_parts


def batches(dataset: Any, count: int) -> list[Any]:
    share = Share(4, 4, 1, 0, 1)
    if is_stream(dataset):
        return [*islice(StreamLoader(dataset, share=share, seed=0).stream(), count)]
    sizes = {"global_size": 4, "micro_size": 4, "accumulation_steps": 1, "rank": 0, "world_size": 1}
    return [*islice(TrainLoader(dataset, **sizes, seed=0, shuffle=False).stream(), count)]


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
        self.datasets.DatasetDict({"train": self.rows, "test": self.rows.select(range(3))}).save_to_disk("both")
        self.rows.save_to_disk("one")

    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("path", ["part{0..1}.jsonl", "part*.jsonl", "rows.parquet", "both", "one"])
    def test_columns_become_tuples_or_dicts(self, path: str, streaming: bool) -> None:
        train = hugging_face(path, columns=["x", "y"], streaming=streaming).train
        assert is_stream(train) == streaming
        found = batches(train, 3)
        rows = sorted((*x, y) for batch in found for x, y in zip(*map(torch.Tensor.tolist, batch), strict=True))
        assert rows == [(i, 2 * i, i % 3) for i in range(12)]
        named = hugging_face(path, columns={"x": "inputs", "y": "labels"}, streaming=streaming).train
        (batch,) = batches(named, 1)
        assert {name: tuple(value.shape) for name, value in batch.items()} == {"inputs": (4, 2), "labels": (4,)}
        (batch,) = batches(hugging_face(path, streaming=streaming).train, 1)
        assert sorted(batch) == ["x", "y"]

    def test_evaluation_is_named_or_a_split_of_the_folder(self) -> None:
        assert len(hugging_face("both").evaluation) == 3
        assert hugging_face("one").evaluation is None
        splits = hugging_face("rows.parquet", eval_path="rows.csv", streaming=True)
        loader = StreamEvalLoader(splits.evaluation, batch_size=7, rank=0, world_size=1, gather=lambda one: [one])
        assert [len(batch["y"]) for batch, _ in loader] == [7, 5]

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ({"path": "part{0..2}.jsonl"}, "data.path = part2.jsonl: there is no such file"),
            ({"path": "one", "eval_path": "*.arrow"}, "data.eval_path = *.arrow: there is no such file"),
            ({"path": "rows.csv", "columns": ["x"]}, "there is no column x; there are y [dataset-columns]"),
            ({"path": "broken.parquet"}, "data.path = broken.parquet: datasets cannot read it: "),
        ],
    )
    def test_what_is_not_there_is_named(self, arguments: dict[str, Any], line: str) -> None:
        Path("broken.parquet").write_text("nothing", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            hugging_face(**arguments)
        assert line in str(caught.value)

    def test_by_config(self) -> None:
        values = {"data": {"kind": "huggingface", "path": "rows.parquet", "columns": ["x", "y"], "train_samples": 12}}
        config = config_from_values(
            values | {"model": {"kind": "gpt", "num_layers": 1}, "task": {"kind": "classification"}}
        )
        assert gather_parts(config, Objects()).splits.num_train == 12


def write_shard(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            for extension, data in sample.items():
                member = tarfile.TarInfo(f"{path.stem}/{number:04}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


class TestShards:
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for part in range(3):
            samples = []
            for number in range(10 + part):
                image, array = io.BytesIO(), io.BytesIO()
                Image.new("RGB", (3, 2), (10 * part + number, 0, 255)).save(image, "png")
                np.save(array, np.array([part, number]))
                samples.append(
                    {
                        "png": image.getvalue(),
                        "cls": str(number).encode(),
                        "txt": b"text",
                        "seg.npy": array.getvalue(),
                        "json": json.dumps({"part": part}).encode(),
                    }
                )
            write_shard(tmp_path / f"s{part:03}.tar", samples)

    def test_files_of_a_name_are_a_sample(self) -> None:
        train = shards("s{000..002}.tar").train
        assert train.num_shards == 3
        samples = [*train]
        assert len(samples) == 33
        assert list(samples[0]) == ["png", "cls", "txt", "seg.npy", "json"]
        last = samples[-1]
        assert (last["cls"], last["txt"], last["json"], last["seg.npy"].tolist()) == (11, "text", {"part": 2}, [2, 11])
        assert torch.allclose(last["png"][:, 1, 2], torch.tensor([31 / 255, 0.0, 1.0]))
        ((images, numbers),) = batches(shards("s*.tar", fields=["png", "cls"]).train, 1)
        assert (tuple(images.shape), numbers.tolist()) == (
            (4, 3, 2, 3),
            [0, 1, 0, 1],
        )

    def test_a_lane_begins_where_its_state_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("framework.data.streams._SAMPLES_PER_STATE", 1)
        monkeypatch.setattr("framework.data.streams._TIME_OF_STATES", 0)
        source = shards("s*.tar", fields=["seg.npy"]).train
        lane = Lane(source, index=1, num_lanes=2, seed=0)
        lane.start(0, Place(0))
        found, places = [], []
        for _ in range(45):
            found.append(lane.take()[0].tolist())
            places.append(lane.place())
        assert found[:10] == [[1, number] for number in range(10)]
        assert found[11] == [1, 0], "the second pass"
        for count in (3, 10, 11, 25):
            again = Lane(source, index=1, num_lanes=2, seed=0)
            again.start(count + 1, places[count])
            assert places[count].state is not None or count == 11
            assert [again.take()[0].tolist() for _ in range(5)] == found[count + 1 : count + 6]

    def test_what_cannot_be_read_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"data.path = s003.tar: there is no such file"):
            shards("s{000..003}.tar")
        with pytest.raises(ConfigError, match=r"a sample of s000.tar has no .jpg, but png, cls"):
            next(iter(shards("s000.tar", fields=["jpg"]).train))
        Path("s001.tar").write_bytes(Path("s001.tar").read_bytes()[:700])
        with pytest.raises(StorageError, match=r"s001.tar: the shard cannot be read.*shard-not-read"):
            list(shards("s001.tar").train)
