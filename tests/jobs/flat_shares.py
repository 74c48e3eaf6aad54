"""Sums of gradients of ZeRO 1 and 2, ours beside DeepSpeed's, on the same batches: flat_shares.py
OUT.json.

Of each case and side: how many messages the backward pass of each micro-batch of a step sends, how
many copies and additions of gradients it makes, and how far the shares of a side of DeepSpeed's are
from ours before the step. `context` is DeepSpeed's own (`DeepSpeedEngine.coalesce_grad_reduction`).
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from framework.engine.distributed import device, gather, process_group, rank
from tests.jobs.half_on_cpu import allow_fp16
from tests.jobs.step_passes import ROWS, Seen, batches, build, counted_messages

TWICE = {"batch": {"micro_size": ROWS, "accumulation_steps": 2}}
BF16 = {"precision": {"dtype": "bf16"}} | TWICE
SUMS = {"precision": {"dtype": "bf16", "grad_accumulation": "fp32"}} | TWICE
SENT = {"precision": {"dtype": "bf16", "grad_reduction": "fp32"}} | TWICE
GROUPS = {"optimizer": {"kind": "adamw", "weight_decay": 0.1, "weight_decay_on": "matrices"}}
# a flat tensor takes half a bucket at most: more than one message
SMALL = {"reduce_bucket_size": 4096}
COALESCED = {"stage": 2, "coalesce": True}
CASES: dict[str, dict[str, Any]] = {
    "z1-fp32": {"zero": {"stage": 1}} | TWICE,
    "z1-sums": {"zero": {"stage": 1}} | SUMS,
    "z1-sent": {"zero": {"stage": 1}} | SENT,
    "z1-scattered": {"zero": {"stage": 1}} | BF16,
    "z1-messages": {"zero": {"stage": 1} | SMALL} | GROUPS | BF16,
    "z1-fp16": {
        "zero": {"stage": 1, "round_robin_gradients": True},
        "precision": {"dtype": "fp16"},
    },
    "z2-bf16": {"zero": {"stage": 2}} | GROUPS | BF16,
    "z2-sums": {"zero": {"stage": 2}} | SUMS,
    "z2-large": {"zero": {"stage": 2} | SMALL},
    "coalesced-fp32": {"zero": COALESCED | SMALL} | TWICE,
    "coalesced-bf16": {"zero": COALESCED} | GROUPS | BF16,
    "coalesced-sums": {"zero": COALESCED} | SUMS,
    "coalesced-overlap": {"zero": COALESCED | {"overlap_comm": True}} | SUMS,
}


def shares(
    case: dict[str, Any], *, is_ours: bool, coalesces: bool = False, scatters: bool = False
) -> dict[str, Any]:
    """Take two steps, and of the second return what its backward passes send and copy, and this
    rank's shares; `coalesces`: within DeepSpeed's context.
    """
    engine = build(case, is_ours=is_ours)
    inner = engine.engine
    if is_ours and scatters:  # as over NCCL
        step: Any = engine._flat_step
        step.sums._shares._scatters = True
    steps = inner.gradient_accumulation_steps()
    dtype = next(engine.module.parameters()).dtype
    found: dict[str, Any] = {}
    for step in range(2):
        messages: list[int] = []
        moved = Seen(1)
        with inner.coalesce_grad_reduction() if coalesces else nullcontext():
            for number, batch in enumerate(batches(step, steps), start=1):
                inputs = batch[0].to(device(), dtype)
                targets = batch[1].to(device())
                loss = (engine(inputs).float() - targets).square().mean()
                with counted_messages() as sent, moved:
                    inner.backward(loss, scale_wrt_gas=steps > 1)
                messages.append(sum(sent.values()))
                if number < steps and not coalesces:
                    inner.step()
        groups = [list(group) for _, group in sorted(inner.optimizer.averaged_gradients.items())]
        found = {"messages": messages, "moves": moved.large["copy_"] + moved.large["add_"]}
        found["shares"] = [
            torch.cat([gradient.reshape(-1).float() for gradient in group]) for group in groups
        ]
        if coalesces:  # it counts no micro-batches
            inner.set_gradient_accumulation_boundary(True)
        inner.step()
        inner._is_gradient_accumulation_boundary = None
    found["hooks"] = len(inner.optimizer._grad_acc_hooks)
    engine.close()
    return found


def main() -> None:
    allow_fp16()
    report: dict[str, Any] = {}
    with process_group(None):
        for name, case in CASES.items():
            ours = shares(case, is_ours=True, scatters="scattered" in name)
            zero = {**case["zero"], "coalesce": False, "overlap_comm": False}
            theirs = {"deepspeed": shares(case | {"zero": zero}, is_ours=False)}
            if "coalesced" in name:
                theirs["stage 1"] = shares(case | {"zero": zero | {"stage": 1}}, is_ours=False)
                theirs["context"] = shares(case | {"zero": zero}, is_ours=False, coalesces=True)
            for side in theirs.values():
                pairs = list(zip(ours["shares"], side.pop("shares"), strict=True))
                side["distance"] = max(float((one - two).abs().max()) for one, two in pairs)
                side["size"] = max(float(two.abs().max()) for _, two in pairs)
            del ours["shares"]
            report[name] = {"ours": ours} | theirs
        reports = gather(report)
        if rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(reports, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
