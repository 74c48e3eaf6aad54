"""Errors of code that writes into weights of ZeRO stage 3; runs of it: `test_written_weights.py`."""

from __future__ import annotations

from framework.engine.spread_weights import written_while_spread


def test_errors_that_are_not_of_spread_weights_are_not_explained() -> None:
    assert written_while_spread(RuntimeError("Cannot access data pointer of Tensor")) is None
    assert written_while_spread(ValueError("size mismatch for a")) is None
