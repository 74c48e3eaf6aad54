"""Constants of the estimate of a step's time that no table of devices has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Rates:
    """Constants that no table of devices has. The first six were chosen on the `fit` half of the
    published points by ``python -m benchmarks.planner.validate --fit``: least squares of log ratios
    of throughput.

    Attributes:
        plateau: share of the fastest matrix product that the products of a large model reach.
        plateau_hopper: the same since Hopper: its clock falls under load.
        attention: share of the fastest matrix product that attention reaches, in the scores that
            are computed; fused kernels leave masked ones out.
        attention_hopper: the same since Hopper: torch's kernels of attention were not written for
            its tensor cores.
        width: half of the plateau is reached where a part's weights on one device are a square of
            this width, on a device of 1e15 FLOP/s; it grows with the root of those, as a product is
            divided among more units.
        memory: share of the memory's bandwidth that other operations reach.
        overlap: share of the computation beside which something is sent that hides it. Values from
            0.3 to 0.7 fit the points equally well.
        network: share of the network's bandwidth that large collectives reach: four fifths of what
            is printed (source `mle-network` of devices.json).
        best: share of the peak that the fastest matrix product reaches on a device without a
            measurement: NVIDIA's reach 0.73 to 0.87.
        launch_seconds: least time of one part in one pass, in which the host starts its operations.
        weight_seconds: time of the host for one weight in one pass at stage 3. Of the points of the
            `fit` half belle-402-007 to -009 show it: their steps take 0.38 to 0.42 s at every
            length and width, for 293 weights in two passes.
        joined_bytes: moved for an element of the optimizer's share by a step at stages 1 and 2
            beyond what the optimizer itself needs: counted, not measured on a device. The norm
            reads 2, the fp32 gradients take 2 + 4, and 4 + 4 where they are divided; the look for
            what was written into weights (engine/written_weights.py) takes 30. DeepSpeed's own
            step took 158, measured with GPT-2 and GPT-2 XL on an H200: 8 and 101 ms
            (benchmarks/results/one_gpu.json).
    """

    plateau: float = 0.91
    plateau_hopper: float = 0.822
    attention: float = 0.323
    attention_hopper: float = 0.2
    width: float = 2270.0
    memory: float = 0.612
    overlap: float = 0.5
    network: float = 0.8
    best: float = 0.8
    launch_seconds: float = 2e-4
    weight_seconds: float = 6.6e-4
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
    launch_seconds=0.0,
    weight_seconds=0.0,
    joined_bytes=0.0,
)
