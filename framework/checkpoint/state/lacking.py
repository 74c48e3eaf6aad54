"""Names of weights that checkpoints lack, for commands without torch: ``python -m
framework.checkpoint.state.lacking``.

It reads paths of checkpoints from stdin, a list in JSON, and writes a list of names for each, or a
text with the reason why its files cannot be read. Files are read as weights only
(`checkpoint_engine.read_file`), and their numbers not at all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from framework.checkpoint.manifest import read_checkpoint
from framework.checkpoint.state.shard_map import map_checkpoint
from framework.errors import in_one_line


def lacking_names(path: Path) -> list[str] | str:
    """List the names that nothing in a checkpoint has numbers for; or return the reason why they
    cannot be known.
    """
    try:
        checkpoint = read_checkpoint(path)
        if checkpoint is None:
            return "it has no manifest that can be read"
        return list(map_checkpoint(checkpoint).lacking)
    except Exception as error:  # files of another release fail in a dozen ways
        return in_one_line(error)


if __name__ == "__main__":
    json.dump([lacking_names(Path(path)) for path in json.load(sys.stdin)], sys.stdout)
