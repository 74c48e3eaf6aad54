"""`plan` estimates a model of the user's own: a child process finds its work, which is kept until
something changes. It is started once here, and answers otherwise in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.cli import main
from framework.commands import traced_work
from tests.commands.children import answering_here
from tests.places import ROOT

OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, width=300):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 2)

    def forward(self, value):
        return self.last(torch.tanh(self.first(value)))

class Asks(Own):
    def forward(self, value):
        made = super().forward(value)
        return made if made.sum() > 0 else -made

def data():
    return torch.utils.data.TensorDataset(torch.randn(64, 6), torch.zeros(64).long())
"""
CONFIG = """
model: {target: "own:Own"}
data: {target: "own:data"}
batch: {global_size: 8, micro_size: 8}
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with answering_here(traced_work, folder, monkeypatch):
        yield


def planned(capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, object]:
    assert main(["plan", "own.yaml", *settings, "--json"]) == 0
    memory: dict[str, object] = json.loads(capsys.readouterr().out)["memory"]
    return memory


def test_it_is_found_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(capsys)
    # (6 + 1) x 300 + (300 + 1) x 2 weights; labels, inputs, and what tanh reads and makes
    assert first["num_params"] == 2702
    assert first["bytes"]["forward"]["activations"] == 64 + 4 * 8 * (6 + 2 * 300)  # type: ignore[index]
    (kept,) = (folder / "cache/dsf-trainer/work").iterdir()
    asked = []

    def ask(*_: object, **__: object) -> object:
        asked.append(True)
        return {"unknown": "it was asked"}

    monkeypatch.setattr(traced_work, "ask_child", ask)
    assert planned(capsys) == first
    assert asked == []
    assert planned(capsys, "zero.stage=2") != first  # the same work at another stage
    assert asked == []
    for setting in (
        "model={target: 'own:Own', args: {width: 8}}",
        "precision.dtype=bf16",
        "training.mlp_tile=4",
    ):
        assert "it was asked" in str(planned(capsys, setting)["unknown"])
    (folder / "own.py").write_text(OWN + "# changed", encoding="utf-8")
    assert "it was asked" in str(planned(capsys)["unknown"])
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    earlier = json.loads(kept.read_text(encoding="utf-8"))
    for part in earlier["work"]["parts"]:
        del part["score_flops"]
    kept.write_text(json.dumps(earlier), encoding="utf-8")
    assert "it was asked" in str(planned(capsys)["unknown"])
    kept.write_text("no work", encoding="utf-8")
    assert "it was asked" in str(planned(capsys)["unknown"])


@pytest.mark.usefixtures("here")
def test_what_has_no_work_is_not_estimated_and_gives_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason that holds as long as the code is the same is kept; a name that is missing may come."""
    asks, missing = "model.target=own:Asks", "model.target=own:Missing"
    reason = str(planned(capsys, asks)["unknown"])
    assert "it does not run without numbers: DataDependentOutputException" in reason
    assert "own:Missing" in str(planned(capsys, missing)["unknown"])
    monkeypatch.setattr(traced_work, "ask_child", lambda *_, **__: {"unknown": "it was asked"})
    assert str(planned(capsys, asks)["unknown"]) == reason
    assert "it was asked" in str(planned(capsys, missing)["unknown"])


@pytest.mark.usefixtures("here")
def test_memory_of_an_optimizer_is_measured_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = "optimizer={target: 'torch.optim:RMSprop', args: {lr: 0.001, centered: true}}"
    memory = planned(capsys, "zero.stage=1", setting)
    assert memory["bytes"]["between"]["optimizer state"] == 8 * 2702  # type: ignore[index]
    (kept,) = (folder / "cache/dsf-trainer/optimizers").iterdir()
    assert json.loads(kept.read_text())["bytes_per_element"] == 8
    monkeypatch.setattr(traced_work, "ask_child", lambda *_, **__: {"unknown": "it was asked"})
    assert planned(capsys, "zero.stage=1", setting) == memory
    lost = planned(
        capsys, "zero.stage=1", "optimizer={target: 'torch.optim:RAdam', args: {lr: 0.001}}"
    )
    assert "optimizer: its state is not measured (it was asked)" in str(lost["unknown"])
