"""Runs that start from a Hugging Face folder, as our model and as transformers' own, train like
plain PyTorch trains transformers' model; what is exported, transformers loads, with the logits of
the trained model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import framework
from framework.checkpoint.state.weight_files import LazyWeights
from framework.commands.export import export
from framework.config.load import config_from_values
from framework.engine.weights import find_weights, put_weights
from framework.setup.user_code import call_factory
from tests.engine.pipe_oracle import plain_run
from tests.engine.saved_runs import write_tokens
from tests.launched import rarely, series, train_cases

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

NUM_STEPS, LENGTH = 5, 32
SHAPE = {
    "vocab_size": 261,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_size": 48,
    "max_positions": LENGTH,
}
SHAPE |= {"dropout": 0.0}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_TEXT = {"data": {"kind": "text", "sequence_length": LENGTH}}
_PAIRS = {"data": {"kind": "text_pairs", "sequence_length": LENGTH}}
_NO_DROPOUT = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Folder -> class without its ending, the class that trains it, its config, our sections, its task
# for plain PyTorch.
FOLDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str]] = {
    "gpt2": (
        "GPT2",
        "AutoModelForCausalLM",
        {"n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, **_NO_DROPOUT},
        {"model": {"kind": "gpt", **SHAPE}, "task": {"kind": "causal_lm"}, **_TEXT},
        "LogitsLM",
    ),
    "bert": (
        "Bert",
        "BertForPreTraining",
        {
            **_ENCODER,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": 40,
        },
        {"model": {"kind": "bert", **SHAPE}, "task": {"kind": "masked_lm"}, **_PAIRS},
        "PairLM",
    ),
    "llama": (
        "Llama",
        "AutoModelForCausalLM",
        {**_ENCODER, "num_key_value_heads": 2},
        _TEXT,
        "LogitsLM",
    ),
}
# Run -> folder, whether our model is trained or transformers' own, sections.
RUNS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "gpt2-z3": ("gpt2", True, {"zero": {"stage": 3}}),
    "gpt2-tensor": ("gpt2", True, {"zero": {"stage": 3}, "parallel": {"tensor": 2}}),
    "gpt2-sequence": ("gpt2", True, {"zero": {"stage": 1}, "parallel": {"sequence": 2}}),
    "bert-z3": ("bert", True, {"zero": {"stage": 3}}),
    "bert-tensor": ("bert", True, {"parallel": {"tensor": 2}}),
    "bert-sequence": ("bert", True, {"zero": {"stage": 2}, "parallel": {"sequence": 2}}),
    **{f"own-gpt2-z{stage}": ("gpt2", False, {"zero": {"stage": stage}}) for stage in (0, 3)},
    "own-bert-z3": ("bert", False, {"zero": {"stage": 3}}),
    **{
        f"own-{folder}-tensor": (
            folder,
            False,
            {"zero": {"stage": stage}, "parallel": {"tensor": 2}},
        )
        for folder, stage in (("gpt2", 3), ("bert", 2))
    },
    **{
        f"own-llama-tensor-z{stage}": (
            "llama",
            False,
            {"zero": {"stage": stage}, "parallel": {"tensor": 2}},
        )
        for stage in (1, 3)
    },
    "own-llama-sequence": ("llama", False, {"zero": {"stage": 2}, "parallel": {"sequence": 2}}),
    **{f"half-z{stage}": ("half", False, {"zero": {"stage": stage}}) for stage in (1, 3)},
}
# With --exhaustive: the other stages.
RARE: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{f"own-gpt2-z{stage}": ("gpt2", False, {"zero": {"stage": stage}}) for stage in (1, 2)},
    **{
        f"own-llama-tensor-z{stage}": (
            "llama",
            False,
            {"zero": {"stage": stage}, "parallel": {"tensor": 2}},
        )
        for stage in (0, 2)
    },
    "half-z0": ("half", False, {"zero": {"stage": 0}}),
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
LORAS = {**{f"lora-z{stage}": ("llama", stage) for stage in (0, 3)}, "lora-half": ("half", 3)}
RARE_LORAS = {f"lora-z{stage}": ("llama", stage) for stage in (1, 2)}


def base_of(folder: str) -> tuple[str, str, dict[str, Any], dict[str, Any], str]:
    return FOLDERS["llama" if folder == "half" else folder]


def values(root: Path, name: str, folder: str, *, is_ours: bool, **sections: Any) -> dict[str, Any]:
    _, trained_as, _, ours, task = base_of(folder)
    checkpoint = {"checkpoint": {"init_weights": str(root / folder)}} if is_ours else {}
    place = {"pretrained_model_name_or_path": str(root / folder)}
    theirs = {
        "model": {"target": f"transformers:{trained_as}.from_pretrained", "args": place},
        "task": {"target": f"tests.jobs.published_parts:{task}"},
    }
    made: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(root)},
        "batch": {"global_size": 8},
        "optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.9},
        "training": {"max_steps": NUM_STEPS, "log_every": 1, "clip_grad_norm": 1.0},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **checkpoint,
        **ours,
        **({} if is_ours else theirs),
    }
    made["data"] = {**made["data"], "path": str(root / "tokens")}
    return made | {key: {**made.get(key, {}), **section} for key, section in sections.items()}


@pytest.fixture(scope="module")
def runs(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    write_tokens(root)
    for folder in (*FOLDERS, "half"):
        family, _, config, *_ = base_of(folder)
        torch.manual_seed(1)
        head = {"GPT2": "LMHeadModel", "Bert": "ForPreTraining"}.get(family, "ForCausalLM")
        described = getattr(transformers, f"{family}Config")(
            vocab_size=261, initializer_range=0.1, **config
        )
        model = getattr(transformers, f"{family}{head}")(described)
        (model.bfloat16() if folder == "half" else model).save_pretrained(
            root / folder, max_shard_size="30KB"
        )
    listed, adapted = (RUNS | RARE, LORAS | RARE_LORAS) if exhaustive else (RUNS, LORAS)
    cases = [
        values(root, name, folder, is_ours=ours, **more)
        for name, (folder, ours, more) in listed.items()
    ]
    cases += [
        values(root, name, folder, is_ours=False, zero={"stage": stage}, training={"lora": LORA})
        for name, (folder, stage) in adapted.items()
    ]
    train_cases(cases, num_ranks=2, folder=root)
    return root


_plain: dict[str, tuple[list[float], torch.nn.Module]] = {}


def plain(root: Path, folder: str) -> tuple[list[float], torch.nn.Module]:
    """Losses and the trained model of plain PyTorch; it never sees our models or names. Weights in
    half precision were read before, and are taken as fp32 has them.
    """
    if folder not in _plain:
        config = values(root, "plain", folder, is_ours=False)
        config["model"]["args"]["dtype"] = "float32"
        losses, _, model = plain_run(config, micro_size=4, num_steps=NUM_STEPS)
        assert losses[-1] < losses[0] - 0.05, "it must learn, or equality says nothing"
        _plain[folder] = losses, model.eval()
    return _plain[folder]


@pytest.mark.parametrize("name", [*RUNS, *rarely(RARE)])
def test_losses_are_those_of_plain_pytorch_with_transformers(name: str, runs: Path) -> None:
    expected, _ = plain(runs, (RUNS | RARE)[name][0])
    assert list(series(runs / name, "train/loss").values()) == pytest.approx(expected, abs=1e-5)


def logits(model: torch.nn.Module, theirs: bool) -> torch.Tensor:
    """Of some tokens, where the model has types with all of one type."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 261
    with torch.no_grad():
        if not theirs and hasattr(model, "recipes"):
            is_bert = type(model).__name__ == "BERT"
            found = (
                model((tokens, torch.zeros_like(tokens), torch.ones_like(tokens)))[0]
                if is_bert
                else model(tokens)
            )
        else:
            outputs = model(tokens)
            found = getattr(outputs, "prediction_logits", None)
            found = outputs.logits if found is None else found
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("name", [*RUNS, *rarely(RARE)])
def test_transformers_loads_the_trained_model(name: str, runs: Path, tmp_path: Path) -> None:
    folder, is_ours, _ = (RUNS | RARE)[name]
    export(str(runs / name), tmp_path / "out", hf=True, trust=str(runs / name), shard_bytes=30_000)
    kind = getattr(transformers, base_of(folder)[1])
    again, loading = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained, (_, expected) = framework.load(runs / name, trust=True), plain(runs, folder)
    found = logits(again.eval(), True)
    assert torch.allclose(found, logits(trained, False), atol=1e-5)
    assert torch.allclose(found, logits(expected, True), atol=1e-4)
    assert not torch.allclose(
        found, logits(kind.from_pretrained(runs / folder).float().eval(), True), atol=1e-2
    )
    if is_ours:  # and a run can start from it
        section = config_from_values(values(runs, "again", folder, is_ours=True)).model
        model, weights = (
            call_factory(section.factory(), key="model"),
            find_weights(str(tmp_path / "out"), model=section),
        )
        assert isinstance(weights, LazyWeights)
        put_weights(model, weights, source="test")
        assert torch.equal(logits(model.eval(), False), logits(trained, False))


@pytest.mark.parametrize("name", [*LORAS, *rarely(RARE_LORAS)])
def test_adapters_on_a_published_model(name: str, runs: Path, tmp_path: Path) -> None:
    """As peft trains them in plain PyTorch; merged, transformers loads them."""
    peft = pytest.importorskip("peft", reason="peft comes with the lora extra")
    losses, folder = list(series(runs / name, "train/loss").values()), (LORAS | RARE_LORAS)[name][0]
    if folder == "llama":
        assert losses == pytest.approx(
            list(series(runs / "lora-z0", "train/loss").values()), abs=1e-6
        )
    assert losses[0] == pytest.approx(plain(runs, folder)[0][0], abs=1e-5)
    assert losses[-1] < losses[0] - 0.01
    export(str(runs / name), tmp_path / "adapter", adapter=True)
    export(str(runs / name), tmp_path / "out", hf=True, trust=str(runs / name))
    base = transformers.AutoModelForCausalLM.from_pretrained(runs / folder).float()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(logits(merged, True), logits(adapted, True), atol=1e-5)
