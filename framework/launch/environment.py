"""Contents of a Python environment, compared with pyproject.toml.

    environment.py stamp EXTRA...           one line that changes when the environment must be installed again
    environment.py missing EXTRA...         requirements that are not installed, one per line
    environment.py installed                everything that is installed, as constraints
    environment.py requirements EXTRA...    everything that is needed, whatever is installed, one per line

It stands alone: it must run before anything is installed, on Python 3.10 without a TOML reader, and
never imports the package. `missing` ends with 1, and says why, when something installed is too old:
launch.sh changes nothing that is there.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def requirements(extras: Sequence[str], *, pyproject: str | None = None) -> list[str]:
    """Requirements of the base and of these extras, such as ``torch>=2.10``, as pyproject.toml
    writes them.
    """
    if pyproject is not None:
        text = pyproject
    else:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found: list[str] = []
    for name in ("dependencies", *extras):
        # Good for this project's own file, one quoted requirement to a line; a test holds it
        # against a TOML reader.
        block = re.search(rf"^{re.escape(name)} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        if block is None:
            raise SystemExit(f"pyproject.toml has no extra {name}")
        found += re.findall(r'^\s*"([^"]+)"', block[1], re.MULTILINE)
    return found


def missing(wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Requirements that are not installed, and sentences about those that are installed but too
    old.
    """
    absent: list[str] = []
    too_old: list[str] = []
    for requirement in wanted:
        name, _, floor = requirement.partition(">=")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(requirement)
            continue
        if _release(version) < _release(floor):
            too_old.append(f"{name} {version} is older than {floor}")
    return absent, too_old


def stamp(extras: Sequence[str]) -> str:
    """Hash of everything that decides what would be installed."""
    digest = hashlib.sha256()
    for file in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / file).read_bytes())
    digest.update(f"{sorted(extras)} {platform.python_version()} {ROOT}".encode())
    return digest.hexdigest()


def installed() -> list[str]:
    """``name==version`` of every installed distribution: installing under these changes none of
    them.
    """
    versions = {
        (each.metadata["Name"] or "").lower(): each.version for each in metadata.distributions()
    }
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name and version]


def _release(version: str) -> tuple[int, ...]:
    """Leading numbers: 2.10.0a0+git, as vendors build it, counts as 2.10.0. Enough for floors."""
    numbers = re.match(r"\d+(\.[1-9]\d*|\.0+(?=\.[1-9]))*", version)
    if numbers:
        return tuple(int(number) for number in numbers[0].split("."))
    return ()


def main(arguments: Sequence[str]) -> int:
    """Print what was asked for."""
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
            print("; ".join(too_old), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
