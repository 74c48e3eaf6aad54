"""Adapters of a model that a tensor group shares: fp32 steps against plain PyTorch with peft in one
process, resumed to the bit, moved to other sizes of the group, and exported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import framework
from framework.checkpoint.state.tensor_split import Split
from framework.commands.export import export
from framework.config.load import config_from_values
from framework.data.order import epoch_order
from framework.engine import tensor_quantized
from framework.models.split import RowLinear
from framework.setup.user_code import call_factory
from tests.engine import test_lora
from tests.engine.saved_runs import write_tokens
from tests.launched import fewer, rarely, series, train_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft comes with the lora extra"),
]

NUM_STEPS = fewer(5, of=20)
BATCH, CLIP = test_lora.BATCH, test_lora.CLIP
# An untied output layer, so that it and the embedding can be adapted.
_UNTIED = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "tie_embeddings": False}
ROWS_AND_COLUMNS = {
    "target_modules": ["query", "value", "output", "up", "down"],
    "modules_to_save": ["norm"],
}
ENDS = {"target_modules": ["embed", "head", "key", "down"], "use_rslora": True}
THEIR_ENDS = {"target_modules": r".*\.(q_proj|o_proj|down_proj|embed_tokens)|lm_head"}
THEIR_HEAD = {
    "target_modules": r".*\.(k|v|o|up|down)_proj",
    "modules_to_save": ["embed_tokens", "lm_head"],
}
# Layers with a matrix of inputs by outputs.
OF_GPT2 = {"target_modules": r".*\.(c_attn|c_proj|c_fc)"}

# Next to nothing is dropped, but the products of what is left are made anew.
DORA = {"target_modules": r".*\.(q|v|o|up|down)_proj", "use_dora": True, "lora_dropout": 1e-12}
# Of nf4 a row layer divides whole rows of blocks: `output` has rows of 32 numbers.
IN_NF4 = {"target_modules": r".*\.(q|v|up|down)_proj", "quantization": "nf4"}
IN_INT8 = {"target_modules": r".*\.(k|o|down)_proj|lm_head", "quantization": "int8"}
# Runs that go on -> from which one.
ROUTES = {
    "dropped-again": "dropped",
    "spread-again": "spread",
    "out-of-a-group": "spread",
    "into-a-group": "undivided",
    "staged-dropped-again": "staged-dropped",
    "out-of-stages": "staged",
}
BEGUN = (0, 3)


class Case(NamedTuple):
    """A run: model, ZeRO stage, adapters, optimizer and what else is changed."""

    model: str
    stage: int
    lora: dict[str, Any]
    optimizer: str = "sgd"
    sections: dict[str, dict[str, Any]] = {}
    within: float = 1e-5


CASES = {
    "gpt-z0": Case("gpt", 0, ROWS_AND_COLUMNS),
    "gpt-z1-accumulated": Case(
        "gpt", 1, ROWS_AND_COLUMNS, "adamw", {"batch": {"accumulation_steps": 2}}, 1e-4
    ),
    "gpt-z2": Case("gpt", 2, ROWS_AND_COLUMNS, sections={"training": {"recompute_every": 1}}),
    "gpt-z3": Case("gpt", 3, ROWS_AND_COLUMNS, sections={"batch": {"accumulation_steps": 2}}),
    "ends-z3": Case("untied", 3, ENDS, "adamw", within=1e-4),
    "dora-z2": Case("gpt", 2, ROWS_AND_COLUMNS | {"use_dora": True}),
    "dora-z3": Case("llama", 3, DORA, "adamw", within=1e-4),
    "nf4-z3": Case("llama", 3, IN_NF4, "adamw", within=1e-4),
    "int8-z1": Case("llama", 1, IN_INT8, sections={"batch": {"accumulation_steps": 2}}),
    "theirs-z3": Case("llama", 3, THEIR_HEAD),
    "gpt2-z1": Case("gpt2", 1, OF_GPT2 | {"modules_to_save": ["ln_f"]}),
    "gpt2-z3": Case("gpt2", 3, OF_GPT2),
}
RARE = {
    "ends-z0": Case("untied", 0, ENDS),
    "theirs-z1": Case("llama", 1, THEIR_ENDS),
    "gpt-z1": Case("gpt", 1, ROWS_AND_COLUMNS),
    "nf4-z0": Case(
        "gpt", 0, {**ROWS_AND_COLUMNS, "target_modules": ["query", "down"], "quantization": "nf4"}
    ),
    "int8-z2": Case("gpt", 2, ROWS_AND_COLUMNS | {"quantization": "int8"}),
    "gpt2-z0": Case("gpt2", 0, OF_GPT2, "adamw", within=1e-4),
    "theirs-z0": Case("llama", 0, THEIR_HEAD, "adamw", within=1e-4),
    "theirs-z2": Case("llama", 2, THEIR_ENDS),
}
FOUR = {
    "gpt-z3-of-four": CASES["gpt-z3"],
    "theirs-z1-of-four": Case(
        "llama", 1, THEIR_ENDS, "adamw", {"batch": {"accumulation_steps": 2}}, 1e-4
    ),
}


# In two stages that tensor groups of two divide.
_STAGES = {"parallel": {"pipe": 2}, "batch": {"global_size": BATCH, "micro_size": 2}}
FOUR |= {
    "gpt-z0-staged": Case("gpt", 0, ROWS_AND_COLUMNS, sections=_STAGES),
    "gpt-z1-staged": Case("gpt", 1, ROWS_AND_COLUMNS, "adamw", _STAGES, 1e-4),
    "theirs-z1-staged": Case("llama", 1, THEIR_HEAD, sections=_STAGES),
    "nf4-z1-staged": Case("llama", 1, IN_NF4, sections=_STAGES),
}


def values(name: str, case: Case, folder: Path, *, tensor: int = 2) -> dict[str, Any]:
    """The run of a case."""
    model = "llama" if case.model in ("llama", "gpt2") else "gpt"
    made = test_lora.config(folder, model, case.optimizer, case.stage)
    if case.model == "untied":
        made["model"] = made["model"] | _UNTIED
    if case.model == "gpt2":
        made["model"] = {"target": "tests.jobs.tensor_parts:gpt2_logits"}
    made["run"]["name"] = name
    made["parallel"] = {"tensor": tensor}
    made["checkpoint"] = {"at_end": True}
    made["training"] |= {
        "max_steps": NUM_STEPS,
        "lora": {**case.lora, "r": 4, "lora_alpha": 8},
    }
    made["training"].pop("ema", None)
    return made | {key: {**made.get(key, {}), **section} for key, section in case.sections.items()}


def kept(folder: Path, name: str, *, tensor: int = 2, stage: int = 3) -> dict[str, Any]:
    """A run of four steps with checkpoints and a moving average. One that is named after another
    run, as `ROUTES` has them, goes on from its middle.
    """
    lora = ROWS_AND_COLUMNS | {"lora_dropout": 0.2 if "dropped" in name else 0.0}
    made = values(name, Case("gpt", stage, lora, "adamw"), folder, tensor=tensor)
    made["model"] = made["model"] | {"dropout": 0.1 if "dropped" in name else 0.0}
    made["training"] |= {"max_steps": 4, "ema": {"decay": 0.9}}
    made["checkpoint"] = {"every_steps": 2}
    if name in ROUTES:
        source = folder / ROUTES[name] / "checkpoints" / "global_step2"
        made["checkpoint"]["resume"] = str(source)
    return made


def staged(folder: Path, name: str, *, is_staged: bool = True) -> dict[str, Any]:
    """A run of four steps as `kept` has them, of a model of transformers, on four ranks: in stages
    that tensor groups divide, or with all of the model on each rank.
    """
    made = kept(folder, name, tensor=2 if is_staged else 1, stage=1)
    made["model"] = test_lora.MODELS["llama"]
    made["training"]["lora"] |= {"target_modules": THEIR_HEAD["target_modules"]}
    made["training"]["lora"] |= {"modules_to_save": THEIR_HEAD["modules_to_save"]}
    if is_staged:
        made["parallel"] |= {"pipe": 2}
        made["batch"] = {"global_size": BATCH, "micro_size": 2}
    return made


def begun(folder: Path, stage: int) -> dict[str, Any]:
    """A run that starts from adapters that peft wrote."""
    made = values(f"begun-z{stage}", Case("gpt", stage, ROWS_AND_COLUMNS), folder)
    made["training"]["lora"]["init_adapter"] = str(folder / "start")
    return made


def held_cases(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Numbers of ranks and configs of the runs that are held against plain PyTorch."""
    return [
        *((2, values(name, case, folder)) for name, case in (CASES | RARE).items()),
        *((4, values(name, case, folder)) for name, case in FOUR.items()),
    ]


def plain(values: dict[str, Any]) -> tuple[list[float], list[float], nn.Module]:
    """Losses, gradient norms and the trained model of PyTorch and peft in one process."""
    samples = call_factory(config_from_values(values).data.factory(), key="data").train
    model, trained = test_lora.adapted(values)
    section = dict(values["optimizer"])
    make: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[section.pop("kind")]
    optimizer = make(trained, **section)
    order = epoch_order(len(samples), seed=0, epoch=0, shuffle=True)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(NUM_STEPS):
        batch = [samples[int(index)] for index in order[step * BATCH : (step + 1) * BATCH]]
        tokens, targets = (
            torch.stack([torch.as_tensor(sample[part]) for sample in batch]) for part in (0, 1)
        )
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        losses.append(loss.item())
    assert min(norms) > CLIP, "clipping must be at work, or it is not compared"
    assert losses[0] - losses[-1] > 0.01, "something must be learnt"
    return losses, norms, model


@pytest.fixture(scope="module")
def two_ranks(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    write_tokens(folder)
    cases = CASES | (RARE if exhaustive else {})
    runs = [values(name, case, folder) for name, case in cases.items()]
    runs += [
        kept(folder, "dropped", stage=2),
        kept(folder, "dropped-again", stage=2),
        kept(folder, "spread"),
        kept(folder, "spread-again"),
        kept(folder, "undivided", tensor=1, stage=1),
        kept(folder, "out-of-a-group", tensor=1, stage=1),
        kept(folder, "into-a-group"),
    ]
    start = begun(folder, 0)
    drawn = {
        name: value for name, value in start["training"]["lora"].items() if name != "init_adapter"
    }
    start["training"]["lora"] = drawn
    test_lora.write_with_peft(folder, start)
    runs += [begun(folder, stage) for stage in BEGUN]
    train_cases(runs, num_ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four-ranks")
    write_tokens(folder)
    runs = [values(name, case, folder) for name, case in FOUR.items()]
    for name in ("staged-dropped", "staged-dropped-again", "staged"):
        runs.append(staged(folder, name))
    runs.append(staged(folder, "out-of-stages", is_staged=False))
    train_cases(runs, num_ranks=4, folder=folder)
    return folder


def hold(run: Path, values: dict[str, Any], within: float, *, is_begun: bool = False) -> None:
    losses, norms, model = plain(values)
    found = list(series(run, "train/loss").values())
    print(f"{run.name}: {max(abs(a - b) for a, b in zip(found, losses, strict=True)):.1e}")
    assert found == pytest.approx(losses, abs=within)
    found_norms = list(series(run, "train/grad_norm").values())
    assert found_norms == pytest.approx(norms, rel=100 * within)
    if is_begun:  # peft names weights otherwise in a model of its own
        return
    held = test_lora.weights(run, NUM_STEPS)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert set(held) == set(trained)
    for name, weight in trained.items():
        torch.testing.assert_close(
            held[name], weight.detach(), atol=10 * within, rtol=0.0, check_dtype=False
        )


@pytest.mark.parametrize("name", [*CASES, *rarely(RARE)])
def test_a_group_trains_adapters_like_peft_in_one_process(two_ranks: Path, name: str) -> None:
    case = (CASES | RARE)[name]
    hold(two_ranks / name, values(name, case, two_ranks), case.within)


@pytest.mark.parametrize("name", FOUR)
def test_two_groups_train_adapters_like_peft_in_one_process(four_ranks: Path, name: str) -> None:
    hold(four_ranks / name, values(name, FOUR[name], four_ranks), FOUR[name].within)


@pytest.mark.parametrize("stage", BEGUN)
def test_a_group_goes_on_from_adapters_that_peft_wrote(two_ranks: Path, stage: int) -> None:
    hold(two_ranks / f"begun-z{stage}", begun(two_ranks, stage), 1e-5, is_begun=True)


def hold_resumed(folder: Path, name: str) -> None:
    """Compare a resumed run with the unbroken one, to the bit."""
    for average in (False, True):
        whole = test_lora.weights(folder / name, 4, average=average)
        again = test_lora.weights(folder / f"{name}-again", 4, average=average)
        assert [*whole] == [*again]
        assert all(torch.equal(whole[name], again[name]) for name in whole)
        before = test_lora.weights(folder / name, 2, average=average)
        assert not any(torch.equal(whole[name], before[name]) for name in whole)


def hold_moved(folder: Path, name: str, *, is_divided: bool) -> None:
    """Compare a run that goes on in another layout with the unbroken one."""
    moved = test_lora.weights(folder / name, 4)
    whole = test_lora.weights(folder / ROUTES[name], 4)
    assert bool(moved.checkpoint.manifest.get("tensor")) == is_divided
    assert set(moved) == set(whole)
    for weight in whole:
        torch.testing.assert_close(moved[weight], whole[weight], atol=1e-4, rtol=0.0)
    base = whole.checkpoint.manifest["base"]
    assert moved.checkpoint.manifest["base"] == base, "frozen weights are the same, however divided"


@pytest.mark.parametrize("name", ["dropped", "spread"])
def test_a_resumed_group_is_the_unbroken_one_to_the_bit(two_ranks: Path, name: str) -> None:
    hold_resumed(two_ranks, name)


def test_resumed_stages_of_groups_are_the_unbroken_ones_to_the_bit(four_ranks: Path) -> None:
    hold_resumed(four_ranks, "staged-dropped")


@pytest.mark.parametrize("name", ["out-of-a-group", "into-a-group"])
def test_a_run_moves_between_sizes_of_the_group(two_ranks: Path, name: str) -> None:
    hold_moved(two_ranks, name, is_divided=name == "into-a-group")


def test_a_run_moves_out_of_stages_of_groups(four_ranks: Path) -> None:
    hold_moved(four_ranks, "out-of-stages", is_divided=False)


@pytest.mark.parametrize("name", ["gpt-z0", "ends-z3", "theirs-z3", "dora-z3", "gpt2-z3"])
def test_exports_are_those_of_one_process(two_ranks: Path, tmp_path: Path, name: str) -> None:
    hold_exports(two_ranks, CASES[name], tmp_path, name)


def hold_loaded(folder: Path, name: str) -> None:
    """Compare the logits of a model over weights in few bits; loading it compares fingerprints."""
    case = (CASES | RARE | FOUR)[name]
    _, _, model = plain(values(name, case, folder))
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    merged = framework.load(folder / name, trust=True)
    with torch.no_grad():
        difference = merged.eval()(tokens) - model.eval()(tokens)
    assert float(difference.abs().max()) < 100 * case.within


@pytest.mark.parametrize("name", ["nf4-z3", "int8-z1", *rarely(("nf4-z0", "int8-z2"))])
def test_weights_in_few_bits_are_those_of_one_process(two_ranks: Path, name: str) -> None:
    hold_loaded(two_ranks, name)


def test_weights_of_stages_in_few_bits_are_those_of_one_process(four_ranks: Path) -> None:
    hold_loaded(four_ranks, "nf4-z1-staged")


@pytest.mark.parametrize("name", ["gpt-z0-staged", "theirs-z1-staged"])
def test_exports_of_stages_are_those_of_one_process(
    four_ranks: Path, tmp_path: Path, name: str
) -> None:
    hold_exports(four_ranks, FOUR[name], tmp_path, name)


def hold_exports(folder: Path, case: Case, tmp_path: Path, name: str) -> None:
    """Compare the logits of exported adapters, and of merged weights, with plain PyTorch's."""
    import peft  # here: it takes seconds

    config = values(name, case, folder)
    _, _, model = plain(config)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    within = 100 * case.within
    export(str(folder / name), tmp_path / "adapter", adapter=True)
    loaded = peft.PeftModel.from_pretrained(test_lora.build(config), str(tmp_path / "adapter"))
    merged = framework.load(folder / name, trust=True)
    with torch.no_grad():
        expected = model.eval()(tokens)
        assert float((loaded.eval()(tokens) - expected).abs().max()) < within
        assert float((merged.eval()(tokens) - expected).abs().max()) < within
        base = test_lora.build(config).eval()(tokens)
        assert float((base - expected).abs().max()) > 10 * within


@pytest.mark.parametrize("what", ["few bits", "DoRA"])
def test_ranks_send_what_lies_on_their_devices(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends nothing else, and below stage 3 adapters are added to a model in host memory."""
    from framework.models import split_dora  # here: peft takes seconds

    sent: list[str] = []
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda parts, own, group: sent.append(own.device.type)
    )
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, group: sent.append(tensor.device.type)
    )
    part: Any = SimpleNamespace(rank=0, size=2, group=None)
    with FakeTensorMode():  # which has devices that are not there
        layer: Any = nn.Linear(4, 6)
        layer.__class__ = RowLinear
        layer.part = part
        if what == "DoRA":
            made: Any = split_dora.DoraLinearLayer(fan_in_fan_out=False)
            with split_dora.measuring_parts(cuda):
                made.update_layer(base_layer=layer)
            found = made.weight
        else:
            monkeypatch.setattr(tensor_quantized, "device", lambda: cuda)
            found = tensor_quantized.whole_of(layer.weight, Split(1, (8,)), part)
    assert sent == ["cuda"]
    assert found.device.type == "cpu"
