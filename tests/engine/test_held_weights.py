"""Every weight is stepped by the optimizer or frozen by name, and every checkpoint holds all of its
numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import framework
from framework.checkpoint.manifest import SEAL, seal
from framework.checkpoint.names import MANIFEST
from framework.commands.export import export
from framework.commands.inspect import run_inspect
from framework.engine.held_weights import held_elements, lacking_names
from framework.errors import EXIT_OK, EXIT_STORAGE, ConfigError, StorageError
from tests.jobs.held_cases import (
    HALF_WAY,
    NAMED,
    NUM_RANKS,
    REFUSED,
    STAGES,
    plain_losses_by_name,
    plain_run,
    shares,
)
from tests.launched import found_by_ranks, series


class TestNames:
    """What a module needs, against what files would hold."""

    def test_a_further_name_is_held_with_the_first(self) -> None:
        model = shares(has_empty=True)
        held = {name: one.numel() for name, one in model.state_dict().items()}
        held["blocks.1.weight"] = held["head.weight"] = 0
        assert lacking_names(model, held) == []

    def test_what_is_nowhere_or_not_whole_is_named(self) -> None:
        model = nn.Linear(4, 3)
        assert lacking_names(model, {"weight": 0, "bias": 3}) == ["weight"]
        assert lacking_names(model, {"weight": 12, "bias": 2}) == ["bias"]

    def test_frozen_weights_that_are_left_out_are_not_missed(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        assert lacking_names(model, {"1.weight": 2, "1.bias": 1}, partly=True) == []

    def test_numbers_of_the_optimizer_and_of_frozen_weights_count(self) -> None:
        content = {
            "module": {"a": torch.zeros(0), "b": torch.zeros(0), "count": torch.zeros(2)},
            "param_shapes": [{"a": torch.Size((2, 3))}],
            "frozen_param_shapes": {"b": torch.Size((4,))},
        }
        assert held_elements(content) == {"a": 6, "b": 4, "count": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("held")
    return folder / "runs", found_by_ranks("held_cases.py", num_ranks=NUM_RANKS, folder=folder)


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    return plain_run()


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() - {"nothing"} == expected.keys()
    return max(float((found[name] - one).abs().max()) for name, one in expected.items())


@pytest.mark.slow
class TestRuns:
    """Two ranks against plain PyTorch."""

    @pytest.mark.parametrize("stage", STAGES)
    def test_losses_and_loaded_weights(self, runs: Any, plain: Any, stage: int) -> None:
        run = runs[0] / f"shares-z{stage}"
        assert [*series(run, "train/loss").values()] == pytest.approx(plain[0][:HALF_WAY], abs=1e-5)
        loaded = framework.load(run, model=lambda: shares(has_empty=stage < 2)).state_dict()
        assert differences(loaded, plain[1][0]) < 1e-5

    @pytest.mark.parametrize("stage", STAGES)
    def test_an_export_has_every_number(
        self, runs: Any, plain: Any, stage: int, tmp_path: Path
    ) -> None:
        export(str(runs[0] / f"shares-z{stage}"), tmp_path / "out", file_format="pt")
        assert differences(torch.load(tmp_path / "out/model.pt"), plain[1][0]) < 1e-5

    @pytest.mark.parametrize("name", ["resumed", "moved", "back"])
    def test_a_run_goes_on_at_any_stage(self, runs: Any, plain: Any, name: str) -> None:
        run = runs[0] / name
        assert [*series(run, "train/loss").values()] == pytest.approx(plain[0][HALF_WAY:], abs=1e-5)
        loaded = framework.load(run, model=lambda: shares(has_empty=name == "none")).state_dict()
        assert differences(loaded, plain[1][1]) < 1e-5

    @pytest.mark.parametrize("name", NAMED)
    def test_a_function_makes_groups_by_name(self, runs: Any, name: str) -> None:
        losses = [*series(runs[0] / name, "train/loss").values()]
        assert losses == pytest.approx(plain_losses_by_name(), abs=1e-6)

    @pytest.mark.parametrize("name", REFUSED)
    def test_an_optimizer_over_other_weights_is_refused_by_name(self, runs: Any, name: str) -> None:
        words = {
            "twice": "0.weight more than once",
            "copies": "4 tensors that it was not given",
            "more": "1 tensor that",
        }
        words |= {
            "none": "on the weights of a stage it fails",
            "lacks": "none of its groups holds 0.",
        }
        words["last"] = "holds 0.weight and 2 more of the 4 weights that require a gradient"
        stated = runs[1][name]
        assert words[name.partition("-")[0]] in stated
        assert stated.startswith("optimizer = ")
        assert stated.endswith("[optimizer-target-result]")
        assert not (runs[0] / name / "metrics.jsonl").exists()

    def test_what_would_lack_a_weight_is_not_written(self, runs: Any) -> None:
        assert "requires_grad of still.weight (and 1 more) was changed" in runs[1]["thawed"]
        assert not list((runs[0] / "thawed" / "checkpoints").glob("global_step*"))


@pytest.mark.slow
class TestOlderCheckpoints:
    """Of releases that noted neither further names nor what a checkpoint holds."""

    @staticmethod
    def older(source: Path, folder: Path) -> Path:
        """A copy of a run's checkpoint without what this release adds to its manifest."""
        target = folder / "old" / "checkpoints" / source.name
        shutil.copytree(source, target)
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        kept = {
            key: value for key, value in manifest.items() if key not in ("ties", "weights", SEAL)
        }
        (target / MANIFEST).write_text(seal(kept), encoding="utf-8")
        return target

    def test_further_names_are_those_of_the_model(
        self, runs: Any, plain: Any, tmp_path: Path
    ) -> None:
        old = self.older(runs[0] / "shares-z3/checkpoints" / f"global_step{HALF_WAY}", tmp_path)
        assert differences(framework.load(old, model=shares).state_dict(), plain[1][0]) < 1e-5

    def test_an_export_without_numbers_is_refused(self, runs: Any, tmp_path: Path) -> None:
        old = self.older(runs[0] / "shares-z3/checkpoints" / f"global_step{HALF_WAY}", tmp_path)
        with pytest.raises(
            StorageError, match=r"numbers of blocks\.1\.bias and 1 more: .* \[weights-not-read\]"
        ):
            export(str(old), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", ["lost-resumed", "lost-moved"])
    def test_a_run_does_not_go_on_without_a_weight(self, runs: Any, name: str) -> None:
        assert "still.weight" in runs[1][name]
        assert runs[1][name].endswith("[checkpoint-not-loaded]")

    def test_nothing_is_loaded_or_exported_without_a_weight(
        self, runs: Any, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=r"lacks still\.weight.*\[weights-differ\]"):
            framework.load(runs[0] / "lost", model=shares)
        with pytest.raises(StorageError, match=r"numbers of still\.weight: .*\[weights-not-read\]"):
            export(str(runs[0] / "lost"), tmp_path / "out")

    def test_inspect_looks_into_the_files(self, runs: Any, tmp_path: Path, capsys: Any) -> None:
        old = self.older(runs[0] / "lost/checkpoints" / f"global_step{HALF_WAY}", tmp_path)
        assert run_inspect(str(old), as_json=False, verify=True) == EXIT_STORAGE
        assert (
            "weights: no file has the numbers of blocks.1.bias and 2 more"
            in capsys.readouterr().out
        )
        assert run_inspect(str(runs[0] / "shares-z3"), as_json=False, verify=True) == EXIT_OK
        assert "8 tensors of 147 numbers, all in its files" in capsys.readouterr().out
