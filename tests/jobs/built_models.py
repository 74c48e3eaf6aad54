"""Builds models at ZeRO stage 3 on every rank, in each way that there is, and compares every weight
with what plain PyTorch builds.

Usage: built_models.py OUT.json. Rank 0 writes {case: {way: problems}}; no problem is an empty list.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from framework.engine.distributed import gather, process_group, rank
from framework.engine.model_build import build_model
from framework.errors import ConfigError
from framework.recipes.image_models.resnet import resnet18
from framework.recipes.language_models.gpt import GPT

PLENTY, ONE_AT_A_TIME, TOO_LITTLE = 1 << 40, 2_600_000, 100


class Net(nn.Module):
    """Two layers and a buffer, initialised as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.rand(3))
        self.initialise()

    def initialise(self) -> None:
        """Leave it as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


class Loop(Net):
    """torchvision's way."""

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=3.0)


class Direct(Net):
    """Written without nn.init."""

    def initialise(self) -> None:
        with torch.no_grad():
            self.first.weight.fill_(7.0)
            self.second.weight[0] = 5.0
            self.first.bias.mul_(3.0)


class ThroughData(Net):
    """Written through `.data`."""

    def initialise(self) -> None:
        self.first.weight.data.normal_()
        self.second.weight.data = torch.full((3, 8), 2.0)


class Loaded(Net):
    """Pretrained weights copied in."""

    def initialise(self) -> None:
        shapes = {
            "first.weight": (8, 8),
            "first.bias": (8,),
            "second.weight": (3, 8),
            "second.bias": (3,),
            "scale": (3,),
        }
        self.load_state_dict({name: torch.full(shape, 0.5) for name, shape in shapes.items()})


class Tied(Net):
    """The head is the embedding, written after both are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.trunc_normal_(self.embedding.weight)


class Copied(Net):
    """Layers copied from a first one, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.layers[1].requires_grad_(False)


class Lazy(nn.Module):
    """A layer that takes its width from what it is called with first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)
        self.layer(torch.zeros(2, 5))


def applied() -> nn.Module:
    """`apply` returns the module."""

    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=5.0)

    return Net().apply(draw)


def gpt2() -> nn.Module:
    """transformers' own initialisation, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def from_pretrained(folder: str) -> nn.Module:
    """Weights from a folder."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder)


def encoder() -> nn.Module:
    """torch copies its layers, and its attention zeroes a bias late."""
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2
    )


def gpt() -> nn.Module:
    """Our own."""
    return GPT.of(
        vocab_size=64,
        max_positions=16,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        mlp_size=64,
    )


def config(stage: int = 3, *, bf16: bool = False) -> dict[str, Any]:
    """As little as DeepSpeed wants."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    }


def differences(
    build: Callable[[], nn.Module], *, bf16: bool = False, hpz: int = 1, **how: Any
) -> list[str]:
    """Names of what is not equal to the bit."""
    ds_config = config(bf16=bf16)
    ds_config["zero_optimization"]["zero_hpz_partition_size"] = hpz
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    model = build_model(build, ds_config=ds_config, **how)
    expected = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    wrong = [] if list(expected) == list(found) else ["names"]
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, value in found.items():
            cast = (
                expected[name].bfloat16()
                if bf16 and isinstance(value, nn.Parameter)
                else expected[name]
            )
            if (
                not torch.equal(cast, value.data)
                or value.requires_grad != expected[name].requires_grad
            ):
                wrong.append(name)
            if isinstance(value, nn.Parameter) and not hasattr(value, "ds_id"):
                wrong.append(f"{name} is not partitioned")
    return wrong


def training_difference(
    build: Callable[[], nn.Module], inputs: torch.Tensor, *, stage: int = 3, **how: Any
) -> float:
    """How far the outputs are from plain SGD's after three steps."""
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    model = build_model(build, ds_config=config(stage), **how)
    engine, *_ = deepspeed.initialize(model=model, config=config(stage), dist_init_required=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        for model in (plain, engine):
            loss = model(inputs).square().mean()
            loss.backward() if model is plain else engine.backward(loss)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    return float((plain(inputs) - engine(inputs)).abs().max())


def refusal(build: Callable[[], nn.Module]) -> str:
    """What is said where it fits nowhere."""
    try:
        build_model(build, ds_config=config(), host_bytes=TOO_LITTLE)
    except ConfigError as error:
        return str(error)
    return "not refused"


def main(out: Path) -> None:
    """Run all cases."""
    folder = tempfile.mkdtemp()
    torch.manual_seed(1)
    gpt2().save_pretrained(folder)
    theirs: dict[str, Callable[[], nn.Module]] = {
        "loop": Loop,
        "direct": Direct,
        "through-data": ThroughData,
        "loaded": Loaded,
        "tied": Tied,
        "copied": Copied,
        "applied": applied,
        "gpt2": gpt2,
        "from-pretrained": lambda: from_pretrained(folder),
        "encoder": encoder,
        "attention": lambda: nn.MultiheadAttention(8, 2),
        "lazy": Lazy,
    }
    ours: dict[str, Callable[[], nn.Module]] = {
        "gpt": gpt,
        "resnet18": lambda: resnet18(10, in_channels=1),
    }
    results: dict[str, Any] = {}
    with process_group(None):
        for name, build in (theirs | ours).items():
            results[name] = {"whole": differences(build, host_bytes=PLENTY)}
            results[name]["bf16"] = differences(build, bf16=True, host_bytes=PLENTY)
        # 2.6 MB hold one such model, not two; pieces are lost.
        big = lambda: nn.Sequential(Loop(), nn.Linear(700, 700))  # noqa: E731
        results["loop"]["in turn"] = differences(big, host_bytes=ONE_AT_A_TIME)
        results["gpt"]["pieces"] = differences(gpt, draws_in_pieces=True, host_bytes=TOO_LITTLE)
        results["gpt"]["bf16 pieces"] = differences(
            gpt, bf16=True, draws_in_pieces=True, host_bytes=TOO_LITTLE
        )
        results["applied"]["pieces"] = differences(applied, host_bytes=TOO_LITTLE)
        results["resnet18"]["pieces first"] = differences(
            ours["resnet18"], draws_in_pieces=True, host_bytes=PLENTY
        )
        refused = {
            name: refusal(build)
            for name, build in theirs.items()
            if name not in ("applied", "gpt2", "lazy")
        }
        torch.manual_seed(5)
        trained = {
            "loop": training_difference(Loop, torch.randn(4, 8)),
            "encoder": training_difference(encoder, torch.randn(4, 6, 8)),
            # Rank 0's memory of the host holds one of them, so that the others wait for its
            # weights.
            "in turn, stage 1": training_difference(
                Loop, torch.randn(4, 8), stage=1, host_bytes=TOO_LITTLE
            ),
        }
        in_turn = build_model(Loop, ds_config=config(1, bf16=True), host_bytes=TOO_LITTLE)
        types = gather(sorted({str(parameter.dtype) for parameter in in_turn.parameters()}))
        results["gpt"]["hpZ"] = differences(gpt, hpz=len(gather(0)), draws_in_pieces=True)
        if rank() == 0:
            out.write_text(
                json.dumps(
                    {"differences": results, "refused": refused, "trained": trained, "types": types}
                ),
                encoding="utf-8",
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
