"""The trial of torch.compile before the first step: what it finds, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.config.precision import BF16, FP32, Autocast
from framework.config.run_config import RunConfig
from framework.config.training import Compile
from framework.engine import compile_probe
from framework.engine.compile_probe import (
    BOUNDS,
    CompileProbe,
    Pass,
    counted_operations,
    difference_of,
)
from framework.engine.gradient_sketches import Sketch, sketched_gradients
from framework.errors import ConfigError
from framework.models import tiled_loss
from framework.models.tiled_loss import output_head, wanting_loss
from framework.plan.compiling import OF_BLOCKS, CompileChoice, compile_choice
from tests.engine.saved_runs import write_tokens
from tests.engine.test_pipeline import GPT
from tests.jobs import wrong_compilers
from tests.launched import NO_COMPILE, series, train_cases
from tests.models.small_models import IDS, gpt

WITH_COMPILER = {"CC": "true", "PATH": "/bin:/usr/bin"}


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"kind": "lenet"},
        "data": {"kind": "digits"},
        "batch": {"global_size": 4},
    }
    return RunConfig.model_validate(base | sections)


def test_auto_compiles_blocks_on_cuda_and_nothing_on_processors() -> None:
    assert compile_choice(config(), "cuda", WITH_COMPILER) == (OF_BLOCKS, True, "")
    assert Compile(per="block") == OF_BLOCKS
    assert compile_choice(config(), "cpu", WITH_COMPILER) == (None, True, "")
    for asked, section in ((True, Compile()), (False, None), ({"mode": "max-autotune"}, ...)):
        choice = compile_choice(config(training={"compile": asked}), "cpu", {})
        assert not choice.is_auto
        assert section is ... or choice.section == section


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"zero": {"stage": 3}}, "zero.stage 3"),
        ({"training": {"detect_anomaly": True}}, "detect_anomaly"),
        (
            {"model": {"kind": "gpt"}, "data": {"kind": "conversations", "packing": True}},
            "packed rows in fp32",
        ),
        ({"profile": {"steps": "3-4", "modules": True}}, "profile.modules"),
    ],
)
def test_auto_has_a_reason_where_it_compiles_nothing(sections: Any, reason: str) -> None:
    choice = compile_choice(config(**sections), "cuda", WITH_COMPILER)
    assert choice.section is None
    assert reason in choice.reason


def test_auto_compiles_nothing_without_a_compiler(tmp_path: Path) -> None:
    choice = compile_choice(config(), "cuda", {"PATH": str(tmp_path)})
    assert "gcc or clang is not on this machine" in choice.reason


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_sketches_show_norms_and_differences_and_leave_no_gradient() -> None:
    weights = {"a": nn.Parameter(torch.zeros(300, 70)), "b": nn.Parameter(torch.zeros(9))}
    weights["unused"] = nn.Parameter(torch.zeros(2))
    one, other = drawn(300, 70, seed=0), drawn(300, 70, seed=1)

    def sketched(gradient: torch.Tensor) -> dict[str, Sketch]:
        fired = list[torch.Tensor]()
        register: Any = weights["a"].register_post_accumulate_grad_hook
        handle = register(fired.append)
        loss = (weights["a"] * gradient).sum() + weights["b"].sum()
        found = sketched_gradients(loss, weights)
        handle.remove()
        assert not fired
        assert all(weight.grad is None for weight in weights.values())
        return found

    first, second = sketched(one), sketched(one + 0.01 * other)
    assert first.keys() == {"a", "b"}
    assert first["a"].norm == pytest.approx(float(one.norm()))
    assert (first["b"].numbers, first["b"].norm) == (9, 3.0)
    assert first["a"].distance(second["a"]) == pytest.approx(0.01 * float(other.norm()), rel=0.7)
    assert first["b"].distance(second["b"]) == 0.0
    assert sketched(one) == first


def sketch(norm: float, numbers: int = 100, off: float = 0.0) -> Sketch:
    return Sketch(numbers, norm, (norm + off,) * 8)


PLAIN = Pass(2.0, {"a": sketch(10.0), "b": sketch(1.0), "bias": sketch(1e-7, 10)})


@pytest.mark.parametrize(
    ("compiled", "stated"),
    [
        (PLAIN, ""),
        (Pass(2.04, PLAIN.gradients), ""),
        (Pass(2.1, PLAIN.gradients), "the loss is 2.1 compiled, and 2 as written"),
        (Pass(float("nan"), PLAIN.gradients), "the loss is nan"),
        (Pass(2.0, {"a": sketch(10.0), "bias": sketch(0.0, 10)}), "b has no gradient compiled"),
        (Pass(2.0, {**PLAIN.gradients, "c": sketch(3.0)}), "c has no gradient as written"),
        (Pass(2.0, {**PLAIN.gradients, "b": sketch(0.0)}), "the gradient of b is 0 compiled"),
        (Pass(2.0, {**PLAIN.gradients, "bias": sketch(0.0, 10)}), ""),
        (Pass(2.0, {"a": sketch(10.0), "b": sketch(1.0)}), ""),
        (Pass(2.0, {**PLAIN.gradients, "a": sketch(10.0, off=0.9)}), ""),
        (
            Pass(2.0, {**PLAIN.gradients, "a": sketch(10.0, off=1.1)}),
            "the gradients differ by 0.11",
        ),
        (Pass(2.0, {**PLAIN.gradients, "b": sketch(1.0, off=4.5)}), "of b differs by 4.5 of"),
    ],
)
def test_what_is_a_difference(compiled: Pass, stated: str) -> None:
    found = difference_of(PLAIN, compiled, BOUNDS["bf16"])
    assert stated in found
    assert bool(stated) == bool(found)


def test_operations_of_blocks_are_counted_by_hand() -> None:
    blocks: list[nn.Module] = [nn.Linear(8, 16), nn.Linear(16, 8)]
    with counted_operations(blocks, True) as count:
        blocks[1](blocks[0](torch.zeros(5, 8)))
        assert count() == 2 * 2 * 5 * 8 * 16
    assert all("forward" not in vars(block) for block in blocks)
    with counted_operations(blocks, False) as count:
        blocks[0](torch.zeros(5, 8))
        assert count() == 0


class Noisy(nn.Module):
    """A block with dropout, statistics of batches and a weight that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.norm(self.linear(rows)).relu(), 0.4, self.training)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compile_probe, "gather", lambda value: [value])
    monkeypatch.setattr(compile_probe, "rank", lambda: 0)
    monkeypatch.setattr(compile_probe, "autocast_if_enabled", lambda engine: nullcontext())
    monkeypatch.setattr(compile_probe, "SMALL_BLOCK", 0)
    monkeypatch.delenv(NO_COMPILE)
    with torch._dynamo.config.patch(disable=False):
        yield


def probe_of(
    model: nn.Module, backend: str, *, is_auto: bool, precision: Any = None, stage: int = 0
) -> Any:
    plan = SimpleNamespace(
        config=SimpleNamespace(
            precision=precision or FP32(),
            training=SimpleNamespace(deterministic=False, sync_batch_norm=False),
            zero=SimpleNamespace(stage=stage),
        ),
        cluster=SimpleNamespace(device="cpu"),
        layout=SimpleNamespace(tensor_size=1, sequence_size=1, expert_size=1),
    )
    if backend in wrong_compilers.WRONG:
        wrong_compilers.Registers(backend)
    section = OF_BLOCKS.model_copy(update={"backend": backend})
    return CompileProbe(
        plan,  # type: ignore[arg-type]
        SimpleNamespace(module=model),
        CompileChoice(section, is_auto),
        names={weight: name for name, weight in model.named_parameters()},
    )


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Noisy(), Noisy(), nn.Linear(6, 1))


def loss_of(model: Any) -> torch.Tensor:
    return model(drawn(20, 6, seed=2) + torch.randn(20, 6)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", *wrong_compilers.WRONG])
@pytest.mark.usefixtures("alone")
def test_nothing_is_left_of_the_trial(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = noisy()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    probe = probe_of(model, backend, is_auto=True)
    probe.decide(loss_of)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    is_right = backend in ("aot_eager", "fails_on_rank_1")
    assert (probe.compiled is not None) is is_right
    assert [module._compiled_call_impl is not None for module in model] == [is_right] * 2 + [False]
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    if is_right:
        assert "auto compiles 2 x Noisy; the first micro-batch gives the same" in said
        probe.close()
        assert all(module._compiled_call_impl is None for module in model)
    else:
        assert f"auto goes on as written: {probe.reason}" in said


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_what_differs_is_named() -> None:
    for backend, kind, reason in (
        ("loses_a_gradient", "compile-differs", "0.linear.weight has no gradient compiled"),
        ("rounds_too_much", "compile-differs", "the gradient"),
    ):
        probe = probe_of(noisy(), backend, is_auto=False)
        with pytest.raises(ConfigError) as error:
            probe.decide(loss_of)
        problem = error.value.problems[0]
        assert (problem.kind, problem.key) == (kind, "training.compile")
        assert reason in problem.reason


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_half_precision_is_within_its_bound() -> None:
    model = gpt().to(torch.bfloat16)

    def loss(model: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(IDS).flatten(0, 1).float(), IDS.flatten())

    probe = probe_of(model, "aot_eager", is_auto=False, precision=BF16())
    probe.decide(loss)
    assert probe.compiled is not None
    probe.close()
    assert probe_of(model, "eager", is_auto=True, precision=Autocast())._dtype() == "bf16"
    assert probe_of(model, "eager", is_auto=True, precision=FP32(matmul="high"))._dtype() == "tf32"


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_tiles_that_are_wrong_leave_blocks_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt().to(torch.bfloat16)
    output_head(model)
    monkeypatch.setattr(tiled_loss, "_DEVICES_WITH_KERNELS", {"cpu"})

    def loss(model: Any) -> torch.Tensor:
        with wanting_loss(IDS, 100, None):
            return model(IDS).nats / IDS.numel()  # type: ignore[no-any-return]

    probe = probe_of(model, "eager", is_auto=False, precision=BF16())
    probe.decide(loss)
    assert probe.compiled.uses_tiles
    probe.close()
    monkeypatch.setattr(tiled_loss.TileKernels, "add_product", lambda *tensors: None)
    probe = probe_of(model, "eager", is_auto=False, precision=BF16())
    probe.decide(loss)
    assert probe.compiled is not None
    assert not probe.compiled.uses_tiles
    probe.close()


@pytest.mark.usefixtures("alone")
def test_models_that_auto_leaves_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), "eager", is_auto=True)
    assert probe.reason == "Sequential has no blocks that repeat"
    probe.decide(loss_of)
    assert probe.compiled is None
    monkeypatch.setattr(compile_probe, "SMALL_BLOCK", 2**33)
    probe = probe_of(noisy(), "eager", is_auto=True)
    probe.decide(loss_of)
    assert "GFLOP of a micro-batch, and a GPU waits for its host below 8.6" in probe.reason
    probe = probe_of(noisy(), "eager", is_auto=True)
    probe.decide(lambda model: model(torch.zeros(20, 7)))
    assert "fails as written: RuntimeError" in probe.reason


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "rounds_too_much"])
@pytest.mark.usefixtures("alone")
def test_a_graph_of_cuda_is_replayed_in_the_trial(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third pass is the first one that replays it; a rank that finds a difference before takes
    as many, for the ranks that wait for it.
    """
    passes = list[int]()

    def loss(model: Any) -> torch.Tensor:
        passes.append(1)
        return loss_of(model)

    probe = probe_of(noisy(), backend, is_auto=True)
    monkeypatch.setattr(type(probe._candidate), "records_graphs", True)
    probe.decide(loss)
    assert len(passes) == 1 + 3
    probe.close()


@pytest.mark.usefixtures("alone")
def test_a_pass_goes_on_where_the_compiler_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other ranks wait in its sums. Of the failure the log has the reason, and no trace."""
    ended = list[float]()

    def loss(model: Any) -> torch.Tensor:
        found = loss_of(model)
        ended.append(found.item())
        return found

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    probe = probe_of(noisy(), "fails_on_rank_1", is_auto=True)
    probe.decide(loss)
    assert len(ended) == 2
    assert ended[0] == ended[1], "as written, both times"
    assert "this compiler is broken" in probe.reason
    assert capsys.readouterr().err == ""
    assert not torch._dynamo.config.suppress_errors


@pytest.mark.parametrize(
    ("fails_at", "error", "stated"),
    [(1, RuntimeError, "no such kernel"), (2, ConfigError, "compile-failed")],
)
@pytest.mark.usefixtures("alone")
def test_a_rank_ends_where_others_would_wait_for_it_in_the_pass(
    fails_at: int, error: type[Exception], stated: str
) -> None:
    calls = list[int]()

    def loss(model: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError("no such kernel")
        return loss_of(model)

    with pytest.raises(error, match=stated):
        probe_of(noisy(), "eager", is_auto=True, stage=3).decide(loss)
    calls.clear()
    probe = probe_of(noisy(), "eager", is_auto=True)
    probe.decide(loss)
    assert "no such kernel" in probe.reason


def run_config(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    backend = name.partition("-")[2].replace("-", "_")
    callbacks = list[Any]()
    compiled: Any = False
    if name.startswith("auto"):
        compiled = "auto"
        smallest = 2**33 if backend == "small" else 0
        backend = "aot_eager" if backend in ("good", "small") else backend
        args: Any = {"backend": backend, "smallest": smallest}
        callbacks.append({"target": "tests.jobs.wrong_compilers:AsOnCuda", "args": args})
    elif name.startswith("true"):
        compiled = {"backend": backend, "per": "block"}
        args = {"backend": backend}
        callbacks.append({"target": "tests.jobs.wrong_compilers:Registers", "args": args})
    model: Any = GPT["model"]
    data: Any = GPT["data"]
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": model | {"dropout": 0.1, "num_layers": 2},
        "data": data | {"path": str(folder / "tokens")},
        "task": GPT["task"],
        "batch": {"global_size": 8},
        "training": {"max_steps": 3, "log_every": 1, "compile": compiled},
        "evaluation": {"at_end": False},
        "checkpoint": {"at_end": False},
        "callbacks": callbacks,
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    } | sections


# Name -> stage. What is behind the first hyphen is the backend.
RUNS = {
    "plain-0": 0,
    "auto-loses-a-gradient": 0,
    "plain-2": 2,
    "auto-good": 2,
    "auto-small": 2,
    "auto-fails-on-rank-1": 2,
    "true-loses-a-gradient": 1,
    "true-fails-on-rank-1": 3,  # where ranks meet in every block
}
# What differs is found in one process as well (`test_what_differs_is_named`).
RARE = {"auto-rounds-too-much": 2}


@pytest.fixture(scope="module")
def runs(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probed")
    write_tokens(folder)
    stages = RUNS | (RARE if exhaustive else {})
    configs = [run_config(folder, name, zero={"stage": stage}) for name, stage in stages.items()]
    train_cases(configs, num_ranks=2, folder=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("auto-loses-a-gradient", "no gradient compiled"),
        pytest.param("auto-rounds-too-much", "of its norm", marks=pytest.mark.exhaustive),
        ("auto-fails-on-rank-1", "on another rank"),
        ("auto-small", "GFLOP of a micro-batch"),
    ],
)
def test_a_run_goes_on_as_if_nothing_had_been_tried(runs: Path, name: str, stated: str) -> None:
    plain = f"plain-{(RUNS | RARE)[name]}"
    for metric in ("train/loss", "train/grad_norm"):
        found = series(runs / name, metric)
        assert len(found) == 3
        assert found == series(runs / plain, metric), "to the bit"
    log = (runs / name / "logs" / "rank0.log").read_text(encoding="utf-8")
    assert log.count("training.compile: auto goes on as written") == 1
    assert stated in log


@pytest.mark.slow
def test_a_right_compiler_is_taken(runs: Path) -> None:
    found, plain = (series(runs / name, "train/loss") for name in ("auto-good", "plain-2"))
    assert found == pytest.approx(plain, abs=1e-5)
    log = (runs / "auto-good" / "logs" / "rank0.log").read_text(encoding="utf-8")
    assert "auto compiles 2 x GPTBlock" in log


@pytest.mark.slow
def test_a_run_that_asks_for_it_ends_with_the_reason(runs: Path) -> None:
    for name, kind in (
        ("true-loses-a-gradient", "compile-differs"),
        ("true-fails-on-rank-1", "compile-failed"),
    ):
        stated = (runs / f"{name}.error").read_text(encoding="utf-8")
        assert kind in stated
        assert "set training.compile: auto" in stated
