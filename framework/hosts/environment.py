"""Contents of a Python environment, compared with pyproject.toml.

    environment.py stamp EXTRA...         one line that changes when packages must be reinstalled
    environment.py missing EXTRA...       requirements that are not installed, one per line
    environment.py installed              everything that is installed, as constraints
    environment.py requirements EXTRA...  everything that is needed, installed or not, one per line

It stands alone: it must run before anything is installed, on Python 3.10 without a TOML reader, and
never imports the package. `missing` ends with 1, and the reason on stderr, if an installed package
is too old: launch.sh does not change installed packages.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


def requirements(extras: Sequence[str], *, pyproject: str | None = None) -> list[str]:
    """Return the requirements of the base and of these extras, such as ``torch>=2.10``.

    Args:
        extras: names of optional dependencies.
        pyproject: text to read them from; None: that of pyproject.toml.

    Raises:
        SystemExit: there is no such extra.
    """
    if pyproject is not None:
        text = pyproject
    else:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines: list[str] = []
    for name in ("dependencies", *extras):
        # Enough for this project's own file, one quoted requirement to a line; a test compares it
        # with a TOML reader.
        block = re.search(rf"^{re.escape(name)} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        if block is None:
            raise SystemExit(f"pyproject.toml has no extra {name}")
        lines += re.findall(r'^\s*"([^"]+)"', block[1], re.MULTILINE)
    return lines


class OldPackage(NamedTuple):
    """An installed package that is older than `oldest`, the oldest version that is wanted."""

    name: str
    version: str
    oldest: str

    def __str__(self) -> str:
        return f"{self.name} {self.version} is older than {self.oldest}"


def missing(wanted: Sequence[str]) -> tuple[list[str], list[OldPackage]]:
    """Return the requirements that are not installed, and the packages that are too old."""
    absent: list[str] = []
    too_old: list[OldPackage] = []
    for requirement in wanted:
        name, _, oldest = requirement.partition(">=")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(requirement)
            continue
        if _release(version) < _release(oldest):
            too_old.append(OldPackage(name, version, oldest))
    return absent, too_old


def stamp(extras: Sequence[str]) -> str:
    """Return a hash of everything that decides which packages would be installed."""
    digest = hashlib.sha256()
    for file in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / file).read_bytes())
    digest.update(f"{sorted(extras)} {platform.python_version()} {ROOT}".encode())
    return digest.hexdigest()


def installed() -> list[str]:
    """Return ``name==version`` of every installed distribution.

    As constraints they keep an installation from changing any of them.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        versions[name] = distribution.version
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name and version]


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers, which are enough for floors.

    2.10.0a0+git, as vendors build it, counts as 2.10.0.
    """
    numbers = re.match(r"\d+(\.[1-9]\d*|\.0+(?=\.[1-9]))*", version)
    if numbers:
        return tuple(int(number) for number in numbers[0].split("."))
    return ()


def main(arguments: Sequence[str]) -> int:
    """Run a command of this file, and return the exit code."""
    command = arguments[0]
    extras = arguments[1:]
    if command == "stamp":
        print(stamp(extras))
    elif command == "installed":
        print("\n".join(installed()))
    elif command == "requirements":
        print("\n".join(requirements(extras)))
    else:
        absent, too_old = missing(requirements(extras))
        print("\n".join(absent))
        if too_old:
            print("; ".join(map(str, too_old)), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
