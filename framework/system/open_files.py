"""The limit of this process's open files."""

from __future__ import annotations

import resource
from contextlib import suppress

from framework.errors import ConfigError


def require(wanted: int, what: str, *, fix: str = "") -> None:
    """Raise this process's limit to `wanted` open files, also for processes that it starts.

    Args:
        wanted: number of files.
        what: needs them, in the plural: ``1000 hosts``.
        fix: another fix than to raise the limit.

    Raises:
        ConfigError: the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    if hard == resource.RLIM_INFINITY:
        allowed = wanted
    else:
        allowed = min(hard, wanted)
    if allowed > soft:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft < wanted:
        reason = f"{what} take {wanted} open files"
        raise_limit = f"ulimit -n {wanted}, which needs root or limits.conf"
        fix = f"{raise_limit}, or {fix}" if fix else raise_limit
        raise ConfigError.of("nofile-low", reason, fix, key="ulimit -n", value=soft)
