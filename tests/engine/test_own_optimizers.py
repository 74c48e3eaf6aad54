"""Optimizers that the framework makes by itself: Lion for devices without a kernel, AdamW with
moments of 8 bits, schedule-free AdamW.

Steps are held against torchao and against papers; runs, steps of 2 ranks on real text with
accumulation and clipping at ZeRO 0 to 3, against plain PyTorch. Resumed to the bit, moved or
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from framework.checkpoint.state.schedule_free import AHEAD_KEY, averaged
from framework.commands.export import export
from framework.engine.adam_8bit import BLOCK, AdamW8bit, code_values
from framework.engine.lamb import Lamb
from framework.engine.lion import Lion
from framework.engine.schedule_free import ScheduleFreeAdamW
from framework.plan.optimizer_memory import bytes_of_blocks, state_of
from framework.setup.user_optimizer import measure_optimizer
from tests.engine.pipe_oracle import plain_run
from tests.engine.test_pipeline import GPT, text
from tests.engine.test_resume import bits
from tests.gpu.oracles import lion
from tests.launched import fewer, furthest, series, train_cases

__all__ = ["text"]  # a fixture

NUM_STEPS: Final = fewer(8, of=20)
STOP: Final = fewer(5, of=12)
SMALL: Final = {**GPT["model"], "num_layers": 1}
ADAM: Final[dict[str, Any]] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "lion": {"optimizer": {"kind": "lion", "lr": 5e-4}},
    "adamw_8bit": {"optimizer": {"kind": "adamw_8bit", "lr": 2e-3, "weight_decay": 0.0}},
    "schedule_free": {
        "optimizer": {"kind": "schedule_free", "lr": 5e-3, "weight_decay": 0.1},
        "scheduler": {"kind": "constant", "warmup_steps": 5},
    },
    "adafactor": {"optimizer": {"kind": "adafactor", "lr": 0.05, "weight_decay": 0.01}},
    "lamb": {"optimizer": {"kind": "lamb", "lr": 0.05, "weight_decay": 0.1}},
    # one of the user's own
    "nadam": {"optimizer": {"target": "torch.optim:NAdam", "args": {"lr": 2e-3}}},
}


def weights_and_gradients(shape: tuple[int, ...], num_steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(num_steps + 1)]


def test_codes_of_8_bits_are_those_of_torchao() -> None:
    """Moments have the same codes after 20 steps, and weights are stepped alike; blocks at the end
    that are shorter, and tensors smaller than a block, are stepped as well.
    """
    torchao = pytest.importorskip("torchao.optim")
    first, *gradients = weights_and_gradients((48, 3 * BLOCK), 20)
    own = torch.nn.Parameter(first.clone())
    theirs = torch.nn.Parameter(first.clone())
    optimizer = AdamW8bit([own], **ADAM)
    oracle = torchao.AdamW8bit([theirs], **ADAM)
    with torch.compiler.set_stance("force_eager"):
        for gradient in gradients:
            own.grad = gradient
            theirs.grad = gradient.clone()
            optimizer.step()
            oracle.step()
    torch.testing.assert_close(own, theirs, rtol=0, atol=5e-6)
    for key in ("exp_avg", "exp_avg_sq"):
        kept = oracle.state[theirs][key]
        assert torch.equal(optimizer.state[own][key], kept.codes)
        torch.testing.assert_close(optimizer.state[own][f"{key}_scales"], kept.scale)


def test_the_numbers_of_codes_rise_to_one() -> None:
    for has_sign in (True, False):
        values = code_values(has_sign=has_sign)
        assert len(set(values)) == 256
        assert list(values) == sorted(values)
        assert values[-1] == 1.0
        assert 0.0 in values


@pytest.mark.parametrize("size", [1, 255, 256, 700])
@pytest.mark.parametrize("at_once", [256, 1 << 22])
def test_blocks_of_any_size_follow_adam(
    monkeypatch: pytest.MonkeyPatch, size: int, at_once: int
) -> None:
    monkeypatch.setattr("framework.engine.adam_8bit.NUMBERS_AT_ONCE", at_once)
    first, *gradients = weights_and_gradients((size,), 20)
    own = torch.nn.Parameter(first.clone())
    plain = torch.nn.Parameter(first.clone())
    optimizer = AdamW8bit([own], **ADAM)
    oracle = torch.optim.AdamW([plain], **ADAM)
    for gradient in gradients:
        own.grad = gradient
        plain.grad = gradient
        optimizer.step()
        oracle.step()
    moved = (plain - first).norm()
    assert (own - plain).norm() < 0.05 * moved  # found: 0.03


def test_state_of_8_bits_is_loaded_as_it_was_saved() -> None:
    first, gradient = weights_and_gradients((700,), 1)
    optimizers = []
    for _ in range(2):
        weight = torch.nn.Parameter(first.clone())
        weight.grad = gradient
        optimizers.append(AdamW8bit([weight], **ADAM))
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    saved, loaded = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert saved.keys() == loaded.keys()
    for key, tensor in saved.items():
        assert loaded[key].dtype == tensor.dtype, key
        assert torch.equal(loaded[key], tensor), key
        assert loaded[key].data_ptr() != tensor.data_ptr() or key == "step", key


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_weights_of_any_order_in_memory_are_stepped(order: torch.memory_format) -> None:
    first, gradient = weights_and_gradients((4, 3, 5, 5), 1)
    weight = torch.nn.Parameter(first.clone(memory_format=order))
    weight.grad = gradient.to(memory_format=order)
    AdamW8bit([weight], **ADAM).step()
    assert weight.is_contiguous(memory_format=order)
    expected = first * (1 - 2e-4) - 2e-3 * gradient.sign()  # Adam's first step
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-5)


def test_lion_is_that_of_its_paper() -> None:
    first, *gradients = weights_and_gradients((5, 7), 20)
    own = torch.nn.Parameter(first.clone())
    plain = torch.nn.Parameter(first.clone())
    optimizer = Lion([own], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    oracle = lion([plain], lr=1e-2)
    for gradient in gradients:
        own.grad = gradient
        plain.grad = gradient
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-6)
    decaying = Lion([own], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.5)
    own.grad = torch.zeros_like(own)
    before = own.detach().clone()
    decaying.step()
    torch.testing.assert_close(own.detach(), before * (1 - 5e-3))


def test_schedule_free_is_that_of_its_authors() -> None:
    """Held against the package schedulefree: weights in training, and the averaged ones."""
    schedulefree = pytest.importorskip("schedulefree")
    first, *gradients = weights_and_gradients((5, 7), 20)
    own = torch.nn.Parameter(first.clone())
    theirs = torch.nn.Parameter(first.clone())
    settings = {**ADAM, "warmup_steps": 5}
    optimizer = ScheduleFreeAdamW([own], **settings)
    oracle = schedulefree.AdamWScheduleFree([theirs], **settings)
    oracle.train()
    for step, gradient in enumerate(gradients, 1):
        own.grad = gradient
        theirs.grad = gradient.clone()
        # the schedule `constant` of a run
        optimizer.param_groups[0]["lr"] = settings["lr"] * min(1, step / 5)
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-6)
    oracle.eval()
    ahead = optimizer.state[own][AHEAD_KEY]
    found = averaged(own.detach(), ahead, beta=settings["betas"][0])
    torch.testing.assert_close(found, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda weights: Lion(weights, lr=1.0, betas=(0.9, 0.99), weight_decay=0.1), "lion"),
        (lambda weights: AdamW8bit(weights, **ADAM), "adamw_8bit"),
        (lambda weights: ScheduleFreeAdamW(weights, **ADAM, warmup_steps=0), "schedule_free"),
        (
            lambda weights: Lamb(
                weights, **ADAM, max_coeff=10.0, min_coeff=0.01, bias_correction=True
            ),
            "lamb",
        ),
    ],
)
def test_planned_bytes_are_those_that_a_step_takes(make: Any, kind: str) -> None:
    from framework.config.load import config_from_values
    from framework.plan.optimizer_memory import step_bytes_per_element

    section = config_from_values({"optimizer": {"kind": kind, "weight_decay": 0.1}}).optimizer
    measured = measure_optimizer(make)
    assert not isinstance(measured, str)
    planned = state_of(section, {})
    assert planned is not None
    assert planned.bytes_per_element == pytest.approx(measured.bytes_per_element, rel=1e-3)
    copies = step_bytes_per_element(section, is_on_cpu=True)
    if kind == "adamw_8bit":
        copies = bytes_of_blocks(1 << 16) >> 16
    assert copies == measured.step_bytes_per_element


def config(name: str, folder: Path, text: Path, **sections: Any) -> dict[str, Any]:
    return {
        **GPT,
        "model": SMALL,
        "run": {"name": name, "output_dir": str(folder)},
        "data": {**GPT["data"], "path": str(text)},
        "batch": {"global_size": 8, "micro_size": 2, "accumulation_steps": 2},
        "training": {"max_steps": NUM_STEPS, "log_every": 1, "clip_grad_norm": 1.0},
        "evaluation": {"every_steps": STOP, "at_end": True, "batch_size": 48},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
    }


STAGES: Final = {
    "lion": (0, 2, 3),
    "adamw_8bit": (0, 1, 2, 3),
    "schedule_free": (0, 1, 3),
    "adafactor": (1, 2, 3),
    "lamb": (0, 1, 2, 3),
    "nadam": (),
}
RUNS: Final[dict[str, dict[str, Any]]] = {
    f"{kind}-z{stage}": {**sections, "zero": {"stage": stage}}
    for kind, sections in OPTIMIZERS.items()
    for stage in STAGES[kind]
}
for _kind in ("adamw_8bit", "adafactor", "lamb"):
    RUNS[f"{_kind}-pipe"] = {
        **OPTIMIZERS[_kind],
        "zero": {"stage": 1},
        "parallel": {"pipe": 2},
        "batch": {"global_size": 8, "micro_size": 2, "accumulation_steps": 4},
    }
# Without losses of its routers, and with room for all tokens: the loss is that of the task.
MIXED: Final = {
    **SMALL,
    "moe": {"num_experts": 2, "capacity_factor": None, "balance_loss": 0.0, "every": 1},
}
DIVIDED: Final = {"batch": {"global_size": 8, "micro_size": 4, "accumulation_steps": 2}}
_MIXED_KINDS: Final = {"adamw_8bit": 1, "schedule_free": 0, "adafactor": 0, "lamb": 2, "nadam": 0}
for _kind, _stage in _MIXED_KINDS.items():
    RUNS[f"{_kind}-tensor"] = {
        **OPTIMIZERS[_kind],
        **DIVIDED,
        "zero": {"stage": _stage},
        "parallel": {"tensor": 2},
    }
    RUNS[f"{_kind}-expert"] = {
        **OPTIMIZERS[_kind],
        "model": MIXED,
        "zero": {"stage": _stage + 1},
        "parallel": {"expert": 2},
    }
_AWAY: Final = {"device": "cpu", "pin_memory": False}
for _kind, _stage in (("adafactor", 3), ("lamb", 2)):
    RUNS[f"{_kind}-offload"] = {
        **OPTIMIZERS[_kind],
        "zero": {"stage": _stage, "offload_optimizer": _AWAY},
    }
RESUMED: Final = (
    "lion-z2",
    "adamw_8bit-z2",
    "adamw_8bit-z3",
    "schedule_free-z1",
    "schedule_free-z3",
    "schedule_free-tensor",
    "adamw_8bit-tensor",
    "adamw_8bit-expert",
    "schedule_free-expert",
    "adafactor-z2",
    "adafactor-z3",
    "adafactor-tensor",
    "adafactor-expert",
    "lamb-z0",
    "lamb-z2",
    "lamb-z3",
    "lamb-tensor",
    "lamb-expert",
    "nadam-expert",
)
_ALONE: Final = {"parallel": {}, "batch": {"global_size": 8, "micro_size": 2}}
# Run -> sections with which it goes on.
MOVED: Final[dict[str, dict[str, Any]]] = {
    "lion-z2": {"zero": {"stage": 3}},
    "schedule_free-z1": {"zero": {"stage": 3}},
    "adamw_8bit-z2": {"zero": {"stage": 1}},
    "adafactor-z2": {"zero": {"stage": 3}},
    "adafactor-z3": {"zero": {"stage": 0}},
    "adafactor-tensor": {**_ALONE, "zero": {"stage": 0}},
    "adafactor-expert": {**DIVIDED, "zero": {"stage": 3}, "parallel": {"tensor": 2}},
    "lamb-z0": {"zero": {"stage": 1}},
    "lamb-z2": {"zero": {"stage": 3}},
    "lamb-z3": {"zero": {"stage": 0}},
    "lamb-tensor": {**_ALONE, "zero": {"stage": 0}},
    "lamb-expert": {**DIVIDED, "zero": {"stage": 0}, "parallel": {"tensor": 2}},
    "nadam-expert": {**_ALONE, "zero": {"stage": 3}},
}


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    cases = []
    for name, sections in RUNS.items():
        saved = {"every_steps": STOP, "keep_last": 9} if name in RESUMED else {"at_end": False}
        cases.append(config(name, folder, text, **sections, checkpoint=saved))
    for name in RESUMED:
        resumed = {"resume": str(folder / name / "checkpoints" / f"global_step{STOP}")}
        cases.append(config(f"{name}-on", folder, text, **RUNS[name], checkpoint=resumed))
    for name, changed in MOVED.items():
        moved = {"resume": str(folder / name / "checkpoints" / f"global_step{STOP}")}
        sections = {**RUNS[name], **changed}
        cases.append(config(f"{name}-moved", folder, text, **sections, checkpoint=moved))
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses, evaluation and model of plain PyTorch, by kind; AdamW in fp32 for that of 8 bits."""
    folder = tmp_path_factory.mktemp("plain")
    results = {}
    mixed = {f"{kind}-mixed": {**OPTIMIZERS[kind], "model": MIXED} for kind in _MIXED_KINDS}
    for kind, sections in (OPTIMIZERS | mixed).items():
        values = config(kind, folder, text, **sections)
        if kind.startswith("adamw_8bit"):
            values["optimizer"] = {**sections["optimizer"], "kind": "adamw"}
        losses, metrics, model = plain_run(values, micro_size=2, num_steps=NUM_STEPS)
        assert losses[-1] < losses[0] - 0.1, "the oracle itself must learn"
        results[kind] = (losses, metrics["loss"], model)
    return results


TOLERANCE: Final = {
    "lion": 1e-3,
    "adamw_8bit": 0.02,
    "schedule_free": 1e-4,
    "adafactor": 1e-5,
    "lamb": 1e-5,
    "nadam": 1e-5,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_plain_pytorch(runs: Path, plain: dict[str, Any], name: str) -> None:
    kind, where = name.split("-")
    losses, evaluated, _ = plain[f"{kind}-mixed" if where == "expert" else kind]
    assert furthest(runs / name, losses) < TOLERANCE[kind]
    measured = series(runs / name, "eval/loss")[NUM_STEPS]
    assert measured == pytest.approx(evaluated, abs=TOLERANCE[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(runs: Path, name: str) -> None:
    unbroken = bits(runs / name, NUM_STEPS)
    resumed = bits(runs / f"{name}-on", NUM_STEPS)
    assert unbroken.keys() == resumed.keys()
    assert [path for path in unbroken if not torch.equal(unbroken[path], resumed[path])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MOVED.keys() - {"adamw_8bit-z2"}))
def test_a_moved_run_goes_on(runs: Path, plain: dict[str, Any], name: str) -> None:
    kind, where = name.split("-")
    losses = series(runs / f"{name}-moved", "train/loss")
    assert losses.keys() == set(range(STOP + 1, NUM_STEPS + 1))
    expected = plain[f"{kind}-mixed" if where == "expert" else kind][0]
    assert losses[NUM_STEPS] == pytest.approx(expected[-1], abs=TOLERANCE[kind])


@pytest.mark.slow
def test_moments_of_8_bits_are_not_moved(runs: Path) -> None:
    message = (runs / "adamw_8bit-z2-moved.error").read_text(encoding="utf-8")
    assert "in the very same layout only" in message
    assert "[resume-8bit-moved]" in message


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_export_has_the_averaged_weights(
    runs: Path, plain: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    (file,) = export(str(runs / f"schedule_free-z{stage}"), tmp_path, file_format="torch")
    exported = torch.load(tmp_path / file, weights_only=True)
    averaged = plain["schedule_free"][2]
    for name, weight in averaged.named_parameters():
        torch.testing.assert_close(exported[name], weight.detach(), rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_8bit-z2", "adamw_8bit-z3"])
def test_checkpoints_have_moments_of_a_byte(runs: Path, name: str) -> None:
    tensors = bits(runs / name, NUM_STEPS)
    codes = [tensor for path, tensor in tensors.items() if path.endswith(("exp_avg", "exp_avg_sq"))]
    assert codes
    assert {tensor.dtype for tensor in codes} == {torch.uint8}
