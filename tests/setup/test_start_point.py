"""What ranks have found for a fresh start, each for itself, has to be the same before they read it
together.
"""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.errors import StorageError
from framework.setup import start_point
from framework.setup.start_point import agreed_weights


class Found:
    """A prepared run of one rank, as far as its first weights go."""

    def __init__(self, reported: str) -> None:
        self.reported, self.plan, self.weights = reported, self, None
        self.config = config_from_values({"checkpoint": {"init_weights": "first.pt"}})

    def describe_weights(self) -> str:
        return self.reported

    def without_weights(self) -> Found:
        return Found("none")


def agreed(monkeypatch: pytest.MonkeyPatch, *reported: str, start: Any = None) -> Any:
    monkeypatch.setattr(start_point, "gather", lambda own: [*reported])
    found: Any = Found(reported[0])
    return agreed_weights(found, start)


def test_all_have_found_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(
        monkeypatch, "2 tensors are found there", "2 tensors are found there"
    ).reported.startswith("2 tensors")


def test_one_that_sees_other_files_ends_all_with_a_code_that_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        StorageError,
        match=r"on rank 1, no weights are read; on rank 0, 2 tensors.*\[weights-differ\]",
    ) as caught:
        agreed(monkeypatch, "2 tensors are found there", "no weights are read")
    assert caught.value.exit_code == 74


def test_a_resumed_run_reads_none_that_a_rank_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        agreed(
            monkeypatch, "2 tensors are found there", "no weights are read", start="global_step7"
        ).reported
        == "none"
    )
