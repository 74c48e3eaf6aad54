"""How many files this process may open: raised as far as the system allows, refused by name where that is too few."""

from __future__ import annotations

import resource
from contextlib import suppress

from framework.errors import ConfigError, Problem


def require(wanted: int, what: str, *, fix: str = "") -> None:
    """See to it that so many files can be open at once; what this process starts has the same limit.

    Args:
        wanted: number of open files.
        what: that needs them, in the plural: ``1000 hosts``.
        fix: what else to do than to raise the limit.

    Raises:
        ConfigError: the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if allowed > soft:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft < wanted:
        raise ConfigError(
            Problem(
                kind="nofile-low",
                key="ulimit -n",
                value=soft,
                reason=f"{what} take {wanted} open files",
                fix=f"ulimit -n {wanted}, which needs root or limits.conf{fix and f', or {fix}'}",
            )
        )
