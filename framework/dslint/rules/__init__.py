"""Rules between the keys of a DeepSpeed JSON: what DeepSpeed refuses, breaks on, or silently does otherwise.

A rule is a row of `tables/rules.json`, where settings do not go together and nothing has to be computed, or a function
under `@rule` in the module of its theme; its name is the stable kind of its problems. An error is
what DeepSpeed stops at, when it reads the file, at `deepspeed.initialize`, in the first step, or in the call that the
key is for. A warning is what it takes and does otherwise. A note depends on code outside the JSON. Unknown keys, types,
ranges and removed keys are the key table's (`framework/dslint/keys.py`).

Left out, and why:

- Single keys whose type, range, choices or status say it all, in the key table: batch sizes and accumulation below 1 or
  as floats, `steps_per_print: 0`, dtypes of `communication_data_type`, `torch_autocast.dtype` and `data_types`, texts
  for truth values, `load_balance_coeff`, parameters of optimizers and schedules (`max_grad_norm`, what Muon swallows,
  floats for `warmup_num_steps`), `tag_validation` and `checkpoint.writer` choices, pipe and grad `_partitioned`, inert
  keys (`pipeline.stages`, `allgather_partitions`, `disable_allgather`, `tp.tp_size` without AutoTP), both names of one
  key.
- `communication_data_type` with reduce-scatter: what parses is always allowed.
- Code decides, and the JSON does not even hint at it: `mpu` objects and their float world sizes,
  `args.deepspeed_config` beside `config=`, `tp_model_init`, `no_sync()`, `loss.backward()`, `zero.Init` without a
  config, a schedule of another optimizer, a client optimizer beside the section, `set_epoch`, saving between two steps,
  DualPipeV.
- The model decides: native MoE with stage 3 or without groups, experts per rank, kv heads of AutoTP and Ulysses, shapes
  and layers of a pipeline, AutoEP that matches no layer, batches that differ within a tensor-parallel group.
- The machine decides: wandb, comet and tensorboard packages, libaio and compilers, LOCAL_RANK, device counts for
  quantized gradients on one node, the loss scale that falls to its minimum. The preflight looks at them.
- A checkpoint decides: a missing `latest`, hyper-parameters that come back from it.
"""

from __future__ import annotations

from framework.dslint.facts import Facts
from framework.dslint.rules import batch, offload, optimizer, parallel, precision, silent, zero  # noqa: F401
from framework.dslint.rules.base import ALL, list_rows
from framework.errors import Problem

__all__ = ["ALL", "apply_rules"]

list_rows()


def apply_rules(facts: Facts) -> list[Problem]:
    """Everything that every rule sees."""
    return [problem for rule in ALL for problem in rule(facts)]
