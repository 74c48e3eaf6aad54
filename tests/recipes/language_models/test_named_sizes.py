"""The sizes that a config names have the published numbers of parameters, and say how many layers
they have.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from framework.config.run_config import RunConfig
from framework.models.layer_lists import as_layers
from framework.plan.layers import num_layers
from framework.recipes.language_models.kinds import BERT, GPT
from framework.setup.user_code import call_factory

# GPT-2: counts of the released checkpoints. Llama: of the released safetensors. tiny GPT: 261*128 +
# 256*128 + 4 * (12*128^2 + 13*128) + 2*128. BERT: of BertForPreTraining; 4.4, 11.3, 29.1, 41.7
# million in Turc et al. 2019, 110 and 340 in Devlin et al.
NUM_PARAMETERS = {
    ("gpt", "tiny"): 859_520,
    ("gpt", "gpt2"): 124_439_808,
    ("gpt", "gpt2-medium"): 354_823_168,
    ("gpt", "gpt2-large"): 774_030_080,
    ("gpt", "gpt2-xl"): 1_557_611_200,
    ("gpt", "tinyllama-1.1b"): 1_100_048_384,
    ("gpt", "llama-2-7b"): 6_738_415_616,
    ("gpt", "llama-3-8b"): 8_030_261_248,
    ("bert", "tiny"): 4_433_468,
    ("bert", "mini"): 11_267_900,
    ("bert", "small"): 29_058_876,
    ("bert", "medium"): 41_668_412,
    ("bert", "base"): 110_106_428,
    ("bert", "large"): 336_226_108,
}


def section(**model: Any) -> Any:
    return RunConfig.model_validate({"model": model}).model


@pytest.mark.parametrize(("kind", "size"), NUM_PARAMETERS)
def test_the_published_number_of_parameters(kind: str, size: str) -> None:
    config = section(kind=kind, size=size)
    with torch.device("meta"):
        model = call_factory(config.factory(), key="model")
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[kind, size]
    assert not list(model.buffers())
    assert len(as_layers(model)) == num_layers(config)


def test_every_size_is_in_the_table() -> None:
    for kind in (GPT, BERT):
        named = get_args(kind.model_fields["size"].annotation)
        assert (
            set(named)
            == set(kind.sizes)
            == {size for name, size in NUM_PARAMETERS if name == section_kind(kind)}
        )


def section_kind(kind: type[GPT] | type[BERT]) -> str:
    return str(kind.model_fields["kind"].default)


def test_what_is_written_down_wins_and_what_follows_it_keeps_its_ratio() -> None:
    config = section(
        kind="gpt", size="tinyllama-1.1b", hidden_size=64, num_heads=16, vocab_size=100
    )
    assert (config.hidden_size, config.num_heads, config.vocab_size, config.max_positions) == (
        64,
        16,
        100,
        2048,
    )
    assert (config.mlp_size, config.num_kv_heads) == (5632 * 64 // 2048, 2)
    assert section(kind="gpt", hidden_size=64, mlp_size=99).mlp_size == 99


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "lenet"},
        {"kind": "small_resnet18"},
        {"kind": "resnet18"},
        {"kind": "resnet50"},
        {"kind": "mlp"},
        {"kind": "mlp", "hidden_sizes": []},
        {"kind": "mlp", "hidden_sizes": [3, 4, 5]},
        {"kind": "gpt", "positions": "rotary"},
        {"kind": "gpt", "num_layers": 3},
        {"kind": "bert", "num_layers": 3},
    ],
    ids=str,
)
def test_every_kind_knows_how_many_layers_it_has(model: dict[str, Any]) -> None:
    config = section(**model)
    with torch.device("meta"):
        assert len(as_layers(call_factory(config.factory(), key="model"))) == num_layers(config)
