"""Programs of torch.export: which models are refused, and how."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from framework.commands.program import refuse_without_onnx, write_onnx, write_program
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.recipes.image_models.small_nets import LeNet


class Undecided(nn.Module):
    """Takes another way where the numbers of a batch are large."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(28, 10)

    def forward(self, images: Tensor) -> Tensor:
        return (
            self.last(images.mean((1, 2)))
            if float(images.detach().sum()) > 0
            else self.last(images[:, 0, 0])
        )


@pytest.mark.slow
def test_images_are_the_example_of_a_model_of_images(tmp_path: Path) -> None:
    model = LeNet().eval()
    written = write_program(tmp_path, model, RunConfig())
    assert written == {"model.pt2": (tmp_path / "model.pt2").stat().st_size}
    images = torch.randn(5, 1, 28, 28)
    for rows in (1, 5):
        with torch.no_grad():
            found = torch.export.load(tmp_path / "model.pt2").module()(images[:rows])
            torch.testing.assert_close(found, model(images[:rows]), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_looks_at_its_numbers_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_program(tmp_path, Undecided().eval(), RunConfig())
    stated = str(caught.value)
    assert stated.startswith("--format = torch_export: torch.export does not take Undecided: ")
    assert "data-dependent" in stated
    assert stated.endswith("; export its weights: --format safetensors [not-exportable]")
    assert "\n" not in stated


@pytest.mark.slow
def test_onnx_computes_what_torch_does(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime comes with the dev extra")
    pytest.importorskip("onnxscript", reason="onnxscript comes with the dev extra")
    model = LeNet().eval()
    written = write_onnx(tmp_path, model, RunConfig())
    assert {"model.onnx"} <= set(written) <= {"model.onnx", "model.onnx.data"}
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    images = torch.randn(5, 1, 28, 28)
    for rows in (1, 5):
        found = session.run(None, {session.get_inputs()[0].name: images[:rows].numpy()})[0]
        with torch.no_grad():
            wanted = model(images[:rows])
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=1e-5)


class Twice(nn.Module):
    """Computes something else in ONNX, where `is_in_onnx_export` answers otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(28, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.last(images.mean((1, 2)))
        return scores * (2 if torch.compiler.is_exporting() else 1)


@pytest.mark.slow
def test_an_onnx_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime comes with the dev extra")
    pytest.importorskip("onnxscript", reason="onnxscript comes with the dev extra")
    with pytest.raises(
        ConfigError, match=r"outputs differ by .* from torch's; .*\[not-exportable\]"
    ):
        write_onnx(tmp_path, Twice().eval(), RunConfig())


def test_onnx_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"setup onnx, .*\[package-missing\]"):
        refuse_without_onnx()


@pytest.mark.slow
def test_a_chat_is_the_example_whether_rows_are_packed_or_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers comes with the dev extra")
    from framework.recipes.language_models.gpt import GPT

    values = {"model": {"kind": "gpt"}, "task": {"kind": "causal_lm"}}
    config = config_from_values({**values, "data": {"kind": "conversations", "packing": True}})
    shape = {
        "vocab_size": 261,
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "mlp_size": 32,
    }
    model = GPT.of(**shape, max_positions=600).eval()
    write_program(tmp_path, model, config)
    ids = torch.arange(34).view(2, 17)
    with torch.no_grad():
        found = torch.export.load(tmp_path / "model.pt2").module()(ids)
        torch.testing.assert_close(found, model(ids), atol=1e-5, rtol=1e-5)
