"""Weights as transformers publishes them make our models compute what its own compute, and the way
back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.checkpoint.huggingface import form_of, published_problems
from framework.checkpoint.state.weight_files import LazyWeights, as_theirs, entries, write_one
from framework.commands.check import main as check
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.engine.weights import find_weights, put_weights
from framework.errors import ConfigError
from framework.setup.user_code import call_factory

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 50,
    "max_positions": 24,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_size": 40,
}
THEIRS = {
    "vocab_size": 50,
    "n_positions": 24,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 40,
}
LLAMA = SIZES | {
    "num_kv_heads": 2,
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "dropout": 0.0,
}
ENCODER = {
    "vocab_size": 50,
    "max_position_embeddings": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
}
ENCODER |= {"num_attention_heads": 4, "intermediate_size": 40}
TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(20) < 15).long().expand(3, 20)


def llama(bias: bool = False, tied: bool = False) -> tuple[str, dict[str, Any], dict[str, Any]]:
    own = {"bias": bias, "tie_embeddings": tied, "rope_theta": 5000.0, "norm_eps": 1e-6}
    theirs = {
        "num_key_value_heads": 2,
        "attention_bias": bias,
        "mlp_bias": bias,
        "tie_word_embeddings": tied,
    }
    theirs |= {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    return "Llama", {"kind": "gpt", **LLAMA, **own}, ENCODER | theirs


# Class of transformers without its ending, our model, its config.
CASES = {
    "gpt2": ("GPT2", {"kind": "gpt", **SIZES}, THEIRS),
    "gpt2-untied": (
        "GPT2",
        {"kind": "gpt", **SIZES, "tie_embeddings": False},
        THEIRS | {"tie_word_embeddings": False},
    ),
    "llama": llama(),
    "llama-biased": llama(bias=True),
    "llama-tied": llama(tied=True),
    "bert": ("Bert", {"kind": "bert", **SIZES}, ENCODER),
}


def drawn(name: str, head: str = "", **config: Any) -> Any:
    """A model of transformers in which no weight is one or zero, and could pass for another."""
    family, _, theirs = CASES[name]
    head = head or {"Bert": "ForPreTraining", "GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    model = getattr(transformers, f"{family}{head}")(
        getattr(transformers, f"{family}Config")(**theirs | config)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def described(name: str, path: Path | str, **model: Any) -> RunConfig:
    values = {"model": CASES[name][1] | model, "checkpoint": {"init_weights": str(path)}}
    return config_from_values(values)


def started(config: RunConfig) -> torch.nn.Module:
    """Our model with the weights that its config names."""
    torch.manual_seed(7)
    model: torch.nn.Module = call_factory(config.model.factory(), key="model").eval()
    assert config.checkpoint.init_weights
    found = find_weights(config.checkpoint.init_weights, model=config.model)
    assert isinstance(found, LazyWeights)
    put_weights(model, found, source="test")
    return model


def same(ours: torch.nn.Module, theirs: Any) -> bool:
    """With types and padding where the model has them."""
    with torch.no_grad():
        if type(ours).__name__ == "GPT":
            return torch.allclose(ours(TOKENS), theirs(TOKENS).logits, atol=1e-5)
        types = (TOKENS > 25).long()
        logits, next_sentence = ours((TOKENS, types, MASK))
        found = theirs(input_ids=TOKENS, token_type_ids=types, attention_mask=MASK)
    found_logits = getattr(found, "prediction_logits", None)
    found_logits = found.logits if found_logits is None else found_logits
    pair = getattr(found, "seq_relationship_logits", None)
    return torch.allclose(found_logits[:, :15], logits[:, :15], atol=1e-5) and (
        pair is None or torch.allclose(pair, next_sentence, atol=1e-5)
    )


@pytest.mark.parametrize("name", CASES)
def test_in_and_out_again(name: str, tmp_path: Path) -> None:
    theirs = drawn(name)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="8KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    config = described(name, tmp_path / "in")
    assert published_problems(config) == []
    ours = started(config)
    assert same(ours, theirs)
    form = form_of(config.model)
    assert form is not None
    whole, stored = as_theirs(ours.state_dict(), ours.state_dict(), form)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text(json.dumps(form.described()), encoding="utf-8")
    found = entries(stored, dtype=torch.float32, names={})
    write_one(tmp_path / "out/model.safetensors", whole, found, metadata={})
    again, loading = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(ours, again.eval())
    ignored = {"transformers_version", "_name_or_path", "architectures", "dtype"}
    differing = {
        key: (value, getattr(again.config, key, None))
        for key, value in theirs.config.to_dict().items()
        if key not in ignored and getattr(again.config, key, None) != value and "drop" not in key
    }
    assert (
        differing.keys() <= {"max_position_embeddings"}
        if name.startswith("llama")
        else differing == {}
    ), differing


def test_without_the_prefix_and_heads(tmp_path: Path) -> None:
    """Published GPT-2 itself is such a folder; a BERT without heads gets those that its seed
    draws.
    """
    theirs = drawn("gpt2")
    theirs.transformer.save_pretrained(tmp_path / "gpt2")
    assert same(started(described("gpt2", tmp_path / "gpt2")), theirs)
    masked = drawn("bert", "ForMaskedLM")
    masked.save_pretrained(tmp_path / "masked")
    config = described("bert", tmp_path / "masked")
    (problem,) = published_problems(config)
    assert (problem.kind, problem.severity) == ("weights-partial", "warning")
    assert "heads.pooler.weight, heads.pooler.bias, outputs.next_sentence.weight" in problem.reason
    assert same(started(config), masked)
    masked.bert.save_pretrained(tmp_path / "base")
    base = started(described("bert", tmp_path / "base"))
    torch.manual_seed(7)
    fresh = call_factory(config.model.factory(), key="model")
    assert torch.equal(base.heads.transform.weight, fresh.heads.transform.weight)
    assert torch.equal(
        base.get_submodule("blocks.1").up.weight,
        masked.bert.encoder.layer[1].intermediate.dense.weight,
    )


def test_files_of_other_times(tmp_path: Path) -> None:
    """Pickled, with masks and a head beside the embedding that it is; norms' weights as BERT first
    called them.
    """
    theirs = drawn("gpt2")
    theirs.config.save_pretrained(tmp_path)
    state = theirs.state_dict() | {
        f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 24, 24) for n in range(2)
    }
    assert "lm_head.weight" in state
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert same(started(described("gpt2", tmp_path)), theirs)
    torch.save(
        state | {"lm_head.weight": state["lm_head.weight"] + 1}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(
        ConfigError, match=r"it has lm_head.weight, which the model has not.*\[weights-differ\]"
    ):
        started(described("gpt2", tmp_path))
    bert, folder = drawn("bert"), tmp_path / "bert"
    bert.save_pretrained(folder)
    former = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert sum("gamma" in name for name in former) == 6
    positions = {"bert.embeddings.position_ids": torch.arange(24)[None]}
    save_file(former | positions, folder / "model.safetensors")
    assert published_problems(described("bert", folder)) == []
    assert same(started(described("bert", folder)), bert)


def test_more_tokens_and_fewer_positions(tmp_path: Path) -> None:
    theirs = drawn("gpt2")
    theirs.save_pretrained(tmp_path)
    config = described("gpt2", tmp_path, vocab_size=64, max_positions=20)
    (problem,) = published_problems(config)
    assert (problem.kind, problem.severity, problem.key) == (
        "weights-padded",
        "note",
        "model.vocab_size",
    )
    ours = started(config)
    with torch.no_grad():
        logits = ours(TOKENS)
    assert torch.allclose(logits[..., :50], theirs(TOKENS).logits, atol=1e-5)
    assert torch.allclose(logits[..., 50:], theirs(TOKENS).logits.mean(-1, keepdim=True), atol=1e-5)
    (tmp_path / "config.json").unlink()  # then names and shapes alone tell
    assert torch.equal(started(config).embed.weight, ours.embed.weight)
    for model in (
        {"vocab_size": 49},
        {"max_positions": 25},
        {"hidden_size": 32},
        {"num_layers": 3},
    ):
        with pytest.raises(ConfigError, match=r"\[weights-differ\]"):
            started(described("gpt2", tmp_path, **model))


MISFITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "activation": (
        "gpt2",
        {},
        {"activation_function": "relu"},
        ["has activation_function: relu; ours is gelu_new"],
    ),
    "epsilon": (
        "gpt2",
        {"norm_eps": 1e-6},
        {},
        ["model.norm_eps = 1e-06", "set model.norm_eps: 1e-05"],
    ),
    "heads": ("bert", {"num_heads": 8}, {}, ["model.num_heads = 8", "set model.num_heads: 4"]),
    "sizes": (
        "gpt2",
        {"num_layers": 3, "vocab_size": 40},
        {},
        ["set model.num_layers: 2", "set model.vocab_size: 50"],
    ),
    "positions": ("bert", {"max_positions": 30}, {}, ["set model.max_positions: 24"]),
    "types": ("bert", {"num_types": 3}, {}, ["set model.num_types: 2"]),
    "tied": ("gpt2", {"tie_embeddings": False}, {}, ["set model.tie_embeddings: true"]),
    "shape": (
        "llama",
        {"mlp": "gelu", "norm": "layernorm"},
        {},
        ["set model.mlp: swiglu", "set model.norm: rmsnorm"],
    ),
    "scaled": (
        "llama",
        {},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ["has rope_parameters.rope_"],
    ),
    "kind": ("bert", {}, {"model_type": "gpt2"}, ["is of a gpt2", "set model.kind: gpt"]),
    "unknown": ("gpt2", {}, {"model_type": "mamba"}, ["is of a mamba", "transformers:AutoModel"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without torch, by `check`: with the key to set."""
    case, model, theirs, stated = MISFITS[name]
    drawn(case).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | theirs), encoding="utf-8"
    )
    found = [str(problem) for problem in published_problems(described(case, tmp_path, **model))]
    assert all(text.endswith("[weights-differ]") for text in found)
    assert len(found) >= len(stated) - 1
    assert all(any(text in line for line in found) for text in stated), found


def test_check_names_tensors_that_are_too_many_or_too_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn("gpt2", vocab_size=261).save_pretrained(tmp_path)
    run = tmp_path / "run.yaml"
    model = ", ".join(
        f"{key}: {value}" for key, value in (CASES["gpt2"][1] | {"vocab_size": 261}).items()
    )
    text = "data: {kind: text, sequence_length: 16}\ntask: {kind: causal_lm}\n"
    run.write_text(
        f"model: {{{model}}}\n{text}checkpoint: {{init_weights: {tmp_path}}}\n", encoding="utf-8"
    )
    assert check([str(run)]) == 0
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.weight"] = weights.pop("transformer.h.1.mlp.c_fc.bias")
    save_file(weights, tmp_path / "model.safetensors")
    assert check([str(run)]) == 2
    _, stated = capsys.readouterr()
    assert f"{run}:4" in stated
    assert "it lacks transformer.h.1.mlp.c_fc.bias; " in stated
    assert "it has classifier.weight, which the model has not" in stated


@pytest.mark.parametrize(
    "shape", [{"positions": "learned"}, {"norm": "layernorm"}, {"mlp": "gelu"}]
)
def test_a_gpt_that_is_neither_has_no_form(shape: dict[str, str]) -> None:
    assert form_of(config_from_values({"model": CASES["llama"][1] | shape}).model) is None
    assert (
        form_of(config_from_values({"model": CASES["gpt2"][1] | {"moe": {"num_experts": 2}}}).model)
        is None
    )
