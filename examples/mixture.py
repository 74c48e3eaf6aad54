"""Two sources in fixed shares: of four samples three are clean, one is noisy, whatever the number
of ranks.

    python examples/mixture.py 40

The smaller source begins anew where it ends. The same in a file:

    data: {kind: mixture, parts: [{weight: 3, data: {...}}, {weight: 1, data: {...}}]}
"""

import sys

import torch
from torch.utils.data import TensorDataset

import framework
from framework.data.mixtures import Mixture


def sums(size: int, *, noise: float, seed: int) -> TensorDataset:
    """Eight numbers, and whether their sum is positive, measured with some noise."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=random)
    return TensorDataset(x, (x.sum(1) + noise * torch.randn(size, generator=random) > 0).long())


def sources() -> list[tuple[float, TensorDataset]]:
    """Weight and samples of each."""
    return [(3, sums(960, noise=0.0, seed=0)), (1, sums(160, noise=2.0, seed=1))]


def main(steps: int) -> None:
    """Train, and evaluate on clean samples."""
    config = {
        "run": {"name": "mixture"},
        "model": {"target": "torch.nn:Linear", "args": {"in_features": 8, "out_features": 2}},
        "batch": {"global_size": 32},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "scheduler": {"kind": "constant"},
        "training": {"max_steps": steps, "log_every": 1},
    }
    framework.fit(config, train_data=Mixture(sources()), eval_data=sums(256, noise=0.0, seed=2))


if __name__ == "__main__":
    main(int(sys.argv[1]))
