"""Moves checkpoints between layouts, many cases in one launched job: move_cases.py CASES.json.

A case is {"config", "own": [run folder, file], "loads": [[run folder, file], ...]}. The checkpoint
of `own`, if it is given, is loaded by DeepSpeed's own means; those of `loads` as moved ones, one
after the other into the same engine. The whole state that the engine then holds is written to the
file, read by DeepSpeed's own functions (stages 1 to 3) or from torch's optimizer (stage 0).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch._utils import _unflatten_dense_tensors

from framework.checkpoint.resume_point import find_checkpoint
from framework.checkpoint.state.deepspeed_format import describe_raw
from framework.checkpoint.state.optimizer_shards import OptimizerViews
from framework.checkpoint.state.weight_names import names_of
from framework.checkpoint.state.weight_parts import splits_of
from framework.config.groups import stepped_by_muon
from framework.config.load import config_from_values
from framework.config.optimizer import Muon
from framework.engine.distributed import gather, process_group
from framework.setup.assemble import assemble_engine
from framework.setup.prepare_run import prepare
from tests.jobs.half_on_cpu import allow_fp16

KEYS = ("exp_avg", "exp_avg_sq")
OF_MUON = ("momentum_buffer",)


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    allow_fp16()
    with process_group(None):
        for case in cases:
            config = config_from_values(case["config"])
            engine: Any = assemble_engine(prepare(config))
            keys = keys_by_name(engine, config.optimizer)
            loads = [(source, truth, True) for source, truth in case["loads"]]
            if "own" in case:
                loads.insert(0, (*case["own"], False))
            for source, truth, moved in loads:
                scramble(engine, keys)
                if config.precision.dtype == "fp16":
                    engine.engine.optimizer.cur_scale = 3.0
                checkpoint = find_checkpoint(
                    source, run_checkpoints=Path(source), allow_unverified=True
                )
                assert checkpoint is not None
                checkpoint = describe_raw(checkpoint)
                state = engine.load(checkpoint, moved=moved)
                held = whole_state(engine, keys)
                if torch.distributed.get_rank() == 0:
                    loss_scale = float(engine.engine._get_optimizer_loss_scale() or 1.0)
                    torch.save(
                        {"state": held, "step": state["step"], "loss_scale": loss_scale}, truth
                    )
            engine.close()


def keys_by_name(engine: Any, optimizer: Any) -> dict[str, tuple[str, ...]]:
    """Keys of the state that the optimizer keeps of each weight."""
    keys = {}
    for tensor, name in names_in(engine).items():
        shape = getattr(tensor, "ds_shape", tensor.shape)
        is_by_muon = isinstance(optimizer, Muon) and stepped_by_muon(name, shape, optimizer)
        keys[name] = OF_MUON if is_by_muon else KEYS
    return keys


def scramble(engine: Any, keys: dict[str, tuple[str, ...]]) -> None:
    """Nothing of the last load may pass for the next one's."""
    names = names_in(engine)
    with torch.no_grad():
        for tensor in names:
            tensor.fill_(7)
        for view in OptimizerViews(engine.engine, names).views(KEYS, keys_of=keys.__getitem__):
            view.values.fill_(7)


def names_in(engine: Any) -> Any:
    module = engine.engine.module
    return module.plain_names() if hasattr(module, "plain_names") else names_of(module)


def whole_state(engine: Any, keys: dict[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """Every weight and moment of the model, on rank 0. Collective."""
    deepspeed_engine = engine.engine
    names = names_in(engine)
    optimizer = deepspeed_engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()
    own: dict[str, torch.Tensor] = {}
    stage0 = copies_of(optimizer)
    for tensor, name in names.items():
        if not hasattr(tensor, "ds_id"):
            own[f"{name} model"] = tensor.detach().clone()
        if not tensor.requires_grad:
            continue
        if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
            own[f"{name} fp32"] = safe_get_full_fp32_param(tensor).detach().clone()
            own |= {
                f"{name} {key}": safe_get_full_optimizer_state(tensor, key).detach().clone()
                for key in keys[name]
            }
        else:
            copy, state = stage0[tensor] if stage0 else (tensor, optimizer.state[tensor])
            own[f"{name} fp32"] = copy.detach().clone()
            own |= {f"{name} {key}": state[key].clone() for key in keys[name]}
    layout = engine._layout
    if layout.pipe_size * layout.tensor_size > 1:
        everyone = gather(own)
    else:
        everyone = of_last_rank(own)
    whole = {name: value for part in everyone for name, value in part.items()}
    splits = {name: split for part in gather(splits_of(names)) for name, split in part.items()}
    size = layout.tensor_size
    for name, split in splits.items():
        kinds = ("model", "fp32", *KEYS, *OF_MUON)
        for key in [f"{name} {what}" for what in kinds if f"{name} {what}" in whole]:
            # ranks of a group stand side by side; a stage has its own weights
            whole[key] = split.whole([part[key] for part in everyone if key in part][:size])
    return whole


def of_last_rank(own: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return what the last rank holds, where all ranks hold the same: less is sent. Collective."""
    parts = [own]
    torch.distributed.broadcast_object_list(parts, src=torch.distributed.get_world_size() - 1)
    return parts


def copies_of(optimizer: Any) -> dict[torch.Tensor, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Half precision at stage 0: parameter -> its fp32 copy and the state of that, from DeepSpeed's
    wrapper.
    """
    found: dict[torch.Tensor, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    if hasattr(optimizer, "fp32_groups_flat"):  # around FusedAdam
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            held = {
                key: _unflatten_dense_tensors(optimizer.optimizer.state[flat][key], group)
                for key in KEYS
            }
            for number, copy in enumerate(_unflatten_dense_tensors(flat, group)):
                found[group[number]] = copy, {key: held[key][number] for key in KEYS}
    elif hasattr(optimizer, "fp32_groups"):
        for group, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            found |= {
                own: (copy, optimizer.optimizer.state[copy])
                for own, copy in zip(group, copies, strict=True)
            }
    return found


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
