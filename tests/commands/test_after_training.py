"""`load`, `evaluate` and `predict`: what training logged comes back from any layout; predictions are the module's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import framework
from framework.cli import main
from framework.commands.evaluate import config_to_evaluate
from framework.commands.predict import image_reader
from framework.commands.results import Results
from framework.config.load import config_from_values
from framework.data.inputs import find_inputs, stacked
from framework.errors import ConfigError, FrameworkError, StorageError
from framework.setup.objects import call_factory
from framework.setup.trained import find_source
from tests.commands.test_trust import forged
from tests.launched import ROOT, job_environment, read_metrics, run_ranks

_QUIET = {"tensorboard": False, "csv": False, "progress": "off", "report": False}
Capture = pytest.CaptureFixture[str]
_GPT = {"kind": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 24, "vocab_size": 261}


def case(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 32, "micro_size": 8},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {"max_steps": 6},
        "monitors": _QUIET,
        **sections,
    }


def text(**sections: Any) -> dict[str, Any]:
    data = {"kind": "text", "sequence_length": 24}
    task, evaluation = {"kind": "causal_lm"}, {"max_samples": 50}
    return {"model": _GPT, "data": data, "task": task, "evaluation": evaluation, **sections}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("after")
    ema = {"training": {"max_steps": 6, "ema": {"decay": 0.5}}, "evaluation": {"weights": "ema"}}
    plain = [
        case(folder, "z0"),
        case(folder, "z1-ema", zero={"stage": 1}, precision={"dtype": "bf16"}, **ema),
        case(folder, "z3", zero={"stage": 3}, **text()),
    ]
    piped = [case(folder, "pipe", **text(parallel={"pipe": 2}, zero={"stage": 1}))]
    for number, cases in enumerate((plain, piped)):  # the engines do not live in one process one after the other
        file = folder / f"cases{number}.json"
        file.write_text(json.dumps(cases), encoding="utf-8")
        run_ranks(ROOT / "tests/jobs/evaluate_runs.py", str(file), num_ranks=2, cwd=folder)
    return folder


def logged(run: Path) -> dict[str, float]:
    return {name: value for name, value in read_metrics(run)[-1].items() if name.startswith("eval/")}


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "framework", *words],
        cwd=cwd,
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_evaluation_is_what_training_logged_to_the_bit(runs: Path) -> None:
    for name in ("z0", "z1-ema", "z3", "pipe"):
        found = json.loads((runs / f"{name}.json").read_text(encoding="utf-8"))
        assert found["metrics"] == logged(runs / name), name
        assert (found["step"], found["weights"]) == (6, "ema" if name == "z1-ema" else "trained")


@pytest.mark.slow
def test_one_process_evaluates_a_pipeline(runs: Path) -> None:
    done = command("evaluate", str(runs / "pipe"), "--json", cwd=runs)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["metrics"]
    assert found == pytest.approx(logged(runs / "pipe"), rel=1e-6)


@pytest.mark.slow
def test_a_loaded_module_measures_the_same(runs: Path) -> None:
    for name in ("z0", "z3", "pipe"):
        model = framework.load(runs / name)
        assert not model.training
        config = framework.load_config(runs / name / "config.yaml")
        data = call_factory(config.data.factory(), key="data").evaluation
        pairs = [data[number] for number in range(min(len(data), config.evaluation.max_samples or len(data)))]
        with torch.no_grad():
            outputs = model(torch.stack([torch.as_tensor(inputs) for inputs, _ in pairs]))
        targets = torch.stack([torch.as_tensor(target) for _, target in pairs])
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        assert float(loss) == pytest.approx(logged(runs / name)["eval/loss"], rel=1e-5), name
    average, trained = framework.load(runs / "z1-ema", weights="ema"), framework.load(runs / "z1-ema")
    assert any(not torch.equal(*pair) for pair in zip(average.parameters(), trained.parameters(), strict=True))
    own = framework.load(runs / "z0", model=type(framework.load(runs / "z0")))
    assert all(
        torch.equal(a, b) for a, b in zip(own.parameters(), framework.load(runs / "z0").parameters(), strict=True)
    )


@pytest.mark.slow
def test_an_exported_program_computes_the_same(runs: Path, capsys: Capture) -> None:
    """Of a batch of another size than it was traced with."""
    inputs = {"z0": torch.randn(5, 1, 28, 28), "pipe": torch.randint(261, (5, 24))}
    for name, some in inputs.items():
        assert main(["export", str(runs / name), str(runs / f"{name}-program"), "--format", "torch_export"]) == 0
        program = torch.export.load(runs / f"{name}-program/model.pt2").module()
        with torch.no_grad():
            assert torch.equal(program(some), framework.load(runs / name)(some))
    assert main(["export", str(runs / "z0"), str(runs / "x"), "--format", "torch_export", "--hf"]) == 78
    assert "leave --hf out" in capsys.readouterr().err


@pytest.mark.slow
def test_predictions_are_the_modules_and_go_on(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """On two ranks, behind what a command that was killed in the middle of a row has left."""
    monkeypatch.chdir(runs)
    images = torch.randn(41, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    np.savez(runs / "images.npz", images.numpy())
    with torch.no_grad():
        expected = torch.softmax(framework.load(runs / "z0")(images), dim=1)
    out = runs / "classes.jsonl"
    words = ("predict", "z0", "images.npz", "--out", "classes.jsonl", "--batch-size", "4")
    assert main(words) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[: 2 * len(whole) // 3])
    done = command(*words, "--num_gpus", "2", cwd=runs)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["input"] for row in rows] == [f"images.npz:{number}" for number in range(1, 42)]
    assert 0 < int(done.stdout.split()[3]) < 41
    assert torch.allclose(torch.tensor([row["probabilities"] for row in rows]), expected, atol=1e-6)
    assert [row["class"] for row in rows] == expected.argmax(dim=1).tolist()
    assert main(["predict", "z1-ema", "images.npz", "--out", "classes.jsonl"]) == 78
    assert "[predictions-of-others]" in capsys.readouterr().err


@pytest.mark.slow
def test_lines_of_text_have_their_probability_or_go_on(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(runs)
    lines = ["import os", "def f(x):\n".strip() + " " * 40 + "return x"]
    (runs / "lines.txt").write_text("\n\n".join(lines), encoding="utf-8")
    assert main(["predict", "z3", "lines.txt", "--out", "lines.csv"]) == 0
    header, *rows = (runs / "lines.csv").read_text(encoding="utf-8").splitlines()
    assert header == "input,checkpoint,num_tokens,log_probability"
    model = framework.load(runs / "z3")
    for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
        ids = torch.tensor([256, *line.encode()])  # the end of a document before
        expected = 0.0
        for start in range(0, len(ids) - 1, 24):
            part = ids[start : start + 25]
            with torch.no_grad():
                chances = torch.log_softmax(model(part[None, :-1])[0], dim=-1)
            expected += float(chances[torch.arange(len(part) - 1), part[1:]].sum())
        name, _, num_tokens, log_probability = row.split(",")
        assert (name, int(num_tokens)) == (f"lines.txt:{1 + 2 * number}", len(line))
        assert float(log_probability) == pytest.approx(expected, rel=1e-5)
    words = ("--temperature", "0", "--max-new-tokens", "30")
    assert main(["predict", "z3", "lines.txt", "--out", "on.jsonl", *words]) == 0
    (first, _) = map(json.loads, (runs / "on.jsonl").read_text(encoding="utf-8").splitlines())
    capsys.readouterr()
    assert main(["generate", "z3", "--prompt", lines[0], "--prompt", "x", *words]) == 0
    alone, _, other = capsys.readouterr().out.partition("\n\nx")
    assert alone == f"{lines[0]}{first['generated']}"
    assert other.endswith("\n")


# ----------------------------------------------------------------------------------------------- without a training run
def test_a_config_is_made_for_measuring_alone(tmp_path: Path) -> None:
    sections = {
        "parallel": {"pipe": 2, "stages": [0, 1]},
        "training": {"ema": {"decay": 0.9}},
        "evaluation": {"weights": "ema"},
        "zero": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "callbacks": [{"target": "os:getcwd"}],
    }
    forged(tmp_path / "run", sections)
    checkpoint = find_source(str(tmp_path / "run"), allow_unverified=False)
    config, _ = config_to_evaluate(checkpoint, ["evaluation.max_samples=7"], num_ranks=3)
    assert (config.parallel.pipe, config.parallel.stages, config.zero.offload_optimizer.device) == (1, None, "none")
    assert (config.training.ema, config.evaluation.weights, config.callbacks) == (None, "trained", [])
    assert (config.evaluation.max_samples, config.checkpoint.init_weights) == (7, str(checkpoint.path))
    assert config_to_evaluate(checkpoint, [], num_ranks=4)[0].parallel.pipe == 2


def test_a_module_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    forged(tmp_path / "object", {"model": {"object": "my.Net"}})
    with pytest.raises(ConfigError, match=r"model.object = my.Net: .*load\(..., model=...\) \[object-not-given\]"):
        framework.load(tmp_path / "object")
    forged(tmp_path / "target", {"model": {"target": "os:getcwd"}})
    with pytest.raises(ConfigError, match=r"trust=True \[target-not-trusted\]"):
        framework.load(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"\[checkpoint-not-found\]"):
        framework.load(tmp_path)


class TestInputs:
    def test_images_of_folders_in_order(self, tmp_path: Path) -> None:
        for name in ("b/2.png", "a/1.png", "3.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            Image.new("RGB", (4, 4)).save(tmp_path / name)
        (tmp_path / "a/notes.md").write_text("no image")
        found = find_inputs([str(tmp_path)], read_image=lambda path: path)
        assert [found.read(number) for number in range(3)] == list(found.names)
        assert [Path(name).name for name in found.names] == ["3.png", "1.png", "2.png"]

    def test_an_image_is_read_as_the_evaluation_reads_it(self, tmp_path: Path) -> None:
        for part in ("train", "val"):
            (tmp_path / part / "red").mkdir(parents=True)
            Image.effect_noise((50, 40), 80).save(tmp_path / part / "red/1.png")
        config = config_from_values({"data": {"kind": "image_folder", "root": str(tmp_path), "image_size": 32}})
        found = find_inputs([str(tmp_path / "val")], read_image=image_reader(config))
        data = call_factory(config.data.factory(), key="data").evaluation
        assert torch.equal(found.read(0), data[0][0])
        (tmp_path / "val/red/1.png").write_bytes(b"no image")
        with pytest.raises(FrameworkError, match=r"val/red/1.png: cannot be read as an image"):
            found.read(0)

    def test_rows_of_tables_and_arrays(self, tmp_path: Path) -> None:
        for head in ("", "height,width\n"):
            (tmp_path / "t.csv").write_text(f"{head}1,2\n3,4.5\n")
            found = find_inputs([str(tmp_path / "t.csv")])
            assert stacked([found.read(0), found.read(1)], found.names).tolist() == [[1.0, 2.0], [3.0, 4.5]]
        np.savez(tmp_path / "t.npz", a=np.arange(6).reshape(3, 2), b=np.ones(3))
        found = find_inputs([str(tmp_path / "t.npz")])
        batch = stacked([found.read(number) for number in range(3)], found.names)
        assert (batch["a"].shape, batch["b"].shape) == ((3, 2), (3,))

    @pytest.mark.parametrize(
        ("name", "content", "stated"),
        [
            ("t.csv", b"a,b\n1,2\n3,x\n", "'x' to float32 at row 1, column 2"),
            ("t.npz", b"no archive", "t.npz: "),
            ("t.jsonl", b'{"text": "a"}\n{"body": 1}\n', 't.jsonl:2: it is no JSON object with the field "text"'),
            ("t.bin", b"", "t.bin: its suffix says nothing"),
            ("t.png", b"", "image_folder; name it: --reader"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, name: str, content: bytes, stated: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            find_inputs([str(tmp_path / name)])
        assert stated in str(caught.value)
        assert str(caught.value).endswith("[input-not-read]")
        assert name in str(caught.value)

    def test_shapes_that_differ_are_named(self) -> None:
        with pytest.raises(ConfigError, match=r"INPUT = two: its shape is \(3,\), and that of one is \(2,\)"):
            stacked([torch.zeros(2), torch.zeros(3)], ["one", "two"])


class TestResults:
    ROWS = tuple({"input": name, "text": f"{name}\nb", "values": [number, 0.5]} for number, name in enumerate("abcd"))

    @pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".npz"])
    def test_broken_anywhere_it_goes_on_to_the_same_file(self, suffix: str, tmp_path: Path) -> None:
        whole, part = tmp_path / f"whole{suffix}", tmp_path / f"part{suffix}"

        def write(path: Path, stop: int = 4) -> int:
            results = Results(path, inputs="abcd", checkpoint="run/global_step1")
            start = results.num_rows
            results.add(self.ROWS[start:stop])
            results.flush()
            return start

        assert write(whole) == 0
        assert write(whole) == 4
        content = whole.read_bytes()
        if suffix == ".npz":
            write(part, 2)
            assert write(part) == 2
            ours, theirs = np.load(part), np.load(whole)
            assert len(theirs.files) == 4
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs.files)
            return
        for place in range(0, len(content), 7):
            part.write_bytes(content[:place])
            write(part)
            assert part.read_bytes() == content

    def test_what_is_of_others_is_left_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "out.jsonl"
        Results(file, inputs="abcd", checkpoint="run/global_step1").add(self.ROWS)
        before = file.read_bytes()
        for inputs, checkpoint in (
            ("abce", "run/global_step1"),
            ("abc", "run/global_step1"),
            ("abcd", "run/global_step2"),
        ):
            with pytest.raises(ConfigError, match=r"\[predictions-of-others\]"):
                Results(file, inputs=inputs, checkpoint=checkpoint)
        (tmp_path / "other.jsonl").write_text("[1]\n")
        with pytest.raises(FrameworkError, match=r"\[predictions-not-written\]"):
            Results(tmp_path / "other.jsonl", inputs="a", checkpoint="x")
        with pytest.raises(StorageError):
            Results(tmp_path / "gone/x.csv", inputs="a", checkpoint="x").add(self.ROWS[:1])
        assert file.read_bytes() == before
