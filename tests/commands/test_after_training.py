"""`load`, `evaluate` and `predict`: what training logged comes back from any layout; predictions
are the module's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import framework
from framework.cli import main
from framework.commands.evaluate import config_to_evaluate, not_repeated
from framework.commands.inputs import batch_of, find_inputs, inputs_in_memory, read_sample
from framework.commands.predict import find_rows
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, FrameworkError, TrainingError
from framework.setup.trained import find_source
from framework.setup.user_code import call_factory
from framework.tasks.from_callable import as_task
from tests.commands.test_trust import forged
from tests.full_disks import longest_file
from tests.launched import ROOT, read_metrics, run_ranks

Capture = pytest.CaptureFixture[str]
_GPT = {
    "kind": "gpt",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 24,
    "vocab_size": 262,
}
_BERT = {
    "kind": "bert",
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_classes": 2,
    "max_positions": 32,
    "vocab_size": 262,
}
_MOE = {"num_experts": 4, "capacity_factor": None, "eval_capacity_factor": None}
_LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value", "up"]}
# Those whose evaluation is that of training to the bit; adapters are merged.
EXACT = ("z0", "z1-ema", "z3", "tensor", "sequence", "experts", "pipe")


def case(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 32, "micro_size": 8},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {"max_steps": 6},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
    }


def text(model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    data = {"kind": "text", "sequence_length": 24}
    task, evaluation = {"kind": "causal_lm"}, {"max_samples": 50}
    return {
        "model": _GPT | (model or {}),
        "data": data,
        "task": task,
        "evaluation": evaluation,
        **sections,
    }


def run_jobs(folder: Path, name: str, jobs: list[Any], *, num_ranks: int = 2) -> None:
    file = folder / f"{name}.jobs"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    run_ranks(ROOT / "tests/jobs/run_commands.py", str(file), num_ranks=num_ranks, cwd=folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on two ranks, and evaluated on the same ones."""
    folder = tmp_path_factory.mktemp("after")
    ema = {"training": {"max_steps": 6, "ema": {"decay": 0.5}}, "evaluation": {"weights": "ema"}}
    plain = [
        case(folder, "z0"),
        case(folder, "z1-ema", zero={"stage": 1}, precision={"dtype": "bf16"}, **ema),
        case(folder, "z3", zero={"stage": 3}, **text()),
        case(folder, "tensor", **text(parallel={"tensor": 2})),
        case(folder, "sequence", **text(parallel={"sequence": 2})),
        case(folder, "experts", **text({"moe": _MOE}, parallel={"expert": 2}, zero={"stage": 1})),
        case(
            folder,
            "lora",
            **text({"positions": "rotary"}, training={"max_steps": 6, "lora": _LORA}),
        ),
        case(
            folder,
            "texts",
            data={
                "kind": "labelled_text",
                "text": "sentence",
                "path": str(folder / "train.jsonl"),
                "label": "class",
                "sequence_length": 32,
            },
            model=_BERT,
        ),
        case(
            folder,
            "chats",
            **text({"max_positions": 256})
            | {"data": {"kind": "conversations", "sequence_length": 256}},
        ),
    ]
    train = [{"sentence": f"text {number}", "class": number % 2} for number in range(200)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, train)), encoding="utf-8")
    piped = [case(folder, "pipe", **text(parallel={"pipe": 2}, zero={"stage": 1}))]
    # the engines do not live in one process
    for name, cases in {"plain": plain, "piped": piped}.items():
        names = [one["run"]["name"] for one in cases]
        run_jobs(folder, name, [*cases, *([f"{each}.json", ["evaluate", each]] for each in names)])
    return folder


def logged(run: Path) -> dict[str, float]:
    return {
        name: value for name, value in read_metrics(run)[-1].items() if name.startswith("eval/")
    }


@pytest.mark.slow
def test_evaluation_is_what_training_logged_to_the_bit(runs: Path) -> None:
    for name in (*EXACT, "lora"):
        found = json.loads((runs / f"{name}.json").read_text(encoding="utf-8"))
        expected = logged(runs / name)
        assert found["metrics"] == (
            expected if name in EXACT else pytest.approx(expected, rel=1e-6)
        ), name
        assert (found["step"], found["weights"]) == (6, "ema" if name == "z1-ema" else "trained")


@pytest.mark.slow
def test_one_process_evaluates_what_was_divided(runs: Path) -> None:
    names = ("pipe", "tensor", "sequence", "experts")
    run_jobs(runs, "one", [[f"one-{name}.json", ["evaluate", name]] for name in names], num_ranks=1)
    for name in names:
        found = json.loads((runs / f"one-{name}.json").read_text(encoding="utf-8"))["metrics"]
        assert found == pytest.approx(logged(runs / name), rel=1e-6), name


@pytest.mark.slow
def test_a_loaded_module_measures_the_same(runs: Path) -> None:
    """Of weights that were divided in any way, and with adapters in them."""
    for name in ("z0", "z3", "tensor", "experts", "lora", "pipe"):
        model = framework.load(runs / name)
        assert not model.training
        config = framework.load_config(runs / name / "config.yaml")
        data = call_factory(config.data.factory(), key="data").evaluation
        pairs = [
            data[number]
            for number in range(min(len(data), config.evaluation.max_samples or len(data)))
        ]
        with torch.no_grad():
            outputs = model(torch.stack([torch.as_tensor(inputs) for inputs, _ in pairs]))
        targets = torch.stack([torch.as_tensor(target) for _, target in pairs])
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        assert float(loss) == pytest.approx(logged(runs / name)["eval/loss"], rel=1e-5), name
    average, trained = (
        framework.load(runs / "z1-ema", weights="ema"),
        framework.load(runs / "z1-ema"),
    )
    assert any(
        not torch.equal(*pair)
        for pair in zip(average.parameters(), trained.parameters(), strict=True)
    )
    own = framework.load(runs / "z0", model=type(framework.load(runs / "z0")))
    assert all(
        torch.equal(a, b)
        for a, b in zip(own.parameters(), framework.load(runs / "z0").parameters(), strict=True)
    )


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the runs, and a group of this process alone."""
    monkeypatch.chdir(runs)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_predictions_are_the_modules_and_go_on(runs: Path, capsys: Capture) -> None:
    """On two ranks, behind what a command that was killed in the middle of a row has left."""
    images = torch.randn(41, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    np.savez(runs / "images.npz", images.double().numpy())
    with torch.no_grad():
        expected = torch.softmax(framework.load(runs / "z0")(images), dim=1)
    out = runs / "classes.jsonl"
    words = ("predict", "z0", "images.npz", "--out", "classes.jsonl", "--batch-size", "4")
    assert main(words) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[: 2 * len(whole) // 3])
    run_jobs(runs, "on", [["on.txt", words]])
    assert (runs / "on.txt").read_text(
        encoding="utf-8"
    ) == "classes.jsonl: 41 rows, 14 of them new\n"
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["input"] for row in rows] == [f"images.npz:{number}" for number in range(1, 42)]
    assert torch.allclose(torch.tensor([row["probabilities"] for row in rows]), expected, atol=1e-6)
    assert [row["class"] for row in rows] == expected.argmax(dim=1).tolist()
    assert main(["predict", "z1-ema", "images.npz", "--out", "classes.jsonl"]) == 78
    assert "[predictions-of-others]" in capsys.readouterr().err
    np.savez(runs / "other.npz", np.ones((9, 3, 2)))
    assert main(["predict", "z0", "other.npz", "--out", "other.jsonl"]) == 70
    assert "[prediction-failed]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["z3", "experts", "lora"])
def test_lines_of_text_go_on(name: str, runs: Path, capsys: Capture) -> None:
    """As `generate` continues each by itself."""
    lines = ["import os", "def f(x):" + " " * 40 + "return x", "x"]
    (runs / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    words = ("--temperature", "0", "--max-new-tokens", "30")
    assert (
        main(["predict", name, "lines.txt", "--out", f"{name}.jsonl", "--batch-size", "2", *words])
        == 0
    )
    rows = [
        json.loads(line)
        for line in (runs / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["input"] for row in rows] == ["lines.txt:1", "lines.txt:2", "lines.txt:3"]
    capsys.readouterr()
    prompts = [word for line in lines for word in ("--prompt", line)]
    assert main(["generate", name, *prompts, *words]) == 0
    expected = [f"{line}{row['generated']}" for line, row in zip(lines, rows, strict=True)]
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_files_as_the_run_trains_on_them(runs: Path) -> None:
    """JSON lines, a table, bare lines and samples in memory have the same answers; the label in a
    row has no part in them.
    """
    texts = ["Return the sine of x.", "Split a path, 1 or 0."]
    rows = [{"sentence": each, "class": number} for number, each in enumerate(texts)]
    (runs / "t.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    table = "".join(f'{number},"{each}"\n' for number, each in enumerate(texts))
    (runs / "t.csv").write_text("class,sentence\n" + table, encoding="utf-8")
    (runs / "t.txt").write_text("\n".join(texts), encoding="utf-8")

    def predicted(name: str, run: str, *words: str) -> list[dict[str, Any]]:
        out = runs / f"{run}-{name}.out"
        assert main(["predict", run, name, "--out", out.name, *words]) == 0
        lines = out.read_text(encoding="utf-8").splitlines()
        return [
            {
                key: value
                for key, value in json.loads(line).items()
                if key not in ("input", "checkpoint")
            }
            for line in lines
        ]

    expected = [
        {key: value for key, value in row.items() if key != "input"}
        for row in framework.predict(runs / "texts", texts)
    ]
    assert predicted("t.jsonl", "texts") == expected
    assert predicted("t.csv", "texts") == expected
    assert predicted("t.txt", "texts", "--lines") == expected
    assert main(["predict", "texts", "t.txt", "--out", "refused"]) == 78
    assert main(["predict", "texts", "t.jsonl", "--out", "refused", "--lines"]) == 78
    asked = [{"prompt": each, "completion": "never read"} for each in texts]
    (runs / "chats.jsonl").write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    options = ("--temperature", "0", "--max-new-tokens", "8")
    answers = predicted("chats.jsonl", "chats", *options)
    assert answers == predicted("t.txt", "chats", "--lines", *options)
    inputs = framework.predict(runs / "chats", asked, temperature=0.0, max_new_tokens=8)
    assert [row["generated"] for row in inputs] == [row["generated"] for row in answers]


# ----------------------------------------------------------------------------------------------- without a training run
def test_metrics_of_python_are_named_where_they_are_not_repeated() -> None:
    measured = ["train/loss", "eval/loss", "eval/auroc", "eval/noisy/f1"]
    assert not_repeated(measured, ["eval/loss", "eval/accuracy"]) == ["eval/auroc"]
    assert not_repeated(measured, ["eval/noisy/loss"]) == ["eval/noisy/f1"]


def test_a_config_is_made_for_measuring_alone(tmp_path: Path) -> None:
    sections = {
        "parallel": {"pipe": 2, "stages": [0, 1]},
        "training": {"ema": {"decay": 0.9}},
        "evaluation": {"weights": "ema"},
        "zero": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "callbacks": [{"target": "os:getcwd"}],
    }
    forged(tmp_path / "run", sections)
    checkpoint = find_source(str(tmp_path / "run"))
    config, _ = config_to_evaluate(checkpoint, ["evaluation.max_samples=7"], num_ranks=3)
    assert (config.parallel.pipe, config.parallel.stages, config.zero.offload_optimizer.device) == (
        1,
        None,
        "none",
    )
    assert (config.training.ema, config.evaluation.weights, config.callbacks) == (
        None,
        "trained",
        [],
    )
    assert (config.evaluation.max_samples, config.checkpoint.init_weights) == (
        7,
        str(checkpoint.path),
    )
    assert config_to_evaluate(checkpoint, [], num_ranks=4)[0].parallel.pipe == 2


def test_a_module_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    forged(tmp_path / "object", {"model": {"object": "my.Net"}})
    with pytest.raises(
        ConfigError, match=r"my.Net was handed over .*, or hand over model=... \[object-not-given\]"
    ):
        framework.load(tmp_path / "object")
    forged(tmp_path / "target", {"model": {"target": "os:getcwd"}})
    with pytest.raises(
        ConfigError, match=r"trust=True\).*; or hand over model=... \[target-not-trusted\]"
    ):
        framework.load(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"\[checkpoint-not-found\]"):
        framework.load(tmp_path)


class TestInputs:
    @pytest.fixture
    def images(self, tmp_path: Path) -> RunConfig:
        for name in ("train/red/1.png", "val/red/1.png", "val/red/b.jpg", "val/red/notes.md"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((50, 40), 80).save(tmp_path / name, "PNG")
        return config_from_values(
            {"data": {"kind": "image_folder", "root": str(tmp_path), "image_size": 32}}
        )

    def test_an_image_is_read_as_the_evaluation_reads_it(
        self, images: RunConfig, tmp_path: Path
    ) -> None:
        found = find_inputs([str(tmp_path / "val")], images)
        assert [Path(name).name for name in found] == ["1.png", "b.jpg"]
        path = next(iter(found.values()))
        assert torch.equal(
            read_sample(path, images),
            call_factory(images.data.factory(), key="data").evaluation[0][0],
        )
        (tmp_path / "val/red/1.png").write_bytes(b"no image")
        with pytest.raises(FrameworkError, match=r"val/red/1.png: cannot be read as an image"):
            read_sample(path, images)

    def test_rows_of_tables_and_arrays(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("# height, width\n1,2\n3,4.5\n")
        found = find_inputs([str(tmp_path / "t.csv")], config_from_values({}))
        assert [row.tolist() for row in found.values()] == [[1.0, 2.0], [3.0, 4.5]]
        np.savez(tmp_path / "t.npz", a=np.arange(6).reshape(3, 2), b=np.ones(3))
        found = find_inputs([str(tmp_path / "t.npz")], config_from_values({}))
        assert list(found) == [f"{tmp_path}/t.npz:{number}" for number in (1, 2, 3)]
        assert {name: array.tolist() for name, array in found[f"{tmp_path}/t.npz:2"].items()} == {
            "a": [2, 3],
            "b": 1,
        }

    @pytest.mark.parametrize(
        ("name", "content", "stated"),
        [
            ("t.csv", b"1,2\n3,x\n", "'x' to float32"),
            ("t.npz", b"no archive", "t.npz: "),
            ("t.png", b"", "how an image is read only data.kind: image_folder says"),
            ("none.npz", None, "there is no such file or folder; check the path"),
        ],
    )
    def test_what_cannot_be_read_is_named(
        self,
        name: str,
        content: bytes | None,
        stated: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)  # a long path would be shortened in the sentence
        if content is not None:
            Path(name).write_bytes(content)
        with pytest.raises(ConfigError, match=r"\[input-not-read\]$") as caught:
            find_inputs([name], config_from_values({}))
        assert stated in str(caught.value)
        assert f"INPUT = {name}: " in str(caught.value)


_ROWS = [{"sentence": "a\u2028b, c", "label": 1}, {"sentence": "d", "label": 0}]
_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


class TestFilesOfTheRunsOwnForm:
    """What the run trains on is read as it was for training; what cannot be meant is refused."""

    LABELLED = config_from_values(
        {
            "data": {"kind": "labelled_text", "path": "t.jsonl", "text": "sentence"},
            "model": {"kind": "bert", "num_classes": 2},
        }
    )
    CHATS = config_from_values(
        {
            "data": {"kind": "conversations", "path": "t.jsonl"},
            "model": {"kind": "gpt"},
            "task": {"kind": "causal_lm"},
        }
    )
    WINDOWS = config_from_values({k: v for k, v in text().items() if k != "evaluation"})

    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def read(self, name: str, content: str, config: RunConfig, **options: Any) -> dict[str, Any]:
        Path(name).write_text(content, encoding="utf-8", newline="")
        return find_inputs([name], config, **options)

    def refused(self, name: str, content: str, config: RunConfig, **options: Any) -> str:
        with pytest.raises(ConfigError, match=r"\[input-not-read\]$") as caught:
            self.read(name, content, config, **options)
        return str(caught.value)

    def test_rows_of_texts_are_their_texts_whatever_the_label(self) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in _ROWS)
        texts = {f"t.jsonl:{n}": row["sentence"] for n, row in enumerate(_ROWS, 1)}
        assert self.read("t.jsonl", lines, self.LABELLED) == texts
        assert self.read("t.jsonl", lines.replace("1}", "0}"), self.LABELLED) == texts
        table = 'label,sentence\n1,"a\u2028b, c"\n0,d\n'
        assert list(self.read("t.csv", table, self.LABELLED).values()) == list(texts.values())
        bare = self.read("t.txt", "a\u2028b, c\nd\n", self.LABELLED, lines=True)
        assert [line.decode() for line in bare.values()] == list(texts.values())
        assert inputs_in_memory(_ROWS, self.LABELLED) == {"1": "a\u2028b, c", "2": "d"}
        assert inputs_in_memory(["x"], self.LABELLED) == {"1": "x"}

    def test_what_cannot_be_meant_is_refused_with_what_can(self) -> None:
        row = json.dumps(_ROWS[0])
        assert "give --lines" in self.refused("t.txt", "bare\n", self.LABELLED)
        assert "leave --lines out" in self.refused("t.txt", row, self.LABELLED, lines=True)
        header = "label,sentence\n1,a\n"
        assert "leave --lines out" in self.refused("t.csv", header, self.LABELLED, lines=True)
        assert "it has no text 'sentence'; it has txt" in self.refused(
            "t.jsonl", '{"txt": "a"}', self.LABELLED
        )
        assert "not read from .parquet files" in self.refused("t.parquet", "PAR1", self.LABELLED)
        prompt = '{"text": "def"}\n'
        assert "name the file .jsonl, or give --lines" in self.refused("p", prompt, self.WINDOWS)
        digits = config_from_values({})
        assert "does not read texts" in self.refused("t.csv", "1,2\n", digits, lines=True)
        images = config_from_values({"data": {"kind": "image_folder", "root": "."}})
        assert "no image" in self.refused("t.csv", "1,2\n", images)

    def test_prompts_of_a_model_of_windows(self) -> None:
        assert self.read("p.txt", "def\n{\n", self.WINDOWS) == {"p.txt:1": b"def", "p.txt:2": b"{"}
        rows = '{"text": "def"}\n\n{"prompt": "x", "text": "y"}\n'
        assert self.read("p.jsonl", rows, self.WINDOWS) == {"p.jsonl:1": "def", "p.jsonl:3": "x"}

    def test_a_conversation_is_asked_up_to_its_last_answer(self) -> None:
        rows = [
            {"messages": [*_CHAT, {"role": "user", "content": "bye"}], "tools": [1]},
            {"messages": _CHAT},
            {"prompt": "hi", "completion": "hello"},
            {"prompt": "hi"},
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "x"}]},
        ]
        found = self.read("t.jsonl", "\n".join(map(json.dumps, rows)), self.CHATS)
        first, *others = found.values()
        assert (first.messages, first.tools) == (rows[0]["messages"], [1])
        assert [list(chat.messages) for chat in others] == [_CHAT[:1]] * 4
        only_answers = json.dumps({"messages": _CHAT[1:]})
        assert "no message to answer" in self.refused("t.jsonl", only_answers, self.CHATS)
        listed = json.dumps(_CHAT[:1])
        assert list(self.read("t", listed, self.CHATS, lines=True).values()) == [listed.encode()]

    @pytest.mark.slow
    def test_rows_of_datasets_with_and_without_targets(self) -> None:
        datasets = pytest.importorskip("datasets")
        rows = {"a": [[1.0], [2.0]], "b": [[3.0], [4.0]], "label": [0, 1]}
        datasets.Dataset.from_dict(rows).to_parquet("whole.parquet")
        datasets.Dataset.from_dict({"a": rows["a"], "b": rows["b"]}).to_parquet("bare.parquet")
        columns: Any
        for columns in (["a", "b", "label"], {"a": "x", "b": "y", "label": "labels"}):
            data = {"kind": "huggingface", "path": "*.parquet", "columns": columns}
            config = config_from_values({"data": data})
            task = as_task(torch.nn.functional.mse_loss)
            batches = []
            for name in ("whole", "bare"):
                found = find_inputs([f"{name}.parquet"], config)
                assert list(found) == [f"{name}.parquet:1", f"{name}.parquet:2"]
                batches.append(batch_of(list(found.values()), config, task))
            for batch in batches:
                inputs = batch.values() if isinstance(batch, dict) else batch
                assert [part.tolist() for part in inputs] == [rows["a"], rows["b"]]

    def test_a_dataset_from_python_is_read_without_its_targets(self) -> None:
        config, task = config_from_values({}), as_task(torch.nn.functional.mse_loss)
        images = torch.arange(6.0).reshape(3, 2)
        for data in (images, torch.utils.data.TensorDataset(images, images)):
            found = inputs_in_memory(data, config)
            assert torch.equal(batch_of(list(found.values()), config, task), images)


def test_predictions_of_others_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    rows = [
        json.dumps({"input": name, "checkpoint": "run/global_step1", "class": 1}) for name in "abc"
    ]
    whole = "".join(f"{row}\n" for row in rows[:2])
    for end in ("", rows[2][:1], rows[2][:9], rows[2][:-3], rows[2]):  # cut off anywhere
        file.write_text(whole + end)
        found = find_rows(file, "abcd", "run/global_step1")
        assert (found.count, found.num_bytes) == (2, len(whole))
        assert file.read_text() == whole + end, "nothing is cut before there is something to write"
        found.append("cd", [[{"class": 2}], [{"class": 3}]])
        written = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(row["input"], row["class"]) for row in written] == [
            ("a", 1),
            ("b", 1),
            ("c", 2),
            ("d", 3),
        ]
    file.write_text(whole)
    for inputs, checkpoint in (
        ("ac", "run/global_step1"),
        ("a", "run/global_step1"),
        ("abc", "run/global_step2"),
    ):
        with pytest.raises(ConfigError, match=r"\[predictions-of-others\]"):
            find_rows(file, inputs, checkpoint)
    assert file.read_text() == whole


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":1}',
        b"{",
        b'{"input"',
        b'{"input": "z',
        b'{"input": "a", "checkpoint": "other/global_step1"',
        b"global_step10",
        b"[1]\n",
        b"1" * 5000 + b"\n",
        b"[" * 100_000 + b"\n",
        b"\x89PNG\r\n\x1a\n\0\0",
        b"\n",
        b" ",
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_is_not_its_own_is_as_it_was(
    content: bytes, is_link: bool, tmp_path: Path
) -> None:
    file = out = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    if is_link:
        out = tmp_path / "out.jsonl"
        out.symlink_to(file)
    with pytest.raises(ConfigError, match=r"\[predictions-of-others\]"):
        find_rows(out, "abcd", "run/global_step1")
    assert file.read_bytes() == content


def test_a_prediction_that_fails_leaves_no_half_row(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    rows = find_rows(file, "abcd", "run/global_step1")
    with pytest.raises(TrainingError, match="no"):
        rows.append("abcd", [TrainingError("no"), [{"class": 1}]])
    assert not file.exists()
    rows.append("abcd", [[{"class": 1}]])
    before = file.read_bytes()
    with longest_file(len(before) + 20), pytest.raises(OSError, match="too large"):
        rows.append("bcd", [[{"class": 1}], [{"class": 2}]])
    assert file.read_bytes() == before
    with pytest.raises(OSError, match="no folder"):
        find_rows(tmp_path / "none" / "out.jsonl", "a", "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        find_rows(tmp_path / "pipe", "a", "x")
