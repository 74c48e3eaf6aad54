"""Whether the run folder is still there and still this run's, looked at whenever something is logged, and so before
every save.
"""

from __future__ import annotations

from framework.train.monitors.base import Point
from framework.train.run_folder import RunFolder


class HeldFolder:
    """No destination of metrics, but a look at where all of them go; what it finds ends the run."""

    name = "run folder"

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def write(self, point: Point) -> None:
        """Raises StorageError where the folder is lost."""
        self._folder.check_held()

    def close(self) -> None:
        """Nothing is held."""
