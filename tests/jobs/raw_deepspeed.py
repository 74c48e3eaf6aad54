"""Plain DeepSpeed, without this framework, trains models and saves them with
`engine.save_checkpoint`: raw_deepspeed.py FOLDER.

Beside every checkpoint rank 0 writes ``<case>.pt``: weights and moments, gathered from the living
engine by DeepSpeed's functions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from framework.engine.extensions import use_own_cache
from framework.recipes.image_models.small_nets import MLP
from tests.jobs.half_on_cpu import allow_fp16
from tests.jobs.move_cases import KEYS, copies_of
from tests.jobs.tied_net import TiedNet

SAMPLES, STEPS = 16, 3
# Case -> stage, precision, optimizer, model.
CASES: dict[str, tuple[int, str, str, str]] = {
    **{f"z{stage}": (stage, "fp32", "AdamW", "mlp") for stage in (0, 1, 2, 3)},
    "z0-bf16": (0, "bf16", "AdamW", "mlp"),
    "z2-bf16": (2, "bf16", "AdamW", "mlp"),
    "z3-fp16": (3, "fp16", "AdamW", "mlp"),
    "z1-sgd": (1, "fp32", "SGD", "mlp"),
    "z0-tied": (0, "fp32", "AdamW", "tied"),
    "z2-tied": (2, "fp32", "AdamW", "tied"),
}
# Pipelines of two stages, with a tied embedding and a function: case -> stage, precision.
PIPES = {"pipe-z0": (0, "fp32"), "pipe-z1-bf16": (1, "bf16")}
WORDS, WIDTH = 20, 8


def ds_config(stage: int, dtype: str, optimizer: str) -> dict[str, Any]:
    parameters = (
        {"lr": 1e-3, "torch_adam": True} if optimizer == "AdamW" else {"lr": 1e-3, "momentum": 0.9}
    )
    half = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": optimizer, "params": parameters},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-3, "warmup_type": "linear"},
        },
        **half,
    }


def train(case: str, folder: Path) -> None:
    stage, dtype, optimizer, model = CASES[case]
    torch.manual_seed(0)
    config = ds_config(stage, dtype, optimizer)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        module = TiedNet() if model == "tied" else MLP(10, image_size=8, hidden_sizes=[24])
    engine, _, _, _ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config, dist_init_required=False
    )
    side, draw = (
        28 if model == "tied" else 8,
        torch.Generator().manual_seed(torch.distributed.get_rank()),
    )
    kind = next(module.parameters()).dtype
    for _ in range(STEPS):
        outputs = engine(torch.rand(SAMPLES // 2, 1, side, side, generator=draw).to(kind))
        engine.backward(
            torch.nn.functional.cross_entropy(
                outputs.float(), torch.randint(10, (SAMPLES // 2,), generator=draw)
            )
        )
        engine.step()
    tag = "after-three" if case == "z0-tied" else None  # a tag of the user's own
    engine.save_checkpoint(str(folder / case), tag=tag)
    held = state_of(engine, ("momentum_buffer",) if optimizer == "SGD" else KEYS)
    if torch.distributed.get_rank() == 0:
        torch.save(held, folder / f"{case}.pt")
    engine.destroy()


def logits(words: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(value, words.weight)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def train_pipeline(case: str, folder: Path) -> None:
    stage, dtype = PIPES[case]
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("words", torch.nn.Embedding, WORDS, WIDTH),
        LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
        torch.relu,
        LayerSpec(torch.nn.LayerNorm, WIDTH),
        LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("words", torch.nn.Embedding, WORDS, WIDTH, forward_fn=logits),
    ]
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config={**ds_config(stage, dtype, "AdamW"), "train_micro_batch_size_per_gpu": 4},
        dist_init_required=False,
    )
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(WORDS, (4, 4, 6), generator=draw)
        engine.train_batch(data_iter=iter([(rows, rows.roll(1, 1)) for rows in tokens]))
    engine.save_checkpoint(str(folder / case), client_state={"best": 1.5})
    held = {}
    for name, weight in module.named_parameters():
        if stage:
            weight = safe_get_full_fp32_param(weight)
        held[name.replace("tied_modules.words", "0")] = weight.detach().clone()
    of_stages: list[Any] = [None, None]
    torch.distributed.all_gather_object(of_stages, held)
    if torch.distributed.get_rank() == 0:
        torch.save(of_stages[1] | of_stages[0], folder / f"{case}.pt")
    engine.destroy()


def state_of(engine: Any, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Weights under their plain names, and moments as ``<name> <key>``. Collective."""
    stage0, found = copies_of(engine.optimizer), {}
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        if not getattr(tensor, "requires_grad", False):
            found[name] = tensor.detach().clone()
        elif hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
            found[name] = safe_get_full_fp32_param(tensor).detach().clone()
            found |= {
                f"{name} {key}": safe_get_full_optimizer_state(tensor, key).detach().clone()
                for key in keys
            }
        else:
            copy, state = stage0[tensor] if stage0 else (tensor, engine.optimizer.state[tensor])
            found[name] = copy.detach().clone()
            found |= {f"{name} {key}": state[key].clone() for key in keys}
    return found


if __name__ == "__main__":
    use_own_cache()  # where its shared-memory op is compiled already
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    allow_fp16()
    for name in CASES:
        train(name, Path(sys.argv[1]))
    for name in PIPES:
        train_pipeline(name, Path(sys.argv[1]))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
