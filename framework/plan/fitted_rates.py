"""Constants of the estimate of a step's time that no table of devices has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Rates:
    """Constants that no table of devices has.

    The fitted ones name the sources of `benchmarks/planner` that show them most. They were fitted
    all at once by ``python -m benchmarks.planner.validate --fit``: least squares of log ratios of
    throughput, in which each source counts as much as every other. `docs/planner.md` has the error
    of each source with constants that were fitted without its points.

    Attributes:
        plateau: share of the fastest matrix product that the products of a large model reach.
            Fitted: llm-foundry, internlm, narayanan-ptd, bigscience on A100.
        plateau_hopper: the same since Hopper: its clock falls under load. Fitted: llm-foundry,
            torchtitan, torchao, colossalai.
        attention: share of the fastest matrix product that attention reaches, in the scores that
            are computed; fused kernels leave masked ones out. Fitted: llm-foundry, qwen with 4,096
            and 8,192 tokens.
        attention_hopper: the same since Hopper: torch's kernels of attention were not written for
            its tensor cores. Fitted: llm-foundry.
        width: half of the plateau is reached where a part's weights on one device are a square of
            this width, on a device of 1e15 FLOP/s; it grows with the root of those, as a product is
            divided among more units. Fitted: llm-foundry's small models, nvidia-bert,
            nvidia-resnet, tensor 2 of internlm.
        memory: share of the memory's bandwidth that other operations reach. Fitted: nvidia-bert,
            nvidia-resnet, bigscience, which write the scores of attention.
        overlap: share of the computation beside which something is sent that hides it. Values from
            0.3 to 0.7 fit the points equally well.
        network: share of the network's bandwidth that large collectives reach. Fitted: internlm,
            llm-foundry on several hosts; printed is four fifths (source `mle-network` of
            devices.json).
        best: share of the peak that the fastest matrix product reaches on a device without a
            measurement: NVIDIA's reach 0.73 to 0.87.
        best_plain: as `best`, of products in fp32, which tensor cores take no part in. Fitted:
            nvidia-bert and nvidia-resnet on V100, at its bound.
        best_tf32: the same of products in TF32, with operands twice as wide as in bf16. Fitted:
            nvidia-bert and nvidia-resnet on A100.
        launch_seconds: time of the host to start an operation; of each one that runs forward two
            run backward. The device waits for it where its own work takes less. Fitted: qwen with
            256 and 512 tokens.
        weight_seconds: time of the host for one weight in one pass at stage 3. Fitted: qwen at ZeRO
            3, deepspeed-bf16-master, lsaie.
        torch_on_host: how many times as long torch's Adam takes on the host as DeepSpeed's kernel,
            which reads and writes everything once: 5 to 7 (DeepSpeed 0.19.8, ops/adam/cpu_adam.py).
        joined_bytes: moved for an element of the optimizer's share by a step at stages 1 and 2
            beyond what the optimizer itself needs: counted, not measured on a device. The norm
            reads 2, the fp32 gradients take 2 + 4, and 4 + 4 where they are divided; the look for
            what was written into weights (engine/written_weights.py) takes 30. DeepSpeed's own
            step took 158, measured with GPT-2 and GPT-2 XL on an H200: 8 and 101 ms
            (benchmarks/results/one_gpu.json).
    """

    plateau: float = 0.839
    plateau_hopper: float = 0.759
    attention: float = 0.229
    attention_hopper: float = 0.222
    width: float = 1185.0
    memory: float = 0.491
    overlap: float = 0.5
    network: float = 0.779
    best: float = 0.8
    best_plain: float = 1.0
    best_tf32: float = 0.608
    launch_seconds: float = 2.59e-5
    weight_seconds: float = 3.3e-4
    torch_on_host: float = 6.0
    joined_bytes: float = 46.0


RATES: Final = Rates()
# Of CPUs, on which the engine was measured: the ranks share the cores, so that nothing hides behind
# anything, products of every size reach what was measured, and the host's own time is the engine's.
OF_PROCESSORS: Final = Rates(
    plateau=1.0,
    attention=0.646,
    width=0.0,
    memory=1.0,
    network=1.0,
    overlap=0.0,
    best_tf32=1.0,
    launch_seconds=0.0,
    weight_seconds=0.0,
    joined_bytes=0.0,
)
