"""The limit of open files is raised where that is enough."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from framework.errors import ConfigError
from framework.system.open_files import require


@pytest.fixture
def hard() -> Iterator[int]:
    """Return the hard limit; the soft one is 256 during the test."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    yield limit[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_what_is_enough_is_left_alone(hard: int) -> None:
    require(256, "few hosts")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)


def test_a_soft_limit_is_raised(hard: int) -> None:
    if hard != resource.RLIM_INFINITY and hard < 300:
        pytest.skip(f"this machine lets nobody open more than {hard} files")
    require(300, "some hosts")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)


def test_what_the_system_does_not_allow_is_refused(hard: int) -> None:
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine has no limit")
    stated = (
        rf"ulimit -n = \d+: many hosts take {hard + 1} open files; .* or take fewer \[nofile-low\]"
    )
    with pytest.raises(ConfigError, match=stated):
        require(hard + 1, "many hosts", fix="take fewer")
