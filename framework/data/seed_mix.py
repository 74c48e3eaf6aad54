"""One stable hash from integers to 64-bit seeds, the same on every machine and in every version.

splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), its state folded over the parts.
Python's `hash` and numpy's `SeedSequence` are not used: the first is no promise, the second costs 10 us per seed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Seeds = npt.NDArray[np.uint64]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


def mix(*parts: int | npt.NDArray[np.integer]) -> Seeds:
    """Hash the parts, in order, elementwise.

    Args:
        parts: integers (taken modulo 2**64) or one-dimensional integer arrays of one length N.

    Returns:
        Seeds of shape (N,), or (1,) when every part is a plain integer. ``mix(0)`` is the first output of splitmix64
        seeded with 0.
    """
    state: Seeds = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = np.uint64(part & _MASK) if isinstance(part, int) else part.astype(np.uint64)
        state = _scrambled((state ^ word) + _GAMMA)
    return state


def mix_int(*parts: int) -> int:
    """`mix` of plain integers, as a plain integer in [0, 2**64)."""
    return int(mix(*parts)[0])


def _scrambled(state: Seeds) -> Seeds:
    """The output function of splitmix64: a bijection that spreads every input bit over all output bits."""
    state = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _MULTIPLIERS[1]
    scrambled: Seeds = state ^ (state >> _SHIFTS[2])
    return scrambled
