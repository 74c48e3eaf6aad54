"""Adapters: fp32 steps at every ZeRO stage against plain PyTorch with peft in one process, resumed
to the bit, moved between stages, merged, and loaded by peft.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import framework
from framework.checkpoint.adapter_files import WEIGHTS, adapter_problems, noted_base
from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from framework.checkpoint.state.weight_files import read_exported
from framework.commands.export import export
from framework.config.load import config_from_values
from framework.config.training import LoRA
from framework.data.order import epoch_order
from framework.engine.adapter_weights import put_adapter
from framework.errors import ConfigError, StorageError
from framework.models.adapters import add_adapters, is_adapter
from framework.models.quantized import dequantize, quantizable, quantize
from framework.plan.work import trained_shapes
from framework.setup.adapters import write_adapter
from framework.setup.user_code import call_factory
from tests.engine.oracle import Average, MuonWithAdam, ScheduleFree
from tests.engine.saved_runs import write_tokens
from tests.engine.test_pipeline import GPT
from tests.gpu.oracles import lamb
from tests.launched import fewer, furthest, rarely, series, train_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft comes with the lora extra"),
]

# Drift is held by one run of each optimizer.
LONG_STEPS, NUM_STEPS, HALF_WAY = fewer(8, of=20), fewer(4, of=20), fewer(2, of=10)
BATCH, CLIP = 8, 0.01
NUM_BLOCKS = 2
MODELS = {
    "gpt": {"kind": "gpt"},
    "llama": {"target": "tests.jobs.llama:Llama"},
}
ADAPTED = {
    "gpt": {"target_modules": ["query", "value", "up"], "modules_to_save": ["norm"]},
    "llama": {"target_modules": r".*\.(q|v|down)_proj"},
}
LR = {"gpt": 10.0, "llama": 2.0}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
    "adamw": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1},
}
TOLERANCES = {"sgd": 1e-5, "adamw": 1e-4}
# Optimizer, ZeRO stage, and by how much losses may be others than those of plain PyTorch: moments
# of 8 bits are held against AdamW's, and Muon computes in bf16.
OTHERS: dict[str, tuple[dict[str, Any], int, float]] = {
    "adafactor-z0": ({"kind": "adafactor", "lr": 0.3}, 0, 1e-5),
    "lamb-z2": ({"kind": "lamb", "lr": 0.3}, 2, 1e-5),
    "muon-z0": ({"kind": "muon", "lr": 0.05}, 0, 1e-4),
    "muon-z3": ({"kind": "muon", "lr": 0.05}, 3, 1e-4),
    "schedule_free-z1": ({"kind": "schedule_free", "lr": 0.02, "weight_decay": 0.1}, 1, 1e-4),
    "adamw_8bit-z2": (OPTIMIZERS["adamw"] | {"kind": "adamw_8bit"}, 2, 5e-3),
    "nf4-adamw_8bit-z0": (OPTIMIZERS["adamw"] | {"kind": "adamw_8bit"}, 0, 5e-3),
}


def training_of(model: str, **lora: Any) -> dict[str, Any]:
    """Sections of a long run with another form of adapters."""
    adapters = ADAPTED[model] | {"r": 4, "lora_alpha": 8} | lora
    return {"training": {"max_steps": LONG_STEPS, "lora": adapters}}


# Small weights are partitioned, too, as large ones are.
SPREAD: dict[str, Any] = {"zero": {"stage": 3, "stage3_param_persistence_threshold": 0}}

# What changes how a step is computed -> of which run, and by how much it may change losses.
VARIANTS: dict[str, tuple[tuple[str, str, int], dict[str, Any], float]] = {
    "long-sgd": (("gpt", "sgd", 2), {"training": {"max_steps": LONG_STEPS}}, 1e-5),
    "long-adamw": (("gpt", "adamw", 2), {"training": {"max_steps": LONG_STEPS}}, 1e-4),
    "accumulation": (("gpt", "sgd", 2), {"batch": {"accumulation_steps": 2}}, 1e-5),
    "recompute": (("gpt", "sgd", 3), {"training": {"recompute_every": 1}}, 1e-5),
    "tiles": (("gpt", "sgd", 2), {"training": {"loss_tile": 5}}, 1e-5),
    "offload": (
        ("gpt", "adamw", 2),
        {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        1e-4,
    ),
    "rslora": (("gpt", "sgd", 1), training_of("gpt", use_rslora=True), 1e-5),
    "dora": (("gpt", "sgd", 2), training_of("gpt", use_dora=True), 1e-5),
    "dora-spread": (("llama", "adamw", 3), SPREAD | training_of("llama", use_dora=True), 1e-4),
    "nf4": (("gpt", "sgd", 1), training_of("gpt", quantization="nf4"), 1e-5),
    "nf4-accumulated": (
        ("gpt", "adamw", 2),
        {"batch": {"accumulation_steps": 2}} | training_of("gpt", quantization="nf4"),
        1e-4,
    ),
    "nf4-spread": (
        ("llama", "adamw", 3),
        SPREAD | training_of("llama", quantization="nf4"),
        1e-4,
    ),
    "int8": (("gpt", "sgd", 0), training_of("gpt", quantization="int8"), 1e-5),
    "int8-spread": (("gpt", "sgd", 3), SPREAD | training_of("gpt", quantization="int8"), 1e-5),
    "int8-bf16": (
        ("gpt", "adamw", 3),
        {"precision": {"dtype": "bf16"}} | training_of("gpt", quantization="int8"),
        0.05,
    ),
    "autocast": (("gpt", "adamw", 2), {"precision": {"dtype": "autocast"}}, 0.02),
    "bf16": (("gpt", "adamw", 3), {"precision": {"dtype": "bf16"}}, 0.05),
    "fp16": (("gpt", "adamw", 2), {"precision": {"dtype": "fp16"}}, 0.02),
}
STAGES = (0, 1, 2, 3)
HELD = [
    *(("gpt", optimizer, stage) for optimizer in OPTIMIZERS for stage in STAGES),
    *(("llama", optimizer, stage) for optimizer, stage in (("sgd", 1), ("adamw", 2), ("sgd", 3))),
]
# Model, optimizer and stage of runs whose two ranks share every sequence.
SHARED = (("gpt", "sgd", 0), ("gpt", "sgd", 1), ("gpt", "adamw", 2), ("llama", "sgd", 3))
# Of runs in two stages, four micro-batches a step.
PIPED = (("gpt", "sgd", 0), ("gpt", "adamw", 1), ("llama", "sgd", 1))
AGAIN, MOVES = (0, 2, 3), ((0, 3), (3, 1))
# With --exhaustive: what another model, stage or move holds above.
RARE_SHARED = (("gpt", "sgd", 2), ("gpt", "sgd", 3), ("llama", "sgd", 1))
RARE_AGAIN, RARE_MOVES = (1,), ((2, 0),)
_RARE = pytest.mark.exhaustive


def varied(folder: Path, name: str) -> dict[str, Any]:
    """The run of a variant."""
    (model, optimizer, stage), sections, _ = VARIANTS[name]
    is_read = "lora" in sections.get("training", {})
    made = config(folder, model, optimizer, stage) | {"checkpoint": {"at_end": is_read}}
    made["run"] = {**made["run"], "name": name}
    return made | {key: {**made.get(key, {}), **section} for key, section in sections.items()}


def other(folder: Path, name: str) -> dict[str, Any]:
    """The run of another optimizer."""
    optimizer, stage, _ = OTHERS[name]
    made = config(folder, "gpt", "sgd", stage) | {"optimizer": optimizer}
    made["run"]["name"] = name
    if name.startswith("nf4"):
        made["training"]["lora"]["quantization"] = "nf4"
    return made


def begun(folder: Path, name: str, stage: int) -> dict[str, Any]:
    """A run that starts from the adapters in `name`, a folder that peft wrote."""
    made = config(folder, "gpt", "sgd", stage)
    made["run"]["name"] = f"begun-{name}-z{stage}"
    made["training"]["lora"]["init_adapter"] = str(folder / name)
    return made


def begun_in_stages(folder: Path) -> dict[str, Any]:
    made = begun(folder, "start", 1)
    made["run"]["name"] = "begun-piped"
    return made | {"parallel": {"pipe": 2}, "batch": {"global_size": BATCH, "micro_size": 2}}


def write_with_peft(folder: Path, values: dict[str, Any]) -> None:
    """Adapters that add something, as peft saves them; and the same, noted as of another base."""
    import peft  # here: it takes seconds
    from safetensors.torch import load_file, save_file

    made = peft.get_peft_model(build(values), peft.LoraConfig(**values["training"]["lora"]))
    torch.manual_seed(4)
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=float(".norm" in name), std=0.1)
    made.save_pretrained(folder / "start")
    (folder / "stranger").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "stranger" / file).write_bytes((folder / "start" / file).read_bytes())
    save_file(
        load_file(folder / "start" / "adapter_model.safetensors"),
        folder / "stranger" / "adapter_model.safetensors",
        metadata={"format": "pt", "base": "0" * 64, "base_dtype": "fp32"},
    )


def shared(folder: Path, model: str, optimizer: str, stage: int) -> dict[str, Any]:
    """The same run by two ranks that share every sequence."""
    made = config(folder, model, optimizer, stage)
    name = f"{made['run']['name']}-shared"
    further = {"training": {"recompute_every": 1}} if (model, stage) == ("gpt", 1) else {}
    made |= {key: {**made[key], **section} for key, section in further.items()}
    return made | {"run": {**made["run"], "name": name}, "parallel": {"sequence": 2}}


def piped(folder: Path, model: str, optimizer: str, stage: int) -> dict[str, Any]:
    """The same run in two stages."""
    made = config(folder, model, optimizer, stage)
    made["run"]["name"] += "-piped"
    return made | {"parallel": {"pipe": 2}, "batch": {"global_size": BATCH, "micro_size": 2}}


def going_on(folder: Path, *, from_stages: bool, in_stages: bool) -> dict[str, Any]:
    """A run that goes on from the middle of one, in stages or not."""
    made = (piped if in_stages else config)(folder, "gpt", "adamw", 1)
    source = "gpt-adamw-z1" + "-piped" * from_stages
    made["run"]["name"] += f"-of-{source}"
    point = folder / source / "checkpoints" / f"global_step{HALF_WAY}"
    made["checkpoint"]["resume"] = str(point)
    return made


def config(
    folder: Path, model: str, optimizer: str, stage: int, start: int | None = None
) -> dict[str, Any]:
    """A run; with `start`, one that goes on from the middle of the one at that stage."""
    own = f"{model}-{optimizer}-z{stage}"
    source = folder / f"{model}-{optimizer}-z{start}" / "checkpoints" / f"global_step{HALF_WAY}"
    begin = {} if start is None else {"resume": str(source)}
    return {
        "run": {
            "name": own if start is None else f"{own}-from-z{start}",
            "output_dir": str(folder),
        },
        "model": GPT["model"] | {"num_layers": NUM_BLOCKS} if model == "gpt" else MODELS[model],
        "data": GPT["data"] | {"path": str(folder / "tokens")},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": BATCH},
        "zero": {"stage": stage},
        "optimizer": ({"lr": LR[model]} if optimizer == "sgd" else {}) | OPTIMIZERS[optimizer],
        "training": {
            "max_steps": NUM_STEPS,
            "log_every": 1,
            "clip_grad_norm": CLIP,
            "lora": ADAPTED[model] | {"r": 4, "lora_alpha": 8},
            **({"ema": {"decay": 0.9}} if optimizer == "adamw" else {}),
        },
        "checkpoint": ({"every_steps": HALF_WAY} if optimizer == "adamw" else {}) | begin,
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }


def held_cases(folder: Path) -> list[dict[str, Any]]:
    """Those that are held against plain PyTorch."""
    whole = [config(folder, *one) for one in HELD]
    return [
        *whole,
        *(varied(folder, name) for name in VARIANTS),
        *(other(folder, name) for name in OTHERS),
        *(shared(folder, *each) for each in SHARED),
        *(piped(folder, *each) for each in PIPED),
        piped_with_dora(folder),
        piped_in_few_bits(folder),
    ]


def piped_with_dora(folder: Path) -> dict[str, Any]:
    """A run in two stages with magnitudes."""
    made = piped(folder, "gpt", "sgd", 1)
    made["run"]["name"] = "piped-dora"
    return made | {
        "training": {**made["training"], **training_of("gpt", use_dora=True)["training"]}
    }


@pytest.fixture(scope="module")
def runs(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_tokens(folder)
    first = [
        *held_cases(folder),
        *(shared(folder, *each) for each in (RARE_SHARED if exhaustive else ())),
    ]
    stages, moves = (AGAIN + RARE_AGAIN, MOVES + RARE_MOVES) if exhaustive else (AGAIN, MOVES)
    again = [config(folder, "gpt", "adamw", stage, stage) for stage in stages]
    moved = [config(folder, "gpt", "adamw", now, before) for before, now in moves]
    elsewhere = config(folder, "gpt", "adamw", 0, 0)  # on other frozen weights
    torch.save(build(config(folder, "gpt", "adamw", 0), seed=5).state_dict(), folder / "other.pt")
    elsewhere["run"]["name"], elsewhere["checkpoint"]["init_weights"] = (
        "other-base",
        str(folder / "other.pt"),
    )
    write_with_peft(folder, config(folder, "gpt", "sgd", 0))
    begin = [begun(folder, "start", stage) for stage in (0, 3)]
    begin.append(begun_in_stages(folder))
    again += [
        going_on(folder, from_stages=one, in_stages=after)
        for one, after in ((True, True), (True, False), (False, True))
    ]
    begin.append(begun(folder, "stranger", 0))
    few = [in_few_bits(folder, 2), in_few_bits(folder, 2, 2), in_few_bits(folder, 3, 2)]
    train_cases(
        [*first, *again, *moved, *begin, *few, elsewhere],
        num_ranks=2,
        folder=folder,
        allow_fp16=True,
    )
    return folder


def piped_in_few_bits(folder: Path) -> dict[str, Any]:
    """The run of `in_few_bits` in two stages."""
    made = in_few_bits(folder, 1)
    made["run"]["name"] = "nf4-piped"
    return made | {"parallel": {"pipe": 2}, "batch": {"global_size": BATCH, "micro_size": 2}}


def build(values: dict[str, Any], *, seed: int = 0) -> Any:
    """The base as a run has it."""
    torch.manual_seed(seed)
    return call_factory(config_from_values(values).model.factory(), key="model")


@pytest.fixture(scope="module")
def plain_losses(runs: Path) -> dict[tuple[str, str], tuple[list[float], float, Average]]:
    return {
        (model, name): plain(config(runs, model, name, 0))
        for model in MODELS
        for name in OPTIMIZERS
    }


def round_base(model: nn.Module, form: Any) -> None:
    """Give the weights under adapters the numbers that few bits hold."""
    for module in quantizable(model).values():
        weight = module.get_base_layer().weight
        held = quantize(weight, form)
        weight.data = dequantize(held, tuple(weight.shape), form, torch.float32)


def in_few_bits(folder: Path, stage: int, start: int | None = None) -> dict[str, Any]:
    """A run in nf4; with `start`, one that goes on from the middle of the one at that stage."""
    made = config(folder, "gpt", "adamw", stage, start)
    made["run"]["name"] = made["run"]["name"].replace("gpt-adamw", "nf4").replace("from-z", "of-z")
    if start is not None:
        source = folder / f"nf4-z{start}" / "checkpoints" / f"global_step{HALF_WAY}"
        made["checkpoint"]["resume"] = str(source)
    made["training"]["lora"]["quantization"] = "nf4"
    return made


def adapted(values: dict[str, Any]) -> tuple[Any, list[nn.Parameter]]:
    """The base with adapters by peft's own functions, and what is trained."""
    import peft  # here: it takes seconds

    model = build(values)
    lora = dict(values["training"]["lora"])
    begin = lora.pop("init_adapter", None)
    if begin is not None:
        model = peft.PeftModel.from_pretrained(model, begin, is_trainable=True)
        return model, [one for one in model.parameters() if one.requires_grad]
    torch.manual_seed(1)
    saved = [
        module
        for name, module in model.named_modules()
        if name.endswith(tuple(lora.get("modules_to_save", ())))
    ]
    given = {name: value for name, value in lora.items() if name != "modules_to_save"}
    form = given.pop("quantization", None)
    peft.inject_adapter_in_model(peft.LoraConfig(**given), model)
    if form is not None:
        round_base(model, form)
    for parameter in (parameter for module in saved for parameter in module.parameters()):
        parameter.requires_grad_(True)
    return model, [one for one in model.parameters() if one.requires_grad]


def plain(values: dict[str, Any], num_steps: int = NUM_STEPS) -> tuple[list[float], float, Average]:
    """PyTorch and peft's own functions, one process; what the base makes of the last batch; and the
    moving average.
    """
    samples = call_factory(config_from_values(values).data.factory(), key="data").train
    model, trained = adapted(values)
    optimizer, losses = plain_optimizer(model, trained, dict(values["optimizer"])), list[float]()
    order, model = epoch_order(len(samples), seed=0, epoch=0, shuffle=True), model.train()
    average = Average(model, 0.9)
    for step in range(num_steps):
        batch = [samples[int(index)] for index in order[step * BATCH : (step + 1) * BATCH]]
        tokens, targets = (
            torch.stack([torch.as_tensor(sample[part]) for sample in batch]) for part in (0, 1)
        )
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert float(nn.utils.clip_grad_norm_(trained, CLIP)) > CLIP  # it is always at work
        optimizer.step()
        average.step()
        losses.append(loss.item())
    untrained = nn.functional.cross_entropy(
        build(values)(tokens).flatten(0, 1), targets.flatten()
    ).item()
    return losses, untrained, average


def plain_optimizer(model: nn.Module, trained: list[nn.Parameter], section: dict[str, Any]) -> Any:
    """The optimizer of a config's section, of PyTorch or by hand."""
    kind, lr = section.pop("kind"), section["lr"]
    if kind == "muon":
        return MuonWithAdam.for_blocks(model, lr=lr, adam_lr=3e-4)
    if kind == "schedule_free":
        return ScheduleFree(model, lr=lr, decay=section["weight_decay"], warmup_steps=0)
    if kind == "adamw_8bit":
        kind = "adamw"
    kinds: Any = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
        "lamb": lamb,
    }
    return kinds[kind](trained, **section)


def weights(run: Path, step: int = NUM_STEPS, **options: Any) -> MergedWeights:
    (found,) = [one for one in list_checkpoints(run / "checkpoints") if one.step == step]
    return MergedWeights(found, **options)


@pytest.mark.parametrize(("model", "optimizer", "stage"), HELD)
def test_steps_are_those_of_peft_in_one_process(
    runs: Path, plain_losses: Any, model: str, optimizer: str, stage: int
) -> None:
    expected, untrained, _ = plain_losses[model, optimizer]
    found = [*series(runs / f"{model}-{optimizer}-z{stage}", "train/loss").values()]
    assert untrained - expected[-1] > 0.01  # that something was learned
    difference = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    print(f"{model} {optimizer} z{stage}: {difference:.1e}")
    assert difference < TOLERANCES[optimizer]


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_step_adapters_as_in_one_process(runs: Path, name: str) -> None:
    losses, untrained, _ = plain(other(runs, name))
    assert untrained - losses[-1] > 0.01
    assert furthest(runs / name, losses) < OTHERS[name][2]


def same_training(run: Path, of: Path, losses: list[float], optimizer: str) -> tuple[Any, Any]:
    """Hold losses, norms and weights of a run against plain PyTorch and another run, `of`; returns
    the weights of both, this run's last.
    """
    found = [*series(run, "train/loss").values()]
    assert found == pytest.approx(losses, abs=TOLERANCES[optimizer])
    norms = series(of, "train/grad_norm")
    bound = 1e-4 if optimizer == "sgd" else 1e-2
    assert series(run, "train/grad_norm") == {
        step: pytest.approx(norm, rel=bound) for step, norm in norms.items()
    }
    left, right = weights(of), weights(run)
    assert {*left} == {*right}
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-4
    return left, right


@pytest.mark.parametrize(
    ("model", "optimizer", "stage"),
    [*SHARED, *(pytest.param(*each, marks=_RARE) for each in RARE_SHARED)],
)
def test_ranks_that_share_sequences_train_the_same_adapters(
    runs: Path, plain_losses: Any, model: str, optimizer: str, stage: int
) -> None:
    run, of = (runs / f"{model}-{optimizer}-z{stage}{end}" for end in ("-shared", ""))
    left, right = same_training(run, of, plain_losses[model, optimizer][0], optimizer)
    assert [*left] == [*right]


@pytest.mark.parametrize(("model", "optimizer", "stage"), PIPED)
def test_two_stages_train_the_same_adapters(
    runs: Path, plain_losses: Any, model: str, optimizer: str, stage: int
) -> None:
    run, of = (runs / f"{model}-{optimizer}-z{stage}{end}" for end in ("-piped", ""))
    left, right = same_training(run, of, plain_losses[model, optimizer][0], optimizer)
    assert left.checkpoint.manifest["base"] == right.checkpoint.manifest["base"]


def test_two_stages_train_magnitudes_and_start_from_adapters(runs: Path) -> None:
    values = config(runs, "gpt", "sgd", 0)
    values["training"]["lora"] = training_of("gpt", use_dora=True)["training"]["lora"]
    found = [*series(runs / "piped-dora", "train/loss").values()]
    assert found == pytest.approx(plain(values, LONG_STEPS)[0], abs=1e-5)
    found = [*series(runs / "begun-piped", "train/loss").values()]
    assert found == pytest.approx(plain(begun(runs, "start", 0))[0], abs=1e-5)


def test_adapters_in_stages_resume_to_the_bit_and_move(runs: Path) -> None:
    whole = weights(runs / "gpt-adamw-z1-piped")
    again = weights(runs / "gpt-adamw-z1-piped-of-gpt-adamw-z1-piped")
    out, into = (
        weights(runs / name)
        for name in ("gpt-adamw-z1-of-gpt-adamw-z1-piped", "gpt-adamw-z1-piped-of-gpt-adamw-z1")
    )
    assert {*whole} == {*again} == {*out} == {*into}
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for other in (out, into):
        assert max(float((whole[name] - other[name]).abs().max()) for name in whole) < 1e-4


def compare_with_peft(run: Path, values: dict[str, Any], folder: Path) -> None:
    """Hold what peft computes with a run's exported adapter against the run's model, and against
    the model without it.
    """
    import peft  # here: it takes seconds

    export(str(run), folder, adapter=True)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    loaded = peft.PeftModel.from_pretrained(build(values), str(folder)).eval()
    with torch.no_grad():
        expected = loaded(tokens)
        found = framework.load(run, trust=True)(tokens)
        base = build(values).eval()(tokens)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((base - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_exports_of_stages_are_those_of_peft(runs: Path, tmp_path: Path, model: str) -> None:
    stage = {"gpt": 0, "llama": 1}[model]
    run, values = runs / f"{model}-sgd-z{stage}-piped", config(runs, model, "sgd", stage)
    compare_with_peft(run, values, tmp_path / "adapter")


@pytest.mark.parametrize("name", VARIANTS)
def test_other_arithmetic_stays_close(runs: Path, plain_losses: Any, name: str) -> None:
    (model, optimizer, _), _, within = VARIANTS[name]
    found = [*series(runs / name, "train/loss").values()]
    form = VARIANTS[name][1].get("training", {}).get("lora")
    values = config(runs, model, optimizer, 0)
    if form is not None:
        values["training"]["lora"] = form
    if form is not None or name.startswith("long"):
        expected = plain(values, LONG_STEPS)[0]
    else:
        expected = plain_losses[model, optimizer][0]
    print(f"{name}: {max(abs(a - b) for a, b in zip(found, expected, strict=True)):.1e}")
    assert found == pytest.approx(expected, abs=within)


def test_two_stages_train_over_weights_in_few_bits(runs: Path) -> None:
    run = runs / "nf4-piped"
    left, _ = same_training(run, runs / "nf4-z2", plain(in_few_bits(runs, 2))[0], "adamw")
    base = weights(run).checkpoint.manifest["base"]
    assert base == left.checkpoint.manifest["base"], "the same bytes, whoever has them"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_from_adapters_that_peft_wrote(runs: Path, stage: int) -> None:
    values = begun(runs, "start", stage)
    found = [*series(runs / values["run"]["name"], "train/loss").values()]
    expected = plain(values)[0]
    assert found == pytest.approx(expected, abs=1e-5)
    drawn = series(runs / "gpt-sgd-z0", "train/loss")
    assert abs(found[0] - drawn[1]) > 0.01  # that they were read
    trained = weights(runs / values["run"]["name"])
    assert {*trained} == {*weights(runs / "gpt-sgd-z0")}


def test_adapters_that_were_trained_on_another_base_are_no_start(runs: Path) -> None:
    stated = (runs / "begun-stranger-z0.error").read_text(encoding="utf-8")
    assert "were trained on other frozen weights" in stated
    assert "[base-differs]" in stated


def test_an_export_for_peft_is_a_start(runs: Path, tmp_path: Path) -> None:
    export(str(runs / "gpt-sgd-z0"), tmp_path / "out", adapter=True)
    values = begun(runs, "start", 0)
    values["training"]["lora"]["init_adapter"] = str(tmp_path / "out")
    loaded = config_from_values(values)
    assert adapter_problems(loaded.training.lora, partial(trained_shapes, loaded)) == []
    held = weights(runs / "gpt-sgd-z0")
    noted = noted_base(str(tmp_path / "out"))
    assert noted == {
        "format": "pt",
        "base": held.checkpoint.manifest["base"]["sha256"],
        "base_dtype": "fp32",
    }
    model = add_adapters(build(values), LoRA(**values["training"]["lora"]), seed=0)
    put_adapter(
        model, read_exported(tmp_path / "out" / WEIGHTS), LoRA(**values["training"]["lora"])
    )
    state = model.state_dict()
    assert all(torch.equal(state[name], held[name]) for name in held)


@pytest.mark.parametrize("stage", STAGES)
def test_the_average_is_that_of_plain_pytorch(runs: Path, plain_losses: Any, stage: int) -> None:
    found, expected = (
        weights(runs / f"gpt-adamw-z{stage}", average=True),
        plain_losses["gpt", "adamw"][2].weights,
    )
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-4, rtol=0.0, check_dtype=False)


@pytest.mark.parametrize("stage", [*AGAIN, *rarely(RARE_AGAIN)])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(runs: Path, stage: int) -> None:
    for average in (False, True):
        whole, again = (
            weights(runs / name, average=average)
            for name in (f"gpt-adamw-z{stage}", f"gpt-adamw-z{stage}-from-z{stage}")
        )
        assert [*whole] == [*again]
        assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    ("before", "now"), [*MOVES, *(pytest.param(*each, marks=_RARE) for each in RARE_MOVES)]
)
def test_a_run_moves_between_stages(runs: Path, before: int, now: int) -> None:
    whole, moved = (
        weights(runs / f"gpt-adamw-z{before}"),
        weights(runs / f"gpt-adamw-z{now}-from-z{before}"),
    )
    assert set(whole) == set(moved)
    assert max(float((whole[name] - moved[name]).abs().max()) for name in whole) < 1e-5


def test_other_frozen_weights_are_refused(runs: Path) -> None:
    stated = (runs / "other-base.error").read_text(encoding="utf-8")
    assert "trained on other frozen weights (weights drawn from run.seed)" in stated
    assert "[base-differs]" in stated


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_hold_no_frozen_weight(runs: Path, stage: int) -> None:
    run = runs / f"gpt-adamw-z{stage}"
    held = weights(run)
    assert {name for name in held if not is_adapter(name)} == {
        f"{place}norm.{name}"
        for place in (
            "",
            *(
                f"blocks.{number}.{norm}_"
                for number in range(NUM_BLOCKS)
                for norm in ("attention", "mlp")
            ),
        )
        for name in ("weight", "bias")
    }
    # fp32 weights, two moments, the average: 16 bytes; at ZeRO 1 and 2 the module's own weights
    # beside them.
    numbers = sum(tensor.numel() for tensor in held.values())
    files = sum(path.stat().st_size for path in held.checkpoint.path.glob("*.pt"))
    base = 4 * sum(
        parameter.numel() for parameter in build(config(runs, "gpt", "adamw", 0)).parameters()
    )
    print(f"z{stage}: {files} bytes, {numbers} trained numbers, base {base} bytes")
    assert 16 * numbers <= files < 20 * numbers + 110_000  # names, random states: measured
    assert (
        len(
            {
                json.dumps(weights(runs / f"gpt-adamw-z{one}").checkpoint.manifest["base"])
                for one in STAGES
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    ("model", "stage"), [("gpt", 0), ("gpt", 2), ("gpt", 3), ("llama", 1), ("llama", 3)]
)
def test_exports_compute_what_the_trained_model_does(
    runs: Path, tmp_path: Path, model: str, stage: int
) -> None:
    import peft  # here: it takes seconds

    run, values = runs / f"{model}-sgd-z{stage}", config(runs, model, "sgd", stage)
    if model == "llama":
        with pytest.raises(ConfigError, match=r"or give --adapter, .* \[target-not-trusted\]"):
            export(str(run), tmp_path / "none")
    written = export(str(run), tmp_path / "adapter", adapter=True)
    export(str(run), tmp_path / "merged", trust=str(run))
    assert (
        0
        < written["adapter_model.safetensors"]
        < 4 * sum(one.numel() for one in weights(run).values()) + 8000
    )
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    # The trained model: the base with the checkpoint's own tensors put into modules that peft made.
    trained = build(values)
    lora = {
        name: value
        for name, value in values["training"]["lora"].items()
        if name != "modules_to_save"
    }
    peft.inject_adapter_in_model(peft.LoraConfig(**lora), trained)
    held = weights(run)
    assert not trained.load_state_dict(dict(held), strict=False).unexpected_keys
    logits = trained.eval()(tokens)
    loaded = peft.PeftModel.from_pretrained(build(values), str(tmp_path / "adapter")).eval()
    assert float((loaded(tokens) - logits).abs().max()) < 1e-6
    merged = build(values, seed=9)
    from safetensors.torch import load_file

    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    difference = float((merged.eval()(tokens) - logits).abs().max())
    print(
        f"{model} z{stage}: merged {difference:.1e}, adapter {written['adapter_model.safetensors']} bytes"
    )
    assert difference < 1e-5
    assert torch.equal(framework.load(run, trust=True)(tokens), merged(tokens))
    own = framework.load(run, model=lambda: build(values))
    assert torch.equal(own(tokens), merged(tokens))
    assert float((build(values).eval()(tokens) - logits).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["rslora", "dora", "dora-spread"])
def test_other_forms_of_adapters_are_those_of_peft(runs: Path, tmp_path: Path, name: str) -> None:
    run = runs / name
    values = varied(runs, name)
    compare_with_peft(run, values, tmp_path / "adapter")


def test_a_run_in_few_bits_resumes_to_the_bit_and_moves(runs: Path) -> None:
    whole = weights(runs / "nf4-z2")
    again = weights(runs / "nf4-z2-of-z2")
    moved = weights(runs / "nf4-z3-of-z2")
    plainly = weights(runs / "gpt-adamw-z2")
    assert [*whole] == [*again] == [*plainly]
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert max(float((whole[name] - moved[name]).abs().max()) for name in whole) < 1e-5
    assert max(float((whole[name] - plainly[name]).abs().max()) for name in whole) > 1e-4


@pytest.mark.parametrize("name", ["nf4", "nf4-spread", "int8-spread", "int8-bf16"])
def test_adapters_are_merged_into_the_numbers_that_few_bits_hold(runs: Path, name: str) -> None:
    import peft  # here: it takes seconds

    values = varied(runs, name)
    base = build(values)
    lora = LoRA(**values["training"]["lora"])
    if "bf16" in name:
        base.to(torch.bfloat16).to(torch.float32)
    peft.inject_adapter_in_model(peft.LoraConfig(**lora.of_peft()), base)
    round_base(base, lora.quantization)
    if "bf16" in name:
        base.to(torch.bfloat16).to(torch.float32)
    held = weights(runs / name, LONG_STEPS)
    assert not base.load_state_dict(dict(held), strict=False).unexpected_keys
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = base.eval()(tokens)
        found = framework.load(runs / name, trust=True)(tokens)
    assert float((found - expected).abs().max()) < 1e-5


def test_adapters_that_nothing_went_through_are_not_exported(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MergedWeights.__getitem__
    zeros = lambda self, name: read(self, name) * (0.0 if "lora_B" in name else 1.0)  # noqa: E731
    monkeypatch.setattr(MergedWeights, "__getitem__", zeros)
    all_of_them = 3 * NUM_BLOCKS
    with pytest.raises(
        StorageError,
        match=rf"{all_of_them} of {all_of_them} adapters have a B of zeros .* after {NUM_STEPS} steps.* \[adapter-unt",
    ):
        export(str(runs / "gpt-sgd-z0"), tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_a_weight_of_two_names_is_not_exported_for_peft(runs: Path, tmp_path: Path) -> None:
    held = weights(runs / "gpt-sgd-z0")
    held.ties = {"head.weight": "embed.weight"}
    with pytest.raises(
        StorageError, match=r"one weight, of which peft would make two; .* \[adapter-tied\]"
    ):
        write_adapter(tmp_path, held, dtype=torch.float32)


def test_adapters_are_no_weights_to_start_from(runs: Path) -> None:
    from framework.engine.weights import checkpoint_weights

    with pytest.raises(
        ConfigError, match=r"it holds adapters, .* name an export of it \[weights-are-adapters\]"
    ):
        checkpoint_weights(weights(runs / "gpt-sgd-z0").checkpoint)


@pytest.mark.parametrize(
    ("lora", "kind"),
    [
        ({"target_modules": ["querry"]}, "did you mean query.*lora-matches-nothing"),
        (
            {"target_modules": ["query"], "modules_to_save": ["norms"]},
            "did you mean norm.*lora-matches-nothing",
        ),
        ({"target_modules": ["embed"]}, "lora-tied"),
        ({"target_modules": ["norm"]}, "lora-not-adaptable"),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(
    tmp_path: Path, lora: dict[str, Any], kind: str
) -> None:
    refused = partial(pytest.raises, ConfigError, match=kind)
    with refused():
        add_adapters(build(config(tmp_path, "gpt", "sgd", 0)), LoRA(**lora), seed=0)
