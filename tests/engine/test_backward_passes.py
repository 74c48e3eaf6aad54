"""Several backward passes before one step of a loop of one's own, and losses that go through
another engine: weights are those of plain PyTorch, or a line says why not.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.launched import run_ranks
from tests.places import ROOT


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("passes")
    stated = run_ranks(
        ROOT / "tests/jobs/backward_passes.py", "out.json", num_ranks=request.param, cwd=folder
    )
    results: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return {**results, "stated": stated}


_REFUSED = {
    "forward_first3": r".*which modules run may not differ.*\[graph-differs-between-ranks\]",
    "offload": r"backward: a second one before step\(\): .*; add the losses .* batch.accumulation_steps.*"
    r"\[several-backwards\]",
    "no_pass": r"step: no backward since the last step.* \[step-without-backward\]",
    "no_graph": r"backward: no gradient can be computed of the loss.* \[loss-without-graph\]",
    "no_number": r"backward: Tensor of shape \(3,\) is no loss; take its mean \[task-loss-result\]",
    "foreign": r"backward: .*call engine.backward\(loss\), not loss.backward\(\) \[backward-not-of-engine\]",
    "broken": r"step: an earlier backward pass has failed.* \[backward-failed\]",
    "shared": r"model: 0.weight is a weight of shared's model as well; .* \[weights-of-two-engines\]",
    "no_step": r"nothing was refused",
}


@pytest.mark.slow
def test_passes_are_those_of_plain_pytorch_or_refused(found: dict[str, Any]) -> None:
    stated = found.pop("stated")
    assert found
    for name, result in found.items():
        if isinstance(result, str):
            assert re.fullmatch(_REFUSED[name], result, re.DOTALL), (name, result)
        else:
            assert result < (5e-3 if name == "bf16" else 1e-6), name
    if "no_step" in found:
        assert re.search(
            r"no_step: the loop ends with a backward that no step\(\) followed", stated
        )
