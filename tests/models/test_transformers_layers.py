"""Layers of transformers' models, one after the other, give what `forward()` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.models.survey import survey
from framework.models.transformers_layers import TransformersLayers

transformers = pytest.importorskip("transformers", reason="transformers comes with the dev extra")
from tests.jobs.dict_rows import Rows, model  # noqa: E402
from tests.jobs.llama import Llama  # noqa: E402

ROWS = Rows()
BATCH: dict[str, Tensor] = torch.utils.data.default_collate([ROWS[number] for number in range(4)])
PLACES = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]).expand(4, -1)
INPUTS: dict[str, Any] = {
    "tokens": BATCH["input_ids"],
    "padded": BATCH,
    "packed": {"input_ids": BATCH["input_ids"], "position_ids": PLACES},
}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral"])
def test_stages_compute_what_the_model_computes(family: str, given: str) -> None:
    net = model(family)
    net.config.use_cache = False  # with a cache, transformers' masks ignore the positions
    taken = TransformersLayers(net, INPUTS[given])
    around = taken.around()
    assert around.enter is not None
    assert around.leave is not None
    value = around.order(INPUTS[given])
    for layer in taken.layers():  # each in a stage of its own
        value = around.leave(layer.apply(layer.build(), around.enter(value)))
    named = INPUTS[given] if isinstance(INPUTS[given], dict) else {"input_ids": INPUTS[given]}
    assert torch.equal(value, net(**named).logits)
    if given == "padded":
        assert torch.equal(taken.judge(value, BATCH["labels"]).loss, net(**BATCH).loss)


def test_shapes_are_found_without_numbers_and_what_is_beside_them_is_sent() -> None:
    taken = TransformersLayers(model("gemma2"), BATCH)
    assert taken.names == ("input_ids", "attention_mask")
    surveyed = survey(taken.layers(), taken.in_order(BATCH), seed=0, leave=taken.around().leave)
    assert all(each.flops is not None for each in surveyed)
    assert not any(each.cannot_send for each in surveyed)
    hidden = surveyed[1].output_bytes - 8 * BATCH["attention_mask"].numel()
    assert hidden == surveyed[-2].output_bytes


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("opt", "it names no embedding, decoder layers and norm"),
        ("roberta", "it names no embedding, decoder layers and norm"),
        ("t5", "it has no output layer of tokens"),
    ],
)
def test_models_without_such_layers_are_refused(family: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        TransformersLayers(model(family), BATCH)
    assert caught.value.problems[0].kind == "model-not-layered"


class Reversed(Llama):
    """Its forward() does something before its layers."""

    def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
        if input_ids is not None:
            input_ids = input_ids.flip(1)
        return super().forward(input_ids, position_ids)


def test_a_forward_that_does_more_is_refused() -> None:
    tokens = BATCH["input_ids"]
    TransformersLayers(Llama(), tokens).refuse_other_logits(tokens)
    with pytest.raises(ConfigError) as caught:
        TransformersLayers(Reversed(), tokens).refuse_other_logits(tokens)
    assert caught.value.problems[0].kind == "layers-differ-from-forward"
