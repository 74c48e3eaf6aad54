"""Bytes as people write them."""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(num_bytes: float) -> str:
    """``512 MiB``, ``1.5 GiB``: two or three digits, in powers of 1024."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return (
        f"{num_bytes:.0f} {_UNITS[unit]}"
        if num_bytes >= 100 or num_bytes == int(num_bytes)
        else f"{num_bytes:.1f} {_UNITS[unit]}"
    )
