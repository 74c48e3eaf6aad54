"""What one GPU does with GPT-2, and how near the plan comes: python -m benchmarks.one_gpu [--only
NAME ...]; and how far from other loops: python -m benchmarks.one_gpu --against

Without `--against`: GPT-2 (124 million weights) and its larger ones, 1,024 tokens of Python's own
sources, byte by byte, each case through `framework.fit` in its turn: ZeRO stages, precisions,
optimizers, recomputation, torch.compile. A case takes 40 steps, with a logged point every ten;
printed are the median of the last two points, the highest memory that torch had allocated, and what
the plan had estimated of both for this device. The first eight of `benchmarks/results` took 100 s on
an H200; it takes a CUDA device.

With it: GPT-2, GPT-2 XL, 8 of the 32 blocks of a Llama of 8 billion (whole and by LoRA), ResNet-50,
LeNet and BERT large through ours (the Trainer as `framework.fit` has it), a plain loop (compiled,
fused AdamW, weights in bf16), DeepSpeed's engine in a bare loop, Accelerate and Hugging Face's
Trainer, in bf16, with the same weights, batches and clipping. They take turns in blocks of steps,
five of them, the first one as warm-up; where not all fit into the memory they run one after the
other. Printed are the ratios of our blocks to theirs: median (smallest - largest). The rows are
measured in the order of `benchmarks.loops.cases.ORDER`, for at most `--seconds` (400); each is
written when it is there, and a second call goes on with the missing ones. `--tiny`, for the tests:
small shapes in fp32, also on several processes of a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import framework
from benchmarks.loops import cases as loops
from benchmarks.records import RESULTS, machine, read_metrics, write
from framework.engine.distributed import process_group, rank
from framework.errors import FrameworkError

STEPS = 40
LOG_EVERY = 10
LARGER = {"model": {"kind": "gpt", "size": "gpt2-xl"}, "batch": {"global_size": 8, "micro_size": 8}}
CASES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero": {"stage": stage}} for stage in range(4)},
    "autocast": {"precision": {"dtype": "autocast"}},
    "fp16": {"precision": {"dtype": "fp16"}},
    "fp32": {"precision": {"dtype": "fp32"}, "zero": {"stage": 0}},
    "DeepSpeed's fused Adam": {
        "optimizer": {"kind": "adamw", "lr": 6e-4, "implementation": "deepspeed"}
    },
    "recomputed": {"training": {"recompute_every": 1}},
    "compiled": {"training": {"compile": {"per": "block"}}},
    "accumulated": {"batch": {"global_size": 128, "micro_size": 32}},
    "optimizer on the host": {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "1.6 billion, ZeRO 1": LARGER,
    "1.6 billion, ZeRO 3, recomputed": {
        **LARGER,
        "zero": {"stage": 3},
        "training": {"recompute_every": 1},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, help="the file of the results")
    parser.add_argument("--against", action="store_true", help="ours against other loops")
    parser.add_argument("--models", nargs="+", choices=loops.CASES, help="with --against")
    parser.add_argument("--seconds", type=float, default=400.0, help="with --against")
    parser.add_argument("--tiny", action="store_true", help="with --against: small shapes, fp32")
    arguments = parser.parse_args()
    if arguments.out is None:
        name = "one_gpu_against.json" if arguments.against else "one_gpu.json"
        arguments.out = RESULTS / name
    if arguments.against:
        against(arguments)
        return
    gpu = torch.cuda.get_device_properties(0)
    results: dict[str, Any] = {
        "machine": machine() | {"gpu": gpu.name, "gpu_bytes": gpu.total_memory},
        "cases": {},
    }
    with process_group(None), tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            figures = measure(name, Path(folder))
            results["cases"][name] = figures
            write(results, arguments.out)
            print(f"{name}: {json.dumps(figures)}", flush=True)


def against(arguments: argparse.Namespace) -> None:
    """Hold ours against other loops, and print the table. Collective."""
    from benchmarks.loops.turns import Options, measure_all, table

    cases = loops.TINY if arguments.tiny else loops.CASES
    if arguments.models:
        cases = {name: case for name, case in cases.items() if name in arguments.models}
    facts: dict[str, Any] = {"machine": machine()}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts["machine"] |= {"gpu": gpu.name, "gpu_bytes": gpu.total_memory}
    with process_group(None), tempfile.TemporaryDirectory() as folder:
        options = Options(
            cases,
            Path(folder),
            arguments.out,
            arguments.seconds,
            log_every=2 if arguments.tiny else 10,
            half=not arguments.tiny,
            compiles=not arguments.tiny,
            blocks=2 if arguments.tiny else 4,
        )
        results = measure_all(options, facts)
        if rank() == 0:
            print("\n".join(table(results, cases)))


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train a case; returns its figures beside the plan's, or why it failed."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    bytes_before = torch.cuda.memory_allocated()
    case = CASES[name]
    try:
        framework.fit(
            {
                "run": {"name": "case", "output_dir": str(folder / name)},
                "model": {"kind": "gpt", "size": "gpt2"},
                "data": {"kind": "text", "sequence_length": 1024},
                "task": {"kind": "causal_lm"},
                "precision": {"dtype": "bf16"},
                "zero": {"stage": 1},
                "batch": {"global_size": 32, "micro_size": 32},
                "optimizer": {"kind": "adamw", "lr": 6e-4},
                "evaluation": {"at_end": False},
                "checkpoint": {"at_end": False},
                "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
                **case,
                "training": {
                    **case.get("training", {}),
                    "max_steps": STEPS,
                    "log_every": LOG_EVERY,
                },
            }
        )
    except (FrameworkError, RuntimeError) as error:
        return {"failed": str(error)[:2000]}
    rows = [row for row in read_metrics(folder / name / "case") if "time/step_ms" in row]
    plan = json.loads((folder / name / "case/plan.json").read_text(encoding="utf-8"))
    measured = plan["measured"]
    last_rows = rows[-2:]
    return {
        "step_ms": round(statistics.median(row["time/step_ms"] for row in last_rows), 2),
        "estimated_step_ms": _rounded(measured["step_seconds"].get("estimate"), 1e3),
        "tokens_per_second": round(
            statistics.median(row["throughput/tokens_per_sec"] for row in last_rows)
        ),
        "mfu": round(statistics.median(row.get("throughput/mfu", 0.0) for row in last_rows), 4),
        "peak_gib": round((rows[0]["memory/device_peak_bytes"] - bytes_before) / 2**30, 3),
        "estimated_peak_gib": _rounded(measured["device_peak_bytes"].get("estimate"), 2**-30),
        "loss": rows[-1]["train/loss"],
        "left_by_others_bytes": bytes_before,
    }


def _rounded(value: float | None, factor: float) -> float | None:
    if value is None:
        return None
    return round(factor * value, 3)


if __name__ == "__main__":
    main()
