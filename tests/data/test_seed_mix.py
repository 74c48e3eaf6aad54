from __future__ import annotations

import numpy as np

from framework.data.order import mix, mix_int


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as published, in plain integers."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def test_one_part_is_the_first_output_of_splitmix64() -> None:
    assert mix_int(0) == 0xE220A8397B1DCDAF  # the published test vector for seed 0
    for seed in (1, 42, 2**63, 2**64 - 1):
        assert mix_int(seed) == splitmix64(seed, 1)[0]


def test_values_never_change_between_versions() -> None:
    assert mix_int(1, 2, 3) == 0xD0734750FDE362B3


def test_arrays_are_mixed_elementwise_like_integers() -> None:
    indices = np.array([0, 5, 10**12])
    assert mix(7, indices, 3).tolist() == [mix_int(7, int(index), 3) for index in indices]


def test_order_and_grouping_of_parts_matter() -> None:
    parts = [(0,), (0, 0), (1, 0), (0, 1), (1, 1), (-1,), (2, 3), (3, 2)]
    assert len({mix_int(*part) for part in parts}) == len(parts)


def test_neighbouring_seeds_and_indices_do_not_collide() -> None:
    indices = np.arange(1000)
    seen = {
        value
        for seed in range(20)
        for value in (mix(seed, 0, indices) & np.uint64(0xFFFFFFFF)).tolist()
    }
    assert len(seen) > 19_990  # 20,000 draws of 32 bits: 0.05 collisions expected
