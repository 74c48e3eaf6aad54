"""At stage 3 a model begins with the weights that plain PyTorch gives it, however it initialises
them, or is refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launched import rarely, run_ranks
from tests.places import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, *rarely([1])])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the job of many models found, on two ranks; with ``--exhaustive`` on one as well."""
    folder = tmp_path_factory.mktemp("built")
    run_ranks(ROOT / "tests/jobs/built_models.py", "out.json", num_ranks=request.param, cwd=folder)
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


def test_weights_equal_those_of_plain_pytorch_to_the_bit(built: dict[str, Any]) -> None:
    differences = built["differences"]
    assert len(differences) == 14
    assert sum(len(ways) for ways in differences.values()) == 34
    assert {name: ways for name, ways in differences.items() if any(ways.values())} == {}


def test_what_fits_nowhere_and_cannot_be_cut_is_refused_with_the_weight(
    built: dict[str, Any],
) -> None:
    refused = built["refused"]
    assert all("[init-lost-at-stage-3]" in text for text in refused.values()), refused
    assert "built_models.py" in refused["loop"]
    assert "uses weight of a Linear [8, 8]" in refused["loop"]
    assert "uses bias of a NonDynamicallyQuantizableLinear" in refused["attention"]
    assert "copy.py" in refused["copied"]


def test_it_trains_as_plain_pytorch_does(built: dict[str, Any]) -> None:
    assert built["trained"].keys() == {"loop", "encoder", "in turn, stage 1"}
    assert all(difference < 2e-6 for difference in built["trained"].values())


def test_where_memory_is_short_rank_0_alone_keeps_weights_on_the_host(
    built: dict[str, Any],
) -> None:
    """At stage 1 in bf16: the others have room for what DeepSpeed sends them."""
    first, *others = built["types"]
    assert first == ["torch.float32"]
    assert all(types == ["torch.bfloat16"] for types in others)
