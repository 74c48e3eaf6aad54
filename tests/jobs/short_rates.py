"""What `plan --measure` starts, with a glance at each figure instead of a quarter of a second:
short_rates OUT.
"""

from __future__ import annotations

import sys

from framework.commands import machine_rates

if __name__ == "__main__":
    machine_rates._SECONDS, machine_rates._LARGEST = 0.02, 0.02  # type: ignore[misc]
    machine_rates._TRIES, machine_rates._STEPS = 1, 4  # type: ignore[misc]
    sys.exit(machine_rates.main(sys.argv[1:]))
