"""The user's folders for files that can be made again, that of compiled ops among them."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def path_of_compilers(environment: Mapping[str, str]) -> str:
    """Return PATH with this Python's own programs first, its ninja among them, as an active
    environment has it.
    """
    scripts = sysconfig.get_path("scripts")
    path = environment.get("PATH") or os.defpath
    if path.split(os.pathsep)[0] == scripts:
        return path
    return os.pathsep.join((scripts, path))


def extensions_folder(environment: Mapping[str, str], *, torch_version: str) -> Path:
    """Return the folder of compiled ops: TORCH_EXTENSIONS_DIR, or one folder for each environment
    and each ninja.

    torch's default folder is shared by all environments of a user, but a built op contains the
    include paths of one of them. Two environments in use would compile the same op again and again,
    and wait for each other's lock meanwhile. So would two releases of ninja (such as 1.11 and
    1.13), which do not recognise each other's commands: torch calls the first ninja on the path
    that `path_of_compilers` sets, which is the same whether or not the environment is active.
    """
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    ninja = shutil.which("ninja", path=path_of_compilers(environment))
    described = f"{sys.prefix} {torch_version} {platform.python_version()} {ninja}"
    key = hashlib.sha256(described.encode()).hexdigest()[:12]
    return cache_folder(environment) / "torch_extensions" / f"dsf-{key}"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the user's folder for files that can be made again."""
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"])
    home = environment.get("HOME") or Path.home()
    return Path(home) / ".cache"
