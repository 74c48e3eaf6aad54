"""Loops of one's own over our engine, on two ranks: the recipes' losses are plain PyTorch's, whole
steps are those of `fit`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import framework
from framework import own_loop
from framework.commands.export import main as export
from framework.errors import ConfigError
from tests.launched import read_metrics, run_ranks, series
from tests.places import ROOT
from tests.warm_ranks import session_ranks

BATCH, RANKS, STEPS = 32, 2, 4


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(step: int) -> Iterator[tuple[torch.Tensor, torch.Generator]]:
    """Each rank's real images at a step, and what it goes on drawing from."""
    images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    for rank in range(RANKS):
        draw = torch.Generator().manual_seed(step * RANKS + rank)
        yield images[torch.randint(len(images), (BATCH,), generator=draw)], draw


def seeded(make: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = make()
    return model


def stepped(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]
) -> list[float]:
    """One step on the mean of the ranks' losses, clipped as a run is by default."""
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [loss.item() for loss in losses]


def plain_gan() -> list[tuple[float, float]]:
    gan = recipe("gan")
    g, d = seeded(gan.generator), seeded(gan.discriminator)
    adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))
    of_g, of_d = adam(g.parameters()), adam(d.parameters())
    ones, zeros, losses = torch.ones(BATCH, 1), torch.zeros(BATCH, 1), []
    for step in range(STEPS):
        pairs = [(real, g(torch.randn(BATCH, 16, generator=draw))) for real, draw in drawn(step)]
        d_losses = stepped(
            d, of_d, [bce(d(real), ones) + bce(d(fake.detach()), zeros) for real, fake in pairs]
        )
        g_losses = stepped(g, of_g, [bce(d(fake), ones) for _, fake in pairs])
        losses.append((d_losses[0], g_losses[0]))
    return losses


def plain_penalty() -> tuple[list[float], torch.nn.Module]:
    it = recipe("gradient_penalty")
    model, losses = seeded(it.critic), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        own = []
        for real, draw in drawn(step):
            fake, mix = torch.rand(BATCH, 64, generator=draw), torch.rand(BATCH, 1, generator=draw)
            own.append(
                model(fake).mean() - model(real).mean() + 10.0 * it.penalty(model, real, fake, mix)
            )
        losses.append(stepped(model, optimizer, own)[0])
    return losses, model


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loops")
    run_ranks(ROOT / "tests/jobs/own_loops.py", "out.json", num_ranks=RANKS, cwd=folder)
    return folder, json.loads((folder / "out.json").read_text(encoding="utf-8"))


@pytest.mark.slow
class TestOnTwoRanks:
    def test_a_gan_has_the_losses_of_plain_pytorch(
        self, loops: tuple[Path, dict[str, Any]]
    ) -> None:
        for stage in (0, 1):
            for found, plain in zip(loops[1][f"gan{stage}"], plain_gan(), strict=True):
                assert found == pytest.approx(plain, rel=1e-5)
        assert loops[1]["halves"] == loops[1]["gan1"][2:], "both go on where they were saved"

    def test_a_gradient_penalty_has_the_losses_of_plain_pytorch(
        self, loops: tuple[Path, dict[str, Any]]
    ) -> None:
        folder, found = loops
        losses, model = plain_penalty()
        for stage in (1, 2):
            assert found[f"penalty{stage}"] == pytest.approx(losses, rel=1e-5)
        line = r"backward: zero\.stage = 3: gradients of gradients .*; set zero\.stage: 2 \[double-backward\]"
        assert re.fullmatch(line, found["penalty3"])
        loaded = framework.load(folder / "penalty1/critic", model=recipe("gradient_penalty").critic)
        for name, weight in model.state_dict().items():
            assert torch.allclose(loaded.state_dict()[name], weight, atol=1e-6)
        assert export([str(folder / "penalty1/critic"), str(folder / "exported")]) == 0

    def test_whole_steps_are_those_of_fit_and_parts_of_them_too(
        self, loops: tuple[Path, dict[str, Any]]
    ) -> None:
        folder, found = loops
        for stage in (0, 2, 3):
            assert found[f"own{stage}"] == list(
                series(folder / f"runs/fit{stage}", "train/loss").values()
            )
            for name in ("own", "apart"):
                loss = read_metrics(folder / f"runs/{name}{stage}")[-1]["eval/loss"]
                assert loss == pytest.approx(found[f"fit{stage}"], rel=1e-6)
            history = found[f"history{stage}"]
            logged = series(folder / f"runs/fit{stage}", "train/loss")
            assert history["train/loss"] == [[*logged], [*logged.values()]]
            assert history["eval/loss"] == [[6], [found[f"fit{stage}"]]]
            assert (folder / f"runs/apart{stage}/checkpoints/global_step6/manifest.json").is_file()

    def test_a_signal_to_one_rank_stops_and_saves_and_the_run_goes_on(
        self, loops: tuple[Path, dict[str, Any]]
    ) -> None:
        folder, found = loops
        (step,) = re.findall(
            r"^SIGTERM: stopped after step (\d+) of 500; .* \[stopped\]$", found["stopped"]
        )
        events = [
            json.loads(line)
            for line in (folder / "runs/stopped/events.jsonl").read_text().splitlines()
        ]
        kinds = [(event["kind"], event["step"]) for event in events]
        assert kinds[:4] == [
            ("start", 0),
            ("save", int(step)),
            ("stop", int(step)),
            ("end", int(step)),
        ]
        assert found["rest"] == 40 - int(step)
        assert found["slow"].keys() == {"eval/loss", "eval/accuracy"}, "no hang"
        often = series(folder / "runs/often", "eval/loss")
        assert list(often) == [0, 4, 6], "as the config has it, without a call"
        assert found["batches"] == "train_step: 1 batches, and batch.accumulation_steps is 2"


@pytest.mark.slow
class TestKeysOfTheConfig:
    def test_a_killed_loop_goes_on_from_the_step_that_every_steps_saved(
        self, tmp_path: Path
    ) -> None:
        script, warm = ROOT / "tests/jobs/own_loop_saves.py", session_ranks()

        def run(*arguments: str) -> tuple[list[int], str]:
            folder = tmp_path / f"said-{len(list(tmp_path.iterdir()))}"
            job = warm.start(arguments, num_ranks=1, folder=folder, script=script, cwd=tmp_path)
            return job.wait(120), job.stated()

        # Whether it asks at every step, at every third or never changes no loss and no save.
        assert run("whole", "10", "-1", "1")[0] == [0]
        for name, asks in (("silent", "0"), ("killed", "3")):
            codes, stated = run(name, "10", "7", asks)
            assert codes == [-9]
            assert "checkpoints  every 4 steps, at the end" in stated
            assert run(name, "10", "-1", asks)[0] == [0]
        losses = {}
        for name in ("whole", "silent", "killed"):
            losses[name] = series(tmp_path / f"runs/{name}", "train/loss")
            saves = (tmp_path / f"runs/{name}/checkpoints").glob("global_step*")
            expected = {"global_step4", "global_step8", "global_step10"}
            assert {folder.name for folder in saves} == expected
        assert losses["whole"] == losses["silent"] == losses["killed"]


class TestRefusals:
    def test_what_the_loop_of_fit_does(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        steps = {"training": {"max_steps": 2}}
        for key, config in {
            "callbacks": {"callbacks": [{"kind": "early_stopping", "metric": "eval/loss"}]},
            "profile": {"profile": {"steps": 2}},
            "monitors.tensorboard.samples": {"monitors": {"tensorboard": {"samples": 2}}},
            "checkpoint.every_epochs": {"checkpoint": {"every_epochs": 1}},
            "evaluation.every_epochs": {"evaluation": {"every_epochs": 1}},
            "evaluation.every_steps": {"evaluation": {"every_steps": 1}},
            "evaluation.at_start": {"evaluation": {"at_start": True}},
        }.items():
            with (
                pytest.raises(ConfigError, match=rf"^{re.escape(key)}: .*\[not-in-own-loop\]$"),
                framework.open_engine({**steps, **config}, model=partial(torch.nn.Linear, 2, 2)),
            ):
                pass
        with (
            pytest.raises(ConfigError, match=r"^callbacks: .*\[not-in-own-loop\]$"),
            framework.open_engine(
                steps, model=partial(torch.nn.Linear, 2, 2), callbacks=[object()]
            ),
        ):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_without_a_length_or_where_ranks_share_samples(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for line, config in {
            "training.max_steps: without train_data nothing says how long the run is; set it": {},
            "parallel.pipe: its steps are more than": {"parallel": {"pipe": 2}},
            "parallel.tensor: its steps are more than the passes of each": {
                "parallel": {"tensor": 2}
            },
        }.items():
            with (
                pytest.raises(ConfigError, match=re.escape(line)),
                framework.open_engine(config, model=partial(torch.nn.Linear, 2, 2)),
            ):
                pass
        assert list(tmp_path.iterdir()) == []

    def test_an_evaluation_that_fails_at_the_start_leaves_nothing_open(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends: list[str] = []

        def fail() -> None:
            raise ValueError("no memory")

        engine = SimpleNamespace(
            _refuse_shared_weights=lambda: None, _evaluate_once=fail, _close=ends.append
        )
        plan = SimpleNamespace(config=SimpleNamespace(evaluation=SimpleNamespace(at_start=True)))
        run = SimpleNamespace(start_step=0)
        monkeypatch.setattr(own_loop, "prepare", lambda *_, **__: SimpleNamespace(plan=plan))
        monkeypatch.setattr(own_loop, "opened", lambda *_: nullcontext(run))
        monkeypatch.setattr(own_loop, "OpenEngine", lambda *_: engine)
        with (
            pytest.raises(ValueError, match="no memory"),
            framework.open_engine({"training": {"max_steps": 1}}, model=torch.nn.Identity()),
        ):
            pass
        assert ends == ["no memory"]
        assert own_loop._OPEN == []

    def test_recipes_are_short(self) -> None:
        for path in (ROOT / "examples").glob("*.py"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path
