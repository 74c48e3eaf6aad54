"""What is installed, read off its files: importing torch would take seconds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def torch_text(name: str) -> str | None:
    """A line of torch's version.py, such as ``__version__`` or ``cuda``; None where it says None or there is no
    torch.
    """
    folder = package_folder("torch")
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return None
    found = re.search(rf"^{re.escape(name)}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return found[1] if found else None


def package_folder(name: str) -> Path | None:
    """Where a package is installed; finding one without dots imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None
