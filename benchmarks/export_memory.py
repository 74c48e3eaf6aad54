"""What `export` needs in memory: a checkpoint of ZeRO stage 2 and 3, of any size, written as
DeepSpeed lays it out.

    python benchmarks/export_memory.py [--megabytes 1000] [--out
    benchmarks/results/export_memory.json]

The peak is told twice: all that the process had in memory, and without mapped files (which the
system drops when somebody else needs the room). What Python, torch and DeepSpeed take before the
export begins is subtracted from both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.manifest import FORMAT, seal
from framework.checkpoint.names import MANIFEST
from framework.config.load import config_from_values
from framework.system.files import hash_file

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
HIDDEN = 2048
PROGRAM = """
import re, sys, threading, time
from framework.commands.export import main
def now(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, peak, done = (now("RssAnon"), now("VmRSS")), [0, 0], threading.Event()
def watch():
    while not done.wait(0.002):
        for number, field in enumerate(("RssAnon", "VmRSS")):
            peak[number] = max(peak[number], now(field))
# A daemon: if `main` raises, the process must end, and not wait for a thread that never stops.
thread = threading.Thread(target=watch, daemon=True); thread.start()
started = time.perf_counter()
code = main(sys.argv[1:])
done.set(); thread.join()
print("measured", code, peak[0] - before[0], peak[1] - before[1], time.perf_counter() - started)
"""


def write_checkpoint(folder: Path, *, stage: int, num_bytes: int) -> Path:
    """Write a checkpoint of square fp32 weights, as after training in bf16 with Adam; returns its
    folder.
    """
    from deepspeed.utils.tensor_fragment import fragment_address

    count = max(2, num_bytes // (4 * HIDDEN * HIDDEN) // NUM_RANKS * NUM_RANKS)
    shapes = {f"layers.{number}.weight": torch.Size([HIDDEN, HIDDEN]) for number in range(count)}
    checkpoint = folder / "checkpoints" / "global_step1"
    checkpoint.mkdir(parents=True)
    share_size = count * HIDDEN * HIDDEN // NUM_RANKS
    common: dict[str, Any] = {
        "param_shapes": [shapes],
        "shared_params": {},
        "frozen_param_shapes": None,
        "optimizer": None,
    }
    for rank in range(NUM_RANKS):
        # Random, so that no file system stores less than it seems.
        flat = torch.empty(share_size).normal_(generator=torch.Generator().manual_seed(rank))
        state = {0: {"step": torch.tensor(1.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}}
        inner: dict[str, Any] = {
            "optimizer_state_dict": {"state": state, "param_groups": []},
            "fp32_flat_groups": [flat],
        }
        if stage == 2:
            names = list(shapes)[rank * count // NUM_RANKS : (rank + 1) * count // NUM_RANKS]
            size = HIDDEN * HIDDEN
            slices = {
                name: fragment_address(size, number * size) for number, name in enumerate(names)
            }
            inner = {
                "base_optimizer_state": inner["optimizer_state_dict"],
                "single_partition_of_fp32_groups": [flat],
                "param_slice_mappings": [slices],
            }
        torch.save(
            {"optimizer_state_dict": inner},
            checkpoint / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if stage == 3:
            empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
            torch.save(
                common | {"module": empty},
                checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            )
    if stage == 2:
        whole = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        torch.save(common | {"module": whole}, checkpoint / "mp_rank_00_model_states.pt")
    files = {path.name: asdict(hash_file(path)) for path in sorted(checkpoint.iterdir())}
    config = config_from_values(
        {"run": {"name": "big"}, "zero": {"stage": stage}, "precision": {"dtype": "bf16"}}
    ).to_dict()
    layout = {
        "world_size": NUM_RANKS,
        "data_parallel_size": NUM_RANKS,
        "pipe_size": 1,
        "global_size": NUM_RANKS,
        "micro_size": 1,
        "accumulation_steps": 1,
    }
    manifest = {"format": FORMAT, "step": 1, "config": config, "layout": layout, "files": files}
    (checkpoint / MANIFEST).write_text(seal(manifest), encoding="utf-8")
    return checkpoint


def measure(checkpoint: Path, out: Path, *options: str) -> dict[str, Any]:
    """Export in a process of its own, and return its figures."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), str(out), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "measured 0" in done.stdout, done.stdout + done.stderr
    _, _, anonymous_bytes, resident_bytes, seconds = done.stdout.splitlines()[-1].split()
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    return {
        "exported_bytes": num_bytes,
        "peak_bytes": int(resident_bytes),
        "peak_bytes_without_mapped_files": int(anonymous_bytes),
        "seconds": round(float(seconds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the model in fp32")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/export_memory.json")
    arguments = parser.parse_args()
    cases = {}
    for stage in (2, 3):
        for options in ((), ("--dtype", "bf16", "--shard-size", "200MB")):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = write_checkpoint(
                    Path(folder), stage=stage, num_bytes=arguments.megabytes * 10**6
                )
                name = " ".join([f"ZeRO-{stage}", *options])
                cases[name] = measure(checkpoint, Path(folder, "out"), *options)
                print(name, cases[name])
    machine = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    result = {"machine": machine, "model_bytes_fp32": arguments.megabytes * 10**6, "cases": cases}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
